"""The true optimum of small cases, by OR-tools' CP-SAT solver (the optional extra ``optimum``).

It is a job shop with precedences: tasks of a stage's lane do not overlap, and a task starts after the end of each
dependency plus the transfer. Communication is asynchronous and without contention. Times are rounded to nanoseconds.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.schedules import PipelineGraph, Placement, Task, TaskKind
from rrfp_jax.simulation.bounds import is_counted, task_lengths_ms, transfer_ms
from rrfp_jax.simulation.links import Links

_UNITS_PER_MS = 10**6


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best order and the bound that the solver found in its time."""

    makespan_ms: float
    """Makespan of the best order found."""
    at_least_ms: float
    """No order is better than this; equal to ``makespan_ms`` if that is proven optimal."""
    is_proven: bool


def find_optimum(
    graph: PipelineGraph,
    placement: Placement,
    durations_ms: NDArray[np.float64],
    *,
    links: Links | None = None,
    windows: Sequence[int] | None = None,
    time_limit_s: float = 10.0,
    num_workers: int = 1,
) -> Optimum:
    """Returns the smallest makespan of one step.

    Args:
        graph, placement: the pipeline.
        durations_ms: [chunks, microbatches, 3] for F, input gradient and weight gradient.
        links: durations of transfers; None: transfers take no time.
        windows: the most microbatches that each stage may hold; None: any number. Memory that operations move does not
            count.
        time_limit_s: the solver returns the best order that it has found in this time.
        num_workers: threads of the solver; with one, the result does not depend on the machine unless time runs out.

    Raises ImportError without OR-tools, naming the extra, and ValueError if no order was found in time.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ImportError(
            "the true optimum needs OR-tools, which is not installed: pip install 'rrfp-jax[optimum]'"
        ) from error
    links = links or Links()
    in_units = {task: round(ms * _UNITS_PER_MS) for task, ms in task_lengths_ms(graph, durations_ms, {}).items()}
    waits = [
        (earlier, task, round(transfer_ms(earlier, task, placement, links) * _UNITS_PER_MS))
        for task in in_units
        for earlier in graph.dependencies(task)
        if earlier in in_units
    ]
    # Whole units of time, their greatest common divisor taken out: the solver's domains stay small.
    common = gcd(*in_units.values(), *(transfer for *_, transfer in waits)) or 1
    durations = {task: duration // common for task, duration in in_units.items()}
    horizon = sum(durations.values()) + sum(transfer // common for *_, transfer in waits)

    model = cp_model.CpModel()
    starts = {task: model.new_int_var(0, horizon, str(task)) for task in durations}
    of_lane: dict[tuple[int, str], list[Task]] = defaultdict(list)
    for task in durations:
        of_lane[placement.stage_of_chunk[task.chunk], graph.lane(task.kind)].append(task)
    for tasks in of_lane.values():
        model.add_no_overlap(
            model.new_fixed_size_interval_var(starts[task], durations[task], f"run {task}") for task in tasks
        )
    for earlier, later, transfer in waits:
        model.add(starts[later] >= starts[earlier] + durations[earlier] + transfer // common)
    if windows is not None:
        _add_windows(model, starts, durations, horizon=horizon, placement=placement, windows=windows)

    makespan = model.new_int_var(0, horizon, "makespan")
    counted = {task: start for task, start in starts.items() if is_counted(graph, task)}
    first: Any = 0
    if len(counted) < len(starts):  # tasks that do not count may run before all that do
        first = model.new_int_var(0, horizon, "first start")
        for start in counted.values():
            model.add(first <= start)
    for task, start in counted.items():
        model.add(makespan >= start + durations[task] - first)
    if (durations_ms == durations_ms[:, :1]).all() and graph.is_full:
        # Equal microbatches can be renumbered: fixing their order on the first chunk loses no makespan, and spares the
        # solver all permutations of the same order.
        for m in range(1, graph.num_microbatches):
            model.add(starts[Task(TaskKind.F, 0, m - 1)] <= starts[Task(TaskKind.F, 0, m)])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = num_workers
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ValueError(
            f"the solver found no order of {len(starts)} tasks in {time_limit_s} s: give it more time, or fewer tasks"
        )
    units_per_ms = _UNITS_PER_MS / common
    return Optimum(
        makespan_ms=solver.objective_value / units_per_ms,
        at_least_ms=solver.best_objective_bound / units_per_ms,
        is_proven=status == cp_model.OPTIMAL,
    )


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
