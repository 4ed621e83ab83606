"""The records of a running stage: its arbiter's events and answers, and the times of its tasks.

The log of events is kept in segments of one step. A segment opens when the stage is idle: the arbiter's whole state is
then the step that it has ended, its estimates for foresight, and the events that came early for later steps. The
segment keeps the state and begins with the early events, so a replay needs nothing from before it; only the newest
segments are kept.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rrfp_jax.core import Estimates, Event, FinishStep, Instruction, RunTask, StageArbiter
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline, Wait

LogEntry = tuple[Event, list[Instruction]]
"""An event and the instructions that answered it."""


@dataclass
class Segment:
    """Events from one step's end to the next."""

    arbiter: StageArbiter
    """An arbiter made like the stage's own, and never driven."""
    ended: int | None = None
    """The step that the stage had ended before; None: it had not begun."""
    early: list[Event] = field(default_factory=list)
    """Events for later steps that had come before, in order."""
    estimates: Estimates | None = None
    """The stage's estimates at that time, if it has foresight."""
    entries: list[LogEntry] = field(default_factory=list)

    def replay(self) -> list[LogEntry]:
        """Feeds the events through the core again; equal to ``entries`` whenever the log is complete."""
        arbiter = open_segment(self.arbiter, self.ended, self.early, self.estimates)
        return [(event, arbiter.handle(event)) for event, _ in self.entries]


def open_segment(
    arbiter: StageArbiter, ended: int | None, early: Iterable[Event], estimates: Estimates | None = None
) -> StageArbiter:
    """Returns an arbiter made like this one that has ended a step and received these events for later ones."""
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
        """Logs an event and its answer; the end of a step opens the next segment."""
        self.entries.append((event, instructions))
        if instructions and isinstance(instructions[-1], FinishStep):
            ended = instructions[-1].step
            events = [*self.segments[-1].early, *(event for event, _ in self.entries)]
            self._open(ended, [event for event in events if event.step > ended])

    def _open(self, ended: int | None, early: list[Event]) -> None:
        segment = Segment(self._made, ended, early, self._arbiter.estimates())
        self.segments.append(segment)
        self.entries = segment.entries
        """The entries of the newest segment."""


class StageRecorder:
    """Records when a stage's tasks ran and why it was idle in between, as the spans and waits of a Timeline."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self._stage = stage
        self._timeline = Timeline(num_stages)
        self._reason: IdleReason | None = None
        self._since_s = 0.0
        self._step = 0

    def begin(self, step: int, time_s: float) -> None:
        """Starts a step; all records belong to it until the next one."""
        self._reason = None
        self._step, self._since_s = step, time_s

    def ran_beside(self, instruction: RunTask, start_s: float, end_s: float, lane: str) -> None:
        """Records an operation that has run on an engine beside compute."""
        self._timeline.spans.append(Span(instruction.step, self._stage, instruction.task, start_s, end_s, lane))

    def ran(self, instruction: RunTask, start_s: float, end_s: float) -> None:
        """Records a task that has run; the time since it was chosen went to the host."""
        if start_s > self._since_s:
            self._timeline.waits.append(Wait(self._step, self._stage, self._since_s, start_s, IdleReason.HOST))
        self._reason = None
        self._timeline.spans.append(Span(instruction.step, self._stage, instruction.task, start_s, end_s))
        self._since_s = end_s

    def observe(self, time_s: float, reason: IdleReason | None) -> None:
        """Records that the stage is idle for this reason from now on, or has a task to run (None)."""
        if reason is not self._reason:
            self._close(time_s)
            self._reason = reason

    def end(self, time_s: float) -> None:
        """Ends the step at this time."""
        self._close(time_s)

    def take(self) -> Timeline:
        """Returns the records so far and begins anew."""
        taken = self._timeline
        self._timeline = Timeline(taken.num_stages)
        return taken

    def _close(self, time_s: float) -> None:
        if self._reason is None:
            return
        if time_s > self._since_s:
            self._timeline.waits.append(Wait(self._step, self._stage, self._since_s, time_s, self._reason))
            self._since_s = time_s
        self._reason = None
