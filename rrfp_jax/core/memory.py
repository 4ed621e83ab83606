"""How much a stage may hold, and why no bound of memory can deadlock: one rule, one proof, three uses.

Rule
----
A bound has a *limit* and an *order*: the turns in which a stage's holdings are taken and let go if the stage runs alone
along one fixed order of its tasks. The limit is at least the peak of that order. A task that takes memory is admitted
if the limit suffices now, and would suffice for everything before its turn that is still to come, run in the order:
the present holdings, the task's own, and the changes of any beginning of the unfinished turns before it are never more
than the limit. A taking turn is past from the task's start, a freeing turn from its end. All other tasks are never
restrained.

Why no deadlock, for any placement, graph and hint
--------------------------------------------------
Let the orders of all stages come from one *total order* of all tasks of the step in which every dependency goes
forward.

*Invariant*: on each stage the unfinished turns, run in the order from here on, stay within the limit. The invariant
holds at first, as the limit is not below the order's peak. It holds after something was taken: the turns behind find
the memory that they would have found, and the rule has counted the turns before. It holds after something was let go,
since that is sooner than the order has it. The start of anything else changes nothing. The lanes of a stage may leave
the order and end in any order, since the rule does not ask on which lane a task runs.

*Progress*: let T be the first unfinished task of the total order, and let nothing run and nothing be under way. All
that T waits for stands before it and has finished, so T is ready; no turn before its own is left on its stage, so by
the invariant memory suffices. T's lane is free, and runs T or another task: an engine the first that is ready and
admissible, the compute lane the best such one under a hint, and T itself under strict consumption, as all entries
before it have started. Foresight may hold for a finite time. So some task runs in every state with work left, and as
each runs once, the step ends. Hints only choose among admissible tasks, so no hint can break this. Each lane has to
skip tasks that cannot run: one that waited for the first task of another order could wait for T itself.

The window
----------
A stage *holds* a microbatch from the start of its first F there to the end of its last task there with that microbatch
(B, or W where the backward is split). Total order: first by microbatch; within one microbatch the F in topological
order of the chunks, then the B or I in reverse topological order, each W after its I. Dependencies that accumulation in
microbatch order adds go forward too. On a stage each microbatch is let go before the next one is taken, the smallest
number first, and only the F that starts to hold a microbatch takes anything.

Each microbatch weighs 1, and the limit is a number of microbatches. The rule then says: a slot is free, and afterwards
the stage's *oldest unfinished* microbatch holds a slot or one is still free. A step may instead give each microbatch a
weight, and the limit is the stage's *capacity*, in bytes for example; no microbatch may weigh more than that. Counting
forwards minus backwards (as appendix C of the RRFP paper does for BF) lacks the condition on the oldest: with general
hints, unequal windows or a graph, younger microbatches can take every slot that the oldest needs.

The footprint
-------------
A window does not bound memory at a table's own peak where stages have several chunks: a microbatch holds one activation
for each chunk that it has passed, so a hint that runs other forwards first holds up to twice as many. The footprint
counts activations, one per chunk and microbatch, from the start of F to the end of B, or of W where the backward is
split. Where operations move activations (:mod:`rrfp_jax.schedules.operations`), it counts the memory of the device: any
task may take memory as it starts and free some as it ends, in parts of an activation, on any lane.

The order is the stage's *row* of a valid table, which is one order of all tasks over all stages and lanes in which
every dependency goes forward. Tasks that take nothing are never restrained, such as an F of a chunk without a backward,
or an offload. Where all F take the same and the hint ranks them in the row's order, one question answers for all: if
a ready F is not admitted, no other one behind it is. Where some take less, each is asked. A task that is about to end
(:class:`rrfp_jax.core.events.DecideNow`) has freed its memory for tasks of the compute lane, which start behind it.
Engines do not wait in that queue: for their tasks its memory is held until the end.

* *Pairs that a step lacks* take all their tasks out of the row. Together these move nothing, and no beginning of theirs
  is below nothing, since no operation frees memory that is not held by then in any order (the graph refuses others); so
  no beginning of the row holds more without them. Dependencies go out with them, and go forward as before.
* *Operations without memory* have a place in the total order and none in the sums.
* *Operations once per chunk or step* move no memory. Either no task of a microbatch waits for them, however indirectly,
  and they stand behind all of these, among R and U, or they wait for none and stand before all; the graph refuses
  others. The verdict on which U waits asks for none of them that comes after U.
* *Accumulation in microbatch order* makes dependencies, so a table with another order is refused.
* *Replicas* have rows and memory of their own, and only R and its followers wait across them.
* *Other owners* (:mod:`rrfp_jax.core.replicas`) give a stage other microbatches than its row names, and tables that are
  made anew for each stage's number of them have no total order in common. So in such a step every stage reserves memory
  in the window's order (:func:`canonical_row`), which is one for any owners, and its row only ranks. Its peak is one
  microbatch, so the footprint of every other step suffices. Any sequence of microbatches that all stages share will do
  in place of their numbers. It is the first of every replica's block, then the second of every block, and so on: so the
  replicas, whose blocks run side by side, do not wait for each other's numbers.

Where operations move memory and no table ranks the ready tasks, the row is the window's order (:func:`canonical_row`).
Operations depend on tasks of their own chunk and microbatch, and stand among these. An operation that takes memory back
for a backward stands right before that backward, and is issued once the backward's other inputs are here: taken back
as soon as it fits, it would leave no memory for forwards, and the offload would be in vain.

Counting the free memory alone in place of the rule deadlocks, for engines alone (a reload takes the slot that the next
forward of its own row needs) and for the compute lane alone (a forward takes the slot of the reload for which the next
backward waits): ``tests/checking/test_broken_operations.py`` has pipelines that do.

Read-ahead
----------
A chunk that runs F only, such as a frozen encoder, keeps nothing for itself, but its outputs lie in its readers'
inboxes until they take them. Such a chunk holds a microbatch from the start of its F to the ends of the F of all its
successors that run this microbatch. A successor on another stage sends a receipt as its F ends
(:attr:`rrfp_jax.core.events.MessageKind.TAKEN`). The chunk's step ends once all has been taken, so the bound holds
across steps too. It comes beside the stage's window or footprint, and takes their total order:

* *Window*: the chunk's turns are start and letting go, one microbatch after the other, for which a limit of 1 suffices.
* *Footprint*: the table's order, in which each F of such a chunk comes as late as possible, right before the first task
  that needs it. F of these chunks take no memory, so the stages' sums stay as they are. The turns follow from this
  order (:func:`turns_of_table`); where several successors read a chunk, the limit must be at least the peak of the
  turns.

Receipts come later than the ends that they report, and nothing waits for them but such chunks and the end of their
step; in the state that *Progress* considers, all of them have come. Strict consumption has no such bound: its table
says how far ahead a chunk runs."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from rrfp_jax.core.plan import RUNNING, StagePlan
from rrfp_jax.schedules import PipelineGraph, Task, TaskKind

Turn = tuple[int, bool]
"""A microbatch, and whether this is its turn to be taken (else to be let go)."""


@lru_cache(maxsize=256)
def holding_turns(microbatches: range, order: tuple[int, ...] = ()) -> tuple[Turn, ...]:
    """Returns the turns of an order that names each microbatch twice; without an order, one after another by number.

    Raises ValueError unless the order names each microbatch twice.
    """
    if not order:
        return tuple((m, is_start) for m in microbatches for is_start in (True, False))
    if sorted(order) != sorted([*microbatches] * 2):
        raise ValueError("an order of turns must name each microbatch twice: its start, and when it is let go")
    seen: set[int] = set()
    turns = []
    for m in order:
        turns.append((m, m not in seen))
        seen.add(m)
    return tuple(turns)


def peak_of_turns(turns: Iterable[Turn], weight: dict[int, int] | None = None) -> int:
    """Returns the most that the turns hold at once; without weights every microbatch weighs 1."""
    changes = ((1 if weight is None else weight[m]) * (1 if is_start else -1) for m, is_start in turns)
    return max(accumulate(changes), default=0)


class Window:
    """The microbatches that a stage, or a chunk that reads ahead, holds during one step.

    Args:
        limit: the most that may be held, in the unit of the weights; None: no limit.
        ends: for each microbatch, how many ends let go of it, 0 where the step lacks it; numbers begin at ``first``.
        order: every microbatch twice, see :func:`holding_turns`.
        weights: of each microbatch; none: 1 each.
        sequence: every microbatch once, where they are not taken by number; for a window without ``order``.

    Raises ValueError where the order alone holds more than the limit.
    """

    __slots__ = (
        "_enough",
        "_is_counted",
        "_lightest",
        "_next",
        "_passed",
        "_sequence",
        "_start_place",
        "_turns",
        "_weights",
        "first",
        "held",
        "is_even",
        "left",
        "limit",
        "load",
        "oldest",
    )

    def __init__(
        self,
        limit: int | None,
        ends: Sequence[int],
        first: int = 0,
        order: tuple[int, ...] = (),
        weights: Sequence[int] = (),
        *,
        sequence: Sequence[int] = (),
    ) -> None:
        self.limit, self.first = limit, first
        self.left = list(ends)
        self.held: set[int] = set()
        self.load = 0
        self._sequence: Sequence[int] = sequence or range(first, first + len(self.left))
        self._passed = 0
        """How many microbatches at the beginning of the sequence have been let go."""
        self.oldest = first
        """The first of the sequence that has not been let go; one past the last number if all have."""
        self._weights = tuple(weights) or (1,) * len(self.left)
        self.is_even = not weights
        """Whether every microbatch weighs 1."""
        self._is_counted = self.is_even and not order
        self._turns: tuple[Turn, ...] = ()
        self._start_place: dict[int, int] = {}
        self._next = 0
        """No turn before this one is left."""
        self._lightest = peak = 1
        self._advance()
        # Most windows count microbatches by number. Their rule is two comparisons, so they need no turns.
        if not self._is_counted:
            self._lightest = min((w for w, left in zip(self._weights, self.left, strict=True) if left), default=0)
            microbatches = range(first, first + len(self.left))
            self._turns = holding_turns(microbatches, order or tuple(m for m in sequence for _ in range(2)))
            self._start_place = {m: place for place, (m, is_start) in enumerate(self._turns) if is_start}
            peak = peak_of_turns(self._turns, dict(zip(microbatches, self._weights, strict=True)))
        if limit is not None and peak > limit:
            raise ValueError(f"a limit of {limit} is less than the {peak} that its order needs: give at least that")
        self._enough = 0 if limit is None else limit - peak
        """Up to this load nothing is refused: the rest of the order adds no more than its peak."""

    def copy(self) -> "Window":
        twin = object.__new__(type(self))
        twin.limit, twin.first, twin.load, twin.oldest = self.limit, self.first, self.load, self.oldest
        twin.left, twin.held = self.left.copy(), self.held.copy()
        twin.is_even, twin._is_counted, twin._weights = self.is_even, self._is_counted, self._weights
        twin._sequence, twin._passed = self._sequence, self._passed
        twin._turns, twin._start_place, twin._next = self._turns, self._start_place, self._next
        twin._lightest, twin._enough = self._lightest, self._enough
        return twin

    @property
    def is_full(self) -> bool:
        """Whether nothing is admitted that is not held."""
        return self.limit is not None and self.load + self._lightest > self.limit

    def weight(self, microbatch: int) -> int:
        return self._weights[microbatch - self.first]

    def admits(self, microbatch: int) -> bool:
        """Returns whether this microbatch is held, or may be from now on."""
        limit, held = self.limit, self.held
        if limit is None or microbatch in held:
            return True
        load = self.load + self._weights[microbatch - self.first]
        if load > limit:
            return False
        if load <= self._enough:
            return True
        if self._is_counted:
            return microbatch == self.oldest or self.oldest in held
        return self._fits_before(self._start_place[microbatch], load, limit)

    def _fits_before(self, last: int, load: int, limit: int) -> bool:
        """Returns whether all that is left before a turn fits beside this load."""
        turns, place = self._turns, self._next
        while place < last and self._is_past(*turns[place]):
            place += 1
        self._next = place
        for other, is_start in turns[place:last]:
            if self._is_past(other, is_start):
                continue
            if is_start:
                load += self._weights[other - self.first]
                if load > limit:
                    return False
            else:
                load -= self._weights[other - self.first]
                if load <= self._enough:
                    return True
        return True

    def _is_past(self, microbatch: int, is_start: bool) -> bool:
        return not self.left[microbatch - self.first] or (is_start and microbatch in self.held)

    def start_forward(self, microbatch: int) -> None:
        """Hold a microbatch from now on, if it is not held yet."""
        if microbatch not in self.held:
            self.held.add(microbatch)
            self.load += self._weights[microbatch - self.first]

    def finish(self, microbatch: int) -> None:
        """Count one of the ends that let go of this microbatch."""
        place = microbatch - self.first
        self.left[place] -= 1
        if not self.left[place]:
            if microbatch in self.held:
                self.held.remove(microbatch)
                self.load -= self._weights[place]
            if microbatch == self.oldest:
                self._advance()

    def _advance(self) -> None:
        left, first, sequence, place = self.left, self.first, self._sequence, self._passed
        while place < len(left) and not left[sequence[place] - first]:
            place += 1
        self._passed = place
        self.oldest = sequence[place] if place < len(left) else first + len(left)

    def ages(self) -> dict[int, int]:
        """Returns the place of each microbatch in the sequence."""
        return {microbatch: place for place, microbatch in enumerate(self._sequence)}


def check_weights(weights: Sequence[int], num_microbatches: int, capacity: int | None, stage: int) -> None:
    """Raise ValueError for weights that a stage cannot take; ``capacity`` None: the stage counts microbatches."""
    if capacity is None:
        raise ValueError(f"stage {stage} is given weights of microbatches and no capacity: it counts them")
    if len(weights) != num_microbatches:
        raise ValueError(f"stage {stage} has {num_microbatches} microbatches and is given {len(weights)} weights")
    if min(weights, default=0) < 0:
        raise ValueError(f"stage {stage} is given a negative weight of a microbatch, {min(weights)}")
    if max(weights, default=0) > capacity:
        raise ValueError(
            f"a microbatch weighs {max(weights)} on stage {stage}, which may hold {capacity}: give at least that as "
            "window, or make microbatches smaller"
        )


def check_windows(window: int | Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Returns one window per stage from one number or one per stage; raises ValueError with the remedy."""
    windows = tuple(map(int, window)) if isinstance(window, Sequence) else (int(window),) * num_stages
    if len(windows) != num_stages:
        raise ValueError(
            f"window has {len(windows)} numbers for {num_stages} stages: give one number, or one for each stage"
        )
    if min(windows) < 1:
        raise ValueError(
            f"window is {min(windows)}: a stage must be allowed to hold at least 1 microbatch, or it can never run"
        )
    return windows


