"""A list schedule in given memory: a free stage starts the admissible task with the smallest key.

An F is admitted if its activation fits, beside room for one microbatch in every later chunk of the stage (the
*reserve*). With it no run gets stuck: take the deepest F that waits. What its stage holds of deeper chunks is on its
way back, and backwards are never restrained; and what it holds of this and earlier chunks was admitted with room left
for this F. Without the reserve more fits, and a run may get stuck.

*Patience* is foresight: a stage stays idle where a task with a smaller key is known to arrive before so many parts of
the chosen one's duration have passed.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.planning.orders.problem import Problem, Rows

Keys = NDArray[np.float64] | NDArray[np.int64]
"""By task; of equal ones the task with the smaller number goes first."""

_NEVER = 1 << 100
"""Later than all turns."""


class Manner(NamedTuple):
    """How a ranking is run."""

    patience: float = 0.0
    keeps_reserve: bool = True
    windows: tuple[int, ...] = ()
    """Microbatches that each chunk may hold; empty: as many as fit."""


PLAIN = Manner()


class Dispatched(NamedTuple):
    """What came about."""

    is_complete: bool
    """False where it got stuck, or would have lasted too long."""
    rows: Rows
    """The orders of the stages, as far as they were run."""


def dispatch(problem: Problem, keys: Keys, manner: Manner = PLAIN, *, cutoff: float = inf) -> Dispatched:
    """The schedule of these keys, given up where it would last longer than ``cutoff`` nanoseconds."""
    run = _Run(problem, keys, manner, cutoff + problem.host)
    return Dispatched(run.goes_through(), run.rows)


def _needs(problem: Problem, *, keeps_reserve: bool) -> list[int]:
    """By chunk: the room that an F needs."""
    placement, m = problem.placement, problem.num_microbatches
    later = [
        [c for c in placement.chunks_of_stage[stage] if c > chunk and keeps_reserve]
        for chunk, stage in enumerate(placement.stage_of_chunk)
    ]
    return [
        problem.weights[chunk * m] + sum(problem.weights[c * m] for c in later[chunk]) for chunk in range(len(later))
    ]


class _Run:
    """The pipeline at one moment. What is ready lies in heaps of ranks, which say both task and place in the ranking:
    of each chunk its F, of each stage the backwards, and the W. What is on its way to a stage lies in a heap too.

    A stage has its *turn* when it may start something. The earliest turn comes next, of equal ones that of the first
    stage. A task ends behind its start, so what has arrived by a turn is known by then; and what a task frees, or hands
    on to its own stage, nobody asks for before it has ended.
    """

    def __init__(self, problem: Problem, keys: Keys, manner: Manner, latest: float) -> None:
        num_stages, m = problem.num_stages, problem.num_microbatches
        order = np.argsort(keys, kind="stable")
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        self.problem, self.patience, self.latest = problem, manner.patience, latest
        self.by_rank: list[int] = order.tolist()
        self.ranks: list[int] = ranks.tolist()
        self.needs = _needs(problem, keeps_reserve=manner.keeps_reserve)
        self.forwards: list[list[int]] = [[] for _ in range(problem.num_chunks)]
        self.forwards[0] = [self.ranks[task] for task in problem.first_tasks()]
        heapify(self.forwards[0])
        self.backs: list[list[int]] = [[] for _ in range(num_stages)]
        self.weights: list[list[int]] = [[] for _ in range(num_stages)]
        self.windows = list(manner.windows) or [m] * problem.num_chunks
        """By chunk: how many more it may hold."""
        self.space = list(problem.room)
        self.left = list(problem.work)
        """By stage: time of the tasks that have not started."""
        self.rows: Rows = [[] for _ in range(num_stages)]
        self.coming: list[list[int]] = [[] for _ in range(num_stages)]
        """By stage: when what is on its way arrives, and in the last bits its rank."""
        self.shift = problem.num_tasks.bit_length()
        self.stage_shift = num_stages.bit_length()
        self.turns, self.free = [_NEVER] * num_stages, [0] * num_stages
        """By stage: its next turn, with its number in the last bits; and when its last task ends."""

    def goes_through(self) -> bool:
        """Run all tasks; False where it gets stuck, or would last too long."""
        problem, latest, patience, left, rows = self.problem, self.latest, self.patience, self.left, self.rows
        durations, stages, followers, delays = problem.durations, problem.stages, problem.followers, problem.delays
        ranks, by_rank, coming, turns, free = self.ranks, self.by_rank, self.coming, self.turns, self.free
        chunks, takes, freed, ways = problem.chunks, problem.weights, problem.freed, problem.num_ways
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
                self.space[stage] -= takes[task]
                self.windows[chunks[task]] -= 1
            elif task + ways < len(stages):
                heappush(self.weights[stage], ranks[task + ways])
            else:
                self.space[stage] += freed[task]
                self.windows[chunks[task]] += 1
            follower = followers[task]
            if follower < 0:
                continue
            other, rank = stages[follower], ranks[follower]
            if other == stage:
                heappush(queue_of[follower], rank)
                continue
            at = end + delays[task]
            heappush(coming[other], at << shift | rank)
            turn = (at if at > free[other] else free[other]) << stage_shift | other
            turns[other] = min(turns[other], turn)
        return not any(left)

    def _queues(self) -> list[list[int]]:
        """By task, but for W: the heap in which it waits once it is ready."""
        problem = self.problem
        forwards = [self.forwards[chunk] for chunk in problem.chunks[: problem.num_ways]]
        return forwards + [self.backs[stage] for stage in problem.stages[: problem.num_ways]]

    def _choosing(self) -> Callable[[int], list[int] | None]:
        """What gives the heap of a stage's best admissible task; None: there is none."""
        backs, weights, space, windows = self.backs, self.weights, self.space, self.windows
        chunks_of = self.problem.placement.chunks_of_stage
        forwards = [[(c, self.needs[c], self.forwards[c]) for c in chunks] for chunks in chunks_of]
        last = len(self.ranks)

        def best_queue(stage: int) -> list[int] | None:
            best, chosen = last, None
            queue = backs[stage]
            if queue:
                best, chosen = queue[0], queue
            queue = weights[stage]
            if queue and queue[0] < best:
                best, chosen = queue[0], queue
            for chunk, need, queue in forwards[stage]:
                if queue and queue[0] < best and need <= space[stage] and windows[chunk]:
                    best, chosen = queue[0], queue
            return chosen

        return best_queue

    def _waits(self, stage: int, best: int, now: int) -> bool:
        """Whether something better is about to arrive."""
        problem, by_rank, shift = self.problem, self.by_rank, self.shift
        until = ceil(now + self.patience * problem.durations[by_rank[best]]) << shift
        mask, ways, space = (1 << shift) - 1, problem.num_ways, self.space[stage]
        for arriving in self.coming[stage]:
            rank = arriving & mask
            if rank < best and arriving < until:
                task = by_rank[rank]
                if task >= ways:
                    return True
                chunk = problem.chunks[task]
                if self.needs[chunk] <= space and self.windows[chunk]:
                    return True
        return False
