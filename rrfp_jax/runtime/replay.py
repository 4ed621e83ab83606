"""The replay of event logs: each log is fed through the core again, on any machine.

The result is the first difference between the recorded instructions and the core's, the arbiters at the log's end, a
timeline, and the wait-for report of all processes whose logs are given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from rrfp_jax.core import Event, FinishStep, IllegalTransition, Instruction, RunTask, StageArbiter, TaskFinished
from rrfp_jax.core.explain import event_text, instruction_text
from rrfp_jax.core.snapshot import rebuild
from rrfp_jax.runtime.event_log import RunLog, Segment, StageLog, StageRecorder, open_segment
from rrfp_jax.runtime.failure import StageState, WaitForReport, stage_state
from rrfp_jax.schedules import COMPUTE
from rrfp_jax.schedules.timeline import Span, Timeline, Wait

_Entry = TypeVar("_Entry", Span, Wait)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place at which the core's answer is not the recorded one."""

    stage: int
    number: int
    """The number of the event, counted over the stage's whole log from 0."""
    event: Event | None
    """None if the state differs in which the next segment begins."""
    recorded: tuple[Instruction, ...]
    replayed: tuple[Instruction, ...] | str
    """The instructions, or the text of the core's refusal of the event."""

    def __str__(self) -> str:
        place = f"stage {self.stage}, event {self.number}"
        if self.event is None:
            return f"{place}: the stage's next step does not begin in the recorded state"
        replayed = self.replayed if isinstance(self.replayed, str) else _listed(self.replayed)
        about = f"{place}, step {self.event.step}, {event_text(self.event)}"
        return f"{about}:\n  recorded: {_listed(self.recorded)}\n  replayed: {replayed}"


def _listed(instructions: Sequence[Instruction]) -> str:
    return ", ".join(map(instruction_text, instructions)) or "nothing"


@dataclass(frozen=True, kw_only=True)
class StageReplay:
    """One stage's log, fed through the core."""

    rank: int
    log: StageLog
    arbiter: StageArbiter
    """In the state at the log's end, or before the first difference."""
    num_events: int
    """The number of events that were answered as recorded."""
    difference: Difference | None
    refusal: str | None
    """The core's refusal of the log's last event, in the run as in the replay; None if it took the event."""
    timeline: Timeline
    """The timeline of the events that were answered as recorded, without tasks that had not finished."""
    unfinished: tuple[Span, ...]
    """The tasks that were running when the log was taken, one of a lane, and those dispatched ahead, as spans of no
    length."""
    last_event_s: float
    state: StageState
    """The stage's state when the log was taken."""


def replay_log(log: RunLog, *, rules_file: str | None = None) -> list[StageReplay]:
    """Replays every stage of a log. Raises ValueError for records that contradict each other.

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
                    self._feed(event, tuple(recorded))
        return self._result()

    def _begin(self, segment: Segment, *, is_first: bool) -> None:
        if self.difference is not None:
            return
        try:
            opened = open_segment(self.arbiter, segment)
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
        """Keeps the timeline as the stage's actor does, with the times of events for those of the compute thread."""
        recorder, time_s = self.recorder, event.time_s
        if isinstance(event, TaskFinished):
            run = RunTask(event.step, event.task)
            start_s, lane = self.dispatched_s.pop(run, time_s), self.run_log.graph.lane(event.task.kind)
            if lane == COMPUTE:  # A task may have been dispatched behind another, which has just ended.
                start_s, self.last_end_s = max(self.last_end_s, start_s), time_s
            recorder.ran(run, start_s, time_s, lane)
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


