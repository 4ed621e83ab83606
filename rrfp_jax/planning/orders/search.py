"""The quickest order of a cut in given memory, with a bound beside it.

Named tables come first, so that no found order is slower than one that fits. Then building blocks are packed, and rules
run by the list scheduler, and the best of all are improved. All are judged by one evaluator, and the best by the
project's simulator.
"""

from collections.abc import Callable, Sequence
from math import inf

from rrfp_jax.arbitration import Ordering, StepRules
from rrfp_jax.costs import CutModel
from rrfp_jax.planning.orders.blocks import try_blocks
from rrfp_jax.planning.orders.found import FoundOrder, Pool
from rrfp_jax.planning.orders.improving import improve
from rrfp_jax.planning.orders.named import named_tables, split_orders
from rrfp_jax.planning.orders.problem import NS_PER_MS, problem_of
from rrfp_jax.planning.orders.reducing import extend, reduced
from rrfp_jax.planning.orders.rule_search import search_rules
from rrfp_jax.simulation import Costs, simulate

EFFORT = 180_000
"""Tasks that are scheduled in a search beside the named tables."""
_RULES = StepRules(updates=False)


def search_orders(
    cut: CutModel,
    room: Sequence[float] | None,
    *,
    seed: int = 0,
    effort: int = EFFORT,
    should_stop: Callable[[], bool] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> list[FoundOrder]:
    """Orders that fit, the quickest first; none where nothing fits.

    Args:
        cut: durations, links, what chunks hold.
        room: by stage, what activations may take at once, in the unit of
            :func:`~rrfp_jax.planning.orders.activations.activation_weight`; None: as much as there is.
        seed: of what is drawn; the same seed gives the same orders.
        effort: how many tasks may be scheduled on the way, all orders together, beside the named tables.
        should_stop: asked between two orders; the best so far is the result.
        progress: told the orders evaluated so far, and the best makespan in milliseconds.
    """
    pool = Pool(problem_of(cut, room))

    def goes_on(most_tasks: float = inf) -> bool:
        if pool.is_settled or pool.tasks >= most_tasks or (should_stop is not None and should_stop()):
            return False
        if progress is not None and pool.best:
            progress(pool.evaluations, pool.best[0].makespan / NS_PER_MS)
        return True

    _try_named(cut, pool, goes_on)
    begin = pool.tasks
    small = reduced(cut)
    try_blocks(cut, pool, lambda: goes_on(begin + effort / 3))
    if small is None:
        search_rules(pool, lambda: goes_on(begin + effort * 2 / 3))
        improve(pool, seed, lambda: goes_on(begin + effort))
    elif goes_on():
        part = Pool(problem_of(small, room))
        search_rules(part, lambda: not part.is_settled and part.tasks < effort / 2 and goes_on())
        improve(part, seed, lambda: not part.is_settled and part.tasks < effort and goes_on())
        pool.evaluations += part.evaluations
        extend(part, pool, goes_on)
    return confirmed(cut, pool)


def _try_named(cut: CutModel, pool: Pool, goes_on: Callable[[], bool]) -> None:
    is_small = reduced(cut) is None
    for table, request in named_tables(cut, pool.problem, fused_too=is_small):
        pool.count()
        if bool(table.graph.split) == cut.split:
            pool.offer(pool.problem.numbered(table.orders), table.name, name=table.name, request=request)
        else:
            pool.offer(pool.problem.numbered(split_orders(table.orders)), f"{table.name}, its backward split")
        if not goes_on():
            return


def named_orders(cut: CutModel, room: Sequence[float] | None) -> list[FoundOrder]:
    """The orders of named tables that fit, the quickest first."""
    pool = Pool(problem_of(cut, room))
    _try_named(cut, pool, lambda: True)
    return [order for order in pool.found() if order.is_named]


def confirmed(cut: CutModel, pool: Pool) -> list[FoundOrder]:
    """All orders of the pool, the best simulated by the arbiters that will run it."""
    found = pool.found()
    if found:
        simulated_ms = simulated_makespan_ms(cut, found[0])
        rounding_ms = pool.problem.num_tasks / NS_PER_MS
        assert abs(simulated_ms - found[0].makespan_ms) <= rounding_ms, (simulated_ms, found[0].makespan_ms)
    return found


def simulated_makespan_ms(cut: CutModel, order: FoundOrder) -> float:
    """By the project's simulator, strictly consumed."""
    made = Ordering(schedule=order.table, consume="strict").resolve(cut.placement, cut.graph)
    run = simulate(made.arbiters(_RULES), Costs(durations_ms=cut.durations_ms), machine=cut.machine)
    return run.timeline.makespan_s() * 1e3