# -- the footprint -----------------------------------------------------------------------------------------------------


def memory_changes(tasks: Iterable[Task], graph: PipelineGraph) -> list[int]:
    """Returns the changes of memory of tasks one after the other: the memory that each takes, and then the memory that
    it frees, negated."""
    return [change for task in tasks for takes, frees in [graph.memory_units(task)] for change in (takes, -frees)]


def canonical_row(graph: PipelineGraph, chunks: Sequence[int], sequence: Iterable[int] = ()) -> list[Task]:
    """Returns a stage's tasks in the window's order, in which every dependency goes forward.

    First by microbatch; within one F by ascending chunks and backwards by descending ones, with operations right where
    they can run, and those that take memory for a backward right before it. ``sequence`` names every microbatch of the
    stage, where they do not come by number.
    """
    row: list[Task] = []
    for m in sequence or range(graph.num_microbatches):
        forth: list[Task] = []
        back: list[Task] = []
        for chunk in chunks:
            if graph.exists(chunk, m):
                forth_here, back_here = _forth_and_back(graph, chunk, m)
                forth += forth_here
                back[:0] = back_here
        row += forth + back
    return row


def _forth_and_back(graph: PipelineGraph, chunk: int, microbatch: int) -> tuple[list[Task], list[Task]]:
    """Returns a chunk's tasks of one microbatch: those that can run before its backward, and the others."""
    tasks = [
        Task(kind, chunk, microbatch)
        for kind in graph.kinds(chunk)
        if not graph.ops or graph.operations.has(kind, chunk, microbatch)
    ]
    if not graph.has_backward(chunk):
        return tasks, []
    first = next(n for n, task in enumerate(tasks) if task.kind is graph.input_gradient_kind(chunk))
    back = set(tasks[first:])

    def goes_back(task: Task) -> bool:
        """Whether an operation takes memory for a task on the way back, or waits for one."""
        if task.kind is TaskKind.F:
            return False
        is_needed = any(task in graph.dependencies(other) for other in back)
        return (is_needed and graph.memory_units(task)[0] > 0) or not back.isdisjoint(graph.dependencies(task))

    while more := {task for task in tasks[:first] if task not in back and goes_back(task)}:
        back |= more
    return [task for task in tasks if task not in back], [task for task in tasks if task in back]


