"""Schedules of one chunk per stage with a whole backward: GPipe, 1F1B and eager 1F1B.

GPipe runs all forwards, then all backwards (Huang et al., arXiv 1811.06965). The others run warm-up forwards, then
forward and backward in turn, then the remaining backwards. 1F1B is PipeDream-Flush (Narayanan et al., arXiv
2006.09503). Eager 1F1B runs more forwards in the warm-up, so that a late input does not stall a stage at once (Zhuang
et al., arXiv 2211.05322), at the price of memory.

GPipe and 1F1B order the chunks of any graph (:mod:`rrfp_jax.schedules.graph_order`): with encoders before a decoder, a
stage warms up with as many forwards as there are hops from it to the loss.
"""

from rrfp_jax.schedules.graph_order import in_turn, one_after_the_other
from rrfp_jax.schedules.order import alternate
from rrfp_jax.schedules.registry import ScheduleRequest, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.tasks import Task, TaskKind, chain, linear


@schedule("gpipe", placement="one chunk per stage", source="GPipe, arXiv 1811.06965", any_graph=True)
def gpipe(request: ScheduleRequest) -> ScheduleTable:
    """Every stage runs F of all microbatches, then B of all microbatches, both in ascending order."""
    return one_after_the_other("gpipe", request)


@schedule("1f1b", placement="one chunk per stage", source="PipeDream-Flush, arXiv 2006.09503", any_graph=True)
def one_f_one_b(request: ScheduleRequest) -> ScheduleTable:
    """Stage s runs p-1-s warm-up forwards; it holds at most p-s microbatches."""
    return in_turn("1f1b", request, reach=1, split=False)


@schedule(
    "eager-1f1b",
    placement="one chunk per stage",
    source="Eager-1F1B, arXiv 2211.05322",
    constraints="windows per stage must not grow along the stages",
)
def eager_one_f_one_b(request: ScheduleRequest) -> ScheduleTable:
    """Stage s runs window(s)-1 warm-up forwards and holds at most window(s) microbatches.

    For the windows see :func:`eager_windows`. Raises ValueError if a stage's window is larger than its predecessor's:
    it would wait for forwards that the predecessor must not run before a backward.
    """
    windows = eager_windows(request.num_stages, request.window)
    for stage in range(1, request.num_stages):
        before, here = (min(w, request.num_microbatches) for w in windows[stage - 1 : stage + 1])
        if here > before:
            raise ValueError(
                f"window {here} of stage {stage} is larger than window {before} of stage {stage - 1}, which would "
                f"deadlock: give stage {stage} at most {before}"
            )
    p, m = request.num_stages, request.num_microbatches
    orders = []
    for stage in range(p):
        forwards, backwards = ([Task(kind, stage, i) for i in range(m)] for kind in (TaskKind.F, TaskKind.B))
        orders.append(alternate(forwards, backwards, min(windows[stage], m) - 1))
    return ScheduleTable.from_orders("eager-1f1b", linear(p), chain(p, m), orders)


def eager_windows(num_stages: int, window: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The in-flight microbatches of every stage: those given, or 2(p-s)-1 on stage s, two warm-up forwards per hop.

    One number limits the first stage, and each later stage to one less: with equal windows everywhere the last stage
    would spend its window on forwards before its first backward, and every other stage would wait for it.
    """
    if isinstance(window, tuple):
        return window
    eager = tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
    return eager if window is None else tuple(max(1, min(most, window - s)) for s, most in enumerate(eager))
