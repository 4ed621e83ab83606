"""The tasks of a cut in flat integers, and a list scheduler that orders them in given memory.

A microbatch goes forth through all chunks and back again, so every task waits for exactly one other, and at most two
wait for it: the next one on that way, and W for its I. Tasks are numbered kind by kind, chunk by chunk, microbatch by
microbatch; kinds are F, the backward (I where it is split) and W. Times are whole nanoseconds, so that sums are exact
and equal moments are equal.

Activations weigh the same here as in the forecast of memory: a microbatch takes ``ChunkBytes.per_microbatch`` on a
chunk from the start of its F to the end of its B or W. Beside those in flight activations wait for their F, at most as
many as the sending chunk can have in flight.

The scheduler
-------------
A free stage starts the admissible task with the smallest key. An F is admitted if its activation fits, beside one
microbatch in every later chunk of the stage (the *reserve*). With the reserve no run gets stuck: take the deepest F
that waits. Activations of deeper chunks that its stage holds are on their way back, and backwards are never restrained;
those of this and earlier chunks were admitted with memory left for this F. Without the reserve more fits, and a run may
get stuck.

*Patience* is foresight: a stage stays idle where a task with a smaller key is known to arrive before this multiple of
the chosen task's duration has passed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import ceil, inf

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
TaskKeys = NDArray[np.float64] | NDArray[np.int64]
"""A key for each task; of equal ones the task with the smaller number goes first."""
_NEVER = 1 << 100
"""A moment later than all others."""


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
    def num_ways(self) -> int:
        """Pairs of chunk and microbatch, which is the number of tasks of a kind."""
        return self.num_chunks * self.num_microbatches

    @cached_property
    def chunks(self) -> list[int]:
        """The chunk of each task."""
        kinds = len(self.durations) // self.num_ways
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
        found = np.zeros(len(self.durations))
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
    placement, m, links = cut.placement, cut.num_microbatches, cut.links
    num_chunks, stage_of, ways = placement.num_chunks, placement.stage_of_chunk, placement.num_chunks * m
    if available is not None and len(available) != placement.num_stages:
        raise ValueError(
            f"memory is given for {len(available)} stages of {placement.num_stages}: give one number for each"
        )
    host, latency = round(cut.machine.host_ms * NS_PER_MS), round(links.latency_ms * NS_PER_MS)
    forward, back, weight = (cut.durations_ms[0, :, :, slot] for slot in range(3))
    by_kind = [forward, back, weight] if cut.split else [forward, back + weight]
    durations, kinds = np.rint(np.stack(by_kind) * NS_PER_MS).astype(np.int64) + host, len(by_kind)
    delay_of = {pair: round((links.latency_ms + ms) * NS_PER_MS) for pair, ms in links.extra_ms.items()}
    followers, delays = [_NOTHING] * (kinds * ways), [0] * (kinds * ways)
    last = num_chunks - 1
    # Forth from chunk to chunk, back in the same way, and around at the last one.
    steps = [(chunk * m, chunk, (chunk + 1) * m, chunk + 1) for chunk in range(last)]
    steps += [(ways + (chunk + 1) * m, chunk + 1, ways + chunk * m, chunk) for chunk in range(last)]
    for before, chunk, after, next_chunk in [*steps, (last * m, last, ways + last * m, last)]:
        a, b = stage_of[chunk], stage_of[next_chunk]
        for i in range(m):
            followers[before + i] = after + i
            delays[before + i] = 0 if a == b else delay_of.get((a, b), latency)
    # The bound comes from the same whole nanoseconds, so that an order that reaches it is seen to do so.
    whole = np.zeros((*durations.shape[1:], 3))
    whole[..., :kinds] = np.moveaxis(durations - host, 0, -1) / NS_PER_MS
    extra_ms = {pair: (delay - latency) / NS_PER_MS for pair, delay in delay_of.items()}
    bound = lower_bound(
        cut.graph, placement, whole,
        links=Links(latency_ms=latency / NS_PER_MS, extra_ms=extra_ms), host_ms=host / NS_PER_MS,
    )  # fmt: skip
    takes = [each.per_microbatch for each in cut.chunk_bytes for _ in range(m)]
    return OrderProblem(
        placement=placement,
        graph=cut.graph,
        num_microbatches=m,
        is_split=cut.split,
        durations=durations.reshape(-1).tolist(),
        stages=[stage_of[chunk] for _ in range(kinds) for chunk in range(num_chunks) for _ in range(m)],
        followers=followers,
        delays=delays,
        weights=takes + [0] * (ways * (kinds - 1)),
        freed=[0] * (ways * (kinds - 1)) + takes,
        available=(inf,) * placement.num_stages if available is None else tuple(available),
        host=host,
        bound=round(bound.total_ms * NS_PER_MS),
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
        beside = max(sizes[chunk].temporaries + sizes[chunk].outputs for chunk in chunks)
        if len(chunks) > 1:  # one chunk may update while another one has microbatches in flight
            beside = max(beside, *(sizes[chunk].step_temporaries for chunk in chunks))
        available[stage] -= beside
    left = list(available)
    for stage, chunks in enumerate(stages):
        for chunk in (each for each in chunks if each > 0):
            sender, weight = available[cut.placement.stage_of_chunk[chunk - 1]], sizes[chunk - 1].per_microbatch
            most = cut.num_microbatches
            if weight > 0 and sender < inf:
                most = min(most, max(0, int(sender // weight)))
            left[stage] -= sizes[chunk].inputs * most
    return tuple(left)


def time_rows(problem: OrderProblem, rows: TaskRows) -> int | None:
    """Returns the nanoseconds from the first start to the last end, where every task starts as soon as its row and its
    input allow; None where the rows deadlock."""
    durations, followers, delays, stages = problem.durations, problem.followers, problem.delays, problem.stages
    ways, last = problem.num_ways, problem.num_ways * (2 if problem.is_split else 1)
    arrived = [_NOTHING] * len(durations)
    arrived[: problem.num_microbatches] = [0] * problem.num_microbatches
    num_done, free, place = 0, [0] * len(rows), [0] * len(rows)
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
            now = max(now, at) + durations[task]
            num_done += 1
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
    return max(free) - problem.host if num_done == len(durations) else None


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


# -- the scheduler -----------------------------------------------------------------------------------------------------


def run_list_scheduler(
    problem: OrderProblem,
    keys: TaskKeys,
    *,
    patience: float = 0.0,
    keeps_reserve: bool = True,
    cutoff: float = inf,
) -> tuple[TaskRows, bool]:
    """Returns the orders of the stages by these keys, as far as they were run, and whether they are complete: they are
    not where the run got stuck, or would have lasted longer than ``cutoff`` nanoseconds."""
    run = _Run(problem, keys, patience, keeps_reserve, cutoff + problem.host)
    is_complete = run.goes_through()
    return run.rows, is_complete


class _Run:
    """The pipeline at one moment.

    Ready tasks lie in heaps of ranks, which name both the task and its place among the keys: a heap of F for each
    chunk, and of backwards and of W for each stage. Tasks on their way to a stage lie in a heap of their own.

    A stage has its *turn* when it may start something. The earliest turn comes next, of equal ones that of the first
    stage. A task ends behind its start, so all that has arrived by a turn is known by then; and nobody asks for the
    memory that a task frees, or for its output on its own stage, before it has ended.
    """

    def __init__(
        self, problem: OrderProblem, keys: TaskKeys, patience: float, keeps_reserve: bool, latest: float
    ) -> None:
        num_stages, m = problem.num_stages, problem.num_microbatches
        order = np.argsort(keys, kind="stable")
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        self.problem, self.patience, self.latest = problem, patience, latest
        self.by_rank: list[int] = order.tolist()
        self.ranks: list[int] = ranks.tolist()
        self.needs = [problem.weights[chunk * m] for chunk in range(problem.num_chunks)]
        """Memory that an F of each chunk needs."""
        if keeps_reserve:
            own, stage_of = list(self.needs), problem.placement.stage_of_chunk
            for chunk, stage in enumerate(stage_of):
                self.needs[chunk] += sum(own[c] for c in problem.placement.chunks_of_stage[stage] if c > chunk)
        self.forwards: list[list[int]] = [[] for _ in range(problem.num_chunks)]
        self.forwards[0] = [self.ranks[task] for task in range(m)]
        heapify(self.forwards[0])
        self.backs: list[list[int]] = [[] for _ in range(num_stages)]
        self.weights: list[list[int]] = [[] for _ in range(num_stages)]
        self.free_memory = list(problem.available)
        self.left = list(problem.work)
        """Nanoseconds of the tasks of each stage that have not started."""
        self.rows: TaskRows = [[] for _ in range(num_stages)]
        self.coming: list[list[int]] = [[] for _ in range(num_stages)]
        """For each stage, arrival of each task on its way there, with the task's rank in the last bits."""
        self.shift = len(problem.durations).bit_length()
        self.stage_shift = num_stages.bit_length()
        self.turns, self.free = [_NEVER] * num_stages, [0] * num_stages
        """For each stage, its next turn with its number in the last bits, and the end of its last task."""

    def goes_through(self) -> bool:
        """Runs all tasks; returns False where it gets stuck, or would last too long."""
        problem, latest, patience, left, rows = self.problem, self.latest, self.patience, self.left, self.rows
        durations, stages, followers, delays = problem.durations, problem.stages, problem.followers, problem.delays
        ranks, by_rank, coming, turns, free = self.ranks, self.by_rank, self.coming, self.turns, self.free
        takes, freed, ways = problem.weights, problem.freed, problem.num_ways
        queue_of, best_queue, shift, stage_shift = self._queues(), self._choosing(), self.shift, self.stage_shift
        mask, stage_mask = (1 << shift) - 1, (1 << stage_shift) - 1
        turns[stages[0]] = stages[0]
        while (turn := min(turns)) < _NEVER:
            now, stage = turn >> stage_shift, turn & stage_mask
            arriving, until = coming[stage], now + 1 << shift
            while arriving and arriving[0] < until:
                rank = heappop(arriving) & mask
                heappush(queue_of[by_rank[rank]], rank)
            queue = best_queue(stage)
            if queue is None or (patience and arriving and self._waits(stage, queue[0], now)):
                turns[stage] = arriving[0] >> shift << stage_shift | stage if arriving else _NEVER
                continue
            if now + left[stage] > latest:
                return False
            task = by_rank[heappop(queue)]
            rows[stage].append(task)
            left[stage] -= durations[task]
            free[stage] = end = now + durations[task]
            turns[stage] = end << stage_shift | stage
            if task < ways:
                self.free_memory[stage] -= takes[task]
            elif task + ways < len(stages):
                heappush(self.weights[stage], ranks[task + ways])
            else:
                self.free_memory[stage] += freed[task]
            follower = followers[task]
            if follower < 0:
                continue
            other, rank = stages[follower], ranks[follower]
            if other == stage:
                heappush(queue_of[follower], rank)
                continue
            at = end + delays[task]
            heappush(coming[other], at << shift | rank)
            # A stage that is busy by then has its turn when its task ends, an idle one when the input arrives.
            turn = (at if at > free[other] else free[other]) << stage_shift | other
            turns[other] = min(turns[other], turn)
        return not any(left)

    def _queues(self) -> list[list[int]]:
        """Returns for each task but W the heap in which it waits once it is ready."""
        problem = self.problem
        forwards = [self.forwards[chunk] for chunk in problem.chunks[: problem.num_ways]]
        return forwards + [self.backs[stage] for stage in problem.stages[: problem.num_ways]]

    def _choosing(self) -> Callable[[int], list[int] | None]:
        """Returns a function to the heap of a stage's best admissible task; None: there is none."""
        backs, weights, free_memory = self.backs, self.weights, self.free_memory
        chunks_of = self.problem.placement.chunks_of_stage
        forwards = [[(self.needs[c], self.forwards[c]) for c in chunks] for chunks in chunks_of]
        last = len(self.ranks)

        def best_queue(stage: int) -> list[int] | None:
            best, chosen = last, None
            queue = backs[stage]
            if queue:
                best, chosen = queue[0], queue
            queue = weights[stage]
            if queue and queue[0] < best:
                best, chosen = queue[0], queue
            for need, queue in forwards[stage]:
                if queue and queue[0] < best and need <= free_memory[stage]:
                    best, chosen = queue[0], queue
            return chosen

        return best_queue

    def _waits(self, stage: int, best: int, now: int) -> bool:
        """Returns whether an admissible task with a smaller key is about to arrive."""
        problem, by_rank, shift = self.problem, self.by_rank, self.shift
        until = ceil(now + self.patience * problem.durations[by_rank[best]]) << shift
        mask, ways, free_memory = (1 << shift) - 1, problem.num_ways, self.free_memory[stage]
        for arriving in self.coming[stage]:
            rank = arriving & mask
            if rank < best and arriving < until:
                task = by_rank[rank]
                if task >= ways or self.needs[problem.chunks[task]] <= free_memory:
                    return True
        return False