class RowMemory:
    """The memory that the entries of a stage's row take and free: fixed, and the same for every step.

    ``at`` gives the node at each position of a step.
    """

    def __init__(self, plan: StagePlan, at: tuple[int, ...], graph: PipelineGraph, row: Iterable[Task]) -> None:
        index = plan.index
        named = [(task, *graph.memory_units(task)) for task in row if task in index]
        self.unit = graph.memory_unit
        self.entries: list[tuple[int, int]] = []
        """(node, units that it takes as it starts, or frees as it ends, as a negative number), in the row's order.
        Tasks that do neither have no entry."""
        self._of_node: dict[int, tuple[int, int, int]] = {}
        """For each node how many entries come before it, and how much it takes and frees."""
        for task, takes, frees in named:
            self._of_node[index[task]] = len(self.entries), takes, frees
            self.entries += [(index[task], change) for change in (takes, -frees) if change]
        self._rank(at)
        by_forwards = {takes for task, takes, _ in named if task.kind is TaskKind.F}
        self.has_costless = 0 in by_forwards
        """Whether some F takes no memory."""
        self.is_even = len(by_forwards - {0}) < 2
        """Whether all F that take memory take the same."""
        self.has_other_takers = any(takes and plan.lanes[index[task]] > 0 for task, takes, _ in named)
        """Whether another task of the compute lane than F takes memory."""
        of_microbatch = [t for t in map(plan.tasks.__getitem__, at) if t.microbatch >= 0]
        self.unnamed = [t for t in of_microbatch if index[t] not in self._of_node]
        self.peak = max(accumulate(change for _, change in self.entries), default=0)
        """The most units that the row holds at once."""

    def _rank(self, at: tuple[int, ...]) -> None:
        found = [self._of_node.get(node, (-1, 0, 0)) for node in at]
        self._at = at
        self.place = tuple(place for place, _, _ in found)
        """By position, how many entries come before the task; -1 for tasks that the row does not name."""
        self.takes = tuple(takes for _, takes, _ in found)
        """By position, the units that a task takes."""
        self.frees = tuple(frees for _, _, frees in found)
        """By position, the units that a task frees."""

    def ranked(self, at: tuple[int, ...]) -> "RowMemory":
        """Returns the same memory for a step whose tasks have other positions."""
        if at is self._at:
            return self
        twin = copy(self)
        twin._rank(at)
        return twin


