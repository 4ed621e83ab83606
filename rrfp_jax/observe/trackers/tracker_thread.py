"""A tracker on a thread of its own, so that it neither holds up the loop nor ends the run."""

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from rrfp_jax.observe.trackers.columns import Row
from rrfp_jax.observe.trackers.interface import Tracker

_log = logging.getLogger(__name__)
_MOST_ROWS = 20_000
"""Rows that may wait; a tracker that is further behind stands still."""


class TrackerThread:
    """Starts a tracker and gives it rows, in their order; names what fails in one warning, and then does nothing."""

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
        """Wait until it takes rows, or for so long (``time.monotonic``): imports would slow the first steps."""
        self._has_started.wait(max(0.0, until_s - time.monotonic()))

    def put(self, row: Row) -> None:
        """Hand a row over, and return at once."""
        if self._is_left_out.is_set():
            return
        if self._rows.qsize() >= _MOST_ROWS:
            self._leave_out(f"{_MOST_ROWS} rows wait for it")
        self._rows.put(row)

    def ask_to_close(self, *, failed: bool) -> None:
        self._rows.put(failed)

    def join(self, until_s: float) -> None:
        """Wait until all rows are written, or for so long (``time.monotonic``), and then leave the tracker behind."""
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
        except (Exception, SystemExit) as error:  # whatever a library may raise
            self._leave_out(" ".join(str(error).split()) or repr(error))
        self._has_started.set()

    def _leave_out(self, reason: str) -> None:
        if not self._is_left_out.is_set():
            self._is_left_out.set()
            _log.warning("the tracker %s is left out from here on: %s", self.name, reason)
