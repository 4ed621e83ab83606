"""A bound of memory that a table itself gives: no more activations than it holds, whatever order readiness makes of it.

The window of :mod:`rrfp_jax.core.window` counts microbatches. With several chunks per stage that does not bound
memory at the table's own peak, since a microbatch holds one activation for each chunk that it has passed: a hint that
runs other forwards first holds up to twice as many. The footprint counts activations, one per chunk and microbatch,
from the start of F to the end of B, or of W where the backward is split.

Where operations move activations (:mod:`rrfp_jax.schedules.operations`), what counts is the memory of the device: any
task may take memory as it starts and free some as it ends, in parts of an activation, on the compute lane or on an
engine beside it, and what takes some is restrained as an F is.

Rule
----
Let the *row* be the table's order of the stage's tasks of all lanes, and ``limit`` at least the peak of that row. A
task that takes memory is admitted if memory suffices also when everything before it in the row still runs in the row's
order: what is held now, what this one takes, and what any beginning of the unfinished entries before it adds, are never
more than ``limit``. What takes memory counts as done with in the row from its start, what frees some from its end.
Tasks that take none are never restrained, such as an F of a chunk without a backward, or an offload. Where all F take
the same, one question answers for all if the hint ranks them in the row's order: if a ready one is not admitted, no
other one behind it is, for what stands before it stands before those as well. Where some take less, each is asked.

A task that is about to end (:class:`rrfp_jax.core.events.DecideNow`) has freed its memory for those of the
compute lane, which start behind it. Engines do not wait in that queue: for what they start it is held until the end.

Why it cannot deadlock
----------------------
A valid table is, over all stages and lanes, one order of all tasks in which every dependency goes forward.

*Invariant*: on each stage the unfinished entries, run in the row's order from here on, stay within the limit. It holds
at first, as the limit is not below the row's peak. It holds after the start of what takes memory: the entries behind it
in the row find what they would have found, and those before it so much more as it takes, which the rule has counted.
The start of anything else changes nothing, and an end frees at once what the row counts as held until the task's place
in it. On which lane a task runs is nowhere asked, so lanes may run out of the row's order, and end in any order.

*Progress*: let T be the first unfinished task of the total order, and let nothing run and nothing be under way. All
that T waits for stands before it and has finished, so T is ready; nothing before it is left in its row, so by the
invariant memory suffices for it. Its lane is free, and runs it or another task: an engine the first that is ready and
admissible, the compute lane the best such one under a hint, and T itself under strict consumption, as all entries
before it have started. Foresight may hold for a finite time. So some task runs in every state with work left, and as
each runs once, the step ends. This needs each lane to skip what cannot run: one that waited for the first of another
order than the row's could wait for T itself.

What else a step may have keeps to this:

* *Pairs that a step lacks* take all their tasks out of the row. Together they move nothing, and no beginning of theirs
  is below nothing, since no operation frees what is not held by then in any order (the graph refuses others); so no
  beginning of the row holds more without them. Dependencies go out with them, and go forward as before.
* *Operations without memory* have a place in the total order and none in the sums.
* *Operations once per chunk or step* move no memory. Either no task of a microbatch waits for them, however indirectly,
  and they stand behind all of these, among R and U, or they wait for none and stand before all; the graph refuses what
  would be both. The verdict on which U waits asks for none of them that comes after U. Strict consumption gives them
  places that keep to this.
* *Accumulation in microbatch order* makes dependencies, so a table with another order is refused.
* *Replicas* have rows and memory of their own, and only R and what follows waits across them.
* *Read-ahead* (:mod:`rrfp_jax.core.read_ahead`) restrains F that take no memory.

Where operations move memory and no table ranks what is ready, the row is the canonical one of the window's argument,
microbatch by microbatch (:func:`canonical_row`), in which every dependency goes forward as well: operations depend on
tasks of their own chunk and microbatch, and stand among these in an order in which they can run. What takes memory
back for a backward, and what waits for that, stands on the way back, right before it. It is issued when that backward's
other inputs are here: a dependency on what comes before it in that order, the backwards of the chunks behind. Taken
back as soon as it fits, it would leave no room for forwards, and the offload would be in vain.

Counting what fits now in place of the rule deadlocks, for all that takes memory, for engines alone (a reload takes the
slot that the next forward of its own row needs) or for the compute lane alone (a forward takes the slot of the reload
for which the next backward waits): ``tests/checking/test_broken_operations.py`` has pipelines that do.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from itertools import accumulate

from rrfp_jax.core.step_plan import StepPlan
from rrfp_jax.core.story import RUNNING
from rrfp_jax.schedules import PipelineGraph, Task, TaskKind


def memory_effect(task: Task, graph: PipelineGraph) -> tuple[int, int]:
    """What a task takes as it starts and what it frees as it ends, in units (:func:`memory_unit`)."""
    if task.microbatch < 0 or not graph.has_backward(task.chunk):
        return 0, 0
    if graph.ops:
        return graph.operations.effect(task)
    return int(task.kind is TaskKind.F), int(task.kind is graph.accumulating_kind(task.chunk))


def memory_unit(graph: PipelineGraph) -> int:
    """How many units one activation is: 1, or more where operations move parts of one."""
    return graph.operations.unit if graph.ops else 1


def memory_changes(tasks: Iterable[Task], graph: PipelineGraph) -> list[int]:
    """What tasks do to memory one after the other: what each takes, and then what it frees."""
    return [change for task in tasks for takes, frees in [memory_effect(task, graph)] for change in (takes, -frees)]


def canonical_row(graph: PipelineGraph, chunks: Sequence[int]) -> list[Task]:
    """A stage's tasks in the order in which every dependency goes forward (:mod:`rrfp_jax.core.window`).

    First by microbatch; within one F by ascending chunks and backwards by descending ones, with operations right where
    they can run, and those that come before something right before it.
    """
    row: list[Task] = []
    for m in range(graph.num_microbatches):
        forth: list[Task] = []
        back: list[Task] = []
        for chunk in chunks:
            if graph.exists(chunk, m):
                forth_here, back_here = _phases(graph, chunk, m)
                forth += forth_here
                back[:0] = back_here
        row += forth + back
    return row


def _phases(graph: PipelineGraph, chunk: int, microbatch: int) -> tuple[list[Task], list[Task]]:
    """A chunk's tasks of one microbatch: those that can run before its backward, and what its backward needs."""
    tasks = [
        Task(kind, chunk, microbatch)
        for kind in graph.kinds(chunk)
        if not graph.ops or graph.operations.has(kind, chunk, microbatch)
    ]
    if not graph.has_backward(chunk):
        return tasks, []
    first = next(n for n, task in enumerate(tasks) if task.kind is graph.input_gradient_kind(chunk))
    back = set(tasks[first:])
    while more := {task for task in tasks[:first] if task not in back and _goes_back(task, back, graph)}:
        back |= more
    return [task for task in tasks if task not in back], [task for task in tasks if task in back]


