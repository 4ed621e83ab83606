"""A cut model in flat integers, as the list scheduler and the evaluation of rows read it.

A microbatch goes forth through all chunks and back again, so every task waits for exactly one other, and at most two
wait for it: the next one on that way, and W for its I. Tasks are numbered kind by kind, chunk by chunk, microbatch by
microbatch; kinds are F, the backward (I where it is split) and W. Times are whole nanoseconds, so that sums are exact
and equal moments are equal.

Activations weigh the same here as in the forecast of memory: a microbatch takes ``ChunkBytes.per_microbatch`` on a
chunk from the start of its F to the end of its B or W. Beside those in flight activations wait for their F, at most as
many as the sending chunk can have in flight."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.costs import CutModel
from rrfp_jax.schedules import PipelineGraph, Placement, Task, TaskKind
from rrfp_jax.simulation import Links, lower_bound

NS_PER_MS = 1_000_000
_NOTHING = -1
"""Stands for a task's number where there is no task."""
TaskRows = list[list[int]]
"""The numbers of each stage's tasks, in order."""


@dataclass(frozen=True, kw_only=True)
class OrderProblem:
    """The tasks of a cut that are to be put in order. Lists are indexed by a task's number."""

    placement: Placement
    graph: PipelineGraph
    num_microbatches: int
    is_split: bool
    durations: list[int]
    """Nanoseconds of each task, with the host's time before it."""
    stages: list[int]
    """The stage of each task."""
    followers: list[int]
    """The next task on the way of the microbatch; -1 at its end."""
    delays: list[int]
    """Nanoseconds from the end of a task to the arrival at its follower."""
    weights: list[int]
    """Memory that a task takes on its stage as it starts."""
    freed: list[int]
    """Memory that a task frees as it ends."""
    available: tuple[float, ...]
    """Memory of each stage for activations; infinite where nothing bounds it."""
    host: int
    """Nanoseconds of the host before each task. Those before the very first task do not count."""
    bound: int
    """Nanoseconds that no order beats, whatever the memory."""

    @cached_property
    def num_chunks(self) -> int:
        return self.placement.num_chunks

    @cached_property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @cached_property
    def num_tasks(self) -> int:
        return len(self.durations)

    @cached_property
    def num_ways(self) -> int:
        """Pairs of chunk and microbatch, which is the number of tasks of a kind."""
        return self.num_chunks * self.num_microbatches

    @cached_property
    def chunks(self) -> list[int]:
        """The chunk of each task."""
        kinds = self.num_tasks // self.num_ways
        return [chunk for _ in range(kinds) for chunk in range(self.num_chunks) for _ in range(self.num_microbatches)]

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks by number."""
        kinds = (TaskKind.F, TaskKind.I, TaskKind.W) if self.is_split else (TaskKind.F, TaskKind.B)
        return [
            Task(kind, chunk, m)
            for kind in kinds
            for chunk in range(self.num_chunks)
            for m in range(self.num_microbatches)
        ]

    @cached_property
    def _numbers(self) -> dict[Task, int]:
        return {task: number for number, task in enumerate(self.tasks)}

    def numbered(self, orders: Iterable[Iterable[Task]]) -> TaskRows:
        """Returns the orders of a table as rows of numbers."""
        return [list(map(self._numbers.__getitem__, order)) for order in orders]

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Nanoseconds of all tasks of each stage."""
        work = [0] * self.num_stages
        for stage, duration in zip(self.stages, self.durations, strict=True):
            work[stage] += duration
        return tuple(work)

    @cached_property
    def period(self) -> int:
        """Nanoseconds of an average microbatch on the fullest stage."""
        return max(1, max(self.work) // self.num_microbatches)

    @cached_property
    def heads(self) -> NDArray[np.float64]:
        """The start of each task on the way of its microbatch when nothing holds that up."""
        found = np.zeros(self.num_tasks)
        for first in range(self.num_microbatches):
            task, at = first, 0
            while task >= 0:
                found[task] = at
                at += self.durations[task]
                if self.is_split and task >= self.num_ways:
                    found[task + self.num_ways] = at
                at += self.delays[task]
                task = self.followers[task]
        found.flags.writeable = False
        return found


def order_problem(cut: CutModel, available: Sequence[float] | None = None) -> OrderProblem:
    """Returns the problem of a cut; raises ValueError where memory is given for another number of stages."""
    placement, m = cut.placement, cut.num_microbatches
    num_chunks, stage_of = placement.num_chunks, placement.stage_of_chunk
    if available is not None and len(available) != placement.num_stages:
        raise ValueError(
            f"memory is given for {len(available)} stages of {placement.num_stages}: give one number for each"
        )
    host = round(cut.machine.host_ms * NS_PER_MS)
    forward, back, weight = (cut.durations_ms[0, :, :, slot] for slot in range(3))
    by_kind = [forward, back, weight] if cut.split else [forward, back + weight]
    durations = np.rint(np.stack(by_kind) * NS_PER_MS).astype(np.int64) + host
    ways = num_chunks * m
    followers, delays = _ways(cut, ways)
    takes = [each.per_microbatch for each in cut.chunk_bytes]
    kinds = len(by_kind)
    return OrderProblem(
        placement=placement,
        graph=cut.graph,
        num_microbatches=m,
        is_split=cut.split,
        durations=durations.reshape(-1).tolist(),
        stages=[stage_of[chunk] for _ in range(kinds) for chunk in range(num_chunks) for _ in range(m)],
        followers=followers,
        delays=delays,
        weights=[takes[chunk] for chunk in range(num_chunks) for _ in range(m)] + [0] * (ways * (kinds - 1)),
        freed=[0] * (ways * (kinds - 1)) + [takes[chunk] for chunk in range(num_chunks) for _ in range(m)],
        available=(inf,) * placement.num_stages if available is None else tuple(available),
        host=host,
        bound=_bound(cut, durations, host),
    )


def memory_for_activations(cut: CutModel, limits: Sequence[float | None]) -> tuple[float, ...]:
    """Returns the bytes that microbatches in flight may take on each stage; ``limits`` are those of devices, None:
    none.

    They may be negative, where not even parameters fit.
    """
    sizes, stages = cut.chunk_bytes, cut.placement.chunks_of_stage
    available = [inf if limit is None else float(limit) for limit in limits]
    for stage, chunks in enumerate(stages):
        available[stage] -= sum(sizes[chunk].fixed for chunk in chunks)
        available[stage] -= max(sizes[chunk].temporaries + sizes[chunk].outputs for chunk in chunks)
    left = list(available)
    for stage, chunks in enumerate(stages):
        for chunk in (each for each in chunks if each > 0):
            sender, weight = available[cut.placement.stage_of_chunk[chunk - 1]], sizes[chunk - 1].per_microbatch
            most = cut.num_microbatches
            if weight > 0 and sender < inf:
                most = min(most, max(0, int(sender // weight)))
            left[stage] -= sizes[chunk].inputs * most
    return tuple(left)


def _ways(cut: CutModel, ways: int) -> tuple[list[int], list[int]]:
    """Returns the follower of each task, and how long the way there is."""
    m, num_chunks, stage_of = cut.num_microbatches, cut.placement.num_chunks, cut.placement.stage_of_chunk
    kinds = 3 if cut.split else 2
    followers, delays = [_NOTHING] * (kinds * ways), [0] * (kinds * ways)

    def lead(before: int, chunk: int, after: int, next_chunk: int) -> None:
        delay = _delay(cut.links, stage_of[chunk], stage_of[next_chunk])
        for i in range(m):
            followers[before + i] = after + i
            delays[before + i] = delay

    for chunk in range(num_chunks - 1):
        lead(chunk * m, chunk, (chunk + 1) * m, chunk + 1)
        lead(ways + (chunk + 1) * m, chunk + 1, ways + chunk * m, chunk)
    last = num_chunks - 1
    lead(last * m, last, ways + last * m, last)
    return followers, delays


def _delay(links: Links, a: int, b: int) -> int:
    return 0 if a == b else round((links.latency_ms + links.extra_ms.get((a, b), 0.0)) * NS_PER_MS)


def _bound(cut: CutModel, durations: NDArray[np.int64], host: int) -> int:
    # From the same whole nanoseconds, so that an order that reaches the bound is seen to do so.
    whole = np.zeros((*durations.shape[1:], 3))
    whole[..., : len(durations)] = np.moveaxis(durations - host, 0, -1) / NS_PER_MS
    latency = round(cut.links.latency_ms * NS_PER_MS)
    extra_ms = {(a, b): (_delay(cut.links, a, b) - latency) / NS_PER_MS for a, b in cut.links.extra_ms}
    links = Links(latency_ms=latency / NS_PER_MS, extra_ms=extra_ms)
    found = lower_bound(cut.graph, cut.placement, whole, links=links, host_ms=host / NS_PER_MS)
    return round(found.total_ms * NS_PER_MS)


class RowTimes(NamedTuple):
    """The times of rows that stages keep to, in nanoseconds."""

    makespan: int
    """From the first start to the last end."""
    starts: list[int]
    """The start of each task."""


def time_rows(problem: OrderProblem, rows: TaskRows) -> RowTimes | None:
    """Starts every task as soon as its row and its input allow; returns None where the rows deadlock."""
    durations, followers, delays, stages = problem.durations, problem.followers, problem.delays, problem.stages
    ways, last = problem.num_ways, problem.num_ways * (2 if problem.is_split else 1)
    arrived = [_NOTHING] * problem.num_tasks
    arrived[: problem.num_microbatches] = [0] * problem.num_microbatches
    starts, num_done = [0] * problem.num_tasks, 0
    free, place = [0] * len(rows), [0] * len(rows)
    wanted = [row[0] for row in rows]
    todo = list(range(len(rows)))[::-1]
    while todo:
        stage = todo.pop()
        row, n, now = rows[stage], place[stage], free[stage]
        while n < len(row):
            task = row[n]
            at = arrived[task]
            if at < 0:
                wanted[stage] = task
                break
            now = max(now, at)
            starts[task] = now
            num_done += 1
            now += durations[task]
            n += 1
            follower = followers[task]
            if follower >= 0:
                arrived[follower] = now + delays[task]
                other = stages[follower]
                if other != stage and wanted[other] == follower:
                    todo.append(other)
            if ways <= task < last:
                arrived[task + ways] = now
        place[stage], free[stage] = n, now
    return RowTimes(max(free) - problem.host, starts) if num_done == problem.num_tasks else None


def memory_peaks(problem: OrderProblem, rows: TaskRows) -> tuple[int, ...]:
    """Returns the most memory that activations take on each stage."""
    weights, freed, found = problem.weights, problem.freed, []
    for row in rows:
        held = most = 0
        for task in row:
            taken = weights[task]
            if taken:
                held += taken
                most = max(most, held)
            held -= freed[task]
        found.append(most)
    return tuple(found)
