"""The records of a running stage: its arbiter's events and answers, the times of its tasks, and their files.

The log of events is kept in segments of one step. A segment opens when the stage is idle: the arbiter's whole state is
then the step that it has ended, its estimates for foresight, and the events that came early for later steps. The
segment keeps the state and begins with the early events, so a replay needs nothing from before it; only the newest
segments are kept. Where steps overlap, the next step is under way at a step's end; the segment then keeps its state too
(:mod:`rrfp_jax.core.overlap`).

From a file a process's arbiters can be rebuilt and fed again without JAX, model or hardware
(:mod:`rrfp_jax.runtime.replay`). It is gzipped JSON with a name and a version, so that any program can read it; never a
pickle.
"""

import gzip
import io
import json
import os
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from rrfp_jax.core import Estimates, Event, FinishStep, Instruction, RunInstruction, RunTask, StageArbiter
from rrfp_jax.core.overlap import OverlappedArbiter, StepUnderWay
from rrfp_jax.core.snapshot import SavedArbiter, save_arbiter
from rrfp_jax.observe.output_files import replacing
from rrfp_jax.readable import shown
from rrfp_jax.record_files import parse_json, read_record
from rrfp_jax.records import MalformedRecord, from_plain, to_plain
from rrfp_jax.runtime.failure import WaitForReport
from rrfp_jax.schedules import COMPUTE, Pair, PipelineGraph, Placement, Task
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline, Wait

FORMAT, VERSION = "rrfp-jax event log", 9
PATTERN = "events*.json.gz"
"""The names of a run directory's logs."""
_MOST_BYTES = 1 << 28
"""Largest size of a log's text: some megabytes of zeros unfold to gigabytes."""
_MOST_PAIRS = 1 << 18
"""Largest number of pairs of a chunk and a microbatch on all stages of a log; their plans take a third of a gigabyte
and fifteen seconds."""
_LAST_S = 1e12
"""Latest time in a log, in seconds: some thousands of years."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Events from one step's end to the next."""

    ended: int | None
    """The step that the stage had ended before; None: it had not begun."""
    early: tuple[Event, ...]
    """Events for later steps that had come before, in order."""
    estimates: Estimates | None
    """The stage's estimates at that time; None if it has no foresight."""
    under_way: StepUnderWay | None = None
    """The next step, if it had begun before; early events are for steps after it."""
    entries: list[tuple[Event, list[Instruction]]]
    """Each event and the instructions that answered it."""


def open_segment(arbiter: StageArbiter | OverlappedArbiter, segment: Segment) -> StageArbiter:
    """Returns an arbiter made like this one, in the state in which a segment begins."""
    if isinstance(arbiter, OverlappedArbiter):
        fresh = cast(StageArbiter, arbiter.fresh(segment.ended, segment.under_way))
    else:
        fresh = arbiter.fresh(segment.ended, segment.estimates)
    for event in segment.early:
        fresh.handle(event)  # its answers, notes to a group, were given when it came
    return fresh


