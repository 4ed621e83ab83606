"""The true optimum of small cases, by OR-tools' CP-SAT solver (the optional extra ``optimum``).

It is a job shop with precedences: tasks of a stage's lane do not overlap, and a task starts after the end of each
dependency plus the transfer. Communication is asynchronous and without contention. Times are rounded to nanoseconds.

Where memory is short, activations may also move to the host and back: the solver chooses which ones, and the order of
tasks and copies together::

    best = find_optimum(chain(4, 8, split=True), linear(4), durations_ms, slots=2, copies=host_copies(10.0))
    ordering = Ordering(schedule=best.table, consume="strict", window=2)

An activation then takes memory from the start of its F to the end of its copy out, and from the start of its copy back
to the end of its W (or B). In the table that comes of it, each copy waits for the stage's copy before it, so that these
keep their order. Strict execution then starts no task later than the solver has it: of the turns before a copy's own,
only tasks of the compute lane are unfinished as it starts, and these run in their order within what is left of the
memory (:mod:`rrfp_jax.core.memory`).

:func:`better_order` finds such orders without the solver; the solver begins with them, and refines large ones.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise, product
from math import ceil, gcd, inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.core.memory import canonical_row
from rrfp_jax.schedules import (
    COMPUTE,
    Op,
    PipelineGraph,
    Placement,
    ScheduleRequest,
    ScheduleTable,
    Task,
    TaskKind,
    build_schedule,
    schedule_names,
)
from rrfp_jax.simulation.bounds import is_counted, lower_bound, task_lengths_ms, transfer_ms
from rrfp_jax.simulation.links import Links

_UNITS_PER_MS = 10**6
_TRIED, _STARTS, _MOVES, _MOVED, _PRUNED = 120_000, 3, 4_000, 400_000, 1_000_000
"""Without the solver: entries of the patterns tried, how many of these are improved, by how many random moves, entries
of these moves, and of the sequences in which a copy is left out."""
_WARMTH, _LEADS_ON = 0.02, 0.02
"""Parts of the makespan by which moves may make it worse at first, and of other ends that count beside it."""
_TWICE, _COPIES, _FURTHER = 0.3, 0.15, 0.6
"""How often two moves are made at once, a move concerns copies, and it goes further. No logarithms: all ranks of a run
must find the same order, whatever their libraries."""
_AT_ONCE, _WINDOW_S = 150, 10.0
"""Tasks up to which the solver has the whole case at once, and seconds that it has for a window of a larger one."""
_Wait = tuple[Task, Task, int]
"""A task, one that waits for it, and the transfer between them in units of time."""


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best order and the bound that the solver found in its time."""

    makespan_ms: float
    """Makespan of the best order found."""
    at_least_ms: float
    """No order that was asked for is better than this; equal to ``makespan_ms`` if that is proven optimal."""
    is_proven: bool
    table: ScheduleTable
    """The best order found: the tasks of each stage as they start, copies too."""


def find_optimum(
    graph: PipelineGraph,
    placement: Placement,
    durations_ms: NDArray[np.float64],
    *,
    links: Links | None = None,
    windows: Sequence[int] | None = None,
    slots: int | Sequence[int] | None = None,
    copies: tuple[Op, Op] | None = None,
    time_limit_s: float = 10.0,
    num_workers: int = 1,
) -> Optimum:
    """Returns the smallest makespan of one step, and an order that has it.

    With ``slots``, and microbatches that take equal times, only orders are asked for in which every chunk takes its
    microbatches by their numbers.

    Args:
        graph, placement: the pipeline.
        durations_ms: [chunks, microbatches, 3] for F, input gradient and weight gradient.
        links: durations of transfers; None: transfers take no time.
        windows: the most microbatches that each stage may hold; None: any number. Memory that operations move does not
            count.
        slots: the most activations that each stage may hold on its devices, one number or one per stage, counted as
            ``offload`` of :mod:`rrfp_jax.runtime.operations` does; None: any number.
        copies: the ways out and back on one engine, as ``host_copies`` there makes them: any activation may move.
            None: none does.
        time_limit_s: the solver returns the best order that it has found in this time; with ``slots`` it begins
            with one of our own, and has more than 150 tasks window by window, which proves nothing but by the bound.
        num_workers: threads of the solver; with one, the result does not depend on the machine unless time runs out.

    Raises ImportError without OR-tools, naming the extra, and ValueError if no order was found in time, and where slots
    and copies do not fit.
    """
    slots = [slots] * placement.num_stages if isinstance(slots, int) else slots
    _check_memory(graph, windows, slots, copies)
    cp_model, links = load_solver(), links or Links()
    times = _in_units(graph, placement, durations_ms, links, copies or ())
    least_ms = lower_bound(graph, placement, durations_ms, links=links).total_ms
    is_even = graph.is_full and bool((durations_ms == durations_ms[:, :1]).all())
    solver = _Solver(
        cp_model, graph, placement, times, slots=slots, windows=windows, is_even=is_even, num_workers=num_workers
    )
    if slots is None:
        found = solver.solved(time_limit_s)
    else:
        solver.bound = ceil(least_ms * times.units_per_ms - 1e-3)
        steps = _Steps(graph, placement, times, slots, copies or ())
        tables = _tables_of(graph, placement, durations_ms, slots)
        begun = steps.searched([steps.numbered(table.orders) for table in tables], solver.bound)
        known = _Solved(steps.starts(begun, by_number=is_even), begun.makespan, solver.bound)
        found = solver.refined(known, time_limit_s)
        found = found._replace(starts=steps.without_needless_copies(found.starts, found.makespan))
    makespan_ms = found.makespan / times.units_per_ms
    is_proven = found.makespan <= found.bound
    return Optimum(
        makespan_ms=makespan_ms,
        at_least_ms=makespan_ms if is_proven else min(max(least_ms, found.bound / times.units_per_ms), makespan_ms),
        is_proven=is_proven,
        table=_table_of(times.spans(found.starts), graph, placement, copies or ()),
    )


