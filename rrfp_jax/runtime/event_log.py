"""The log of what an arbiter was told and what it answered, bounded, and its replay.

The log is kept in segments of one step. A segment opens with a copy of the arbiter as it stood, so a replay needs
nothing from before it; only the newest segments are kept.
"""

from collections import deque
from dataclasses import dataclass, field

from rrfp_jax.arbitration import Event, Instruction, StageArbiter

Entry = tuple[Event, list[Instruction]]


@dataclass
class Segment:
    """Events from one step's end to the next, with the arbiter's state before the first of them."""

    arbiter: StageArbiter
    opened_s: float | None = None
    """The time of the event before the first; None where there was none."""
    entries: list[Entry] = field(default_factory=list)

    def replay(self) -> list[Entry]:
        """Feed the events through the core again; equal to ``entries`` whenever the log is complete."""
        arbiter = self.arbiter.copy()
        return [(event, arbiter.handle(event)) for event, _ in self.entries]


class EventLog:
    """The newest ``max_segments`` segments of one stage."""

    def __init__(self, arbiter: StageArbiter, max_segments: int) -> None:
        self.segments: deque[Segment] = deque(maxlen=max_segments)
        self._open(Segment(arbiter.copy()))

    def roll(self, arbiter: StageArbiter) -> None:
        """Open the next segment; ``arbiter`` is in the state after the last event appended."""
        last, _ = self.entries[-1]
        self._open(Segment(arbiter.copy(), last.time_s))

    def _open(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.entries = segment.entries
        """Of the newest segment: what happens is appended here."""