class EventLog:
    """The newest ``max_segments`` segments of one stage."""

    def __init__(self, arbiter: StageArbiter | OverlappedArbiter, max_segments: int) -> None:
        self.segments: deque[Segment] = deque(maxlen=max_segments)
        self._arbiter, self.arbiter = arbiter, cast(StageArbiter, arbiter.fresh(None))
        """The stage's own arbiter, and one made like it that is never driven."""
        self._open(arbiter.step, [])

    def append(self, event: Event, instructions: list[Instruction]) -> None:
        """Logs an event and its answer; the end of a step opens the next segment."""
        self.entries.append((event, instructions))
        if instructions and isinstance(instructions[-1], FinishStep):
            ended = instructions[-1].step
            # The next segment begins with all that has come early for steps that have not begun.
            self._open(ended, [*self.segments[-1].early, *(event for event, _ in self.entries)])

    def _open(self, ended: int | None, events: Sequence[Event]) -> None:
        own = self._arbiter
        under_way = own.step_under_way() if isinstance(own, OverlappedArbiter) else None
        begun = ended if under_way is None else under_way.step
        early = tuple(event for event in events if begun is None or event.step > begun)
        estimates = own.estimates()
        segment = Segment(ended=ended, early=early, estimates=estimates, under_way=under_way, entries=[])
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
        self._reason = None
        self._step, self._since_s = step, time_s

    def ran(self, instruction: RunTask, start_s: float, end_s: float, lane: str = COMPUTE) -> None:
        """Records a task that has run on a lane; if that is compute, the time since it was chosen went to the host."""
        if lane != COMPUTE:
            self._timeline.spans.append(Span(instruction.step, self._stage, instruction.task, start_s, end_s, lane))
            return
        if start_s > self._since_s:
            self._timeline.waits.append(Wait(self._step, self._stage, self._since_s, start_s, IdleReason.HOST))
        self._reason = None
        self._timeline.spans.append(Span(instruction.step, self._stage, instruction.task, start_s, end_s))
        self._since_s = end_s

    def observe(self, time_s: float, reason: IdleReason | None) -> None:
        """Records that the stage is idle for this reason from now on, or has a task to run (None)."""
        if reason is not self._reason:
            self.end(time_s)
            self._reason = reason

    def take(self) -> Timeline:
        """Returns the records so far and begins anew. Where steps overlap, they are those of a period."""
        taken = self._timeline
        self._timeline = Timeline(taken.num_stages)
        return taken

    def end(self, time_s: float) -> None:
        """Ends the stage's idleness, or the step, at this time."""
        if self._reason is None:
            return
        if time_s > self._since_s:
            self._timeline.waits.append(Wait(self._step, self._stage, self._since_s, time_s, self._reason))
            self._since_s = time_s
        self._reason = None


class StartedTask(NamedTuple):
    """The task or pair that a stage's thread was running when the log was taken."""

    step: int
    task: Task | Pair
    start_s: float


@dataclass(frozen=True, kw_only=True)
class StageLog:
    """The newest segments of one stage."""

    arbiter: SavedArbiter
    segments: tuple[Segment, ...]
    started: StartedTask | None


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The reason why a run was given up, from its process's report."""

    summary: str
    failed_stages: tuple[int, ...]
    """The stages of this process in which a task raised an error."""
    lost_ranks: tuple[int, ...]
    lost_stages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """The logs of the stages that one process hosts, at least one. Times are seconds on that process's clock."""

    rank: int
    clock_offset_s: float
    """Seconds to add to this process's clock to have rank 0's."""
    taken_s: float
    """The time at which the log was taken."""
    ending: Ending | None
    """None if the run was not given up."""
    graph: PipelineGraph
    placement: Placement
    stages: tuple[StageLog, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("the log is of no stage at all")


def take_log(
    logs: Mapping[int, EventLog],
    started: Mapping[int, tuple[RunInstruction, float]] | None = None,
    *,
    report: WaitForReport | None = None,
    rank: int = 0,
    clock_offset_s: float = 0.0,
    taken_s: float | None = None,
) -> RunLog:
    """Returns the logs of a process as records, on any thread; events that are logged meanwhile may be missing.

    Args:
        logs: one or more event logs, by stage.
        started: the instruction that each busy stage's thread is in, and its start (``time.perf_counter``).
        report: the report of a run that was given up.
        rank, clock_offset_s: see :class:`RunLog`.
        taken_s: the time of the call, in seconds on the clock of the events; None: now.
    """
    first, ending = next(iter(logs.values())).arbiter, None
    if report is not None:
        failed = (state.stage for state in report.stages if state.failed and state.rank in (None, rank))
        ending = Ending(
            summary=report.summary,
            failed_stages=tuple(failed),
            lost_ranks=report.lost_ranks,
            lost_stages=report.lost_stages,
        )
    stages = []
    for stage, log in sorted(logs.items()):
        running = (started or {}).get(stage)
        stages.append(
            StageLog(
                arbiter=save_arbiter(log.arbiter),
                # The stage's own thread may append meanwhile.
                segments=tuple(replace(each, entries=each.entries.copy()) for each in log.segments.copy()),
                started=running and StartedTask(running[0].step, running[0].task, running[1]),
            )
        )
    return RunLog(
        rank=rank,
        clock_offset_s=clock_offset_s,
        taken_s=time.perf_counter() if taken_s is None else taken_s,
        ending=ending,
        graph=first.graph,
        placement=first.placement,
        stages=tuple(stages),
    )


def log_name(rank: int = 0, num_ranks: int = 1) -> str:
    return "events.json.gz" if num_ranks == 1 else f"events-rank{rank}.json.gz"


def write_log(log: RunLog, path: str | os.PathLike[str]) -> None:
    """Writes a log in one piece. Raises OSError if that cannot be done, and leaves the former file as it was."""
    text = json.dumps({"format": FORMAT, "version": VERSION, "log": to_plain(log)}, separators=(",", ":"))
    with replacing(path) as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), compresslevel=6, mtime=0))