class Footprint:
    """One stage's activations during one step.

    The arbiter's own count for each node, ``waiting``, says which turns are past. Positions are places in
    the step's order.
    """

    __slots__ = ("_first", "_row", "held", "limit")

    def __init__(self, row: RowMemory, limit: int) -> None:
        self._row, self.limit = row, limit
        self.held = self._first = 0

    def copy(self) -> "Footprint":
        twin = object.__new__(type(self))
        twin._row, twin.limit, twin.held, twin._first = self._row, self.limit, self.held, self._first
        return twin

    def start(self, position: int) -> None:
        """Count the memory that the task at this position takes."""
        self.held += self._row.takes[position]

    def finish(self, position: int) -> None:
        """Count the memory that the task at this position frees."""
        self.held -= self._row.frees[position]

    def is_free(self, position: int) -> bool:
        return not self._row.takes[position]

    def admits(self, position: int, waiting: Sequence[int], due: int | None = None) -> bool:
        """Returns whether the task at this position, which has not started, may start now.

        ``due``: the position of a task that is about to end, whose memory is held until it does.
        """
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
        end = -1
        if due is not None and row.frees[due]:
            # The arbiter counts a due task as ended. An engine does not: its memory comes back at its place in the row.
            if held + row.frees[due] > limit:
                return False
            end = row.place[due] + (row.takes[due] > 0)
            if end >= first:
                held += row.frees[due]
        if held > limit:
            return False
        for place, (node, change) in enumerate(entries[first:last], first) if first < last else ():
            left = waiting[node]
            if left >= 0 or (left == RUNNING and change < 0) or place == end:
                held += change
                if held > limit:
                    return False
        return True

    def first_costless(self, *forwards: Iterable[int]) -> int | None:
        """Returns the first of the forwards at these positions that takes no memory, if there is one."""
        if not self._row.has_costless:
            return None
        takes = self._row.takes
        return min((position for some in forwards for position in some if not takes[position]), default=None)

    def first_admitted(self, waiting: Sequence[int], *ready: Iterable[int]) -> int | None:
        """Returns the first of the ready tasks at these positions that may start, if there is one."""
        takes, positions = self._row.takes, sorted(position for some in ready for position in some)
        return next((p for p in positions if not takes[p] or self.admits(p, waiting)), None)