def load_solver() -> Any:
    """Returns the module of the solver's models. Raises ImportError without OR-tools, naming the extra."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ImportError(
            "the true optimum needs OR-tools, which is not installed: pip install 'rrfp-jax[optimum]'"
        ) from error
    return cp_model


class _Solved(NamedTuple):
    """An order that the solver has found, in units of time."""

    starts: dict[Task, int]
    """Start of each task, and of each copy that is made."""
    makespan: int
    bound: int
    """No order that was asked for is shorter."""


class _Solver:
    """One case, as models of the solver.

    A large case is refined window by window: tasks and copies that start before the window keep their starts, those
    behind it the order on their lane, and those within it are free. The windows go from the end of the step to its
    start, and become wider once none of them is better.
    """

    def __init__(
        self,
        cp_model: Any,
        graph: PipelineGraph,
        placement: Placement,
        times: "_Times",
        *,
        slots: Sequence[int] | None,
        windows: Sequence[int] | None,
        is_even: bool,
        num_workers: int,
    ) -> None:
        self.cp_model, self.graph, self.placement, self.times = cp_model, graph, placement, times
        self.slots, self.windows, self.is_even, self.num_workers = slots, windows, is_even, num_workers
        self.bound = 0
        self.seconds = 0.0
        """Seconds that the solver has taken so far."""

    def refined(self, known: _Solved, time_limit_s: float) -> _Solved:
        """Returns the best order that is found from a known one on: of the whole case at once where it is small."""
        if known.makespan <= self.bound:
            return known
        if len(self.times.durations) <= _AT_ONCE:
            return self.solved(time_limit_s, known)
        best, width, is_better = known, max(1, known.makespan // 6), False
        first = best.makespan - width
        while self.seconds < time_limit_s and best.makespan > self.bound and width < 2 * best.makespan:
            found = self.solved(min(_WINDOW_S, time_limit_s - self.seconds), best, (first, first + width))
            is_better = is_better or found.makespan < best.makespan
            best, first = found, first - width // 2
            if first + width // 2 <= 0:
                width, is_better = width if is_better else width * 3 // 2, False
                first = best.makespan - width
        return best._replace(bound=self.bound)

    def solved(
        self, time_limit_s: float, known: _Solved | None = None, window: tuple[int, int] | None = None
    ) -> _Solved:
        """Returns the best order that is found in this time, at least the known one.

        Raises ValueError where there is none.
        """
        times, graph, placement, durations = self.times, self.graph, self.placement, self.times.durations
        horizon = sum(durations.values()) + sum(transfer for *_, transfer in times.waits)
        horizon = horizon if known is None else known.makespan
        model = self.cp_model.CpModel()
        starts = {task: model.new_int_var(0, horizon, str(task)) for task in durations}
        of_lane: dict[tuple[int, str], list[Task]] = defaultdict(list)
        for task in durations:
            of_lane[placement.stage_of_chunk[task.chunk], graph.lane(task.kind)].append(task)
        for tasks in of_lane.values():
            model.add_no_overlap(
                model.new_fixed_size_interval_var(starts[task], durations[task], f"run {task}") for task in tasks
            )
        for earlier, later, transfer in times.waits:
            model.add(starts[later] >= starts[earlier] + durations[earlier] + transfer)
        if self.windows is not None:
            _add_windows(model, starts, durations, horizon=horizon, placement=placement, windows=self.windows)
        made: dict[Task, _Copy] = {}
        if self.slots is not None:
            made = _add_slots(model, starts, times, horizon=horizon, graph=graph, placement=placement, slots=self.slots)
        if self.is_even:
            _add_numbers(model, starts, made, every_kind=self.slots is not None)
        self._add_hints(model, starts, made, {} if known is None else known.starts)
        makespan = _makespan(model, starts, durations, horizon, graph)
        if known is not None and window is not None:
            self._fix(model, starts, made, known.starts, window)
        model.minimize(makespan)
        solver = self.cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit_s
        solver.parameters.num_workers = self.num_workers
        status = solver.solve(model)
        self.seconds += solver.wall_time
        if status in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            found = {task: solver.value(start) for task, start in starts.items()}
            found |= {task: solver.value(copy.start) for task, copy in made.items() if solver.value(copy.moves)}
            return _Solved(found, round(solver.objective_value), ceil(solver.best_objective_bound - 1e-6))
        if status == self.cp_model.UNKNOWN and known is not None:  # too short a time to look at what it began with
            return known
        raise ValueError(
            f"the solver found no order of {len(starts)} tasks in {time_limit_s} s: give it more time, or fewer tasks"
        )

    def _add_hints(
        self, model: Any, starts: dict[Task, Any], made: "dict[Task, _Copy]", known: dict[Task, int]
    ) -> None:
        if not known:
            return
        for task, variable in (starts | {task: copy.start for task, copy in made.items()}).items():
            model.add_hint(variable, known.get(task, 0))
        for task, copy in made.items():
            if task.kind == next(iter(self.times.copies)):  # both ways have one flag
                model.add_hint(copy.moves, task in known)

    def _fix(
        self,
        model: Any,
        starts: dict[Task, Any],
        made: "dict[Task, _Copy]",
        known: dict[Task, int],
        window: tuple[int, int],
    ) -> None:
        """Leaves free what starts within the window alone."""
        first, last = window
        behind: dict[tuple[int, bool], list[Task]] = defaultdict(list)
        for task, start in known.items():
            if start < first:
                model.add((made[task].start if task in made else starts[task]) == start)
            elif start >= last:
                behind[self.placement.stage_of_chunk[task.chunk], task in made].append(task)
        for tasks in behind.values():
            tasks.sort(key=known.__getitem__)
            for earlier, later in pairwise(tasks):
                if earlier in made:
                    model.add(made[later].start >= made[earlier].start + self.times.copies[earlier.kind])
                else:
                    model.add(starts[later] >= starts[earlier] + self.times.durations[earlier])
        for task, copy in made.items():
            forward, backward = (
                known[Task(kind, *task[1:])] for kind in (TaskKind.F, self.graph.input_gradient_kind(task.chunk))
            )
            if backward < first or forward >= last or (task in known and not first <= known[task] < last):
                model.add(copy.moves == (task in known))


def _check_memory(
    graph: PipelineGraph, windows: Sequence[int] | None, slots: Sequence[int] | None, copies: tuple[Op, Op] | None
) -> None:
    if slots is None:
        if copies is not None:
            raise ValueError("copies move what a stage holds beyond its slots: give slots too, or leave copies out")
        return
    if min(slots) < 1:
        raise ValueError(f"the optimum has {min(slots)} slots: give at least 1 for what a stage holds on its devices")
    if windows is not None:
        raise ValueError("windows and slots both bound what stages hold: leave one of them out")
    if graph.ops:
        raise ValueError("slots count the activations of a graph without operations: leave its operations out")
    if copies is not None and (copies[0].lane != copies[1].lane or copies[0].lane == COMPUTE):
        raise ValueError("the optimum has copies on two engines: let the ways out and back share one beside compute")
    if copies is not None and not all(round(op.ms * _UNITS_PER_MS) for op in copies):
        raise ValueError("the optimum has copies that take no time: give more than 0 ms, for example 0.001")


@dataclass(frozen=True)
class _Times:
    """Lengths and transfers in whole units of time."""

    durations: dict[Task, int]
    waits: list[_Wait]
    copies: dict[str, int]
    """The lengths of copies by their letters."""
    units_per_ms: float

    def spans(self, starts: dict[Task, int]) -> dict[Task, tuple[int, int]]:
        """Returns start and end of tasks and copies that start at these times."""
        lengths = {task: self.durations[task] if task in self.durations else self.copies[task.kind] for task in starts}
        return {task: (start, start + lengths[task]) for task, start in starts.items()}


def _in_units(
    graph: PipelineGraph, placement: Placement, durations_ms: NDArray[np.float64], links: Links, copies: Iterable[Op]
) -> _Times:
    lengths_ms = task_lengths_ms(graph, durations_ms, {})
    in_units = {task: round(ms * _UNITS_PER_MS) for task, ms in lengths_ms.items()}
    waits = [
        (earlier, task, round(transfer_ms(earlier, task, placement, links) * _UNITS_PER_MS))
        for task in in_units
        for earlier in graph.dependencies(task)
        if earlier in in_units
    ]
    of_copies = {op.letter: round(op.ms * _UNITS_PER_MS) for op in copies}
    # Whole units of time, their greatest common divisor taken out: the solver's domains stay small.
    common = gcd(*in_units.values(), *of_copies.values(), *(transfer for *_, transfer in waits)) or 1
    return _Times(
        {task: units // common for task, units in in_units.items()},
        [(earlier, later, transfer // common) for earlier, later, transfer in waits],
        {letter: units // common for letter, units in of_copies.items()},
        _UNITS_PER_MS / common,
    )


def _makespan(
    model: Any, starts: dict[Task, Any], durations: dict[Task, int], horizon: int, graph: PipelineGraph
) -> Any:
    makespan = model.new_int_var(0, horizon, "makespan")
    counted = {task: start for task, start in starts.items() if is_counted(graph, task)}
    first: Any = 0
    if len(counted) < len(starts):  # tasks that do not count may run before all that do
        first = model.new_int_var(0, horizon, "first start")
        for start in counted.values():
            model.add(first <= start)
    for task, start in counted.items():
        model.add(makespan >= start + durations[task] - first)
    return makespan


def _add_numbers(model: Any, starts: dict[Task, Any], made: "dict[Task, _Copy]", *, every_kind: bool) -> None:
    """Fixes the order of equal microbatches, which spares the solver all permutations of the same order.

    They can be renumbered, so on the first chunk's F this loses no makespan; nor, without copies, on each chunk's tasks
    of every kind. Deterministic runs add gradients up in no other order.
    """
    for (kind, chunk, m), start in starts.items():
        before = Task(kind, chunk, m - 1)
        if before in starts and (every_kind or (kind, chunk) == (TaskKind.F, 0)):
            model.add(start >= starts[before])
    for (kind, chunk, m), copy in made.items():
        if m:
            model.add(copy.start >= made[Task(kind, chunk, m - 1)].start)


# -- a good order without the solver -----------------------------------------------------------------------------------


def better_order(
    graph: PipelineGraph,
    placement: Placement,
    durations_ms: NDArray[np.float64],
    *,
    slots: Sequence[int],
    copies: tuple[Op, Op] | None = None,
    links: Links | None = None,
    tables: Iterable[ScheduleTable] = (),
    than_ms: float = inf,
) -> Optimum | None:
    """Returns a good order of tasks and copies together, found without the solver in about a second; None where it
    does not take less than ``than_ms``.

    Args:
        graph, placement, durations_ms, copies, links: as in :func:`find_optimum`; each way of the copies may have an
            engine of its own.
        slots: the most microbatches' activations that each stage may hold on its devices.
        tables: orders of this graph to begin with, whatever they hold.
    """
    times = _in_units(graph, placement, durations_ms, links or Links(), copies or ())
    least_ms = lower_bound(graph, placement, durations_ms, links=links).total_ms
    if than_ms <= least_ms * (1 + 1e-9):
        return None
    steps = _Steps(graph, placement, times, slots, copies or ())
    bound = ceil(least_ms * times.units_per_ms - 1e-3)
    best = steps.searched([steps.numbered(table.orders) for table in tables], bound)
    if best.makespan >= than_ms * times.units_per_ms:
        return None
    makespan_ms = best.makespan / times.units_per_ms
    return Optimum(
        makespan_ms=makespan_ms,
        at_least_ms=min(least_ms, makespan_ms),
        is_proven=best.makespan <= bound,
        table=_table_of(times.spans(steps.starts(best)), graph, placement, copies or ()),
    )


def _tables_of(
    graph: PipelineGraph, placement: Placement, durations_ms: NDArray[np.float64], slots: Sequence[int]
) -> Iterator[ScheduleTable]:
    """Yields the named tables of this graph on this placement."""
    forward, input_gradient, weight_gradient = np.nanmean(durations_ms, axis=(0, 1)).tolist()
    request = ScheduleRequest(
        num_stages=placement.num_stages,
        num_microbatches=graph.num_microbatches,
        window=max(slots),
        durations_ms=(forward, input_gradient, weight_gradient),
        memory_limit=float(max(slots)),
    )
    for name in schedule_names():
        try:
            table = build_schedule(name, request)
        except ValueError:  # not for these sizes
            continue
        if (table.graph, table.placement) == (graph, placement):
            yield table


def _random_parts() -> Iterator[float]:
    """Yields numbers from 0 to 1, the same ones each time."""
    generator = np.random.default_rng(0)
    while True:
        yield from generator.random(1024).tolist()


class _Timed(NamedTuple):
    """A sequence of steps that fits, and the times that it leads to."""

    makespan: int
    cost: float
    """The makespan, and small parts of the ends of stages and tasks, which lead on where makespans are equal."""
    sequence: list[int]
    ends: list[int]


class _Steps:
    """The tasks and possible copies of a step by number, for orders that are found without the solver.

    A *sequence* names all tasks, and the copies that are made. It is the order in which a stage's tasks, its copies and
    its memory take their turns. Each entry starts once its lane has ended the entry before it there, all that it waits
    for has ended and, where it takes memory, a slot is free that an entry before it has left. So the slots always
    suffice, and a sequence whose entry takes a slot that nothing before it frees does not fit.

    The search begins with rows of a few patterns: F up to a number in flight, then backwards and F in turn, each W some
    backwards behind its I; copies are put into a row as its slots ask for. The best one is improved by random moves of
    entries and copies, of which a few that make it worse are taken (simulated annealing). Microbatches keep their
    order on each chunk.
    """

    def __init__(
        self, graph: PipelineGraph, placement: Placement, times: _Times, slots: Sequence[int], copies: Sequence[Op]
    ) -> None:
        self.graph, self.placement, stage_of = graph, placement, placement.stage_of_chunk
        pairs = [(c, m) for c in range(graph.num_chunks) if graph.has_backward(c) for m in graph.microbatches(c)]
        made = [Task(TaskKind(op.letter), *pair) for op in copies for pair in pairs]
        self.tasks = [*times.durations, *made]
        self.num_computed = len(times.durations)
        self.number = number = {task: n for n, task in enumerate(self.tasks)}
        spans = times.spans(dict.fromkeys(self.tasks, 0))
        self.lengths = [max(1, end) for _, end in spans.values()]
        """Units of each entry; at least 1, so that entries that wait for each other start one after the other."""
        self.stages = [stage_of[task.chunk] for task in self.tasks]
        engines = {
            op.letter: n
            for op in copies
            for n, lane in enumerate({each.lane: 0 for each in copies}, 1)
            if lane == op.lane
        }
        self.lanes = [
            engines.get(task.kind, 0) * placement.num_stages + stage
            for task, stage in zip(self.tasks, self.stages, strict=True)
        ]
        self.before: list[list[tuple[int, int]]] = [[] for _ in self.tasks]
        """For each entry those that it waits for, with transfers; a copy that is not made ends at 0."""
        for earlier, later, transfer in times.waits:
            self.before[number[later]].append((number[earlier], transfer))
        self.slots = [
            most * graph.passes_per_microbatch(chunks)
            for most, chunks in zip(slots, placement.chunks_of_stage, strict=True)
        ]
        self.takes, self.frees = [False] * len(self.tasks), [False] * len(self.tasks)
        self.stays: list[tuple[int, ...]] = []
        """For each activation its F, its first and its last backward task and, if it may move, its two copies."""
        for c, m in pairs:
            kinds = TaskKind.F, graph.input_gradient_kind(c), graph.accumulating_kind(c)
            stay = tuple(number[Task(TaskKind(kind), c, m)] for kind in (*kinds, *(op.letter for op in copies)))
            self.stays.append(stay)
            self.takes[stay[0]] = self.frees[stay[2]] = True
            if copies:
                out, back = stay[3:]
                self.frees[out] = self.takes[back] = True
                self.before[out].append((stay[0], 0))
                self.before[back].append((out, 0))
                self.before[stay[1]].append((back, 0))
        self.after: list[list[int]] = [[] for _ in self.tasks]
        for n, needed in enumerate(self.before):
            for other, _ in needed:
                self.after[other].append(n)
        for task, n in number.items():  # microbatches keep their order
            following = number.get(task._replace(microbatch=task.microbatch + 1))
            if n < self.num_computed and following is not None:
                self.after[n].append(following)

    def numbered(self, orders: Iterable[Iterable[Task]]) -> list[list[int]]:
        return [[self.number[task] for task in order] for order in orders]

    def starts(self, found: _Timed, *, by_number: bool = False) -> dict[Task, int]:
        """Returns the start of each entry; if asked, copies of a chunk take their turns by microbatch."""
        starts: dict[Task, int] = {}
        copied: dict[tuple[TaskKind, int], list[Task]] = defaultdict(list)
        for n in found.sequence:
            task = self.tasks[n]
            starts[task] = found.ends[n] - self.lengths[n]
            if by_number and n >= self.num_computed:
                copied[task.kind, task.chunk].append(task)
        for each in copied.values():  # they may, since F and backwards are in order
            starts |= zip(sorted(each), sorted(starts[task] for task in each), strict=True)
        return starts

    def without_needless_copies(self, starts: dict[Task, int], makespan: int) -> dict[Task, int]:
        """Returns an order that takes no longer, without copies that buy no time."""
        known = self.timed(sorted(map(self.number.__getitem__, starts), key=lambda n: starts[self.tasks[n]]))
        return starts if known is None or known.makespan > makespan else self.starts(self.pruned(known))

    def timed(self, sequence: list[int] | None, most: float = inf) -> _Timed | None:
        """Returns the times of a sequence; None where it does not fit, or costs more than ``most``."""
        if sequence is None:
            return None
        lengths, lanes, stages, before = self.lengths, self.lanes, self.stages, self.before
        takes, frees, num_stages = self.takes, self.frees, self.placement.num_stages
        ends, free = [0] * len(lengths), [0] * (max(lanes) + 1)
        slots = [[0] * most_held for most_held in self.slots]
        for n in sequence:
            lane = lanes[n]
            start = free[lane]
            for other, transfer in before[n]:
                arrival = ends[other] + transfer
                if arrival > start:  # noqa: PLR1730 (max takes twice the time, and this runs a million times)
                    start = arrival
            if takes[n]:
                left = slots[stages[n]]
                if not left:
                    return None
                start = max(start, heappop(left))
            end = start + lengths[n]
            if end > most:
                return None
            ends[n] = free[lane] = end
            if frees[n]:
                heappush(slots[stages[n]], end)
        computed = free[:num_stages]
        makespan = max(computed)
        cost = makespan + _LEADS_ON * (sum(computed) / num_stages + sum(ends) / len(ends) / 5)
        return _Timed(makespan, cost, sequence, ends) if cost <= most else None

    def merged(self, rows: Sequence[Sequence[int]]) -> list[int] | None:
        """Returns a sequence in which each stage keeps to its row; None where they wait for each other."""
        there = {n for row in rows for n in row}
        done, places, sequence, goes_on = set[int](), [0] * len(rows), list[int](), True
        while goes_on:
            goes_on = False
            for stage, row in enumerate(rows):
                while places[stage] < len(row):
                    n = row[places[stage]]
                    if not all(other in done or other not in there for other, _ in self.before[n]):
                        break
                    done.add(n)
                    sequence.append(n)
                    places[stage] += 1
                    goes_on = True
        return sequence if len(sequence) == len(there) else None

    # -- patterns ------------------------------------------------------------------------------------------------------

    def searched(self, bases: Iterable[list[list[int]]], bound: int) -> _Timed:
        """Returns the best sequence found, from rows of the patterns and of ``bases`` on."""
        starts: dict[int, _Timed] = {}  # by their makespans, the first of each
        for tried, rows in enumerate(self._patterns([each for each in bases if self._is_by_number(each)])):
            if starts and (tried * len(self.tasks) > _TRIED or min(starts) <= bound):
                break
            found = self.timed(self.merged(rows))
            if found is not None:
                starts.setdefault(found.makespan, found)
        # One microbatch after the other always fits, so there is a start.
        best = starts[min(starts)]
        for makespan in sorted(starts)[:_STARTS]:
            if best.makespan > bound:
                best = min(best, self._annealed(starts[makespan], bound), key=lambda each: each.makespan)
        return self.pruned(best)

    def _is_by_number(self, rows: list[list[int]]) -> bool:
        place = {n: at for row in rows for at, n in enumerate(row)}
        return all(
            place[n] < place[other]
            for n in place
            for other in self.after[n]
            if other in place and self.lanes[n] == self.lanes[other] and self.tasks[n][:2] == self.tasks[other][:2]
        )

    def _patterns(self, bases: list[list[list[int]]]) -> Iterator[list[list[int]]]:
        """Yields rows with copies that fit, those that have proved best first."""
        graph, chunks_of_stage = self.graph, self.placement.chunks_of_stage
        plain = [self.numbered([canonical_row(replace(graph, ops=()), chunks)])[0] for chunks in chunks_of_stage]
        to_end, from_start = [0] * graph.num_chunks, [0] * graph.num_chunks
        for c in range(graph.num_chunks):
            from_start[c] = max((from_start[b] + 1 for b in graph.predecessors(c)), default=0)
        for c in reversed(range(graph.num_chunks)):
            to_end[c] = max((to_end[a] + 1 for a in graph.successors(c)), default=0)
        ahead = [max(to_end[c] for c in chunks) for chunks in chunks_of_stage]
        behind = [min(from_start[c] for c in chunks) for chunks in chunks_of_stage]
        for further, (spare, lead) in product((0, -1, -2, -3, 1), ((0, 0), (1, 1))):
            lasts = [max(0, most - 1 - spare) for most in self.slots]
            for lag, slope in product((max(lasts), 0, 1), (1, 2)):
                depths = [slope * hops + 1 + further for hops in ahead]
                lags = [min(lag, *each) for each in zip(behind, lasts, strict=True)]
                for rows, late in product((plain, *bases), (lags, lasts)):
                    made = [self._row(*each) for each in zip(rows, depths, lags, late, strict=True)]
                    yield from self._with_copies(made, spare, lead)
            for rows in (plain, *bases):
                yield from self._with_copies(rows, spare, lead)

    def _row(self, row: list[int], depth: int, lag: int, last_lag: int) -> list[int]:
        """Returns a stage's row with F until ``depth`` activations are in flight, and each W ``lag`` backwards late."""
        kinds = [self.tasks[n].kind for n in row]
        forwards = [n for n, kind in zip(row, kinds, strict=True) if kind is TaskKind.F]
        backwards = [n for n, kind in zip(row, kinds, strict=True) if kind in (TaskKind.B, TaskKind.I)]
        weights = {self.tasks[n][1:]: n for n, kind in zip(row, kinds, strict=True) if kind is TaskKind.W}
        forward_of = {stay[1]: stay[0] for stay in self.stays}
        found, owed, done = list[int](), list[int](), set[int]()
        left = iter(forwards)
        for number, back in enumerate(backwards):
            while len(done) - number < depth or (back in forward_of and forward_of[back] not in done):
                forward = next(left, None)
                if forward is None:
                    break
                found.append(forward)
                if self.takes[forward]:
                    done.add(forward)
            found.append(back)
            owed += [weights[self.tasks[back][1:]]] if self.tasks[back][1:] in weights else []
            if len(owed) > (lag if len(done) < len(forwards) else last_lag):
                found.append(owed.pop(0))
        return [*found, *left, *owed]

    def _with_copies(self, rows: list[list[int]], spare: int, lead: int) -> Iterator[list[list[int]]]:
        """Yields the rows with the fewest copies by which they hold no more than the slots less the spare ones, each
        way back ``lead`` entries early; nothing where that cannot be."""
        made = []
        for row, most in zip(rows, self.slots, strict=True):
            place = {n: at for at, n in enumerate(row)}
            held, copies = [0] * len(row), list[tuple[int, int]]()
            stays = sorted((stay for stay in self.stays if stay[0] in place), key=lambda stay: place[stay[0]])
            for stay in stays:
                for at in range(place[stay[0]], place[stay[2]] + 1):
                    held[at] += 1
            here, waiting = list[tuple[int, ...]](), iter(stays)
            upcoming = next(waiting, None)
            for at in range(len(row)):
                while upcoming is not None and place[upcoming[0]] < at:
                    here.append(upcoming)
                    upcoming = next(waiting, None)
                here = [stay for stay in here if place[stay[1]] > at and len(stay) > 3]
                while held[at] > max(1, most - spare) and here:
                    last = max(here, key=lambda stay: place[stay[1]])
                    here.remove(last)
                    first, end = place[last[0]], place[last[1]]
                    copies += [(first, last[3]), (max(first + 1, end - lead) - 1, last[4])]
                    for between in range(first + 1, end):
                        held[between] -= 1
            if max(held, default=0) > most:
                return
            behind: dict[int, list[int]] = defaultdict(list)
            for at, copy in sorted(copies, key=lambda each: self.takes[each[1]]):  # what leaves makes room first
                behind[at].append(copy)
            made.append([n for at, entry in enumerate(row) for n in (entry, *behind[at])])
        yield made

    # -- improvement ---------------------------------------------------------------------------------------------------

    def _annealed(self, best: _Timed, bound: int) -> _Timed:
        random, present = _random_parts(), best
        num_moves = min(_MOVES, _MOVED // len(best.sequence))
        for move in range(num_moves):
            warmth = _WARMTH * best.makespan * (1 - move / num_moves) ** 2
            sequence = self._moved(present.sequence, random)
            if next(random) < _TWICE:
                sequence = self._moved(sequence, random)
            found = self.timed(sequence, present.cost + warmth * next(random) ** 2)
            if found is not None:
                present = self._by_start(found)
                if found.makespan < best.makespan:
                    best = present
                    if best.makespan <= bound:
                        break
        return best

    def _by_start(self, found: _Timed) -> _Timed:
        ends, lengths = found.ends, self.lengths
        return found._replace(sequence=sorted(found.sequence, key=lambda n: ends[n] - lengths[n]))

    def _moved(self, sequence: list[int], random: Iterator[float]) -> list[int]:
        """Returns the sequence with one entry at another place, or with the copies of one activation or without."""
        sequence = sequence.copy()
        if next(random) < _COPIES and self.stays and len(self.stays[0]) > 3:
            forward, backward, _, out, back = self.stays[int(next(random) * len(self.stays))]
            if out in sequence:
                sequence.remove(out)
                sequence.remove(back)
                return sequence
            first, last = sequence.index(forward) + 1, sequence.index(backward)
            leaves = first + (int(next(random) * (last - first + 1)) if next(random) < 0.5 else 0)
            sequence.insert(last - (int(next(random) * (last - leaves + 1)) if next(random) < 0.5 else 0), back)
            sequence.insert(leaves, out)
            return sequence
        at = place = int(next(random) * len(sequence))
        entry = sequence[at]
        stage, further = self.stages[entry], 1
        while next(random) < _FURTHER:
            further += 1
        if next(random) < 0.5:
            while place > 0 and further and entry not in self.after[sequence[place - 1]]:
                place -= 1
                further -= self.stages[sequence[place]] == stage
        else:
            after = self.after[entry]
            while place < len(sequence) - 1 and further and sequence[place + 1] not in after:
                place += 1
                further -= self.stages[sequence[place]] == stage
        sequence.insert(place, sequence.pop(at))
        return sequence

    def pruned(self, best: _Timed) -> _Timed:
        """Returns the sequence without copies that buy no time, as many of them as can be looked at in a moment."""
        copied = set(best.sequence)
        moved = [stay[3:] for stay in self.stays if not copied.isdisjoint(stay[3:])]
        for out, back in moved[: _PRUNED // len(best.sequence)]:
            found = self.timed([n for n in best.sequence if n not in (out, back)], best.cost * (1 + _LEADS_ON))
            if found is not None and found.makespan <= best.makespan:
                best = self._by_start(found)
        return best


# -- bounds of memory --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Copy:
    """One copy of the model: variables for its start and for whether it is made."""

    start: Any
    moves: Any


def _add_slots(
    model: Any,
    starts: dict[Task, Any],
    times: _Times,
    *,
    horizon: int,
    graph: PipelineGraph,
    placement: Placement,
    slots: Sequence[int],
) -> dict[Task, _Copy]:
    """Bounds the activations that a stage holds, and lets them move by copies; returns the copies."""
    made: dict[Task, _Copy] = {}
    for chunks, most in zip(placement.chunks_of_stage, slots, strict=True):
        held, engine = [], []
        for pair in [(c, m) for c in chunks if graph.has_backward(c) for m in graph.microbatches(c)]:
            forward, first, last = (
                Task(kind, *pair)
                for kind in (TaskKind.F, graph.input_gradient_kind(pair[0]), graph.accumulating_kind(pair[0]))
            )
            if not times.durations[forward]:  # its activation might come and go at one moment, and count nowhere
                raise ValueError(f"{forward} takes no time, so slots mean nothing: give it more than 0 ms")
            moves = model.new_bool_var("")
            stays = [(starts[forward], starts[last] + times.durations[last], ~moves)]
            if times.copies:
                (out, out_units), (back, back_units) = times.copies.items()
                leaves, returns = (model.new_int_var(0, horizon, "") for _ in range(2))
                model.add(leaves >= starts[forward] + times.durations[forward]).only_enforce_if(moves)
                model.add(returns >= leaves + out_units).only_enforce_if(moves)
                model.add(starts[first] >= returns + back_units).only_enforce_if(moves)
                stays += [(starts[forward], leaves + out_units, moves), (returns, stays[0][1], moves)]
                for letter, start, units in ((out, leaves, out_units), (back, returns, back_units)):
                    engine.append(model.new_optional_fixed_size_interval_var(start, units, moves, ""))
                    made[Task(TaskKind(letter), *pair)] = _Copy(start, moves)
            else:
                model.add(moves == 0)
            for begin, end, is_there in stays:
                size = model.new_int_var(0, horizon, "")
                held.append(model.new_optional_interval_var(begin, size, end, is_there, ""))
        model.add_no_overlap(engine)
        model.add_cumulative(held, [1] * len(held), most * graph.passes_per_microbatch(chunks))
    return made


def _add_windows(
    model: Any,
    starts: dict[Task, Any],
    durations: dict[Task, int],
    *,
    horizon: int,
    placement: Placement,
    windows: Sequence[int],
) -> None:
    """Bounds the microbatches that a stage holds, each from the start of its first task to the end of its last."""
    for chunks, window in zip(placement.chunks_of_stage, windows, strict=True):
        of_microbatch: dict[int, list[Task]] = defaultdict(list)
        for task in durations:
            if task.microbatch >= 0 and task.chunk in chunks:
                of_microbatch[task.microbatch].append(task)
        held = []
        for tasks in of_microbatch.values():
            first, last, length = (model.new_int_var(0, horizon, "") for _ in range(3))
            for task in tasks:
                model.add(first <= starts[task])
                model.add(last >= starts[task] + durations[task])
            held.append(model.new_interval_var(first, length, last, ""))
        model.add_cumulative(held, [1] * len(held), window)


# -- the order that it found -------------------------------------------------------------------------------------------


def _table_of(
    spans: dict[Task, tuple[int, int]], graph: PipelineGraph, placement: Placement, copies: Sequence[Op]
) -> ScheduleTable:
    """Returns the table of tasks that run at these times, with the copies among them as operations."""
    lanes = {op.letter: op.lane for op in copies}
    before = TopologicalSorter({task: graph.dependencies(task) for task in spans if task.kind not in lanes})
    turn = {task: n for n, task in enumerate(before.static_order())}  # decides where tasks take no time
    in_time = sorted(
        (task for task in spans if task.microbatch >= 0), key=lambda task: (*spans[task], turn.get(task, 0))
    )
    rows: list[list[Task]] = [[] for _ in range(placement.num_stages)]
    for task in in_time:
        rows[placement.stage_of_chunk[task.chunk]].append(task)
    waits = {
        (later, earlier)
        for row in rows
        for lane in lanes.values()
        for earlier, later in pairwise(task for task in row if lanes.get(task.kind) == lane)
    }
    ops = [
        replace(
            op,
            pairs=frozenset((task.chunk, task.microbatch) for task in in_time if task.kind == op.letter),
            waits=frozenset(wait for wait in waits if wait[0].kind == op.letter),
        )
        for op in copies
    ]
    graph = replace(graph, ops=(*graph.ops, *(op for op in ops if op.pairs)))
    return ScheduleTable.from_orders("optimum", placement, graph, rows).validate()
