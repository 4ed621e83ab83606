"""Feeding a log through the core again: the same instructions, the arbiters at the log's end, and the timeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp_jax.core import Event, FinishStep, IllegalTransition, Instruction, RunTask, StageArbiter, TaskFinished
from rrfp_jax.core.saved import rebuild
from rrfp_jax.core.story import of_event, of_instruction
from rrfp_jax.runtime.event_log import opening
from rrfp_jax.runtime.log_file.run_log import RunLog, SegmentLog, StageLog
from rrfp_jax.runtime.recorder import StageRecorder
from rrfp_jax.runtime.report import StageState, stage_state
from rrfp_jax.schedules import COMPUTE
from rrfp_jax.schedules.timeline import Span, Timeline


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where the core's answer is not the recorded one."""

    stage: int
    number: int
    """Of the event, counted over the stage's whole log from 0."""
    event: Event | None
    """None: not an answer differs, but the state in which the next segment begins."""
    recorded: tuple[Instruction, ...]
    replayed: tuple[Instruction, ...] | str
    """The text of the core's refusal, where it does not take the event."""

    def __str__(self) -> str:
        place = f"stage {self.stage}, event {self.number}"
        if self.event is None:
            return f"{place}: the stage's next step does not begin in the recorded state"
        replayed = self.replayed if isinstance(self.replayed, str) else _listed(self.replayed)
        what = f"{place}, step {self.event.step}, {of_event(self.event)}"
        return f"{what}:\n  recorded: {_listed(self.recorded)}\n  replayed: {replayed}"


def _listed(instructions: Sequence[Instruction]) -> str:
    return ", ".join(map(of_instruction, instructions)) or "nothing"


@dataclass(frozen=True, kw_only=True)
class StageReplay:
    """One stage's log, fed through the core."""

    rank: int
    log: StageLog
    arbiter: StageArbiter
    """In the state at the log's end, or before the first difference."""
    num_events: int
    """How many events were answered as recorded."""
    difference: Difference | None
    refusal: str | None
    """Why the core refused the log's last event, in the run as in the replay; None: it took it."""
    timeline: Timeline
    """Of the events that were answered as recorded; tasks that had not finished are left out."""
    unfinished: tuple[Span, ...]
    """The tasks that were running when the log was taken, one of a lane, and those dispatched ahead: from start to
    start."""
    last_event_s: float
    state: StageState
    """What the stage did when the log was taken."""


def replay_log(log: RunLog, *, rules_file: str | None = None) -> list[StageReplay]:
    """Replay every stage of a log; raises ValueError for records that contradict each other.

    ``rules_file`` defines the rule that was the run's hint, if that was a user's own.
    """
    return [_Replay(log, stage, rules_file).run() for stage in log.stages]


class _Replay:
    def __init__(self, run: RunLog, stage: StageLog, rules_file: str | None) -> None:
        self.run_log, self.log = run, stage
        self.arbiter = rebuild(stage.arbiter, run.graph, run.placement, rules_file=rules_file)
        self.recorder = StageRecorder(stage.arbiter.stage, run.placement.num_stages)
        self.timeline = Timeline(run.placement.num_stages)
        self.num_events = 0
        self.difference: Difference | None = None
        self.refusal: str | None = None
        self.last_event_s: float | None = None
        self.last_end_s = float("-inf")
        self.dispatched_s: dict[RunTask, float] = {}

    def run(self) -> StageReplay:
        for number, segment in enumerate(self.log.segments):
            self._begin(segment, is_first=not number)
            for event, recorded in segment.entries:
                if self.difference is None:
                    self._feed(event, recorded)
        return self._result()

    def _begin(self, segment: SegmentLog, *, is_first: bool) -> None:
        if self.difference is not None:
            return
        try:
            opened = opening(self.arbiter, segment.ended, segment.early, segment.estimates)
        except Exception as error:  # nothing that comes early is refused, so this log was changed
            raise ValueError(f"the log of stage {self.log.arbiter.stage} contradicts itself: {error}") from error
        if is_first or opened.key() == self.arbiter.key():
            self.arbiter = opened
        else:
            self._differ(None, (), ())

    def _feed(self, event: Event, recorded: tuple[Instruction, ...]) -> None:
        is_last = self.num_events + 1 == sum(len(segment.entries) for segment in self.log.segments)
        was_active, before = self.arbiter.is_active, self.arbiter.copy()
        try:
            replayed = tuple(self.arbiter.handle(event))
        except Exception as error:  # whatever ended the run ends its replay, as the thing to be looked at
            text = str(error) if isinstance(error, IllegalTransition) else repr(error)
            if is_last and not recorded:
                self.refusal = text
            else:
                self._differ(event, recorded, f"refused: {text}")
            self.arbiter = before
            return
        if replayed != recorded:
            self._differ(event, recorded, replayed)
            self.arbiter = before
            return
        self.num_events += 1
        self._record(event, recorded, was_active=was_active)

    def _differ(
        self, event: Event | None, recorded: tuple[Instruction, ...], replayed: tuple[Instruction, ...] | str
    ) -> None:
        self.difference = Difference(
            stage=self.arbiter.stage, number=self.num_events, event=event, recorded=recorded, replayed=replayed
        )

    def _record(self, event: Event, instructions: tuple[Instruction, ...], *, was_active: bool) -> None:
        """Keep the timeline as the stage's actor does, with the times of events for those of the compute thread."""
        recorder, time_s = self.recorder, event.time_s
        if isinstance(event, TaskFinished):
            self._ran(RunTask(event.step, event.task), time_s)
        elif not was_active and self.arbiter.is_active:
            recorder.begin(event.step, time_s)
        for instruction in instructions:
            if isinstance(instruction, RunTask):
                self.dispatched_s[instruction] = time_s
            elif isinstance(instruction, FinishStep):
                recorder.end(time_s)
                self.timeline.extend(recorder.take())
        recorder.observe(time_s, self.arbiter.idle_reason())
        self.last_event_s = time_s

    def _ran(self, run: RunTask, end_s: float) -> None:
        start_s, lane = self.dispatched_s.pop(run, end_s), self.run_log.graph.lane(run.task.kind)
        if lane != COMPUTE:
            self.recorder.ran_beside(run, start_s, end_s, lane)
            return
        self.recorder.ran(run, max(self.last_end_s, start_s), end_s)
        self.last_end_s = end_s

    def _result(self) -> StageReplay:
        log, stage = self.run_log, self.log.arbiter.stage
        last_event_s = log.taken_s if self.last_event_s is None else self.last_event_s
        self.recorder.end(last_event_s)
        self.timeline.extend(self.recorder.take())
        since_s = log.taken_s - (self.log.started.start_s if self.log.started else last_event_s)
        return StageReplay(
            rank=log.rank,
            log=self.log,
            arbiter=self.arbiter,
            num_events=self.num_events,
            difference=self.difference,
            refusal=self.refusal,
            timeline=self.timeline,
            unfinished=tuple(
                Span(run.step, stage, run.task, start_s, start_s, lane)
                for run, dispatched_s in self.dispatched_s.items()
                for lane in [log.graph.lane(run.task.kind)]
                for start_s in [max(self.last_end_s, dispatched_s) if lane == COMPUTE else dispatched_s]
            ),
            last_event_s=last_event_s,
            state=stage_state(
                self.arbiter, since_s, failed=log.ending is not None and stage in log.ending.failed_stages
            ),
        )