# -- read-ahead --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AheadBound:
    """How many microbatches one chunk without a backward may have produced that not all its readers have taken."""

    chunk: int
    limit: int
    turns: tuple[int, ...] = ()
    """The chunk's microbatches in the order in which they start and are let go, each named twice; empty: one after the
    other, by number."""

    def needed(self, graph: PipelineGraph) -> int:
        """Returns the least limit with which the turns can come one after the other."""
        return peak_of_turns(holding_turns(graph.range_of(self.chunk), self.turns))

    def check(self, graph: PipelineGraph) -> None:
        """Raise ValueError where the bound does not fit this graph."""
        if not graph.reads_ahead(self.chunk):
            raise ValueError(f"chunk {self.chunk} has a backward, or nobody reads it: it needs no bound of read-ahead")
        needed = self.needed(graph)
        if self.limit < needed:
            raise ValueError(
                f"read_ahead is {self.limit} for chunk {self.chunk}, of which {needed} "
                f"{'microbatch is' if needed == 1 else 'microbatches are'} waited for at once: give at least {needed}"
            )


class ReadAhead:
    """The bounded chunks of one stage, numbered from 0, during one step."""

    __slots__ = ("_lets_go", "number", "windows")

    def __init__(self, bounds: Sequence[AheadBound], plan: StagePlan, graph: PipelineGraph) -> None:
        self.number = {bound.chunk: number for number, bound in enumerate(bounds)}
        self.windows = tuple(
            Window(bound.limit, plan.holds[bound.chunk], graph.range_of(bound.chunk).start, bound.turns)
            for bound in bounds
        )
        self._lets_go = plan.lets_go

    def copy(self) -> "ReadAhead":
        twin = object.__new__(type(self))
        twin.number, twin._lets_go = self.number, self._lets_go
        twin.windows = tuple(window.copy() for window in self.windows)
        return twin

    def admits(self, task: Task) -> bool:
        """Returns whether read-ahead lets a task start; bounded chunks have nothing but F."""
        number = self.number.get(task.chunk)
        return number is None or self.windows[number].admits(task.microbatch)

    def start(self, task: Task) -> None:
        number = self.number.get(task.chunk)
        if number is not None:
            self.windows[number].start_forward(task.microbatch)

    def finish(self, node: int, microbatch: int) -> None:
        """Let go of all that a task of this stage has taken, as it ends or counts as ended."""
        for chunk in self._lets_go.get(node, ()):
            self.let_go(chunk, microbatch)

    def let_go(self, chunk: int, microbatch: int) -> None:
        """Count one of the ends that let go of an output of a chunk, if it is bounded."""
        number = self.number.get(chunk)
        if number is not None:
            self.windows[number].finish(microbatch)


