"""``metrics.jsonl`` and the trackers that get its rows."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from rrfp_jax.observe.metrics import MetricsFile
from rrfp_jax.observe.trackers.interface import TrackedRun, Tracker
from rrfp_jax.observe.trackers.tracker_thread import TrackerThread

_MODULES = {"csv": "csv_file", "tensorboard": "tensorboard_events", "wandb": "wandb_run", "mlflow": "mlflow_run"}
TRACKER_FILES = ("metrics.csv", "tensorboard", "wandb", "wandb.json", "mlflow", "mlflow.json")
"""What they leave in the run directory, by name."""
_START_S = 20.0
"""How long a run waits for its trackers before the first step."""
_CLOSE_S, _CLOSE_AFTER_FAILURE_S = 20.0, 4.0
"""How long at its end; after a failure less, because the process is then ended within some seconds."""


class TrackedMetrics:
    """Writes every row to the file, and hands it to all trackers.

    As a context manager it closes all of them, with the time that there is: less where an exception leaves the block.

    Args:
        file: closed here.
        run: what the trackers are told.
        names: of trackers.
    """

    def __init__(self, file: MetricsFile, run: TrackedRun, names: Sequence[str]) -> None:
        self._file = file
        self._trackers = [TrackerThread(name, partial(_starter(name), run)) for name in names]
        until_s = time.monotonic() + _START_S
        for tracker in self._trackers:
            tracker.wait_for_start(until_s)

    def write(self, values: Mapping[str, Any]) -> None:
        """Write one row; as :meth:`MetricsFile.write`."""
        row = self._file.write(values)
        for tracker in self._trackers:
            tracker.put(row)

    def close(self, *, failed: bool = False) -> None:
        """Have all rows written; a tracker that takes too long is left behind."""
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


def _starter(name: str) -> Callable[[TrackedRun], Tracker]:
    """The module's ``start``, loaded by the thread that calls it."""

    def start(run: TrackedRun) -> Tracker:
        tracker: Tracker = import_module(f"{__package__}.{_MODULES[name]}").start(run)
        return tracker

    return start
