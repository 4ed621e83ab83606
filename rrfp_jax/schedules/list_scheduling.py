"""List scheduling: an order from priorities, by running the pipeline in ideal time.

Whenever a stage is free, it starts the best of the tasks whose inputs are there. Only entry is limited: at most
``window`` microbatches are between their first forward and their last backward, over the whole pipeline. Everything
that has entered can always go on, so this cannot deadlock.
"""

import heapq
from collections.abc import Callable, Iterator

from rrfp_jax.schedules.validation import dependants
from rrfp_jax.tasks import PipelineGraph, Placement, Task, TaskKind

Priority = Callable[[Task], tuple[int, ...]]


class ListScheduler:
    """One run: what is ready on each stage, and what is under way; smaller priorities first, ``length`` in any unit."""

    def __init__(
        self,
        placement: Placement,
        graph: PipelineGraph,
        *,
        length: Callable[[Task], float],
        priority: Priority,
        window: int,
    ) -> None:
        self.placement, self.graph, self.length, self.priority, self.window = placement, graph, length, priority, window
        self.after = dependants(graph)
        self.missing = {task: len(graph.dependencies(task)) for task in graph.tasks()}
        self.unfinished = [0] * graph.num_microbatches
        for task in self.missing:
            self.unfinished[task.microbatch] += 1
        self.entered: set[int] = set()
        self.ready: list[set[Task]] = [set() for _ in range(placement.num_stages)]
        self.running: list[tuple[float, Task]] = []
        self.busy = [False] * placement.num_stages
        for task, count in self.missing.items():
            if count == 0:
                self.ready[placement.stage_of_chunk[task.chunk]].add(task)

    def orders(self) -> list[list[Task]]:
        """Run to the end; the orders of the stages."""
        orders: list[list[Task]] = [[] for _ in range(self.placement.num_stages)]
        now = 0.0
        while True:
            for stage in range(self.placement.num_stages):
                task = None if self.busy[stage] else min(self._admissible(stage), key=self.priority, default=None)
                if task is not None:
                    self._start(stage, task, now)
                    orders[stage].append(task)
            if not self.running:
                return orders
            now = self.running[0][0]
            while self.running and self.running[0][0] <= now:
                self._finish(heapq.heappop(self.running)[1])

    def _admissible(self, stage: int) -> Iterator[Task]:
        full = len(self.entered) >= self.window
        return (task for task in self.ready[stage] if not full or task.microbatch in self.entered)

    def _start(self, stage: int, task: Task, now: float) -> None:
        self.entered.add(task.microbatch)
        self.ready[stage].remove(task)
        self.busy[stage] = True
        heapq.heappush(self.running, (now + self.length(task), task))

    def _finish(self, task: Task) -> None:
        self.busy[self.placement.stage_of_chunk[task.chunk]] = False
        self.unfinished[task.microbatch] -= 1
        if self.unfinished[task.microbatch] == 0:
            self.entered.remove(task.microbatch)
        for follower in self.after.get(task, ()):
            self.missing[follower] -= 1
            if self.missing[follower] == 0:
                self.ready[self.placement.stage_of_chunk[follower.chunk]].add(follower)


def backward_first(task: Task) -> tuple[int, ...]:
    """Backwards before forwards, earlier microbatches first, and forwards of later chunks first."""
    return (task.kind is TaskKind.F, task.microbatch, -task.chunk)