def turns_of_table(graph: PipelineGraph, tasks: Iterable[Task]) -> dict[int, tuple[int, ...]]:
    """Returns the turns of each chunk that reads ahead, where F without a backward come as late as an order allows.

    ``tasks``: all tasks of the pipeline in the order of a table. Turns are empty where they come one after the other,
    by number."""
    found: dict[int, list[int]] = {c: [] for c in range(graph.num_chunks) if graph.reads_ahead(c)}
    started: set[tuple[int, int]] = set()
    readers_left = {
        (c, m): sum(graph.exists(s, m) for s in graph.successors(c)) for c in found for m in graph.microbatches(c)
    }

    def run(chunk: int, m: int) -> None:
        before = [p for p in graph.predecessors(chunk) if p in found and graph.exists(p, m)]
        for p in before:
            if (p, m) not in started:
                run(p, m)
        if chunk in found:
            started.add((chunk, m))
            found[chunk].append(m)
        for p in before:
            readers_left[p, m] -= 1
            if not readers_left[p, m]:
                found[p].append(m)

    for kind, chunk, microbatch in tasks:
        if kind is TaskKind.F and chunk not in found:
            run(chunk, microbatch)
    turns: dict[int, tuple[int, ...]] = {}
    for chunk, order in found.items():
        # Absent microbatches stand behind the others; an order that goes by number needs no words.
        absent = sorted(set(graph.range_of(chunk)).difference(order))
        by_number = [m for m in graph.range_of(chunk) if m not in absent for _ in range(2)]
        turns[chunk] = () if order == by_number else (*order, *(m for m in absent for _ in range(2)))
    return turns
