"""Bounds beside every result: a lower bound for any order, and an upper bound for the paper's BF.

Lower bound of a step's makespan, for any order, window and placement: the larger of

* the critical path: the longest chain of tasks and transfers that wait for each other;
* for each stage, the work it has to do, plus the *fill* before it (no task of the stage can start earlier, whatever the
  others do) and the *drain* after it (something remains to be done elsewhere after any task that may be its last);
* for each engine that runs operations beside a stage, its work, fill and drain.

All hold for any means of communication, because transfers never occupy less than their time on the way.

With operations in the graph the bounds come from the longest paths through its tasks one by one (:func:`path_bounds`).
The makespan lies between the first start and the last end of tasks with a microbatch on compute lanes. So a path counts
from such a task to such a task; an operation that need not run between the two, such as one that runs before the first
forward, bounds nothing.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.core import MessageKind
from rrfp_jax.schedules import COMPUTE, PipelineGraph, Placement, Task, TaskKind
from rrfp_jax.simulation.costs import InjectedSleeps, for_graph, of_tasks
from rrfp_jax.simulation.links import Links

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """A makespan that no order can beat, in milliseconds from first start to last end."""

    critical_path_ms: float
    stage_ms: tuple[float, ...]
    """Fill, work and drain of each stage."""
    engine_ms: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """Fill, work and drain of every engine beside a stage, by stage and lane."""

    @property
    def total_ms(self) -> float:
        return max(self.critical_path_ms, *self.stage_ms, *self.engine_ms.values())


def at_least_ms(durations_ms: Array, sleeps: InjectedSleeps | None) -> Array:
    """Returns durations with the part of the injected sleeps that does not depend on the order."""
    if sleeps is None:
        return durations_ms
    longer = durations_ms.copy()
    longer[..., :2] += sleeps.factors * sleeps.base_ms  # whatever ran before
    return longer


def lower_bound(
    graph: PipelineGraph,
    placement: Placement,
    durations_ms: Array,
    *,
    links: Links | None = None,
    host_ms: float = 0.0,
    operations_ms: Mapping[str, float] | None = None,
) -> LowerBound:
    """Returns the lower bound of one step.

    Args:
        graph, placement: the pipeline.
        durations_ms: [chunks, microbatches, 3] for F, input gradient and weight gradient.
        links: durations of transfers; None: transfers take no time.
        host_ms: time of the host before each task, where nothing hides it.
        operations_ms: durations of operations by their letters; by default an operation's own ``ms``.
    """
    links = links or Links()
    if graph.ops:
        longest_ms, lanes_ms = path_bounds(
            graph, placement, durations_ms, links=links, host_ms=host_ms, operations_ms=operations_ms
        )
    else:
        longest_ms, lanes_ms = _array_bounds(graph, placement, durations_ms, links, host_ms)
    # The host's time before the very first task lies before the first start.
    less_ms = {lane: max(0.0, lane_ms - host_ms) for lane, lane_ms in lanes_ms.items()}
    return LowerBound(
        critical_path_ms=max(0.0, longest_ms - host_ms),
        stage_ms=tuple(less_ms.pop((stage, COMPUTE), 0.0) for stage in range(placement.num_stages)),
        engine_ms=less_ms,
    )


def bf_upper_bound_ms(forward_ms: Array, backward_ms: Array) -> float:
    """Returns the RRFP paper's bound (section 6) on the makespan of BF with one chunk per stage and free communication.

    Args:
        forward_ms, backward_ms: [stages, microbatches]; a fused backward.

    It is the sum of the forward-only and the backward-only pipeline's makespans, and of the time by which the slowest
    stage exceeds the last stage, over all microbatches but the first (forward) or the last (backward).
    """
    extra_forward = (forward_ms.max(axis=0) - forward_ms[-1])[1:].sum()
    extra_backward = (backward_ms.max(axis=0) - backward_ms[-1])[:-1].sum()
    return float(one_way_ms(forward_ms) + one_way_ms(backward_ms[::-1]) + extra_forward + extra_backward)


def one_way_ms(durations_ms: Array) -> float:
    """Returns the makespan of a pipeline that runs in one direction; [stages, microbatches] in the order of passage."""
    stage_free = np.zeros(len(durations_ms))
    for microbatch in durations_ms.T:
        arrived = 0.0
        for stage, duration in enumerate(microbatch):
            arrived = stage_free[stage] = max(arrived, stage_free[stage]) + duration
    return float(stage_free[-1])


_Lane = tuple[int, str]
"""A stage, and compute or an engine beside it."""
_PathBounds = tuple[float, dict[_Lane, float]]
"""The critical path; and fill, work and drain of every lane of a stage that has work. In milliseconds."""


def _array_bounds(
    graph: PipelineGraph, placement: Placement, durations_ms: Array, links: Links, host_ms: float
) -> _PathBounds:
    """Returns the bounds of a graph without operations, from arrays over all microbatches at once.

    They follow from the longest paths that lead to the start of an F (heads) and those that begin at a task's end
    (tails). All arrays are [chunks, microbatches]; entries of pairs that do not exist mean nothing.
    """
    chunks, stage_of = range(graph.num_chunks), placement.stage_of_chunk
    exists = np.array([[graph.exists(c, m) for m in range(graph.num_microbatches)] for c in chunks])
    split = np.array([[graph.accumulating_kind(c) is TaskKind.W] for c in chunks])
    forward, input_gradient, weight_gradient = np.moveaxis(for_graph(durations_ms[np.newaxis], graph)[0], -1, 0)
    forward = forward + host_ms
    weight = np.where(split, weight_gradient + host_ms, 0.0)
    backward = input_gradient + host_ms + np.where(split, 0.0, weight_gradient)
    head, forward_tail, backward_tail = (np.zeros(forward.shape) for _ in range(3))

    def transfer(kind: MessageKind, source: int, target: int) -> float:
        a, b = stage_of[source], stage_of[target]
        return 0.0 if a == b else links.transfer_ms(kind, a, b)

    for c in chunks:
        for p in graph.predecessors(c):
            ends = head[p] + forward[p] + transfer(MessageKind.ACTIVATION, p, c)
            np.maximum(head[c], ends, out=head[c], where=exists[p])
    # Backwards go by ascending chunk here: a chunk's backward leads on to those of its predecessors, whose tails are
    # known by then. Forwards follow by descending chunk: each leads to its own backward and to its successors.
    for c in chunks:
        backward_tail[c] = weight[c]
        for p in graph.gradient_predecessors(c):
            rest = transfer(MessageKind.GRADIENT, c, p) + backward[p] + backward_tail[p]
            np.maximum(backward_tail[c], rest, out=backward_tail[c], where=exists[p])
    for c in reversed(chunks):
        if graph.has_backward(c):
            forward_tail[c] = backward[c] + backward_tail[c]
        for s in graph.successors(c):
            rest = transfer(MessageKind.ACTIVATION, c, s) + forward[s] + forward_tail[s]
            np.maximum(forward_tail[c], rest, out=forward_tail[c], where=exists[s])
    lanes_ms: dict[_Lane, float] = {}
    for stage, own in enumerate(map(list, placement.chunks_of_stage)):
        if not exists[own].any():
            continue
        trained = [c for c in own if graph.has_backward(c)]
        work = forward[own][exists[own]].sum() + (backward + weight)[trained][exists[trained]].sum()
        # A stage's first task is an F. Its last is one that leads to no other task of its chunk.
        last = {c: backward_tail if graph.has_backward(c) else forward_tail for c in own}
        drains = [
            0.0 if graph.has_backward(c) and split[c, 0] else float(last[c][c][exists[c]].min())
            for c in own
            if exists[c].any()
        ]
        lanes_ms[stage, COMPUTE] = float(head[own][exists[own]].min() + work + min(drains))
    return float(np.where(exists, head + forward + forward_tail, 0.0).max()), lanes_ms


def path_bounds(
    graph: PipelineGraph,
    placement: Placement,
    durations_ms: NDArray[np.float64],
    *,
    links: Links,
    host_ms: float = 0.0,
    operations_ms: Mapping[str, float] | None = None,
) -> _PathBounds:
    """Returns the bounds of one step; the arguments are those of :func:`lower_bound`, for any graph."""
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
    of_lane: dict[_Lane, list[Task]] = defaultdict(list)
    for task in between:
        of_lane[placement.stage_of_chunk[task.chunk], graph.lane(task.kind)].append(task)
    lanes_ms = {
        lane: min(heads[t] for t in tasks) + sum(lasts_ms[t] for t in tasks) + min(tails[t] for t in tasks)
        for lane, tasks in of_lane.items()
    }
    return max(heads[task] + lasts_ms[task] + tails[task] for task in between), lanes_ms


def task_lengths_ms(
    graph: PipelineGraph, durations_ms: NDArray[np.float64], operations_ms: Mapping[str, float]
) -> dict[Task, float]:
    """Returns the length of each task of a step; tasks that run once per step come last.

    ``durations_ms`` is [chunks, microbatches, 3], for the built-in kinds. An operation takes ``operations_ms`` by its
    letters, or its own ``ms``.
    """
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
    """Whether the makespan counts this task: one with a microbatch on a compute lane."""
    return task.microbatch >= 0 and graph.lane(task.kind) == COMPUTE


def transfer_ms(earlier: Task, later: Task, placement: Placement, links: Links) -> float:
    """Returns the time from the end of a task to the arrival of its output at a later one; 0 within a stage."""
    source, target = placement.stage_of_chunk[earlier.chunk], placement.stage_of_chunk[later.chunk]
    kind = MessageKind.ACTIVATION if earlier.kind is TaskKind.F else MessageKind.GRADIENT
    return 0.0 if source == target else links.transfer_ms(kind, source, target)
