"""Sample timelines: a small list scheduler, so that the pictures of these tests look like those of real runs."""

import heapq
import random
from collections.abc import Callable

import pytest

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.schedules import (
    Op,
    PipelineGraph,
    ScheduleRequest,
    Task,
    TaskKind,
    build_schedule,
    chain,
    looped,
    with_operations,
)
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline, Wait
from rrfp_jax.simulation import Costs, simulate
from rrfp_jax.simulation.costs import constant

SampleTimeline = Callable[..., Timeline]

_RANK = {TaskKind.B: 0, TaskKind.I: 0, TaskKind.F: 1, TaskKind.W: 2}


def list_schedule(
    num_stages: int,
    num_microbatches: int,
    *,
    chunks_per_stage: int = 1,
    split: bool = False,
    window: int | None = None,
    fixed_order: bool = False,
    durations_ms: dict[str, float] | None = None,
    jitter: float = 0.0,
    host_ms: float = 0.0,
    step: int = 0,
    start_s: float = 0.0,
) -> Timeline:
    """Run every stage's most wanted ready task (backward, forward, weight gradient) until all are done.

    ``fixed_order`` takes forwards and backwards in the order of the same run without jitter.
    """
    sizes = {"F": 5.0, "B": 10.0, "I": 5.0, "W": 5.0, "R": 2.0, "U": 3.0} | (durations_ms or {})
    order: list[list[Task]] | None = None
    if fixed_order:
        order = list_schedule(
            num_stages, num_microbatches, chunks_per_stage=chunks_per_stage, split=split, window=window,
            durations_ms=durations_ms,
        ).order()  # fmt: skip
    graph = chain(num_stages * chunks_per_stage, num_microbatches, split=split)
    run = _Run(graph, num_stages, chunks_per_stage, window or num_stages)
    run.order = order
    run.sizes, run.jitter, run.host_s, run.step = sizes, jitter, host_ms / 1e3, step
    return run.timeline(start_s)


