"""Predicted durations of single tasks, from a microbatch's operations and the durations of the tasks before it.

A task's time is nearly a line in its operations (:func:`rrfp_jax.costs.flops.chunk_flops`): so much for every task,
such as launching and whatever counts no operations, and so much for each operation, more where a chunk computes its
forward again. Both numbers differ between chunks and kinds of tasks and are the same for all replicas, which run the
same programs. So each kind on each chunk has a line of its own, fitted by least squares to the tasks of all its
replicas together. A slow replica shifts the line of all alike, which cancels in comparisons among them.

Five sums over tasks hold all that the fit needs. They add up over microbatches, steps and replicas, so a unit reports
sums and no list of tasks.
"""

from collections.abc import Iterable
from typing import NamedTuple, Self

_LEAST_SPREAD = 1e-9
"""Relative variance of the operations below which they count as equal."""


class TaskSums(NamedTuple):
    """Sums over tasks of one kind on one chunk."""

    num_tasks: float = 0.0
    flops: float = 0.0
    """Predicted operations of all tasks."""
    squared_flops: float = 0.0
    busy_s: float = 0.0
    """Measured durations of all tasks."""
    flops_times_s: float = 0.0

    @classmethod
    def of(cls, tasks: Iterable[tuple[float, float]]) -> Self:
        """Returns the sums over tasks, given as (predicted operations, measured seconds)."""
        found = [(1.0, flops, flops * flops, seconds, flops * seconds) for flops, seconds in tasks]
        return cls(*map(sum, zip(*found, strict=True))) if found else cls()

    def plus(self, other: "TaskSums") -> "TaskSums":
        """Returns the sums over the tasks of both."""
        return TaskSums(*(a + b for a, b in zip(self, other, strict=True)))


class TaskLine(NamedTuple):
    """The time of a task as a line in its operations."""

    task_s: float
    """Seconds that each task takes whatever its operations."""
    flop_s: float
    """Seconds for each operation."""

    def predicted_s(self, tasks: TaskSums) -> float:
        """Returns the predicted seconds of all these tasks together."""
        return self.task_s * tasks.num_tasks + self.flop_s * tasks.flops


def fitted_line(tasks: TaskSums) -> TaskLine:
    """Returns the line of least squares through these tasks, with no negative number.

    Where all tasks have the same operations, as without any variation in length, the time is in proportion to them; no
    tasks give zeros.
    """
    num_tasks, flops, squared_flops, busy_s, flops_times_s = tasks
    if not num_tasks:
        return TaskLine(0.0, 0.0)
    spread = num_tasks * squared_flops - flops * flops
    if spread <= _LEAST_SPREAD * num_tasks * squared_flops:
        return TaskLine(0.0, busy_s / flops) if flops else TaskLine(busy_s / num_tasks, 0.0)
    flop_s = (num_tasks * flops_times_s - flops * busy_s) / spread
    task_s = (busy_s - flop_s * flops) / num_tasks
    # Of two numbers of which one would be negative, that one is 0 in the best fit.
    if flop_s < 0:
        return TaskLine(busy_s / num_tasks, 0.0)
    if task_s < 0:
        return TaskLine(0.0, flops_times_s / squared_flops)
    return TaskLine(task_s, flop_s)
