"""Records when a stage's tasks ran and why it was idle in between, as the spans and waits of a Timeline."""

from rrfp_jax.core import RunTask
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline, Wait


class StageRecorder:
    """The record of one stage; ``take`` hands over what has been recorded so far."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self._stage = stage
        self._timeline = Timeline(num_stages)
        self._reason: IdleReason | None = None
        self._since_s = 0.0
        self._step = 0

    def begin(self, step: int, time_s: float) -> None:
        """A step starts here; what follows belongs to it."""
        self._reason = None
        self._step, self._since_s = step, time_s

    def ran_beside(self, instruction: RunTask, start_s: float, end_s: float, lane: str) -> None:
        """An operation has run on an engine beside compute."""
        self._timeline.spans.append(Span(instruction.step, self._stage, instruction.task, start_s, end_s, lane))

    def ran(self, instruction: RunTask, start_s: float, end_s: float) -> None:
        """A task has run; the time since it was chosen went to the host."""
        if start_s > self._since_s:
            self._timeline.waits.append(Wait(self._step, self._stage, self._since_s, start_s, IdleReason.HOST))
        self._reason = None
        self._timeline.spans.append(Span(instruction.step, self._stage, instruction.task, start_s, end_s))
        self._since_s = end_s

    def observe(self, time_s: float, reason: IdleReason | None) -> None:
        """The stage is idle for this reason from now on, or has been told to run something (None)."""
        if reason is not self._reason:
            self._close(time_s)
            self._reason = reason

    def end(self, time_s: float) -> None:
        """The step has ended here."""
        self._close(time_s)

    def take(self) -> Timeline:
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