@dataclass(frozen=True, kw_only=True)
class RunReplay:
    """The replay of one or more processes of a run."""

    logs: tuple[RunLog, ...]
    stages: tuple[StageReplay, ...]
    """By stage, then by rank: a stage that spans processes has one replay in each."""

    @property
    def num_events(self) -> int:
        return sum(stage.num_events for stage in self.stages)

    def report(self) -> WaitForReport:
        endings = [log.ending for log in self.logs if log.ending is not None]
        summaries = dict.fromkeys(ending.summary for ending in endings)
        told = [s for s in summaries if not any(s != other and other in s for other in summaries)]
        return WaitForReport(
            summary="; ".join(told) or "the run had not been given up when its log was taken",
            stages=tuple(
                replace(stage.state, rank=stage.rank) if len(self.logs) > 1 else stage.state for stage in self.stages
            ),
            lost_ranks=tuple(sorted({rank for ending in endings for rank in ending.lost_ranks})),
            lost_stages=tuple(sorted({stage for ending in endings for stage in ending.lost_stages})),
        )

    def timeline(self) -> Timeline:
        """Returns the spans of all tasks, by the events; tasks that ran when the log was taken end soon after the last
        event.

        Times are seconds on rank 0's clock. The first process's record counts for a stage that spans several.
        """
        first = {stage.arbiter.stage: stage for stage in reversed(self.stages)}
        merged = Timeline(self.logs[0].placement.num_stages)
        for stage in sorted(first):
            later_s = self.offset_s(first[stage])
            merged.spans += [_later(span, later_s) for span in first[stage].timeline.spans]
            merged.waits += [_later(wait, later_s) for wait in first[stage].timeline.waits]
        # running tasks end a little after the last event, for a run may have hung for hours since
        last_s = max(stage.last_event_s + self.offset_s(stage) for stage in self.stages)
        taken_s = max(log.taken_s + log.clock_offset_s for log in self.logs)
        longest_s = max((span.end_s - span.start_s for span in merged.spans), default=taken_s - last_s)
        end_s = min(taken_s, last_s + longest_s)
        for replay in first.values():
            merged.spans += _running(replay, self.offset_s(replay), end_s)
            merged.waits += _waiting(replay, self.offset_s(replay), end_s)
        return merged

    def offset_s(self, stage: StageReplay) -> float:
        """Returns the seconds to add to the times of a stage's process to have rank 0's clock."""
        return next(log.clock_offset_s for log in self.logs if log.rank == stage.rank)


def replay_run(logs: Sequence[RunLog], *, rules_file: str | None = None) -> RunReplay:
    """Replays the logs of one run's processes. Raises ValueError if they cannot be of one run.

    ``rules_file`` is as for :func:`replay_log`.
    """
    logs = sorted(logs, key=lambda log: log.rank)
    for before, log in pairwise(logs):
        if before.rank == log.rank:
            raise ValueError(f"two logs are of rank {log.rank}: give the logs of one run, one of each process")
        if (before.graph, before.placement) != (log.graph, log.placement):
            raise ValueError(
                f"the logs of ranks {before.rank} and {log.rank} are of different pipelines: give the logs of one run"
            )
    stages = [stage for log in logs for stage in replay_log(log, rules_file=rules_file)]
    return RunReplay(logs=tuple(logs), stages=tuple(sorted(stages, key=lambda s: (s.arbiter.stage, s.rank))))


def _later(entry: _Entry, by_s: float) -> _Entry:
    return entry._replace(start_s=entry.start_s + by_s, end_s=entry.end_s + by_s)


def _running(replay: StageReplay, later_s: float, end_s: float) -> Iterator[Span]:
    """Yields the running task of each lane as a span; a task that was dispatched behind it has not started."""
    first = {span.lane: span for span in reversed(replay.unfinished)}
    for span in first.values():
        start_s = span.start_s + later_s
        yield span._replace(start_s=start_s, end_s=max(start_s, end_s))


def _waiting(replay: StageReplay, later_s: float, end_s: float) -> Iterator[Wait]:
    arbiter, start_s = replay.arbiter, replay.last_event_s + later_s
    reason = arbiter.idle_reason()
    if arbiter.step is not None and arbiter.is_active and reason is not None and start_s < end_s:
        yield Wait(arbiter.step, arbiter.stage, start_s, end_s, reason)


class Happening(NamedTuple):
    """An event or instruction of the log that is about a microbatch."""

    time_s: float
    what: str


def happenings(replay: StageReplay, microbatch: int, step: int) -> Iterator[Happening]:
    """Yields the events and instructions about a microbatch in a step, in order; -1 stands for those of the step."""
    for segment in replay.log.segments:
        for event, instructions in segment.entries:
            if event.step == step and microbatch in _microbatches(event):
                yield Happening(event.time_s, event_text(event))
            for instruction in instructions:
                if instruction.step == step and microbatch in _microbatches(instruction):
                    yield Happening(event.time_s, instruction_text(instruction))


def standing(replay: StageReplay, microbatch: int, step: int) -> str:
    """Returns the state of the microbatch at the log's end, one line per task."""
    present = replay.arbiter.step
    if present == step:
        return replay.arbiter.tell(microbatch)
    if present is None or present < step:
        return f"  step {step} had not begun here"
    return f"  step {step} had ended here"


def _microbatches(record: Any) -> Iterator[int]:
    """Yields the microbatch of the task or message that an event, an instruction or a note is about, if any."""
    for name in ("task", "message"):
        if (subject := getattr(record, name, None)) is not None:
            yield subject.microbatch
    if (note := getattr(record, "note", None)) is not None:
        yield from _microbatches(note)
