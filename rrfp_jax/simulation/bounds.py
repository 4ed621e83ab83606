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

Weight gradients that a step may lack (TimelyFreeze, arXiv 2602.05754) shorten it: :func:`choose_frozen` solves for the
shares of them to leave out, so that a table's step is shortest while no stage leaves out more than a limit on average.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import pairwise
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.core import MessageKind
from rrfp_jax.schedules import COMPUTE, PipelineGraph, Placement, ScheduleTable, Task, TaskKind
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation.costs import InjectedSleeps, for_graph, of_tasks, recorded
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


# -- weight gradients that a step may lack -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FrozenShares:
    """The shares of the weight gradients that steps leave out, and the makespan of a table's step with them."""

    placement: Placement
    shares: Array
    """[chunks, microbatches], each from 0, all is computed, to 1, nothing is."""
    num_trained: int
    """How many weight gradients a whole step has."""
    makespan_ms: float
    whole_ms: float
    """The makespan with nothing left out."""

    def durations_ms(self, durations_ms: Array) -> Array:
        """Returns durations [..., chunks, microbatches, 3] with the rest of each weight gradient."""
        rest = durations_ms.copy()
        rest[..., 2] *= 1 - self.shares
        return rest

    def pairs(self, step: int, part: float = 1.0) -> list[tuple[int, int]]:
        """Returns the (chunk, microbatch) pairs whose whole weight gradient a step leaves out, as ``Pipeline.step``
        takes them.

        Over many steps each pair is left out in its share of them, times ``part``; in each step every stage leaves out
        the sum of its shares, up to the fraction of one. Never are all left out.
        """
        found = []
        for chunks in self.placement.chunks_of_stage:
            passed = step * _GOLDEN % 1.0
            for chunk in chunks:
                for microbatch, share in enumerate(self.shares[chunk]):
                    before, passed = passed, passed + share * part
                    if int(passed + _ROUNDING) > int(before + _ROUNDING):
                        found.append((chunk, microbatch))
        return found if len(found) < self.num_trained else found[1:]


_GOLDEN = 0.6180339887498949
"""Its multiples, modulo 1, fill the range evenly however many there are."""
_ROUNDING = 1e-6
"""Shares come from a solver, which keeps its bounds to about as much."""


def choose_frozen(
    table: ScheduleTable, durations_ms: Array, limit: float, *, links: Links | None = None
) -> FrozenShares:
    """Returns the shares of weight gradients to leave out for the shortest step of a table that is followed strictly.

    On no stage is the mean share above ``limit``; of all such choices it is the one that leaves out least.
    ``durations_ms`` is [chunks, microbatches, 3].

    Raises ValueError for a limit that is no share, or is all, and for a table with operations.
    """
    from scipy.optimize import linprog  # loads scipy, which takes long
    from scipy.sparse import coo_array

    check_freeze_limit(limit)
    graph, placement = table.graph, table.placement
    if graph.ops:
        raise ValueError(f"table {table.name!r} has operations, which run beside its rows: give the table without them")
    links = links or Links()
    tasks = table.execution
    number = {task: n for n, task in enumerate(tasks)}
    lasts_ms = task_lengths_ms(graph, durations_ms, {})
    lengths = np.array([lasts_ms[task] for task in tasks])
    # The columns: the start of each task, the makespan, and the share that is left out of each weight gradient.
    trains = [t for t in tasks if graph.trains(t.chunk) and t.kind is graph.accumulating_kind(t.chunk)]
    whole_ms = np.array([durations_ms[t.chunk, t.microbatch, 2] for t in trains])
    end, num_tasks = len(tasks), len(tasks)
    share = {number[t]: num_tasks + 1 + n for n, t in enumerate(trains)}
    gain = dict(zip(share, whole_ms.tolist(), strict=True))
    after: list[tuple[int, int, float]] = []
    for order in table.orders:
        after += [(number[a], number[b], 0.0) for a, b in pairwise(order)]
        after += [(number[order[-1]], end, 0.0)] if order else []
    for task in tasks:
        for needed in graph.dependencies(task):
            if placement.stage_of_chunk[needed.chunk] != placement.stage_of_chunk[task.chunk]:
                after.append((number[needed], number[task], transfer_ms(needed, task, placement, links)))
    cells: list[tuple[int, int, float]] = []
    bounds: list[float] = []
    for row, (first, then, ms) in enumerate(after):  # start + length - left out + transfer <= start of the other
        cells += [(row, first, 1.0), (row, then, -1.0)]
        if first in share:
            cells.append((row, share[first], -gain[first]))
        bounds.append(-lengths[first] - ms)
    for stage in range(placement.num_stages):
        own = [share[number[t]] for t in trains if placement.stage_of_chunk[t.chunk] == stage]
        cells += [(len(bounds), column, 1.0) for column in own]
        bounds.append(limit * len(own))
    rows, columns, values = zip(*cells, strict=True)
    num_columns = num_tasks + 1 + len(trains)
    matrix = coo_array((values, (rows, columns)), shape=(len(bounds), num_columns)).tocsr()
    costs = np.zeros(num_columns)
    costs[end] = 1.0
    costs[end + 1 :] = _LEAST * lengths.sum() / max(1, len(trains))
    limits = np.zeros((num_columns, 2))
    limits[: end + 1, 1] = inf
    limits[end + 1 :, 1] = 1.0
    found = linprog(costs, A_ub=matrix, b_ub=np.array(bounds), bounds=limits, method="highs")
    if not found.success:
        raise ValueError(f"the weight gradients to leave out of table {table.name!r} were not found: {found.message}")
    shares = np.zeros(durations_ms.shape[:2])
    for task, column in zip(trains, share.values(), strict=True):
        shares[task.chunk, task.microbatch] = min(1.0, max(0.0, found.x[column]))
    starts = np.zeros(num_tasks + 1)
    for first, then, ms in sorted(after, key=lambda wait: wait[0]):  # tasks are in an order in which they can run
        starts[then] = max(starts[then], starts[first] + lengths[first] + ms)
    return FrozenShares(placement, shares, len(trains), float(found.x[end]), float(starts[end]))


