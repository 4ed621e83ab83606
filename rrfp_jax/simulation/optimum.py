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

The solver begins with the orders that are found without it (:mod:`rrfp_jax.simulation.orders_with_copies`), and
refines large ones.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.schedules import COMPUTE, Op, PipelineGraph, Placement, ScheduleTable, Task, TaskKind
from rrfp_jax.simulation.bounds import is_counted, lower_bound
from rrfp_jax.simulation.links import Links
from rrfp_jax.simulation.orders_with_copies import (
    UNITS_PER_MS,
    CopiedSteps,
    Optimum,
    UnitTimes,
    table_of_spans,
    tables_like,
    times_in_units,
)

_AT_ONCE, _WINDOW_S = 150, 10.0
"""Tasks up to which the solver has the whole case at once, and seconds that it has for a window of a larger one."""


def find_optimum(
    graph: PipelineGraph,
    placement: Placement,
    durations_ms: NDArray[np.float64],
    *,
    links: Links | None = None,
    windows: Sequence[int] | None = None,
    slots: int | Sequence[int] | None = None,
    copies: tuple[Op, Op] | None = None,
    tables: Iterable[ScheduleTable] = (),
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
        tables: orders to begin with too where they hold no more than the slots, copies among them or not.
        time_limit_s: the solver returns the best order that it has found in this time; with ``slots`` it begins
            with one of our own, and has more than 150 tasks window by window, which proves nothing but by the bound.
        num_workers: threads of the solver; with one, the result does not depend on the machine unless time runs out.

    Raises ImportError without OR-tools, naming the extra, and ValueError if no order was found in time, and where slots
    and copies do not fit.
    """
    slots = [slots] * placement.num_stages if isinstance(slots, int) else slots
    _check_memory(graph, windows, slots, copies)
    cp_model, links = load_solver(), links or Links()
    times = times_in_units(graph, placement, durations_ms, links, copies or ())
    least_ms = lower_bound(graph, placement, durations_ms, links=links).total_ms
    is_even = graph.is_full and bool((durations_ms == durations_ms[:, :1]).all())
    solver = _Solver(
        cp_model, graph, placement, times, slots=slots, windows=windows, is_even=is_even, num_workers=num_workers
    )
    if slots is None:
        found = solver.solved(time_limit_s)
    else:
        solver.bound = ceil(least_ms * times.units_per_ms - 1e-3)
        steps = CopiedSteps(graph, placement, times, slots, copies or ())
        named = tables_like(graph, placement, durations_ms, slots)
        begun = steps.searched([steps.numbered(table.orders) for table in named], solver.bound)
        for rows in (steps.numbered(table.orders) for table in tables):
            if steps.is_by_number(rows) or not is_even:
                begun = steps.timed(steps.merged(rows), begun.cost) or begun
        known = _Solved(steps.starts(begun, by_number=is_even), begun.makespan, solver.bound)
        found = solver.refined(known, time_limit_s)
        found = found._replace(starts=steps.without_needless_copies(found.starts, found.makespan))
    makespan_ms = found.makespan / times.units_per_ms
    is_proven = found.makespan <= found.bound
    return Optimum(
        makespan_ms=makespan_ms,
        at_least_ms=makespan_ms if is_proven else min(max(least_ms, found.bound / times.units_per_ms), makespan_ms),
        is_proven=is_proven,
        table=table_of_spans(times.spans(found.starts), graph, placement, copies or ()),
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
        times: UnitTimes,
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
    if copies is not None and not all(round(op.ms * UNITS_PER_MS) for op in copies):
        raise ValueError("the optimum has copies that take no time: give more than 0 ms, for example 0.001")


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


# -- bounds of memory --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Copy:
    """One copy of the model: variables for its start and for whether it is made."""

    start: Any
    moves: Any


def _add_slots(
    model: Any,
    starts: dict[Task, Any],
    times: UnitTimes,
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
            if pair in times.moves:
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
