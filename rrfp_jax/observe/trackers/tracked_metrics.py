"""``metrics.jsonl`` and the trackers that get its rows.

A tracker never ends a run, and never slows its loop: each works on a thread of its own. A failure is named in one
warning, and the tracker is left out from then on. All rows are handed over before the process ends, however it ends,
within a bounded time.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from rrfp_jax.observe.metrics import MetricsFile
from rrfp_jax.observe.trackers.services import SERVICES, Row, TrackedRun, Tracker

_START_S = 20.0
"""How long a run waits for its trackers before the first step."""
_CLOSE_S, _CLOSE_AFTER_FAILURE_S = 20.0, 4.0
"""How long a run waits at its end. After a failure the process is ended within some seconds, so it waits less."""
_MOST_ROWS = 20_000
"""Rows that may wait for a tracker. One that is further behind stands still."""

_log = logging.getLogger(__name__)


class TrackedMetrics:
    """Writes every row to the file, and hands it to all trackers.

    As a context manager it closes all of them, in less time where an exception leaves the block.

    Args:
        file: the metrics file, closed here.
        runs: the facts about the run for each tracker, with its settings.
    """

    def __init__(self, file: MetricsFile, runs: Sequence[TrackedRun]) -> None:
        self._file = file
        self._trackers = [
            _TrackerThread(run.settings.tracker, partial(SERVICES[run.settings.tracker], run)) for run in runs
        ]
        until_s = time.monotonic() + _START_S
        for tracker in self._trackers:
            tracker.wait_for_start(until_s)

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes one row, as :meth:`MetricsFile.write`."""
        row = self._file.write(values)
        for tracker in self._trackers:
            tracker.put(row)

    def close(self, *, failed: bool = False) -> None:
        """Blocks until all rows are written. A tracker that takes too long is left behind."""
        self._file.close()
        for tracker in self._trackers:
            tracker.ask_to_close(failed=failed)
        until_s = time.monotonic() + (_CLOSE_AFTER_FAILURE_S if failed else _CLOSE_S)
        for tracker in self._trackers:
            tracker.join(until_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


class _TrackerThread:
    """Starts a tracker on a thread of its own and gives it rows in their order."""

    def __init__(self, name: str, start: Callable[[], Tracker]) -> None:
        self.name = name
        self._start = start
        self._rows: SimpleQueue[Row | bool] = SimpleQueue()
        """Rows, and at the end whether the run has failed."""
        self._is_left_out = threading.Event()
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def wait_for_start(self, until_s: float) -> None:
        """Blocks until the tracker takes rows, at most until ``until_s`` (``time.monotonic``)."""
        # Its imports would slow the first steps.
        self._has_started.wait(max(0.0, until_s - time.monotonic()))

    def put(self, row: Row) -> None:
        """Hands a row over and returns at once."""
        if self._is_left_out.is_set():
            return
        if self._rows.qsize() >= _MOST_ROWS:
            self._leave_out(f"{_MOST_ROWS} rows wait for it")
        self._rows.put(row)

    def ask_to_close(self, *, failed: bool) -> None:
        self._rows.put(failed)

    def join(self, until_s: float) -> None:
        """Blocks until all rows are written, at most until ``until_s``, and then leaves the tracker behind."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            self._leave_out("it has not taken the last rows in time")

    def _work(self) -> None:
        try:
            tracker = self._start()
            self._has_started.set()
            while not isinstance(row := self._rows.get(), bool) and not self._is_left_out.is_set():
                tracker.write(row)
            tracker.close(failed=row is True)
        except (Exception, SystemExit) as error:  # libraries may raise anything
            self._leave_out(" ".join(str(error).split()) or repr(error))
        self._has_started.set()

    def _leave_out(self, reason: str) -> None:
        if not self._is_left_out.is_set():
            self._is_left_out.set()
            _log.warning("the tracker %s is left out from here on: %s", self.name, reason)
