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
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.core import SCHEDULE, StageArbiter, StageSetup, StepRules, hint_by_name, hint_names, ready
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
from rrfp_jax.simulation._driver import simulate
from rrfp_jax.simulation.bounds import is_counted, lower_bound, task_lengths_ms, transfer_ms
from rrfp_jax.simulation.costs import Costs, for_graph
from rrfp_jax.simulation.links import Links

_UNITS_PER_MS = 10**6
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
    slots: int | None = None,
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
        slots: the most activations that each stage may hold on its devices, counted as ``offload`` of
            :mod:`rrfp_jax.runtime.operations` does; None: any number.
        copies: the ways out and back on one engine, as ``host_copies`` there makes them: any activation may move.
            None: none does.
        time_limit_s: the solver returns the best order that it has found in this time; with ``slots`` it begins
            with one of our own.
        num_workers: threads of the solver; with one, the result does not depend on the machine unless time runs out.

    Raises ImportError without OR-tools, naming the extra, and ValueError if no order was found in time, and where slots
    and copies do not fit.
    """
    _check_memory(graph, windows, slots, copies)
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ImportError(
            "the true optimum needs OR-tools, which is not installed: pip install 'rrfp-jax[optimum]'"
        ) from error
    links = links or Links()
    times = _in_units(graph, placement, durations_ms, links, copies or ())
    durations, horizon = times.durations, sum(times.durations.values()) + sum(transfer for *_, transfer in times.waits)
    is_even = graph.is_full and bool((durations_ms == durations_ms[:, :1]).all())
    known: dict[Task, int] = {}
    if slots is not None:
        known, horizon = _known_starts(times, _known_orders(graph, placement, durations_ms, slots), placement)
        known = _by_number(known) if is_even else known

    model = cp_model.CpModel()
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
    if windows is not None:
        _add_windows(model, starts, durations, horizon=horizon, placement=placement, windows=windows)
    made: dict[Task, _Copy] = {}
    if slots is not None:
        made = _add_slots(model, starts, times, horizon=horizon, graph=graph, placement=placement, slots=slots)
    if is_even:
        _add_numbers(model, starts, made, every_kind=slots is not None)
    for task, start in known.items():
        model.add_hint(starts[task], start)
    model.minimize(_makespan(model, starts, durations, horizon, graph))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = num_workers
    status = solver.solve(model)
    least_ms = lower_bound(graph, placement, durations_ms, links=links).total_ms
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = {task: solver.value(start) for task, start in starts.items()}
        found |= {task: solver.value(copy.start) for task, copy in made.items() if solver.value(copy.moves)}
        makespan_ms = solver.objective_value / times.units_per_ms
        least_ms = max(least_ms, solver.best_objective_bound / times.units_per_ms)
    elif status == cp_model.UNKNOWN and known:  # the time was too short to look at what it began with
        found, makespan_ms = known, horizon / times.units_per_ms
    else:
        raise ValueError(
            f"the solver found no order of {len(starts)} tasks in {time_limit_s} s: give it more time, or fewer tasks"
        )
    lengths = durations | {task: times.copies[task.kind] for task in made}
    spans = {task: (start, start + lengths[task]) for task, start in found.items()}
    return Optimum(
        makespan_ms=makespan_ms,
        at_least_ms=makespan_ms if status == cp_model.OPTIMAL else min(least_ms, makespan_ms),
        is_proven=status == cp_model.OPTIMAL,
        table=_table_of(spans, graph, placement, copies or ()),
    )


def _check_memory(
    graph: PipelineGraph, windows: Sequence[int] | None, slots: int | None, copies: tuple[Op, Op] | None
) -> None:
    if slots is None:
        if copies is not None:
            raise ValueError("copies move what a stage holds beyond its slots: give slots too, or leave copies out")
        return
    if slots < 1:
        raise ValueError(f"the optimum has {slots} slots: give at least 1 for what a stage holds on its devices")
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


# -- the orders that the solver begins with ----------------------------------------------------------------------------


def _known_orders(
    graph: PipelineGraph, placement: Placement, durations_ms: NDArray[np.float64], slots: int
) -> Iterator[list[Task]]:
    """Yields orders that hold no more than the slots: those of hints, whose window is as wide, and of tables."""
    costs = Costs(durations_ms=for_graph(durations_ms[np.newaxis], graph))
    for name in hint_names():
        if name != SCHEDULE:
            consumption, rules = ready(hint_by_name(name)), StepRules(updates=False)
            setups = [
                StageSetup(graph, placement, stage, consumption=consumption, window=slots, rules=rules)
                for stage in range(placement.num_stages)
            ]
            spans = simulate([StageArbiter(setup) for setup in setups], costs).timeline.spans
            tasks = sorted(
                (span for span in spans if span.task.microbatch >= 0), key=lambda span: (span.start_s, span.end_s)
            )
            yield [span.task for span in tasks]
    forward, input_gradient, weight_gradient = np.nanmean(durations_ms, axis=(0, 1)).tolist()
    request = ScheduleRequest(
        num_stages=placement.num_stages,
        num_microbatches=graph.num_microbatches,
        window=slots,
        durations_ms=(forward, input_gradient, weight_gradient),
        memory_limit=float(slots),
    )
    for name in schedule_names():
        try:
            table = build_schedule(name, request)
        except ValueError:  # not for these sizes
            continue
        if (table.graph, table.placement) == (graph, placement) and max(table.peak_activations()) <= slots:
            yield list(table.execution)


def _known_starts(times: _Times, orders: Iterable[Iterable[Task]], placement: Placement) -> tuple[dict[Task, int], int]:
    """Returns the starts of the tasks in the best order, each as soon as it can, and its makespan."""
    needed: dict[Task, list[tuple[Task, int]]] = defaultdict(list)
    for earlier, later, transfer in times.waits:
        needed[later].append((earlier, transfer))
    found = []
    for order in orders:
        starts, free = dict[Task, int](), [0] * placement.num_stages
        for task in order:
            stage = placement.stage_of_chunk[task.chunk]
            arrivals = (starts[earlier] + times.durations[earlier] + transfer for earlier, transfer in needed[task])
            starts[task] = max(free[stage], *arrivals, 0)
            free[stage] = starts[task] + times.durations[task]
        found.append((starts, max(free)))
    return min(found, key=lambda each: each[1])


def _by_number(starts: dict[Task, int]) -> dict[Task, int]:
    """Returns the same starts, each chunk's tasks of a kind numbered as they start; for equal microbatches."""
    alike: dict[tuple[TaskKind, int], list[int]] = defaultdict(list)
    for (kind, chunk, _), start in starts.items():
        alike[kind, chunk].append(start)
    return {Task(*of, m): start for of, each in alike.items() for m, start in enumerate(sorted(each))}


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
    slots: int,
) -> dict[Task, _Copy]:
    """Bounds the activations that a stage holds, and lets them move by copies; returns the copies."""
    made: dict[Task, _Copy] = {}
    for chunks in placement.chunks_of_stage:
        held, engine = [], []
        for pair in [(c, m) for c in chunks if graph.has_backward(c) for m in graph.microbatches(c)]:
            forward, first, last = (
                Task(kind, *pair)
                for kind in (TaskKind.F, graph.input_gradient_kind(pair[0]), graph.accumulating_kind(pair[0]))
            )
            if not times.durations[forward]:  # its activation might come and go at one moment, and count nowhere
                raise ValueError(f"{forward} takes no time, so slots mean nothing: give it more than 0 ms")
            moves = model.new_bool_var("")
            model.add_hint(moves, False)
            stays = [(starts[forward], starts[last] + times.durations[last], ~moves)]
            if times.copies:
                (out, out_units), (back, back_units) = times.copies.items()
                leaves, returns = (model.new_int_var(0, horizon, "") for _ in range(2))
                model.add(leaves >= starts[forward] + times.durations[forward]).only_enforce_if(moves)
                model.add(returns >= leaves + out_units).only_enforce_if(moves)
                model.add(starts[first] >= returns + back_units).only_enforce_if(moves)
                stays += [(starts[forward], leaves + out_units, moves), (returns, stays[0][1], moves)]
                for letter, start, units in ((out, leaves, out_units), (back, returns, back_units)):
                    model.add_hint(start, 0)
                    engine.append(model.new_optional_fixed_size_interval_var(start, units, moves, ""))
                    made[Task(TaskKind(letter), *pair)] = _Copy(start, moves)
            else:
                model.add(moves == 0)
            for begin, end, is_there in stays:
                size = model.new_int_var(0, horizon, "")
                held.append(model.new_optional_interval_var(begin, size, end, is_there, ""))
        model.add_no_overlap(engine)
        model.add_cumulative(held, [1] * len(held), slots * graph.passes_per_microbatch(chunks))
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
    spans: dict[Task, tuple[int, int]], graph: PipelineGraph, placement: Placement, copies: Iterable[Op]
) -> ScheduleTable:
    """Returns the table of tasks that run at these times, with the copies among them as operations."""
    letters = {op.letter for op in copies}
    before = TopologicalSorter({task: graph.dependencies(task) for task in spans if task.kind not in letters})
    turn = {task: n for n, task in enumerate(before.static_order())}  # decides where tasks take no time
    in_time = sorted(
        (task for task in spans if task.microbatch >= 0), key=lambda task: (*spans[task], turn.get(task, 0))
    )
    rows: list[list[Task]] = [[] for _ in range(placement.num_stages)]
    for task in in_time:
        rows[placement.stage_of_chunk[task.chunk]].append(task)
    waits = {
        (later, earlier) for row in rows for earlier, later in pairwise(task for task in row if task.kind in letters)
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
