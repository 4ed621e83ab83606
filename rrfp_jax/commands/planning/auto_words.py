"""What ``layers_per_chunk: auto`` has chosen, and why, in two lines."""

from collections.abc import Callable

from rrfp_jax.arbitration import Order, StepRules
from rrfp_jax.costs import CostBook, CutModel
from rrfp_jax.simulation import simulate

_STEPS, _MOST_TASKS = 3, 30_000


def choice_in_words(
    book: CostBook, order: Order, counts: Callable[[CutModel], str], even: CutModel, best: CutModel
) -> tuple[str, ...]:
    """What was chosen, and why."""
    source = ", ".join(filter(None, (book.source, f"for {book.device}" if book.device else "")))
    chosen = f"layers_per_chunk auto: {counts(best)}; costs: {source or 'of a file'}"
    if best.counts == even.counts:
        return (chosen, f"the fullest stage has {_share(best):.1%} of the work: no cut is better than the even one")
    told = (
        f"the fullest stage has {_share(best):.1%} of the work, and {_share(even):.1%} with "
        f"{counts(even)}: a step is expected to take {_step_ms(order, best) / _step_ms(order, even):.1%} of "
        "that cut's"
    )
    return chosen, told


def _share(cut: CutModel) -> float:
    """Of the fullest stage in the work of all."""
    return max(cut.stage_work_ms) / sum(cut.stage_work_ms)


def _step_ms(order: Order, cut: CutModel) -> float:
    """A step in this order, where so many tasks are quickly simulated; else the fullest stage's part of it."""
    tasks = cut.graph.num_chunks * cut.num_microbatches * (3 if cut.split else 2)
    if tasks > _MOST_TASKS:
        return max(cut.stage_work_ms)
    steps = min(_STEPS, _MOST_TASKS // tasks)
    return simulate(order.arbiters(StepRules()), cut.simulated_costs(), machine=cut.machine, num_steps=steps).step_ms[
        -1
    ]
