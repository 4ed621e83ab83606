"""A list scheduler in given memory: a free stage starts the admissible task with the smallest key.

An F is admitted if its activation fits, beside one microbatch in every later chunk of the stage (the *reserve*). With
the reserve no run gets stuck: take the deepest F that waits. Activations of deeper chunks that its stage holds are on
their way back, and backwards are never restrained; those of this and earlier chunks were admitted with memory left for
this F. Without the reserve more fits, and a run may get stuck.

*Patience* is foresight: a stage stays idle where a task with a smaller key is known to arrive before this multiple of
the chosen task's duration has passed.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.planner.order_problem import OrderProblem, TaskRows

TaskKeys = NDArray[np.float64] | NDArray[np.int64]
"""A key for each task; of equal ones the task with the smaller number goes first."""
_NEVER = 1 << 100
"""A moment later than all others."""


class Listed(NamedTuple):
    """The rows that a list scheduler has made."""

    is_complete: bool
    """False where it got stuck, or would have lasted too long."""
    rows: TaskRows
    """The orders of the stages, as far as they were run."""


def run_list_scheduler(
    problem: OrderProblem,
    keys: TaskKeys,
    *,
    patience: float = 0.0,
    keeps_reserve: bool = True,
    cutoff: float = inf,
) -> Listed:
    """Returns the schedule of these keys, given up where it would last longer than ``cutoff`` nanoseconds."""
    run = _Run(problem, keys, patience, keeps_reserve, cutoff + problem.host)
    return Listed(run.goes_through(), run.rows)


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
        self.shift = problem.num_tasks.bit_length()
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