def read_log(path: str | os.PathLike[str]) -> RunLog:
    """Reads a log. Raises ValueError, with one sentence, for a file that is missing, damaged or none of ours."""
    try:
        data, _ = read_record(Path(path))
    except OSError as error:
        raise ValueError(f"event log {path} cannot be read ({error.strerror}): give the path of a log") from None
    return _decode(path, data)


def _decode(path: str | os.PathLike[str], data: bytes) -> RunLog:
    if data[:2] != b"\x1f\x8b":
        raise ValueError(f"{path} is no event log, for it is not compressed: give a file named like {log_name()}")
    try:
        text = gzip.GzipFile(fileobj=io.BytesIO(data)).read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(
                f"event log {path} unfolds to more than {_MOST_BYTES >> 20} MiB, which no run writes: take the file "
                "from the run once more"
            )
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"event log {path} is damaged or cut short: take the file from the run once more") from None
    try:
        content: Any = parse_json(text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is no event log: give a file named like {log_name()} from a run directory")
    if content.get("version") != VERSION:
        raise ValueError(
            f"event log {path} has version {shown(content.get('version')):.20}, and this program reads version "
            f"{VERSION}: replay it with the program that wrote it"
        )
    try:
        log: RunLog = from_plain(RunLog, content.get("log"))
        _check_sizes(log)
    except (MalformedRecord, _BeyondBounds) as error:
        raise ValueError(f"event log {path} does not hold what it should: {error}") from None
    return log


class _BeyondBounds(ValueError):
    """The log has numbers that no run has."""


def _check_sizes(log: RunLog) -> None:
    """Raises _BeyondBounds if numbers in the log, and not its events, would make a replay large or long."""
    if log.graph.num_chunks != log.placement.num_chunks:
        raise _BeyondBounds(
            f"the graph has {log.graph.num_chunks} chunks and the placement {log.placement.num_chunks} of them"
        )
    num_chunks = {stage: len(chunks) for stage, chunks in enumerate(log.placement.chunks_of_stage)}
    num_pairs = sum(
        num_chunks.get(each.arbiter.stage, 0)
        * log.graph.num_microbatches
        * (1 + max(0, each.arbiter.evaluation_batches))
        for each in log.stages
    )
    if num_pairs > _MOST_PAIRS:
        raise _BeyondBounds(
            f"its stages have {shown(num_pairs)} pairs of a chunk and a microbatch, and a replay has at most "
            f"{_MOST_PAIRS}"
        )
    times = [log.taken_s, log.clock_offset_s]
    for stage in log.stages:
        times += [] if stage.started is None else [stage.started.start_s]
        for segment in stage.segments:
            times += [event.time_s for event in segment.early]
            times += [event.time_s for event, _ in segment.entries]
    if not all(abs(time_s) < _LAST_S for time_s in times):
        raise _BeyondBounds("a time in it is no number of seconds that any clock shows")
