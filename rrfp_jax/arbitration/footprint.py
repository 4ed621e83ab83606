"""A bound of memory that a table itself gives: no more activations than it holds, whatever order readiness makes of it.

The window of :mod:`rrfp_jax.arbitration.window` counts microbatches. With several chunks per stage that does not bound
memory at the table's own peak, since a microbatch holds one activation for each chunk that it has passed: a hint that
runs other forwards first holds up to twice as many. The footprint counts activations, one per chunk and microbatch,
from the start of F to the end of B, or of W where the backward is split.

Where operations move activations (:mod:`rrfp_jax.tasks.operations`), what counts is the memory of the device: an
operation takes memory as it starts or frees some as it ends, in parts of an activation, and is restrained as an F is.

Rule
----
Let the *row* be the table's order of the stage's tasks, and ``limit`` at least the peak of that row. An F is admitted
if memory suffices also when everything before it in the row still runs in the row's order: the activations held now,
this one, and those that any beginning of the unfinished entries before it adds, are never more than ``limit``. What
takes memory counts as done with in the row from its start, what frees some from its end. Tasks that take none are never
restrained, such as an F of a chunk without a backward. If a ready F is not admitted, no
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

Where operations move memory and no table ranks what is ready, the row is the canonical one of the window's argument,
microbatch by microbatch (:func:`canonical_row`), in which every dependency goes forward as well. What takes memory back
for a backward is then issued when that backward's other inputs are here: a dependency on what comes before it in that
order. Taken back as soon as it fits, it would leave no room for forwards, and the offload would be in vain.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from rrfp_jax.arbitration.plan import FINISHED
from rrfp_jax.arbitration.step_plan import StepPlan
from rrfp_jax.arbitration.story import DUE
from rrfp_jax.tasks import PipelineGraph, Task, TaskKind

_DONE = (FINISHED, DUE)


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
    """A stage's tasks in the order in which every dependency goes forward (:mod:`rrfp_jax.arbitration.window`).

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
    needed = {tasks[first]}
    for task in reversed(tasks[:first]):
        is_needed = any(task in graph.dependencies(one) for one in needed)
        if is_needed and task.kind is not TaskKind.F and memory_effect(task, graph)[0]:
            needed.add(task)
    forth = [task for task in tasks[:first] if task not in needed]
    return forth, [task for task in tasks if task not in forth]


class RowMemory:
    """What the entries of a stage's row do to its memory: fixed, and the same for every step."""

    __slots__ = ("entries", "frees", "has_costless", "has_other_takers", "peak", "place", "takes", "unit", "unnamed")

    def __init__(self, step: StepPlan, graph: PipelineGraph, row: Iterable[Task]) -> None:
        plan, index = step.plan, step.plan.index
        tasks = [task for task in row if task in index]
        effects = [memory_effect(task, graph) for task in tasks]
        self.unit = memory_unit(graph)
        self.entries: list[tuple[int, int]] = []
        """(node, what it takes as it starts, or frees as it ends, as a negative number), in the row's order; none for
        tasks that do neither."""
        place: dict[int, int] = {}
        for task, (takes, frees) in zip(tasks, effects, strict=True):
            place[index[task]] = len(self.entries)
            self.entries += [(index[task], change) for change in (takes, -frees) if change]
        self.place = tuple(place.get(node, -1) for node in step.at)
        """By position, how many entries come before the task; -1 for what the row does not name."""
        of_node = {index[task]: effect for task, effect in zip(tasks, effects, strict=True)}
        self.takes = tuple(of_node.get(node, (0, 0))[0] for node in step.at)
        """By position."""
        self.frees = tuple(of_node.get(node, (0, 0))[1] for node in step.at)
        """By position."""
        self.has_costless = any(
            task.kind is TaskKind.F and not takes for task, (takes, _) in zip(tasks, effects, strict=True)
        )
        """Whether some F takes no memory."""
        self.has_other_takers = any(
            takes and plan.lanes[index[task]] > 0 for task, (takes, _) in zip(tasks, effects, strict=True)
        )
        """Whether something else of the compute lane takes memory."""
        self.unnamed = [t for t in map(plan.tasks.__getitem__, step.at) if t.microbatch >= 0 and index[t] not in place]
        self.peak = max(accumulate(change for _, change in self.entries), default=0)
        """The most units that the row holds at once."""

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
        twin = object.__new__(Footprint)
        twin._row, twin.limit = self._row, self.limit
        twin.held, twin._first = self.held, self._first
        return twin

    def start(self, position: int) -> None:
        """The task at this position has started."""
        self.held += self._row.takes[position]

    def finish(self, position: int) -> None:
        """The task at this position has finished, or counts as if it had."""
        self.held -= self._row.frees[position]

    def admits(self, position: int, waiting: Sequence[int], due: int | None = None) -> bool:
        """Whether the task at this position, which has not started, may start now; what the task at position ``due``
        frees is held until its end."""
        entries, first = self._row.entries, self._first
        last = self._row.place[position]
        while first < last and not _is_left(entries[first][1], waiting[entries[first][0]]):
            first += 1
        self._first = first
        held = self.held + self._row.takes[position] + (0 if due is None else self._row.frees[due])
        if held > self.limit:
            return False
        for node, change in entries[first:last]:
            if _is_left(change, waiting[node]):
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
    if change > 0:
        return waiting >= 0
    return change < 0 and waiting not in _DONE
