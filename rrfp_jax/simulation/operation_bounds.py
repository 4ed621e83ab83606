"""The lower bound of a step whose graph has operations, from the longest paths through its tasks one by one.

The makespan lies between the first start and the last end of tasks with a microbatch on compute lanes. So a path counts
from such a task to such a task; an operation that need not run between the two, such as one that fetches parameters
before the first forward, bounds nothing. Every engine gives a bound of its own, as a stage does: the work that it has
to do in between, what must have run before any of it, and what remains after any of it.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.arbitration import MessageKind
from rrfp_jax.simulation.costs import for_graph, of_tasks
from rrfp_jax.simulation.links import Links
from rrfp_jax.tasks import COMPUTE, PipelineGraph, Placement, Task, TaskKind

Lane = tuple[int, str]
"""A stage, and compute or an engine beside it."""


@dataclass(frozen=True, kw_only=True)
class PathBounds:
    """In milliseconds."""

    critical_path_ms: float
    lanes_ms: dict[Lane, float]
    """Fill, work and drain of every stage's lanes that have to do between the first start and the last end."""


def path_bounds(
    graph: PipelineGraph,
    placement: Placement,
    durations_ms: NDArray[np.float64],
    *,
    links: Links,
    host_ms: float = 0.0,
    operations_ms: Mapping[str, float] | None = None,
) -> PathBounds:
    """Of one step; the arguments are those of :func:`rrfp_jax.simulation.bounds.lower_bound`, for any graph."""
    lasts_ms = task_lengths_ms(graph, durations_ms, operations_ms or {})
    for task in lasts_ms:
        if graph.lane(task.kind) == COMPUTE:
            lasts_ms[task] += host_ms
    waits = {task: [needed for needed in graph.dependencies(task) if needed in lasts_ms] for task in lasts_ms}
    order = list(TopologicalSorter(waits).static_order())
    heads = {task: 0.0 if is_counted(graph, task) else -inf for task in order}
    tails = dict(heads)
    for task in order:
        for needed in waits[task]:
            arrival_ms = heads[needed] + lasts_ms[needed] + transfer_ms(needed, task, placement, links)
            heads[task] = max(heads[task], arrival_ms)
    for task in reversed(order):
        for needed in waits[task]:
            rest_ms = transfer_ms(needed, task, placement, links) + lasts_ms[task] + tails[task]
            tails[needed] = max(tails[needed], rest_ms)
    between = [task for task in order if isfinite(heads[task]) and isfinite(tails[task])]
    of_lane: dict[Lane, list[Task]] = defaultdict(list)
    for task in between:
        of_lane[placement.stage_of_chunk[task.chunk], graph.lane(task.kind)].append(task)
    return PathBounds(
        critical_path_ms=max(heads[task] + lasts_ms[task] + tails[task] for task in between),
        lanes_ms={
            lane: min(heads[t] for t in tasks) + sum(lasts_ms[t] for t in tasks) + min(tails[t] for t in tasks)
            for lane, tasks in of_lane.items()
        },
    )


def task_lengths_ms(
    graph: PipelineGraph, durations_ms: NDArray[np.float64], operations_ms: Mapping[str, float]
) -> dict[Task, float]:
    """How long each task of a step takes: [chunks, microbatches, 3] for the built-in ones, and by its letters, or as it
    says itself, for an operation. Those that run once per step come last."""
    built_in = of_tasks(for_graph(durations_ms[np.newaxis], graph))
    own = {op.letter: operations_ms.get(op.letter, op.ms) for op in graph.ops}
    tasks = list(graph.tasks())
    if graph.ops:
        tasks += graph.operations.once(range(graph.num_chunks))
    return {
        task: own[task.kind] if task.kind in own else built_in[task.kind][0][task.chunk][task.microbatch]
        for task in tasks
    }


def is_counted(graph: PipelineGraph, task: Task) -> bool:
    """Whether the makespan lies between the starts and ends of such tasks."""
    return task.microbatch >= 0 and graph.lane(task.kind) == COMPUTE


def transfer_ms(earlier: Task, later: Task, placement: Placement, links: Links) -> float:
    """From the end of a task to the arrival of what another needs of it; nothing within a stage."""
    source, target = placement.stage_of_chunk[earlier.chunk], placement.stage_of_chunk[later.chunk]
    kind = MessageKind.ACTIVATION if earlier.kind is TaskKind.F else MessageKind.GRADIENT
    return 0.0 if source == target else links.transfer_ms(kind, source, target)
