"""Event logs as files: all that rebuilds a process's arbiters and feeds them again without JAX.

A log is gzipped JSON with a name and a version, so that any program can read it; never a pickle.
"""

import gzip
import io
import json
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rrfp_jax.bounded_text import shown
from rrfp_jax.core import Estimates, Event, Instruction, RunTask
from rrfp_jax.core.saved import SavedArbiter, save_arbiter
from rrfp_jax.observe.output_files import replacing
from rrfp_jax.record_files import parse_json, read_record
from rrfp_jax.records import MalformedRecord, from_plain, to_plain
from rrfp_jax.runtime.event_log import EventLog, Segment
from rrfp_jax.runtime.report import WaitForReport
from rrfp_jax.schedules import PipelineGraph, Placement, Task

FORMAT, VERSION = "rrfp-jax event log", 7
PATTERN = "events*.json.gz"
"""The names of a run directory's logs."""
_MOST_BYTES = 1 << 28
"""Largest size of a log's text: some megabytes of zeros unfold to gigabytes."""
_MOST_PAIRS = 1 << 18
"""Largest number of pairs of a chunk and a microbatch on all stages of a log; their plans take a third of a gigabyte
and fifteen seconds."""
_LAST_S = 1e12
"""Latest time in a log, in seconds: some thousands of years."""

Entry = tuple[Event, tuple[Instruction, ...]]
"""An event and the instructions that answered it."""


class Started(NamedTuple):
    """The task that a stage's thread was in when the log was taken."""

    step: int
    task: Task
    start_s: float


@dataclass(frozen=True, kw_only=True)
class SegmentLog:
    """Events from one step's end to the next."""

    ended: int | None
    """The step that the stage had ended before; None: it had not begun."""
    early: tuple[Event, ...]
    """What had come before for later steps, in order."""
    estimates: Estimates | None
    """What the stage had learnt for its foresight by then; None where it has none."""
    entries: tuple[Entry, ...]


@dataclass(frozen=True, kw_only=True)
class StageLog:
    """The newest segments of one stage."""

    arbiter: SavedArbiter
    segments: tuple[SegmentLog, ...]
    started: Started | None


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why a run was given up, as its process's report says."""

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
    """What to add to this process's clock to have rank 0's."""
    taken_s: float
    """When the log was taken."""
    ending: Ending | None
    """None where the run was not given up."""
    graph: PipelineGraph
    placement: Placement
    stages: tuple[StageLog, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("the log is of no stage at all")


def take_log(
    logs: Mapping[int, EventLog],
    started: Mapping[int, tuple[RunTask, float]] | None = None,
    *,
    report: WaitForReport | None = None,
    rank: int = 0,
    clock_offset_s: float = 0.0,
    taken_s: float | None = None,
) -> RunLog:
    """The logs of a process as records, from any thread; what is logged meanwhile may be missing at the end.

    Args:
        logs: one or more event logs, by stage.
        started: the instruction that each busy stage's thread is in, and its start (``time.perf_counter``).
        report: why the run was given up.
        rank, clock_offset_s: of this process; see :class:`RunLog`.
        taken_s: the time of all this, in seconds on the clock of the events; None: now.
    """
    first = next(iter(logs.values())).segments[-1].arbiter
    return RunLog(
        rank=rank,
        clock_offset_s=clock_offset_s,
        taken_s=time.perf_counter() if taken_s is None else taken_s,
        ending=None if report is None else _ending(report, rank),
        graph=first.graph,
        placement=first.placement,
        stages=tuple(_stage(log, (started or {}).get(stage)) for stage, log in sorted(logs.items())),
    )


def _ending(report: WaitForReport, rank: int) -> Ending:
    return Ending(
        summary=report.summary,
        failed_stages=tuple(state.stage for state in report.stages if state.failed and state.rank in (None, rank)),
        lost_ranks=report.lost_ranks,
        lost_stages=report.lost_stages,
    )


def _stage(log: EventLog, started: tuple[RunTask, float] | None) -> StageLog:
    segments = list(log.segments)
    return StageLog(
        arbiter=save_arbiter(segments[0].arbiter),
        segments=tuple(map(_segment, segments)),
        started=started and Started(started[0].step, started[0].task, started[1]),
    )


def _segment(segment: Segment) -> SegmentLog:
    return SegmentLog(
        ended=segment.ended,
        early=tuple(segment.early),
        estimates=segment.estimates,
        entries=tuple((event, tuple(instructions)) for event, instructions in segment.entries.copy()),
    )


def log_name(rank: int = 0, num_ranks: int = 1) -> str:
    """The name of a process's log in the run directory."""
    return "events.json.gz" if num_ranks == 1 else f"events-rank{rank}.json.gz"


def write_log(log: RunLog, path: str | os.PathLike[str]) -> None:
    """Write a log in one piece; raises OSError where that cannot be done, and leaves what stood there before."""
    text = json.dumps({"format": FORMAT, "version": VERSION, "log": to_plain(log)}, separators=(",", ":"))
    with replacing(path) as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), compresslevel=6, mtime=0))


def read_log(path: str | os.PathLike[str]) -> RunLog:
    """Read a log; raises ValueError, in one sentence, for a file that is missing, damaged or none of ours."""
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
    """Numbers of a log that no run has."""


def _check_sizes(log: RunLog) -> None:
    """Raise _BeyondBounds if numbers in the log, and not its events, would make a replay large or long."""
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
