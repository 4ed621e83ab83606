"""The log of what an arbiter was told and what it answered, bounded, and its replay.

The log is kept in segments of one step. A segment opens where the stage is idle: all that the arbiter knows then is
which step it has ended, what it has learnt for its foresight, and what came early for later steps. The segment keeps
the one and begins with the other, so a replay needs nothing from before it; only the newest segments are kept.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rrfp_jax.core import Estimates, Event, FinishStep, Instruction, StageArbiter

Entry = tuple[Event, list[Instruction]]


@dataclass
class Segment:
    """Events from one step's end to the next."""

    arbiter: StageArbiter
    """Made like the stage's own, and never driven."""
    ended: int | None = None
    """The step that the stage had ended before; None: it had not begun."""
    early: list[Event] = field(default_factory=list)
    """What had come before for later steps, in order."""
    estimates: Estimates | None = None
    """What the stage had learnt by then, if it has foresight."""
    entries: list[Entry] = field(default_factory=list)

    def replay(self) -> list[Entry]:
        """Feed the events through the core again; equal to ``entries`` whenever the log is complete."""
        arbiter = opening(self.arbiter, self.ended, self.early, self.estimates)
        return [(event, arbiter.handle(event)) for event, _ in self.entries]


def opening(
    arbiter: StageArbiter, ended: int | None, early: Iterable[Event], estimates: Estimates | None = None
) -> StageArbiter:
    """An arbiter made like this one, where it has ended a step and these events for later ones have come."""
    fresh = arbiter.fresh(ended, estimates)
    for event in early:
        fresh.handle(event)  # its answers, notes to a group, were given when it came
    return fresh


class EventLog:
    """The newest ``max_segments`` segments of one stage."""

    def __init__(self, arbiter: StageArbiter, max_segments: int) -> None:
        self._arbiter, self._made = arbiter, arbiter.fresh(None)
        self.segments: deque[Segment] = deque(maxlen=max_segments)
        self._open(arbiter.step, [])

    def append(self, event: Event, instructions: list[Instruction]) -> None:
        """Log an event and its answer; the end of a step opens the next segment."""
        self.entries.append((event, instructions))
        if instructions and isinstance(instructions[-1], FinishStep):
            ended = instructions[-1].step
            events = [*self.segments[-1].early, *(event for event, _ in self.entries)]
            self._open(ended, [event for event in events if event.step > ended])

    def _open(self, ended: int | None, early: list[Event]) -> None:
        segment = Segment(self._made, ended, early, self._arbiter.estimates())
        self.segments.append(segment)
        self.entries = segment.entries
        """Of the newest segment."""
