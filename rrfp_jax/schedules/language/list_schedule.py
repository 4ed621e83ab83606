"""List scheduling: orders that come about by running the pipeline in ideal time.

Whenever a stage is free, a *rule* is asked what it starts among the tasks whose inputs are there, and what it starts
runs to its end. The order in which a stage starts its tasks is its row of the table. Such an order cannot deadlock: it
has been run.
"""

import heapq
from collections.abc import Callable, Set
from typing import Protocol

from rrfp_jax.schedules.validation import dependants
from rrfp_jax.tasks import PipelineGraph, Placement, Task

_ROUNDING = 1e-9
"""Ends that lie no further apart are one moment: sums of lengths differ in their last bits."""


class Choice(Protocol):
    """What a free stage starts."""

    def choose(self, stage: int, ready: Set[Task]) -> Task | None:
        """One of the ``ready`` tasks of a free stage, the oldest first, which then starts; None leaves it idle until
        something ends."""

    def finished(self, task: Task) -> None:
        """A task has ended."""


def list_orders(
    placement: Placement, graph: PipelineGraph, rule: Choice, *, length: Callable[[Task], float], hop: float = 0.0
) -> list[list[Task]]:
    """The orders of the stages, up to the moment when nothing runs and the rule starts nothing.

    ``length`` gives the time of a task, ``hop`` the time between the end of a task and the start of a dependent one on
    another stage, both in any unit.
    """
    run = _Run(placement, graph, hop)
    orders: list[list[Task]] = [[] for _ in range(placement.num_stages)]
    while True:
        for stage in range(placement.num_stages):
            task = None if run.busy[stage] else rule.choose(stage, run.ready[stage].keys())
            if task is not None:
                run.start(task, length(task))
                orders[stage].append(task)
        if not run.coming:
            return orders
        for task in run.advance():
            rule.finished(task)


class _Run:
    """The pipeline at one moment: what is ready on each stage, what runs, and what is on its way."""

    def __init__(self, placement: Placement, graph: PipelineGraph, hop: float) -> None:
        self.stage_of, self.hop = placement.stage_of_chunk, hop
        self.after = dependants(graph)
        self.missing = {task: len(graph.dependencies(task)) for task in graph.tasks()}
        self.ready: list[dict[Task, None]] = [{} for _ in range(placement.num_stages)]
        """What has been ready for longest comes first."""
        for task, count in self.missing.items():
            if count == 0:
                self.ready[self.stage_of[task.chunk]][task] = None
        self.busy = [False] * placement.num_stages
        self.now = 0.0
        self.coming: list[tuple[float, bool, Task]] = []
        """(when, whether it is the end of this task; else one of its inputs arrives), the next one first."""

    def start(self, task: Task, length: float) -> None:
        stage = self.stage_of[task.chunk]
        del self.ready[stage][task]
        self.busy[stage] = True
        heapq.heappush(self.coming, (self.now + length, True, task))

    def advance(self) -> list[Task]:
        """Go on to the next moment; the tasks that end there."""
        self.now = self.coming[0][0]
        ended = []
        while self.coming and self.coming[0][0] <= self.now + _ROUNDING:
            _, is_end, task = heapq.heappop(self.coming)
            if is_end:
                ended.append(task)
                self._end(task)
            else:
                self._arrive(task)
        return ended

    def _end(self, task: Task) -> None:
        stage = self.stage_of[task.chunk]
        self.busy[stage] = False
        for follower in self.after.get(task, ()):
            if self.hop and self.stage_of[follower.chunk] != stage:
                heapq.heappush(self.coming, (self.now + self.hop, False, follower))
            else:
                self._arrive(follower)

    def _arrive(self, task: Task) -> None:
        """One more of its inputs is there."""
        self.missing[task] -= 1
        if self.missing[task] == 0:
            self.ready[self.stage_of[task.chunk]][task] = None