def _goes_back(task: Task, back: set[Task], graph: PipelineGraph) -> bool:
    """Whether an operation takes memory for one of these, or waits for one."""
    if task.kind is TaskKind.F:
        return False
    is_needed = any(task in graph.dependencies(other) for other in back)
    return (is_needed and memory_effect(task, graph)[0] > 0) or not back.isdisjoint(graph.dependencies(task))


class RowMemory:
    """What the entries of a stage's row do to its memory: fixed, and the same for every step."""

    __slots__ = (
        "_at",
        "_of_node",
        "entries",
        "frees",
        "has_costless",
        "has_other_takers",
        "is_even",
        "peak",
        "place",
        "takes",
        "unit",
        "unnamed",
    )

    def __init__(self, step: StepPlan, graph: PipelineGraph, row: Iterable[Task]) -> None:
        plan, index = step.plan, step.plan.index
        tasks = [task for task in row if task in index]
        effects = [memory_effect(task, graph) for task in tasks]
        self.unit = memory_unit(graph)
        self.entries: list[tuple[int, int]] = []
        """(node, what it takes as it starts, or frees as it ends, as a negative number), in the row's order; none for
        tasks that do neither."""
        self._of_node: dict[int, tuple[int, int, int]] = {}
        """For each node how many entries come before it, and what it takes and frees."""
        for task, (takes, frees) in zip(tasks, effects, strict=True):
            self._of_node[index[task]] = len(self.entries), takes, frees
            self.entries += [(index[task], change) for change in (takes, -frees) if change]
        self._rank(step.at)
        self.has_costless = any(
            task.kind is TaskKind.F and not takes for task, (takes, _) in zip(tasks, effects, strict=True)
        )
        """Whether some F takes no memory."""
        of_forwards = {takes for task, (takes, _) in zip(tasks, effects, strict=True) if task.kind is TaskKind.F}
        self.is_even = len(of_forwards - {0}) < 2
        """Whether all F that take memory take the same."""
        self.has_other_takers = any(
            takes and plan.lanes[index[task]] > 0 for task, (takes, _) in zip(tasks, effects, strict=True)
        )
        """Whether something else of the compute lane takes memory."""
        of_microbatch = [t for t in map(plan.tasks.__getitem__, step.at) if t.microbatch >= 0]
        self.unnamed = [t for t in of_microbatch if index[t] not in self._of_node]
        self.peak = max(accumulate(change for _, change in self.entries), default=0)
        """The most units that the row holds at once."""

    def _rank(self, at: tuple[int, ...]) -> None:
        found = [self._of_node.get(node, (-1, 0, 0)) for node in at]
        self._at = at
        self.place = tuple(place for place, _, _ in found)
        """By position, how many entries come before the task; -1 for what the row does not name."""
        self.takes = tuple(takes for _, takes, _ in found)
        """By position."""
        self.frees = tuple(frees for _, _, frees in found)
        """By position."""

    def ranked(self, at: tuple[int, ...]) -> "RowMemory":
        """The same for a step whose tasks have other positions."""
        if at is self._at:
            return self
        twin = copy(self)
        twin._rank(at)
        return twin

    def check_limit(self, limit: int, stage: int) -> None:
        """Raise ValueError where the row alone holds more, or does not name every task."""
        if self.unnamed:
            some = ", ".join(map(str, self.unnamed[:3]))
            raise ValueError(f"the row of stage {stage} lacks {some}, and memory follows it: name every task, once")
        if self.peak > limit:
            peak, least = self.peak / self.unit, -(-self.peak // self.unit)
            raise ValueError(
                f"the footprint of stage {stage} is {limit / self.unit:g} activations and its table holds {peak:g}: "
                f"allow at least {least}, or take a schedule with a lower peak"
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
        twin = object.__new__(type(self))
        twin._row, twin.limit = self._row, self.limit
        twin.held, twin._first = self.held, self._first
        return twin

    def start(self, position: int) -> None:
        """The task at this position has started."""
        self.held += self._row.takes[position]

    def finish(self, position: int) -> None:
        """The task at this position has finished, or counts as if it had."""
        self.held -= self._row.frees[position]

    def is_free(self, position: int) -> bool:
        """Whether the task at this position takes nothing."""
        return not self._row.takes[position]

    def admits(self, position: int, waiting: Sequence[int], due: int | None = None) -> bool:
        """Whether the task at this position, which has not started, may start now; what the task at position ``due``
        frees is held until its end, as what a running one frees."""
        row, first = self._row, self._first
        entries, last = row.entries, row.place[position]
        while first < last:
            node, change = entries[first]
            left = waiting[node]
            if left >= 0 or (left == RUNNING and change < 0):
                break
            first += 1
        self._first = first
        held, limit = self.held + row.takes[position], self.limit
        if due is not None and row.frees[due]:
            return self._admits_before_end(due, held, range(first, last), waiting)
        if held > limit:
            return False
        for node, change in entries[first:last] if first < last else ():
            left = waiting[node]
            if left >= 0 or (left == RUNNING and change < 0):
                held += change
                if held > limit:
                    return False
        return True

    def _admits_before_end(self, due: int, held: int, places: range, waiting: Sequence[int]) -> bool:
        """Whether memory suffices along these entries, where the due task frees its own at its place among them."""
        row = self._row
        of_due = row.frees[due]
        end = row.place[due] + (row.takes[due] > 0)
        held += of_due
        if held > self.limit:
            return False
        if end < places.start:
            held -= of_due
        for place in places:
            node, change = row.entries[place]
            if _is_left(change, waiting[node]) or place == end:
                held += change
                if held > self.limit:
                    return False
        return True

    def first_costless(self, *forwards: Iterable[int]) -> int | None:
        """The first of the forwards at these positions that takes no memory, if there is one."""
        if not self._row.has_costless:
            return None
        takes = self._row.takes
        return min((position for some in forwards for position in some if not takes[position]), default=None)

    def first_admitted(self, waiting: Sequence[int], *ready: Iterable[int]) -> int | None:
        """The first of the ready tasks at these positions that may start, if there is one."""
        takes, positions = self._row.takes, sorted(position for some in ready for position in some)
        return next((p for p in positions if not takes[p] or self.admits(p, waiting)), None)


def _is_left(change: int, waiting: int) -> bool:
    """Whether an entry has yet to take or free its memory."""
    return waiting >= 0 or (waiting == RUNNING and change < 0)
