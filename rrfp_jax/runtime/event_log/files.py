"""Event logs as files, from which a process's arbiters can be rebuilt and fed again without JAX.

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
from rrfp_jax.core.snapshot import SavedArbiter, save_arbiter
from rrfp_jax.observe.output_files import replacing
from rrfp_jax.record_files import parse_json, read_record
from rrfp_jax.records import MalformedRecord, from_plain, to_plain
from rrfp_jax.runtime.event_log.recording import EventLog
from rrfp_jax.runtime.failure import WaitForReport
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


class StartedTask(NamedTuple):
    """The task that a stage's thread was running when the log was taken."""

    step: int
    task: Task
    start_s: float


@dataclass(frozen=True, kw_only=True)
class SegmentLog:
    """Events from one step's end to the next."""

    ended: int | None
    """The step that the stage had ended before; None: it had not begun."""
    early: tuple[Event, ...]
    """Events for later steps that had come before, in order."""
    estimates: Estimates | None
    """The stage's estimates at that time; None if it has no foresight."""
    entries: tuple[tuple[Event, tuple[Instruction, ...]], ...]
    """Each event and the instructions that answered it."""


@dataclass(frozen=True, kw_only=True)
class StageLog:
    """The newest segments of one stage."""

    arbiter: SavedArbiter
    segments: tuple[SegmentLog, ...]
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
    started: Mapping[int, tuple[RunTask, float]] | None = None,
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
    first, ending = next(iter(logs.values())).segments[-1].arbiter, None
    if report is not None:
        failed = (state.stage for state in report.stages if state.failed and state.rank in (None, rank))
        ending = Ending(
            summary=report.summary,
            failed_stages=tuple(failed),
            lost_ranks=report.lost_ranks,
            lost_stages=report.lost_stages,
        )
    return RunLog(
        rank=rank,
        clock_offset_s=clock_offset_s,
        taken_s=time.perf_counter() if taken_s is None else taken_s,
        ending=ending,
        graph=first.graph,
        placement=first.placement,
        stages=tuple(_stage(log, (started or {}).get(stage)) for stage, log in sorted(logs.items())),
    )


def _stage(log: EventLog, started: tuple[RunTask, float] | None) -> StageLog:
    segments = list(log.segments)
    return StageLog(
        arbiter=save_arbiter(segments[0].arbiter),
        segments=tuple(
            SegmentLog(
                ended=segment.ended,
                early=tuple(segment.early),
                estimates=segment.estimates,
                # the stage's own thread may append meanwhile
                entries=tuple((event, tuple(instructions)) for event, instructions in segment.entries.copy()),
            )
            for segment in segments
        ),
        started=started and StartedTask(started[0].step, started[0].task, started[1]),
    )


def log_name(rank: int = 0, num_ranks: int = 1) -> str:
    """Returns the name of a process's log in the run directory."""
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
