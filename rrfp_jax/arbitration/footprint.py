"""A bound of memory that a table itself gives: no more activations than it holds, whatever order readiness makes of it.

The window of :mod:`rrfp_jax.arbitration.window` counts microbatches. With several chunks per stage that does not bound
memory at the table's own peak, since a microbatch holds one activation for each chunk that it has passed: a hint that
runs other forwards first holds up to twice as many. The footprint counts activations, one per chunk and microbatch,
from the start of F to the end of B, or of W where the backward is split.

Rule
----
Let the *row* be the table's order of the stage's tasks, and ``limit`` at least the peak of that row. An F is admitted
if memory suffices also when everything before it in the row still runs in the row's order: the activations held now,
this one, and those that any beginning of the unfinished entries before it adds, are never more than ``limit``. An F
counts as done with in the row from its start, all else from its end, which frees memory. Other tasks are never
restrained, and neither is an F of a chunk without a backward, which keeps nothing. If a ready F is not admitted, no
other one behind it in the row is, for what stands before it stands before those as well; so one question answers for
all, if the hint ranks them in the row's order.

Why it cannot deadlock
----------------------
A valid table is, over all stages, one order of all tasks in which every dependency goes forward. *Invariant*: on each
stage the unfinished entries, run in the row's order from here on, stay within the limit. It holds at first, as the
limit is not below the row's peak. It holds after an F that was admitted: the entries behind it in the row find what
they would have found, and those before it one activation more, which the rule has counted. Other tasks only free
memory, sooner than the row does. Now let T be the first unfinished task of the total order. All that it waits for has
finished, so it is ready, running, or its input is on its way; and nothing before it is left in its row, so it is
admissible by the invariant. So in every state with work left something can run, and as each task runs once, the step
ends. Tasks that a step lacks take F and B out of the row together, which leaves no beginning of it with more. Where
gradients are added up in microbatch order, these are dependencies too, so a table with another order is refused.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from rrfp_jax.arbitration.plan import FINISHED
from rrfp_jax.arbitration.step_plan import StepPlan
from rrfp_jax.arbitration.story import DUE
from rrfp_jax.tasks import PipelineGraph, Task, TaskKind

_DONE = (FINISHED, DUE)


def memory_changes(tasks: Iterable[Task], graph: PipelineGraph) -> tuple[int, ...]:
    """Of each task: 1 where it takes an activation, -1 where it frees one, else 0."""
    return tuple(
        0
        if task.microbatch < 0 or not graph.has_backward(task.chunk)
        else (task.kind is TaskKind.F) - (task.kind is graph.accumulating_kind(task.chunk))
        for task in tasks
    )


class RowMemory:
    """What the entries of a stage's row do to its memory: fixed, and the same for every step."""

    __slots__ = ("changes", "has_costless", "nodes", "peak", "place", "unnamed")

    def __init__(self, step: StepPlan, graph: PipelineGraph, row: Iterable[Task]) -> None:
        index = step.plan.index
        tasks = [task for task in row if task in index]
        self.nodes = tuple(index[task] for task in tasks)
        self.changes = memory_changes(tasks, graph)
        """Of each entry: 1 where it takes an activation, -1 where it frees one."""
        self.has_costless = any(not graph.has_backward(task.chunk) for task in tasks)
        """Whether some F takes no memory."""
        of_node = {node: place for place, node in enumerate(self.nodes)}
        self.place = tuple(of_node.get(node, -1) for node in step.at)
        """By position, the place in the row; -1 for what it does not name."""
        self.unnamed = [
            t for t in map(step.plan.tasks.__getitem__, step.at) if t.microbatch >= 0 and index[t] not in of_node
        ]
        self.peak = max(accumulate(self.changes), default=0)
        """The most activations that the row holds at once."""

    def check_limit(self, limit: int, stage: int) -> None:
        """Raise ValueError where the row alone holds more, or does not name every task."""
        if self.unnamed:
            some = ", ".join(map(str, self.unnamed[:3]))
            raise ValueError(f"the row of stage {stage} lacks {some}, and memory follows it: name every task, once")
        if self.peak > limit:
            raise ValueError(
                f"the footprint of stage {stage} is {limit} activations and its table holds {self.peak}: "
                f"allow at least {self.peak}, or take a schedule with a lower peak"
            )


class Footprint:
    """One stage's activations under the rule above, during one step.

    What has started and finished is the arbiter's own count of what each node waits for, ``waiting``; positions are
    places in the step's order.
    """

    __slots__ = ("_first", "_row", "held", "limit")

    def __init__(self, row: RowMemory, limit: int) -> None:
        self._row, self.limit = row, limit
        self.held = self._first = 0

    def copy(self) -> "Footprint":
        twin = object.__new__(Footprint)
        twin._row, twin.limit = self._row, self.limit
        twin.held, twin._first = self.held, self._first
        return twin

    def start(self, position: int) -> None:
        """The task at this position has started."""
        place = self._row.place[position]
        if place >= 0 and self._row.changes[place] > 0:
            self.held += 1

    def finish(self, position: int) -> None:
        """The task at this position has finished, or counts as if it had."""
        place = self._row.place[position]
        if place >= 0 and self._row.changes[place] < 0:
            self.held -= 1

    def admits(self, position: int, waiting: Sequence[int]) -> bool:
        """Whether the F at this position, which has not started, may start now."""
        nodes, changes, first = self._row.nodes, self._row.changes, self._first
        last = self._row.place[position]
        while first < last and not _is_left(changes[first], waiting[nodes[first]]):
            first += 1
        self._first = first
        held = self.held + changes[last]
        if held > self.limit:
            return False
        for place in range(first, last):
            if _is_left(changes[place], waiting[nodes[place]]):
                held += changes[place]
                if held > self.limit:
                    return False
        return True

    def first_costless(self, *forwards: Iterable[int]) -> int | None:
        """The first of the forwards at these positions that takes no memory, if there is one."""
        if not self._row.has_costless:
            return None
        place, changes = self._row.place, self._row.changes
        return min((position for some in forwards for position in some if not changes[place[position]]), default=None)


def _is_left(change: int, waiting: int) -> bool:
    """Whether an entry has yet to take or free its memory."""
    if change > 0:
        return waiting >= 0
    return change < 0 and waiting not in _DONE