_LEAST = 1e-4
"""The weight of all that is left out beside the makespan: of equally short steps the one that leaves out least."""


def check_freeze_limit(limit: float) -> None:
    """Raises ValueError for a share of the weight gradients that no step can lack."""
    if not 0 <= limit < 1:
        what = "would leave out every weight gradient, and nothing would train" if limit == 1 else "is no share"
        raise ValueError(f"a freeze limit of {limit} {what}: give 0 or more, and less than 1")


class Freezing:
    """The weight gradients that the steps of a run leave out, in TimelyFreeze's three phases.

    Until step ``warm_up`` all are computed. The next ``monitored`` steps are measured, and the shares to leave out are
    chosen. These grow from nothing to all of them within ``growing`` steps::

        freezing = Freezing(table, 0.5, warm_up=100, monitored=10, growing=200)
        for step, batch in enumerate(batches):
            state, metrics = pipeline.step(state, batch, left_out=freezing.left_out(step))
            freezing.observe(step, metrics.result().timeline)

    A run that goes on later measures again first. It takes a pipeline in one process, without replicas: where stages
    are elsewhere, give all processes the pairs of the same :class:`FrozenShares`.

    Raises ValueError for a limit that is no share, or is all, and for negative numbers of steps.
    """

    def __init__(self, table: ScheduleTable, limit: float, *, warm_up: int, monitored: int, growing: int) -> None:
        check_freeze_limit(limit)
        if warm_up < 0 or monitored < 1 or growing < 0:
            raise ValueError(
                f"phases of {warm_up}, {monitored} and {growing} steps: give 0 or more, and monitor at least 1"
            )
        self._table, self._limit = table, limit
        self._warm_up, self._monitored, self._growing = warm_up, monitored, growing
        self._measured_ms: list[Array] = []
        self.shares: FrozenShares | None = None
        """The chosen shares; None until they are."""

    def left_out(self, step: int) -> list[tuple[int, int]]:
        """Returns the pairs that this step leaves out."""
        if self.shares is None:
            return []
        grown = step + 1 - self._warm_up - self._monitored
        return self.shares.pairs(step, min(1.0, grown / self._growing) if self._growing else 1.0)

    def observe(self, step: int, timeline: Timeline) -> None:
        """Takes in the record of a step; raises ValueError where it has not all tasks of the table, or others."""
        if self.shares is not None or step < self._warm_up:
            return
        graph = self._table.graph
        if any(span.task.chunk >= graph.num_chunks for span in timeline.spans):
            raise ValueError("the recorded step has more chunks than the table: freezing takes a run without replicas")
        self._measured_ms.append(recorded(timeline, graph)[0])
        if len(self._measured_ms) == self._monitored:
            self.shares = choose_frozen(self._table, np.mean(self._measured_ms, axis=0), self._limit)
