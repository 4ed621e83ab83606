"""The steps that are under way: what the stages hosted here have left so far, and the futures that wait for them.

Of several processes rank 0 resolves a step when all have ended it, every other one when the stages hosted there have.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rrfp_jax.runtime.control_plane import Peers
from rrfp_jax.runtime.stage_threads import StageOutcome
from rrfp_jax.runtime.tree_collectives import StepStatistics
from rrfp_jax.schedules.timeline import StepSums, Timeline

_STEPS_NAMED = 16


@dataclass(frozen=True)
class StepOutcome:
    """What a finished step leaves. What grows with the run is worked out by who asks, not on the event loop."""

    step: int
    result: Any
    """What the executors returned, alike on all stages."""
    stages: dict[int, StageOutcome]
    """Of the stages hosted here, ascending."""
    timeline: Timeline
    """The record of the stages hosted here."""
    ended_s: float
    """When the last stage ended the step (``time.perf_counter``)."""
    looking_ahead: int = 0
    """Stages hosted here whose foresight was at work."""
    told: StepStatistics | None = None
    """On rank 0 of several, what all ranks together have told."""

    @cached_property
    def peak_memory_bytes(self) -> dict[int, int]:
        """The most that each stage held: of all stages on rank 0, elsewhere of those hosted here."""
        if self.told is not None:
            return self.told.peak_memory_bytes()
        return {stage: one.peak_memory_bytes for stage, one in self.stages.items()}

    @cached_property
    def peak_host_bytes(self) -> dict[int, int]:
        """And in host memory."""
        if self.told is not None:
            return self.told.peak_host_bytes()
        return {stage: one.peak_host_bytes for stage, one in self.stages.items()}

    @cached_property
    def sums(self) -> StepSums:
        """What the step adds up to: on all stages on rank 0, elsewhere on those hosted here."""
        if self.told is not None:
            return self.told.sums
        return replace(self.timeline.sums(), looking_ahead=self.looking_ahead)


@dataclass
class _Pending:
    future: "Future[StepOutcome]"
    timeline: Timeline
    sums: StepSums
    """Of the stages of which this is the first rank."""
    peaks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of these too."""
    outcomes: dict[int, StageOutcome] = field(default_factory=dict)
    looking_ahead: int = 0


class StepsUnderWay:
    """Of one process. Steps begin on the event loop and end in turns (:mod:`rrfp_jax.runtime.serial_executor`)."""

    def __init__(self, num_stages: int, num_hosted: int, peers: Peers | None) -> None:
        self._num_stages, self._num_hosted, self._peers = num_stages, num_hosted, peers
        self._pending: dict[int, _Pending] = {}
        self.begun_s = 0.0
        """When the first step that is under way was submitted, or a step ended elsewhere."""
        self._trained: dict[int, int] = {}
        """Of the last steps, the number of the training step that they are, or that an evaluation comes after."""
        self._evaluations: set[int] = set()

    def __len__(self) -> int:
        return len(self._pending)

    def call(self, step: int, trained: int | None, *, evaluates: bool) -> None:
        """From now on a step has this number for people, who count those that train; from any thread."""
        self._trained[step] = step if trained is None else trained
        self._trained.pop(step - _STEPS_NAMED, None)
        self._evaluations.discard(step - _STEPS_NAMED)
        if evaluates:
            self._evaluations.add(step)

    def number(self, step: int) -> int:
        """The number by which people know a step."""
        return self._trained.get(step, step)

    def name(self, step: int) -> str:
        """A step for people."""
        number = self.number(step)
        return f"evaluation after {number} steps" if step in self._evaluations else f"step {number}"

    def begin(self, step: int, future: "Future[StepOutcome]") -> None:
        """A step is under way."""
        if not self._pending:
            self.begun_s = time.perf_counter()
        self._pending[step] = _Pending(future, Timeline(self._num_stages), StepSums(num_stages=self._num_stages))

    def stage_ended(
        self, stage: int, step: int, outcome: StageOutcome, timeline: Timeline, *, looks_ahead: bool
    ) -> None:
        """A stage hosted here has ended a step; where it is the last one, the step has ended here."""
        pending, peers = self._pending[step], self._peers
        pending.outcomes[stage] = outcome
        pending.timeline.extend(timeline)
        pending.looking_ahead += looks_ahead
        if peers is not None and peers.layout.ranks_of(stage)[0] == peers.rank:
            sums = replace(timeline.sums(), looking_ahead=int(looks_ahead))
            pending.sums = pending.sums.merged(sums, later_s=peers.clocks.offset_s)
            pending.peaks[stage] = outcome.peak_memory_bytes, outcome.peak_host_bytes
        if len(pending.outcomes) < self._num_hosted:
            return
        if peers is None or peers.rank:
            self._resolve(step, None)
        if peers is not None:
            peers.step_ended_here(step, pending.sums, pending.peaks)

    def ended_everywhere(self, step: int, summary: StepStatistics) -> None:
        """All stages, also those elsewhere, have ended a step; on rank 0."""
        self.begun_s = time.perf_counter()
        if step in self._pending:
            self._resolve(step, summary)

    def fail(self, error: Exception) -> None:
        """No step ends any more."""
        while self._pending:  # where the loop may begin another meanwhile
            self._pending.popitem()[1].future.set_exception(error)

    def _resolve(self, step: int, told: StepStatistics | None) -> None:
        pending = self._pending.pop(step)
        stages, ahead = dict(sorted(pending.outcomes.items())), pending.looking_ahead
        result, ended_s = next(iter(pending.outcomes.values())).result, time.perf_counter()
        pending.future.set_result(StepOutcome(step, result, stages, pending.timeline, ended_s, ahead, told))
