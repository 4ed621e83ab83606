"""What foresight asks of a step's plan, in tables by number.

Messages have the numbers of :attr:`rrfp_jax.core.plan.StagePlan.arrivals`; positions are places in the hint's
order.
"""

from collections.abc import Sequence
from typing import TypeVar

from rrfp_jax.core.estimates import Edge, TaskKey
from rrfp_jax.core.events import Message, MessageKind
from rrfp_jax.core.plan import StagePlan
from rrfp_jax.schedules import Task

K = TypeVar("K")


class Outlook:
    """Fixed during a step; kinds and edges have the same numbers in all steps of one kind."""

    __slots__ = (
        "announces",
        "arrivals",
        "edge_of",
        "edges",
        "inputs_of",
        "kind_at",
        "kinds",
        "task_at",
    )

    def __init__(self, plan: StagePlan, task_at: Sequence[Task]) -> None:
        self.arrivals, self.task_at = plan.arrivals, task_at
        keys = [task[:2] for task in task_at]
        self.kinds: tuple[TaskKey, ...] = tuple(dict.fromkeys(keys))
        """What durations are learnt for."""
        self.kind_at = _numbers(keys, self.kinds)
        """By position, the number of the task's kind and chunk among these."""
        edges = [message[:3] for message in plan.messages]
        self.edges: tuple[Edge, ...] = tuple(dict.fromkeys(edges))
        """What leads are learnt for."""
        self.edge_of = _numbers(edges, self.edges)
        """By the message's number, the number of its edge among these."""
        inputs: list[list[int]] = [[] for _ in plan.needs]
        for number in plan.arrivals.values():
            inputs[plan.awaited_by[number]].append(number)
        self.inputs_of = tuple(map(tuple, inputs))
        """The numbers of the messages that each node waits for."""
        self.announces: tuple[tuple[tuple[Message, int], ...], ...] = tuple(
            tuple(send for send in plan.sends[plan.index[task]] if send[0].kind is not MessageKind.TAKEN)
            for task in task_at
        )
        """What the start of the task at each position says to which stages: all that it will send but word of what it
        took."""


def _numbers(found: Sequence[K], among: Sequence[K]) -> tuple[int, ...]:
    number = {key: n for n, key in enumerate(among)}
    return tuple(number[key] for key in found)
