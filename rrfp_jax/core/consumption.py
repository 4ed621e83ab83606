"""How a stage consumes its hint: skip what is absent (``ready``, RRFP) or wait for it (``strict``, the baseline).

Both drive the same arbiter. ``Strict`` names its table's entries one after another and waits for each; R and U follow
the table, and an operation that runs once per step comes right before what waits for it, or last. It ignores the
window: a table has a peak of its own, to be compared with the window before the start.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rrfp_jax.core.hints import Choice, Heads, Hint, Rank, schedule_hint
from rrfp_jax.core.plan import StagePlan
from rrfp_jax.schedules import Task


@dataclass(frozen=True, eq=False)
class Consumption:
    """What the arbiter asks: an order of the plan's tasks, and which ready task to run next."""

    rank: Callable[[Task], Rank]
    choose: Callable[[int, Heads], Choice]
    initial: int
    is_strict: bool
    hint: Hint
    """What ranks the tasks; for ``strict`` it holds the table's row."""

    def order(self, plan: StagePlan) -> tuple[int, ...]:
        """The step's tasks (as node numbers) in hint order: lane after lane for ``ready``, one sequence for ``strict``.

        Positions in this order are what ``choose`` sees. The tasks of engines beside compute, which it never sees, come
        last.
        """
        lanes, rank = plan.lanes, self.rank
        ranked = {node: (rank(task), 0) for node, task in plan.present()}
        for node in plan.once:
            ranked[node] = _ahead_of_followers(node, plan, ranked)
        return tuple(node for *_, node in sorted((lanes[node] < 0, *key, node) for node, key in ranked.items()))


def _ahead_of_followers(node: int, plan: StagePlan, ranked: dict[int, tuple[Rank, int]]) -> tuple[Rank, int]:
    """Of an operation that runs once per step, which no row names: right before the first task that waits for it, or
    behind all others."""
    found = [
        _ahead_of_followers(after, plan, ranked) if after in plan.once else ranked[after]
        for after in plan.dependents[node]
        if after in ranked
    ]
    if found:
        first, ahead = min(found)
        return first, ahead - 1
    return max(ranked.values())[0], 1


def ready(hint: Hint) -> Consumption:
    """Run the best task of those that are ready and admissible."""
    return Consumption(hint.rank, hint.choose, hint.initial, is_strict=False, hint=hint)


def strict(order: tuple[Task, ...]) -> Consumption:
    """Run the entries of ``order`` one after another, waiting for each; then R and U.

    The state counts the entries that were dispatched, and so is the position of the next one.
    """
    hint = schedule_hint(order)
    return Consumption(hint.rank, _choose_next, 0, is_strict=True, hint=hint)


def _choose_next(position: int, heads: Heads) -> Choice:
    return (position, position + 1) if position in heads else (None, position)
