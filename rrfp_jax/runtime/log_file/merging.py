"""The replays of a run's processes side by side: one wait-for report and one timeline on one clock."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from rrfp_jax.runtime.log_file.replaying import StageReplay, replay_log
from rrfp_jax.runtime.log_file.run_log import RunLog
from rrfp_jax.runtime.report import WaitForReport
from rrfp_jax.schedules.timeline import Span, Timeline, Wait

_Entry = TypeVar("_Entry", Span, Wait)


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
        """What every stage did when the logs were taken."""
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
        """When each task ran, by the events; tasks that ran when the log was taken end soon after the last event.

        Times are seconds on rank 0's clock. Of a stage that spans processes, the first one's record counts.
        """
        first = {stage.arbiter.stage: stage for stage in reversed(self.stages)}
        merged = Timeline(self.logs[0].placement.num_stages)
        for stage in sorted(first):
            later_s = self.offset_s(first[stage])
            merged.spans += [_later(span, later_s) for span in first[stage].timeline.spans]
            merged.waits += [_later(wait, later_s) for wait in first[stage].timeline.waits]
        end_s = self._picture_end_s(merged)
        for replay in first.values():
            merged.spans += _running(replay, self.offset_s(replay), end_s)
            merged.waits += _waiting(replay, self.offset_s(replay), end_s)
        return merged

    def offset_s(self, stage: StageReplay) -> float:
        """What to add to the times of a stage's process to have rank 0's clock."""
        return next(log.clock_offset_s for log in self.logs if log.rank == stage.rank)

    def _picture_end_s(self, finished: Timeline) -> float:
        """The end of running tasks: a little after the last event, for a run may have hung for hours since."""
        last_s = max(stage.last_event_s + self.offset_s(stage) for stage in self.stages)
        taken_s = max(log.taken_s + log.clock_offset_s for log in self.logs)
        longest_s = max((span.end_s - span.start_s for span in finished.spans), default=taken_s - last_s)
        return min(taken_s, last_s + longest_s)


def replay_run(logs: Sequence[RunLog], *, rules_file: str | None = None) -> RunReplay:
    """Replay the logs of one run's processes; raises ValueError if they cannot be of one run.

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
    """The running task of each lane as a span; what was dispatched behind it has not started."""
    first = {span.lane: span for span in reversed(replay.unfinished)}
    for span in first.values():
        start_s = span.start_s + later_s
        yield span._replace(start_s=start_s, end_s=max(start_s, end_s))


def _waiting(replay: StageReplay, later_s: float, end_s: float) -> Iterator[Wait]:
    """What an idle stage waited for after its last event."""
    arbiter, start_s = replay.arbiter, replay.last_event_s + later_s
    reason = arbiter.idle_reason()
    if arbiter.step is not None and arbiter.is_active and reason is not None and start_s < end_s:
        yield Wait(arbiter.step, arbiter.stage, start_s, end_s, reason)
