"""Lower bounds that count memory, beside those of :mod:`rrfp_jax.simulation.bounds` that do not.

For each stage, over all orders that fit its room:

* *filling*: nothing of the stage's backwards starts before the quickest way to one of them. Until then it can only run
  F, and no more of them than fit. So of its work all but these F lies behind that moment, and its drain behind that.
* *holding*: an activation is held for at least as long as the quickest way from its F to its backward and W. All of
  them together, weight times time, need the room for a certain time.

Room counts in whole units that divide all weights of the stage.
"""

from math import ceil, gcd, inf

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.planning.orders.problem import Problem

Floats = NDArray[np.float64]


def memory_bound(problem: Problem) -> int:
    """No order within the room is quicker, in nanoseconds."""
    stages = [_Stage(problem, stage) for stage in range(problem.num_stages) if problem.room[stage] != inf]
    found = max((max(stage.filling(), stage.holding()) for stage in stages), default=0.0)
    return max(0, ceil(found - 0.5) - problem.host)


def tails(problem: Problem) -> Floats:
    """By task: the time from its end to the end of its microbatch when nothing holds it up."""
    ways = problem.num_ways
    found = np.zeros(problem.num_tasks)
    order = np.argsort(problem.heads, kind="stable")[::-1]
    for task in order.tolist():
        follower = problem.followers[task]
        tail = 0.0
        if follower >= 0:
            tail = found[follower] + problem.durations[follower] + problem.delays[task]
        if problem.is_split and ways <= task < 2 * ways:
            tail = max(tail, problem.durations[task + ways])
        found[task] = tail
    return found


class _Stage:
    """What a bound needs of a stage; arrays are [its chunks, microbatches]."""

    def __init__(self, problem: Problem, stage: int) -> None:
        shape = (-1, problem.num_chunks, problem.num_microbatches)
        chunks = list(problem.placement.chunks_of_stage[stage])

        def of_kinds(values: Floats) -> list[Floats]:
            return list(values.reshape(shape)[:, chunks])

        durations = of_kinds(np.array(problem.durations, np.float64))
        head, tail = of_kinds(problem.heads), of_kinds(tails(problem))
        weights = of_kinds(np.array(problem.weights))
        self.forward, self.weight = durations[0], weights[0].astype(np.float64)
        unit = gcd(*map(int, weights[0].ravel())) or 1
        self.room = problem.room[stage] // unit * unit
        self.work = float(sum(each.sum() for each in durations))
        self.first_forward, self.first_back = float(head[0].min()), float(head[1].min())
        self.drain = float(tail[-1].min())
        span = head[1] + durations[1] - head[0] + (durations[2] if problem.is_split else 0.0)
        self.held = float((self.weight * span).sum())
        """Weight times time."""

    def filling(self) -> float:
        """All but the F that fit lies behind the first backward."""
        before = min(self._forwards_that_fit(), max(0.0, self.first_back - self.first_forward))
        return self.first_back + self.work - before + self.drain

    def holding(self) -> float:
        """All that is held needs the room for so long."""
        if self.room <= 0:
            return 0.0
        return self.first_forward + self.held / self.room + self.drain

    def _forwards_that_fit(self) -> float:
        """The most time that F take whose activations fit at once, parts of F included."""
        weight, time = self.weight.ravel(), self.forward.ravel()
        free = float(time[weight <= 0].sum())
        weight, time = weight[weight > 0], time[weight > 0]
        order = np.argsort(-time / weight, kind="stable")
        filled = np.minimum(np.cumsum(weight[order]), max(0.0, self.room))
        return free + float((np.diff(filled, prepend=0.0) * (time / weight)[order]).sum())
