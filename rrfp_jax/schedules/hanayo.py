"""Hanayo: waves over the stages (Liu et al., SC'23, arXiv 2308.15762), by list scheduling.

One copy of the model goes down and up the stages ``W`` times, 2W chunks per stage, chunks at the turning points on the
same stage. It keeps Chimera's short gaps without its second copy of the weights.

List scheduling makes an order from priorities, by running the pipeline in ideal time. Whenever a stage is free, it
starts the best of the tasks whose inputs are there. Only entry is limited: at most ``window`` microbatches are between
their first forward and their last backward, over the whole pipeline. Everything that has entered can always go on, so
this cannot deadlock.
"""

import heapq
from collections.abc import Callable, Iterator

from rrfp_jax.schedules.registry import ScheduleRequest, chunks_per_stage, schedule
from rrfp_jax.schedules.table import ScheduleTable
from rrfp_jax.schedules.validation import dependants
from rrfp_jax.tasks import PipelineGraph, Placement, Task, TaskKind, chain, waves

Priority = Callable[[Task], tuple[int, ...]]


@schedule(
    "hanayo",
    placement="waves: down and up the stages, chunks_per_stage / 2 times",
    source="Hanayo, arXiv 2308.15762",
    chunks_per_stage=2,
    fixed_chunks=False,
    constraints="an even number of chunks per stage (2 per wave)",
)
def hanayo(request: ScheduleRequest) -> ScheduleTable:
    """Waves of at most p microbatches under way: backwards first, then earlier microbatches, then deeper chunks.

    The order is the list schedule with these priorities in slots where F and B last equally long. With p microbatches
    it leaves the gaps of the published figures, 2(p-1) slots of a chunk per stage, for any number of waves; the next
    p microbatches follow as soon as one leaves. Raises ValueError for an odd number of chunks per stage.
    """
    p, m, v = request.num_stages, request.num_microbatches, chunks_per_stage("hanayo", request)
    if v % 2:
        raise ValueError(f"hanayo needs 2 chunks per stage and wave, not {v} in all: give chunks_per_stage={v + 1}")
    placement, graph = waves(p, v // 2), chain(v * p, m)
    run = ListScheduler(placement, graph, length=lambda _: 1, priority=backward_first, window=p)
    return ScheduleTable.from_orders("hanayo", placement, graph, run.orders())


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
