"""``tensorboard/``: event files, a scalar for every number of a row.

TensorBoard keeps numbers in single precision. When a run goes on, a new event file begins with the mark by which
TensorBoard forgets all that the earlier ones hold of the steps from there on, as after a restart of TensorFlow. Where a
kill has cost rows, the mark stands at the last step that they hold, and these follow from ``metrics.jsonl``.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rrfp_jax.observe.trackers.columns import Row, scalars, step_of
from rrfp_jax.observe.trackers.interface import TrackedRun, Tracker

FOLDER = "tensorboard"
_QUEUED = 1000


def start(run: TrackedRun) -> Tracker:
    """Begin a new event file."""
    return _EventFile(run)


class _EventFile:
    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder, self._event = run.path / FOLDER, event_pb2.Event
        last = max(_steps(folder), default=None)
        self._writer = EventFileWriter(str(folder), max_queue_size=_QUEUED)
        begins = None if last is None else min(last, run.first_step)
        if begins is not None:
            mark = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=begins, session_log=mark))
        for row in run.past:
            if begins is None or step_of(row) >= begins:
                self._add(row)
        self._writer.flush()

    def write(self, row: Row) -> None:
        self._add(row)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - the files tell of rows only
        self._writer.close()

    def _add(self, row: Row) -> None:
        event = self._event(wall_time=time.time(), step=step_of(row))
        for name, value in scalars(row).items():
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.add_event(event)


def _steps(folder: Path) -> Iterator[int]:
    """The steps of all rows in earlier event files, a partial event at the end of one left out."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for path in sorted(folder.glob("*tfevents*")):
        events: Any = LegacyEventFileLoader(str(path)).Load()
        yield from (event.step for event in events if event.HasField("summary"))
