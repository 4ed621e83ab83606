"""What a stage learns for its foresight, on its own clock alone: moving averages that outlive the steps."""

from dataclasses import dataclass, field
from typing import TypeVar

from rrfp_jax.arbitration.events import Message, MessageKind
from rrfp_jax.tasks import Task, TaskKind

TaskKey = tuple[TaskKind, int]
"""Kind and chunk."""
Edge = tuple[MessageKind, int, int]
"""Kind of the message, source and target chunk."""
K = TypeVar("K")


@dataclass(kw_only=True)
class Estimates:
    """Durations in seconds. Plain data, so that a log can hold them."""

    durations_s: dict[TaskKey, float] = field(default_factory=dict)
    """What a task usually takes."""
    leads_s: dict[Edge, float] = field(default_factory=dict)
    """From an announcement to the arrival of what it announced."""
    notices: dict[Edge, float] = field(default_factory=dict)
    """The share of waits for an announcement that were not in vain."""

    def copy(self) -> "Estimates":
        return Estimates(durations_s=self.durations_s.copy(), leads_s=self.leads_s.copy(), notices=self.notices.copy())

    def usual_s(self, task: Task) -> float | None:
        """What such a task usually takes; as long as the longest other one, if it has not run yet; None: none has."""
        usual = self.durations_s.get(task[:2])
        return usual if usual is not None else max(self.durations_s.values(), default=None)

    def lead_s(self, message: Message) -> float | None:
        """From its announcement to its arrival; None if nothing has ever been announced here.

        Of an edge that is new it is the least that its kind of message has had on other edges, or 0: where a stage
        waits for its first gradient, that is better than to expect none.
        """
        lead = self.leads_s.get(message[:3])
        if lead is None and self.leads_s:
            lead = min((known for edge, known in self.leads_s.items() if edge[0] is message.kind), default=0.0)
        return lead

    def key(self) -> tuple[frozenset[object], ...]:
        """All of it as a hashable value."""
        return tuple(frozenset(one.items()) for one in (self.durations_s, self.leads_s, self.notices))


def learn(averages: dict[K, float], key: K, observed: float, share: float) -> None:
    """Move an average by this share of the way; the first observation is the average itself."""
    before = averages.get(key)
    averages[key] = observed if before is None else before + share * (observed - before)
