"""A cut model in flat integers, as the evaluators read it.

A microbatch goes forth through all chunks and back again, so every task waits for exactly one other, and at most two
wait for it: what comes next on that way, and W for its I. Tasks are numbered kind by kind, chunk by chunk, microbatch
by microbatch; kinds are F, the backward (I where it is split) and W. Times are whole nanoseconds, so that sums are
exact and equal moments are equal.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.planning.costs import CutModel
from rrfp_jax.planning.orders.activations import activation_weights
from rrfp_jax.schedules import PipelineGraph, Placement, Task, TaskKind
from rrfp_jax.simulation import Links, lower_bound

NS_PER_MS = 1_000_000
NOTHING = -1
"""In place of a task's number."""
Rows = list[list[int]]
"""The numbers of each stage's tasks, in order."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be ordered."""

    placement: Placement
    graph: PipelineGraph
    num_microbatches: int
    is_split: bool
    durations: list[int]
    """By task; of the host before it too."""
    stages: list[int]
    """By task."""
    followers: list[int]
    """By task: the next one on the way of its microbatch; ``NOTHING`` at its end."""
    delays: list[int]
    """By task: from its end to the arrival at what follows it."""
    weights: list[int]
    """By task: what it takes as it starts, of the room of its stage."""
    freed: list[int]
    """By task: what it frees as it ends."""
    room: tuple[float, ...]
    """By stage; infinite where nothing bounds it."""
    host: int
    """Before each task; that before the very first does not count."""
    bound: int
    """No order is quicker, whatever the room."""

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
        """Pairs of chunk and microbatch: tasks of a kind."""
        return self.num_chunks * self.num_microbatches

    @cached_property
    def chunks(self) -> list[int]:
        """By task."""
        kinds = self.num_tasks // self.num_ways
        return [chunk for _ in range(kinds) for chunk in range(self.num_chunks) for _ in range(self.num_microbatches)]

    def first_tasks(self) -> range:
        """The tasks that wait for nothing."""
        return range(self.num_microbatches)

    def number(self, task: Task) -> int:
        kind, chunk, microbatch = task
        offset = 0 if kind is TaskKind.F else 2 if kind is TaskKind.W else 1
        return (offset * self.num_chunks + chunk) * self.num_microbatches + microbatch

    def task(self, number: int) -> Task:
        place, microbatch = divmod(number, self.num_microbatches)
        offset, chunk = divmod(place, self.num_chunks)
        kinds = (TaskKind.F, TaskKind.I, TaskKind.W) if self.is_split else (TaskKind.F, TaskKind.B)
        return Task(kinds[offset], chunk, microbatch)

    @cached_property
    def tasks(self) -> list[Task]:
        """By number."""
        return list(map(self.task, range(self.num_tasks)))

    @cached_property
    def numbers(self) -> dict[Task, int]:
        """By task."""
        return {task: number for number, task in enumerate(self.tasks)}

    def numbered(self, orders: Iterable[Iterable[Task]]) -> Rows:
        """Rows from the orders of a table."""
        return [list(map(self.numbers.__getitem__, order)) for order in orders]

    @cached_property
    def work(self) -> tuple[int, ...]:
        """By stage: the time of all its tasks."""
        work = [0] * self.num_stages
        for stage, duration in zip(self.stages, self.durations, strict=True):
            work[stage] += duration
        return tuple(work)

    @cached_property
    def period(self) -> int:
        """Time of an average microbatch on the fullest stage."""
        return max(1, max(self.work) // self.num_microbatches)

    @cached_property
    def heads(self) -> NDArray[np.float64]:
        """By task: the start on the way of its microbatch when nothing holds it up."""
        found = np.zeros(self.num_tasks)
        for first in self.first_tasks():
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


def problem_of(cut: CutModel, room: Sequence[float] | None = None) -> Problem:
    """The problem of a cut; raises ValueError where room and stages differ in number."""
    placement, m = cut.placement, cut.num_microbatches
    num_chunks, stage_of = placement.num_chunks, placement.stage_of_chunk
    if room is not None and len(room) != placement.num_stages:
        raise ValueError(f"room is given for {len(room)} stages of {placement.num_stages}: give one number for each")
    host = round(cut.machine.host_ms * NS_PER_MS)
    forward, back, weight = (cut.durations_ms[0, :, :, slot] for slot in range(3))
    by_kind = [forward, back, weight] if cut.split else [forward, back + weight]
    durations = np.rint(np.stack(by_kind) * NS_PER_MS).astype(np.int64) + host
    ways = num_chunks * m
    followers, delays = _ways(cut, ways)
    takes = activation_weights(cut)
    kinds = len(by_kind)
    return Problem(
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
        room=(inf,) * placement.num_stages if room is None else tuple(room),
        host=host,
        bound=_bound(cut, durations, host),
    )


def _ways(cut: CutModel, ways: int) -> tuple[list[int], list[int]]:
    """What follows each task, and how long the way there is."""
    m, num_chunks, stage_of = cut.num_microbatches, cut.placement.num_chunks, cut.placement.stage_of_chunk
    kinds = 3 if cut.split else 2
    followers, delays = [NOTHING] * (kinds * ways), [0] * (kinds * ways)

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
    """From the same whole nanoseconds, so that an order that reaches the bound is seen to do so."""
    whole = np.zeros((*durations.shape[1:], 3))
    whole[..., : len(durations)] = np.moveaxis(durations - host, 0, -1) / NS_PER_MS
    latency = round(cut.links.latency_ms * NS_PER_MS)
    extra_ms = {(a, b): (_delay(cut.links, a, b) - latency) / NS_PER_MS for a, b in cut.links.extra_ms}
    links = Links(latency_ms=latency / NS_PER_MS, extra_ms=extra_ms)
    found = lower_bound(cut.graph, cut.placement, whole, links=links, host_ms=host / NS_PER_MS)
    return round(found.total_ms * NS_PER_MS)
