"""The replay of event logs: each log is fed through the core again, on any machine.

The result is the first difference between the recorded instructions and the core's, the arbiters at the log's end, a
timeline, and the wait-for report of all processes whose logs are given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

from rrfp_jax.core import (
    Event,
    FinishStep,
    IllegalTransition,
    Instruction,
    RunPair,
    RunTask,
    StageArbiter,
    TaskFinished,
)
from rrfp_jax.core.explain import event_text, instruction_text
from rrfp_jax.core.overlap import OverlappedArbiter
from rrfp_jax.core.snapshot import rebuild
from rrfp_jax.runtime.event_log import RunLog, Segment, StageLog, StageRecorder, open_segment
from rrfp_jax.runtime.failure import WaitForReport, stage_state
from rrfp_jax.schedules import COMPUTE, Pair
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


class StageReplay:
    """One stage's log, fed through the core. Raises ValueError for records that contradict each other.

    Args:
        run: the log of the stage's process.
        rules_file: defines the rule that was the run's hint, if that was a user's own.
    """

    def __init__(self, run: RunLog, log: StageLog, rules_file: str | None) -> None:
        stage, self.rank, self.offset_s = log.arbiter.stage, run.rank, run.clock_offset_s
        self.log = log
        self.arbiter = rebuild(log.arbiter, run.graph, run.placement, rules_file=rules_file)
        """In the state at the log's end, or before the first difference."""
        self.num_events = 0
        """The number of events that were answered as recorded."""
        self.difference: Difference | None = None
        self.refusal: str | None = None
        """The core's refusal of the log's last event, in the run as in the replay; None if it took the event."""
        self.timeline = Timeline(run.placement.num_stages)
        """The timeline of the events that were answered as recorded, without tasks that had not finished."""
        self._graph, self._recorder = run.graph, StageRecorder(stage, run.placement.num_stages)
        self.last_event_s = run.taken_s
        self._last_end_s = float("-inf")
        self._dispatched_s: dict[RunTask, float] = {}
        self._first_of_pairs = set[RunTask]()
        for number, segment in enumerate(log.segments):
            self._replay(segment, is_first=not number)
        self._recorder.end(self.last_event_s)
        self.timeline.extend(self._recorder.take())
        self.unfinished = tuple(
            Span(each.step, stage, each.task, start_s, start_s, lane)
            for each, dispatched_s in self._dispatched_s.items()
            for lane in [self._graph.lane(each.task.kind)]
            for start_s in [max(self._last_end_s, dispatched_s) if lane == COMPUTE else dispatched_s]
        )
        """The tasks that were running when the log was taken, one of a lane, and those dispatched ahead, as spans of no
        length."""
        since_s = run.taken_s - (log.started.start_s if log.started else self.last_event_s)
        failed = run.ending is not None and stage in run.ending.failed_stages
        self.state = stage_state(self.arbiter, since_s, failed=failed)
        """The stage's state when the log was taken."""

    def _replay(self, segment: Segment, *, is_first: bool) -> None:
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
        for event, recorded in segment.entries:
            if self.difference is None:
                self._feed(event, tuple(recorded))

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
        recorder, time_s = self._recorder, event.time_s
        if isinstance(event, TaskFinished):
            run = RunTask(event.step, event.task)
            start_s, lane = self._dispatched_s.pop(run, time_s), self._graph.lane(event.task.kind)
            end_s = time_s
            if lane == COMPUTE:  # A task may have been dispatched behind another, which has just ended.
                start_s = max(self._last_end_s, start_s)
                if run in self._first_of_pairs:  # As the actor has it, each task of a pair gets a half of the time.
                    self._first_of_pairs.remove(run)
                    end_s = (start_s + time_s) / 2
                self._last_end_s = end_s
            recorder.ran(run, start_s, end_s, lane)
        elif not was_active and self.arbiter.is_active:
            recorder.begin(event.step, time_s)
        for instruction in instructions:
            if isinstance(instruction, RunTask):
                self._dispatched_s[instruction] = time_s
            elif isinstance(instruction, RunPair):
                first, second = (RunTask(instruction.step, task) for task in instruction.task)
                self._dispatched_s |= {first: time_s, second: time_s}
                self._first_of_pairs.add(first)
            elif isinstance(instruction, FinishStep):
                recorder.end(time_s)
                self.timeline.extend(recorder.take())
                if self.arbiter.is_active or instruction is not instructions[-1]:
                    recorder.begin(instruction.step + 1, time_s)
        recorder.observe(time_s, self.arbiter.idle_reason())
        self.last_event_s = time_s


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
            later_s = first[stage].offset_s
            merged.spans += [_later(span, later_s) for span in first[stage].timeline.spans]
            merged.waits += [_later(wait, later_s) for wait in first[stage].timeline.waits]
        # running tasks end a little after the last event, for a run may have hung for hours since
        last_s = max(stage.last_event_s + stage.offset_s for stage in self.stages)
        taken_s = max(log.taken_s + log.clock_offset_s for log in self.logs)
        longest_s = max((span.end_s - span.start_s for span in merged.spans), default=taken_s - last_s)
        end_s = min(taken_s, last_s + longest_s)
        for replay in first.values():
            merged.spans += _running(replay, replay.offset_s, end_s)
            merged.waits += _waiting(replay, replay.offset_s, end_s)
        return merged


def replay_run(logs: Sequence[RunLog], *, rules_file: str | None = None) -> RunReplay:
    """Replays the logs of one run's processes. Raises ValueError if they cannot be of one run.

    ``rules_file`` is as for :class:`StageReplay`.
    """
    logs = sorted(logs, key=lambda log: log.rank)
    for before, log in pairwise(logs):
        if before.rank == log.rank:
            raise ValueError(f"two logs are of rank {log.rank}: give the logs of one run, one of each process")
        if (before.graph, before.placement) != (log.graph, log.placement):
            raise ValueError(
                f"the logs of ranks {before.rank} and {log.rank} are of different pipelines: give the logs of one run"
            )
    stages = [StageReplay(log, stage, rules_file) for log in logs for stage in log.stages]
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
    arbiter = cast(StageArbiter | OverlappedArbiter, replay.arbiter)
    if isinstance(arbiter, OverlappedArbiter):
        arbiter = arbiter.of_step(step)
    present = arbiter.step
    if present == step and arbiter.is_active:
        return arbiter.tell(microbatch)
    if present is None or present < step:
        return f"  step {step} had not begun here"
    return f"  step {step} had ended here"


def _microbatches(record: Any) -> Iterator[int]:
    """Yields the microbatch of the task or message that an event, an instruction or a note is about, if any."""
    for name in ("task", "message"):
        subject = getattr(record, name, None)
        for each in subject if isinstance(subject, Pair) else () if subject is None else (subject,):
            yield each.microbatch
    if (note := getattr(record, "note", None)) is not None:
        yield from _microbatches(note)
