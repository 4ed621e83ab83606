"""A list schedule in given memory: a free stage starts the admissible task with the smallest key.

An F is admitted if its activation fits, beside room for one microbatch in every later chunk of the stage (the
*reserve*). With it no run gets stuck: take the deepest F that waits. What its stage holds of deeper chunks is on its
way back, and backwards are never restrained; and what it holds of this and earlier chunks was admitted with room left
for this F. Without the reserve more fits, and a run may get stuck.

*Patience* is foresight: a stage stays idle where a task with a smaller key is known to arrive before so many parts of
the chosen one's duration have passed.
"""

from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.planning.orders.problem import NOTHING, Problem, Rows

Keys = NDArray[np.float64] | NDArray[np.int64]
"""By task; of equal ones the task with the smaller number goes first."""

_TOO_LATE = -2


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
    of each chunk its F, of each stage the backwards, and the W."""

    def __init__(self, problem: Problem, keys: Keys, manner: Manner, latest: float) -> None:
        num_stages, m = problem.num_stages, problem.num_microbatches
        order = np.argsort(keys, kind="stable")
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        self.problem, self.patience, self.latest = problem, manner.patience, latest
        needs = _needs(problem, keeps_reserve=manner.keeps_reserve)
        self.by_rank: list[int] = order.tolist()
        self.ranks: list[int] = ranks.tolist()
        self.needs = [needs[chunk] for chunk in range(problem.num_chunks) for _ in range(m)]
        self.forwards: list[list[int]] = [[] for _ in range(problem.num_chunks)]
        self.forwards[0] = [self.ranks[task] for task in problem.first_tasks()]
        heapify(self.forwards[0])
        self.backs: list[list[int]] = [[] for _ in range(num_stages)]
        self.weights: list[list[int]] = [[] for _ in range(num_stages)]
        chunks_of = problem.placement.chunks_of_stage
        self.queues = [[(c, needs[c], self.forwards[c]) for c in chunks_of[stage]] for stage in range(num_stages)]
        """By stage: the room that F of a chunk need, and those that are ready."""
        self.windows = list(manner.windows) or [m] * problem.num_chunks
        """By chunk: how many more it may hold."""
        self.coming: list[dict[int, int]] = [{} for _ in range(num_stages)]
        """By stage: when what is on its way arrives, by rank."""
        self.space = list(problem.room)
        self.left = list(problem.work)
        """By stage: time of the tasks that have not started."""
        self.rows: Rows = [[] for _ in range(num_stages)]
        self.idle = [True] * num_stages

    def goes_through(self) -> bool:
        """Run all tasks; False where it gets stuck, or would last too long."""
        problem, idle, ranks = self.problem, self.idle, self.ranks
        stages, durations, followers, delays = problem.stages, problem.durations, problem.followers, problem.delays
        num_tasks, ways, m = problem.num_tasks, problem.num_ways, problem.num_microbatches
        forwards, backs = self.forwards, self.backs
        shift = (2 * num_tasks).bit_length()
        mask = (1 << shift) - 1
        events = list[int]()  # the time of each, then its task; of arrivals the task plus the number of all tasks
        touched, now = {stages[0]}, 0
        while True:
            for stage in touched:
                task = self._start(stage, now) if idle[stage] else NOTHING
                if task >= 0:
                    heappush(events, now + durations[task] << shift | task)
                elif task == _TOO_LATE:
                    return False
            if not events:
                break
            touched.clear()
            now = events[0] >> shift
            until = now + 1 << shift
            while events and events[0] < until:
                task = heappop(events) & mask
                if task < num_tasks:
                    touched.add(self._end(task))
                    delay, task = delays[task], followers[task]
                    if task < 0:
                        continue
                    if delay:
                        heappush(events, now + delay << shift | task + num_tasks)
                        continue
                else:
                    task -= num_tasks
                touched.add(stages[task])
                heappush(backs[stages[task]] if task >= ways else forwards[task // m], ranks[task])
        return not any(self.left)

    def _end(self, task: int) -> int:
        """A task has ended; its stage."""
        problem = self.problem
        stage, ways, after = problem.stages[task], problem.num_ways, task + problem.num_ways
        self.idle[stage] = True
        self.space[stage] += problem.freed[task]
        if after >= problem.num_tasks:  # it is of the last kind
            self.windows[(after - problem.num_tasks) // problem.num_microbatches] += 1
        elif task >= ways:
            heappush(self.weights[stage], self.ranks[after])
        return stage

    def _start(self, stage: int, now: int) -> int:
        """The task that a free stage starts; ``NOTHING`` where it stays idle, ``_TOO_LATE`` if that is hopeless."""
        problem, space = self.problem, self.space[stage]
        best = problem.num_tasks
        chosen = self.backs[stage]
        if chosen:
            best = chosen[0]
        queue = self.weights[stage]
        if queue and queue[0] < best:
            best, chosen = queue[0], queue
        for chunk, need, queue in self.queues[stage]:
            if queue and queue[0] < best and need <= space and self.windows[chunk]:
                best, chosen = queue[0], queue
        if best == problem.num_tasks:
            return NOTHING
        task = self.by_rank[best]
        duration = problem.durations[task]
        if self.patience and self._waits(stage, best, now, duration):
            return NOTHING
        left = self.left[stage]
        if now + left > self.latest:
            return _TOO_LATE
        heappop(chosen)
        self.left[stage] = left - duration
        self.idle[stage] = False
        self.space[stage] = space - problem.weights[task]
        if task < problem.num_ways:
            self.windows[task // problem.num_microbatches] -= 1
        self.rows[stage].append(task)
        return task

    def _waits(self, stage: int, best: int, now: int, duration: int) -> bool:
        """Whether something better is about to arrive; else the chosen task starts, and its follower is on its way."""
        problem, coming = self.problem, self.coming[stage]
        if coming:
            until, space = now + self.patience * duration, self.space[stage]
            for rank, at in list(coming.items()):
                if at <= now:
                    del coming[rank]
                elif rank < best and at < until:
                    task = self.by_rank[rank]
                    if task >= problem.num_ways or (
                        self.needs[task] <= space and self.windows[task // problem.num_microbatches]
                    ):
                        return True
        task = self.by_rank[best]
        follower = problem.followers[task]
        if follower >= 0 and problem.stages[follower] != stage:
            coming = self.coming[problem.stages[follower]]
            coming[self.ranks[follower]] = now + duration + problem.delays[task]
        return False
