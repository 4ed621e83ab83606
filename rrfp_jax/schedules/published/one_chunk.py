"""Schedules of one chunk per stage, which also order the chunks of any graph: GPipe, 1F1B and the zero-bubble pair.

GPipe runs all forwards, then all backwards (Huang et al., arXiv 1811.06965). The others run warm-up forwards, then
forward and backward in turn, then the remaining backwards. 1F1B is PipeDream-Flush (Narayanan et al., arXiv
2006.09503). Eager 1F1B runs more forwards in the warm-up, so that a late input does not stall a stage at once (Zhuang
et al., arXiv 2211.05322), at the price of memory. ZB-H1 and ZB-H2 (Qi et al., arXiv 2401.10241, section 2) are 1F1B
with a split backward, whose W wait until the stage would otherwise idle in the cool-down: a stage that warms up with
few forwards defers many W, so that every stage holds equally many microbatches. ZB-H1 keeps the memory of 1F1B's first
stage; ZB-H2 doubles the warm-up, and at equal F, I and W has no bubble at all but the parallelogram's.

Why no order here can deadlock, whatever the graph. Let ``d(c)`` be the longest way from chunk c to the loss, in hops
between stages, ``D`` the longest of all that have a backward, and k how far the warm-up reaches: 1 in 1F1B and ZB-H1, 2
in ZB-H2. In half-rounds, of which a microbatch has two, ``F(c, m)`` runs at ``2 m - (2 k - 1) d(c)``; its backward B,
or I where it is split, at ``2 m + d(c) + 1``; W, where it is filled in late, at ``2 m + 2 k (D - d(c)) + d(c) + 1``;
and within a half-round first B or I, then W, then F. So a stage with one chunk runs ``k d(c)`` warm-up forwards, then
forward and backward in turn: on a chain of p stages ``d(c) = p - 1 - c``, which gives the published tables. A chunk
holds a microbatch from F to its B (or W), at most ``k d(c) + 1`` of them at once, or ``k D + 1`` with late W.

Where chunk p feeds chunk c on another stage, ``d(p) > d(c)``, so that ``F(p, m)`` is before ``F(c, m)``, and the
backward of c before that of p; F of a chunk is before its backward, and I before W. On one stage the half-rounds may be
equal, and then forwards go by ascending and backwards by descending chunk. So all dependencies lead forward in one
order of all tasks, and every stage follows that order. It holds as well for any part of the tasks: those that a step
lacks are skipped. A chunk that runs F alone has forwards in these places only."""

from functools import partial

from rrfp_jax.schedules.language import B, F, I, Stage, TaskOrder, W, rounds
from rrfp_jax.schedules.registry import schedule
from rrfp_jax.schedules.request import ONE_EACH

_SPLIT_SOURCE = "our construction: 1F1B, split as in Zero Bubble, arXiv 2401.10241"


@schedule("gpipe", shape=ONE_EACH, source="GPipe, arXiv 1811.06965", any_graph=True)
def gpipe(s: Stage) -> TaskOrder:
    """Every stage runs F of all microbatches, then B of all microbatches, both in ascending order."""
    return rounds(F.every(2).ahead(s.hops)) + rounds(B.every(2).behind(s.hops))


@schedule("1f1b-split", shape=ONE_EACH, source=_SPLIT_SOURCE, split_backward=True, weights_fill=True, any_graph=True)
@schedule("1f1b", shape=ONE_EACH, source="PipeDream-Flush, arXiv 2006.09503", any_graph=True)
def one_f_one_b(s: Stage) -> TaskOrder:
    """Stage s runs p-1-s warm-up forwards; it holds at most p-s microbatches.

    With a split backward each W follows its I at once: the same memory, without the weight gradients in fill and drain.
    There is no better order: a stage whose memory is full must run a W before the next F, and in the drain the next
    gradient comes no sooner than the W has ended. Where the table ranks ready tasks and a stage may hold more, the
    times of the run itself show where it would idle: then W rank behind F and I. A stage that may hold no more keeps
    each W in its place: only a W frees memory for the next F, so that one I before it holds up every stage behind.
    """
    return rounds(B.every(2).behind(s.hops).behind(1), F.every(2).ahead(s.hops))


@schedule(
    "eager-1f1b",
    shape=ONE_EACH,
    source="Eager-1F1B, arXiv 2211.05322",
    constraints="windows per stage must not grow along the stages",
)
def eager_one_f_one_b(s: Stage) -> TaskOrder:
    """Stage s runs window(s)-1 warm-up forwards and holds at most window(s) microbatches.

    For the windows see :func:`eager_windows`. Raises ValueError if a stage's window is larger than its predecessor's:
    it would wait for forwards that the predecessor must not run before a backward.
    """
    windows = [min(window, s.m) for window in eager_windows(s.p, s.asked.window)]
    if s.i > 0 and windows[s.i] > windows[s.i - 1]:
        raise ValueError(
            f"window {windows[s.i]} of stage {s.i} is larger than window {windows[s.i - 1]} of stage {s.i - 1}, which "
            f"would deadlock: give stage {s.i} at most {windows[s.i - 1]}"
        )
    return rounds(F.ahead(windows[s.i] - 1), B)


def eager_windows(num_stages: int, window: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns the in-flight microbatches of every stage: those given, or 2(p-s)-1 on stage s, two warm-up F per hop.

    One number limits the first stage, and each later stage to one less: with equal windows everywhere the last stage
    would spend its window on forwards before its first backward, and every other stage would wait for it.
    """
    if isinstance(window, tuple):
        return window
    eager = tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
    return eager if window is None else tuple(max(1, min(most, window - s)) for s, most in enumerate(eager))


def _zero_bubble(s: Stage, reach: int) -> TaskOrder:
    """``reach`` warm-up F per hop, then F and I in turn, W so late that all stages hold equally many microbatches."""
    return rounds(
        I.every(2).behind(s.hops).behind(1),
        W.every(2).behind(lambda c: 2 * reach * (s.depth - s.hops(c)) + s.hops(c) + 1),
        F.every(2).ahead(lambda c: (2 * reach - 1) * s.hops(c)),
    )


for _name, _reach in (("zb-h1", 1), ("zb-h2", 2)):
    schedule(_name, shape=ONE_EACH, source="Zero Bubble, arXiv 2401.10241", split_backward=True, any_graph=True)(
        partial(_zero_bubble, reach=_reach)
    )
