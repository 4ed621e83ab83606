"""Choices that nothing can change any more: they need not wait for the running task's end.

A stage decides late because what arrives meanwhile may be better. Where nothing that may still happen can change the
choice, waiting is worth nothing, and costs the way of the end from the device to the loop and of the choice back; in a
group it costs the leader's word to all others as well. So a certain choice is handed over while the task before it
runs. The running task counts as finished then, as it does where a driver has a stage decide early.

When a choice is certain
------------------------
A hint chooses one of the lanes' heads, by its state. Give it, in place of the tasks that are ready and admissible, all
that have not started: if it takes task x even then, it takes x from any of them that x is among. For a hint takes the
smallest position of some lane, namely the first lane of its state's sequence that has a head; or the smallest position
of all; or the entry of a strict row. With fewer tasks to choose from, no lane in front of x's has a head more, and none
in x's lane comes before x. So neither an arrival nor an end changes the choice: x is certain as soon as it is ready and
admissible with the running task counted as finished.

A driver that says when a task is about to end (:class:`rrfp_jax.core.DecideNow`) has anything chosen then. A
choice that was certain before is still the same, so the order is that of a stage which chooses everything at that
moment; only the device has certain tasks sooner.

What follows
------------
A stage that hands over certain choices early runs the same tasks in the same order as one that does not: until the
running task ends, it may start only what it would start then whatever happens meanwhile. Nothing new can deadlock, as
with every early decision. An announcement says that a task has begun on the device, so it waits for the end of the task
before, also of one that was not certain: how long a message takes from there varies least, and foresight relies on
it. Foresight, which holds the best-ranked task for the table's next entry, has nothing to hold, for a certain choice is
that entry.

In a group the leader's choice travels while the task before it runs, and each member takes it up as its own ends.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from rrfp_jax.core.hints import Choice, Heads
from rrfp_jax.core.step_plan import StepPlan


class Certainty:
    """What has not started, of one step of one stage."""

    __slots__ = ("_heads", "_ranked")

    def __init__(self, ranked: StepPlan) -> None:
        self._ranked = ranked
        self._heads = [positions[0] if positions else None for positions in ranked.in_lanes]
        """The first of each lane that has not started, as far as was looked."""

    def copy(self) -> "Certainty":
        twin = Certainty(self._ranked)
        twin._heads = self._heads.copy()
        return twin

    def choice(self, choose: Callable[[int, Heads], Choice], state: int, waiting: Sequence[int]) -> int | None:
        """The position that the hint takes if every task that has not started were ready and admissible.

        Args:
            state: the hint's.
            waiting: for each node, as the arbiter has it: below 0 from its start on.
        """
        at, heads = self._ranked.at, self._heads
        for lane, head in enumerate(heads):
            if head is not None and waiting[at[head]] < 0:
                heads[lane] = self._first_left(lane, head, waiting)
        return choose(state, (heads[0], heads[1], heads[2], heads[3]))[0]

    def _first_left(self, lane: int, started: int, waiting: Sequence[int]) -> int | None:
        """The first task of a lane behind this one that has not started."""
        at, positions = self._ranked.at, self._ranked.in_lanes[lane]
        for number in range(bisect_right(positions, started), len(positions)):
            if waiting[at[positions[number]]] >= 0:
                return positions[number]
        return None