class _Run:
    def __init__(self, graph: PipelineGraph, num_stages: int, chunks_per_stage: int, window: int) -> None:
        self.graph, self.window = graph, window
        self.placement = looped(num_stages, chunks_per_stage)
        self.order: list[list[Task]] | None = None
        self.sizes: dict[str, float] = {}
        self.jitter = self.host_s = self.now = 0.0
        self.step = 0
        self.random = random.Random(0)
        self.left = [list(graph.tasks(chunks)) for chunks in self.placement.chunks_of_stage]
        self.done: set[Task] = set()
        self.held: list[set[int]] = [set() for _ in range(num_stages)]
        self.free_at: list[float | None] = [None] * num_stages
        self.idle_reason = [IdleReason.FILL] * num_stages
        self.out = Timeline(num_stages)

    def timeline(self, start_s: float) -> Timeline:
        self.now = start_s
        self.free_at = [start_s] * self.out.num_stages
        self.random.seed(self.step)
        running: list[tuple[float, int, Task]] = []
        self._start_all(running)
        while running:
            self.now, stage, task = heapq.heappop(running)
            self.done.add(task)
            if task.microbatch not in {other.microbatch for other in self.left[stage]}:
                self.held[stage].discard(task.microbatch)
            self.free_at[stage] = self.now
            self._start_all(running)
        assert not any(self.left), "the sample schedule is stuck"
        self._finish_step()
        return self.out

    def _start_all(self, running: list[tuple[float, int, Task]]) -> None:
        for stage, free_at in enumerate(self.free_at):
            if free_at is None:
                continue
            task, reason = self._choose(stage)
            if reason is not self.idle_reason[stage] or task is not None:
                self._wait(stage, free_at, self.now, self.idle_reason[stage])
                self.free_at[stage] = self.now
                self.idle_reason[stage] = reason
            if task is not None:
                heapq.heappush(running, self._run(stage, task))
                self.free_at[stage] = None

    def _choose(self, stage: int) -> tuple[Task | None, IdleReason]:
        left = self.left[stage]
        if not left:
            return None, IdleReason.DRAIN
        ready = [task for task in left if self.done.issuperset(self.graph.dependencies(task))]
        if self.order is not None:
            if self.order[stage][0] in ready:
                return self.order[stage][0], IdleReason.INPUT
            started = len(left) < len(list(self.graph.tasks(self.placement.chunks_of_stage[stage])))
            return None, IdleReason.ORDER if ready else IdleReason.INPUT if started else IdleReason.FILL
        admitted = [task for task in ready if self._admits(stage, task)]
        if admitted:
            return min(
                admitted, key=lambda t: (_RANK[t.kind], t.microbatch // 4, -t.chunk, t.microbatch)
            ), IdleReason.INPUT
        if ready:
            return None, IdleReason.WINDOW
        return None, self.idle_reason[stage] if self.idle_reason[stage] is IdleReason.FILL else IdleReason.INPUT

    def _admits(self, stage: int, task: Task) -> bool:
        held = self.held[stage]
        if task.kind is not TaskKind.F or task.microbatch in held:
            return True
        oldest = min(other.microbatch for other in self.left[stage])
        keeps_room = task.microbatch == oldest or oldest in held or len(held) + 1 < self.window
        return len(held) < self.window and keeps_room

    def _run(self, stage: int, task: Task) -> tuple[float, int, Task]:
        self.left[stage].remove(task)
        if self.order is not None:
            self.order[stage].remove(task)
        if task.kind is TaskKind.F:
            self.held[stage].add(task.microbatch)
        start_s = self.now + self.host_s
        self._wait(stage, self.now, start_s, IdleReason.HOST)
        end_s = start_s + self.sizes[task.kind] / 1e3 * self.random.lognormvariate(0, self.jitter)
        self.out.spans.append(Span(self.step, stage, task, start_s, end_s))
        self.idle_reason[stage] = IdleReason.INPUT
        return end_s, stage, task

    def _finish_step(self) -> None:
        """R and U of every chunk, after the last task of the whole pipeline."""
        for stage, chunks in enumerate(self.placement.chunks_of_stage):
            self._wait(stage, self.free_at[stage] or self.now, self.now, self.idle_reason[stage])
            end_s = self.now
            for kind in (TaskKind.R, TaskKind.U):
                for chunk in chunks:
                    start_s, end_s = end_s, end_s + self.sizes[kind] / 1e3
                    if end_s > start_s:
                        self.out.spans.append(Span(self.step, stage, Task(kind, chunk), start_s, end_s))

    def _wait(self, stage: int, start_s: float, end_s: float, reason: IdleReason) -> None:
        if end_s > start_s:
            self.out.waits.append(Wait(self.step, stage, start_s, end_s, reason))


def wide_timeline(num_stages: int, num_microbatches: int) -> Timeline:
    """A GPipe step with a split backward in closed form, all tasks of 1 ms: quick to make for any size."""
    out = Timeline(num_stages)
    turn = num_stages + num_microbatches - 1
    end = turn + 2 * turn
    for stage in range(num_stages):
        back = num_stages - 1 - stage
        for m in range(num_microbatches):
            starts = (
                (TaskKind.F, stage + m),
                (TaskKind.I, turn + 2 * (back + m)),
                (TaskKind.W, turn + 2 * (back + m) + 1),
            )
            for kind, start in starts:
                out.spans.append(Span(0, stage, Task(kind, stage, m), start / 1e3, (start + 1) / 1e3))
        idle = (
            (0, stage, IdleReason.FILL),
            (stage + num_microbatches, turn + 2 * back, IdleReason.INPUT),
            (turn + 2 * (back + num_microbatches), end, IdleReason.DRAIN),
        )
        out.waits += [Wait(0, stage, a / 1e3, b / 1e3, reason) for a, b, reason in idle if b > a]
    return out


def offloaded_timeline(num_stages: int, num_microbatches: int, *, ms: float = 8.0) -> Timeline:
    """1F1B whose first half copies to the host and back on two engines, and whose last stage has a small operation."""
    table = build_schedule("1f1b", ScheduleRequest(num_stages=num_stages, num_microbatches=num_microbatches))
    pairs = frozenset((c, m) for c in range(num_stages // 2) for m in range(num_microbatches))
    out = Op("O", after=("F",), lane="d2h", frees=1.0, ms=ms, pairs=pairs)
    back = Op("L", after=("O",), before=("B",), lane="h2d", holds=1.0, ms=ms, pairs=pairs)
    own = Op("S", after=("B",), ms=2.0, chunks=frozenset({num_stages - 1}))
    table = with_operations(table, (out, back, own))
    order = Ordering(schedule=table, consume="strict").resolve(table.placement, chain(num_stages, num_microbatches))
    costs = Costs(durations_ms=constant((10.0, 10.0, 10.0), order.graph))
    rules = StepRules(updates=False, agreement=Agreement.NONE)
    return simulate(order.arbiters(rules), costs).timeline


@pytest.fixture
def offloaded() -> SampleTimeline:
    """``offloaded(num_stages, num_microbatches, ...)``: see :func:`offloaded_timeline`."""
    return offloaded_timeline


@pytest.fixture
def sample() -> SampleTimeline:
    """``sample(num_stages, num_microbatches, ...)``: see :func:`list_schedule`."""
    return list_schedule


@pytest.fixture
def wide() -> SampleTimeline:
    """``wide(num_stages, num_microbatches)``: see :func:`wide_timeline`."""
    return wide_timeline
