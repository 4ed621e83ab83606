"""The directory of a run and the files in it.

``config.yaml``       the resolved configuration
``metrics.jsonl``     one object per step
``metrics.jsonl.damaged``   lines of it that were no objects
``tensorboard/``, ``wandb/``, ``wandb.json``, ``mlflow/``, ``mlflow.json``                     files of trackers
``timeline.png``      picture of the last steps
``trace.json``        the last steps for ui.perfetto.dev
``profile/``          traces of chosen steps, a folder for each rank that takes one
``checkpoints/``      the newest committed steps
``tokenizer/``        the tokenizer and other files that came with the model that the run began with
``run.lock``          the process that writes here; removed at the end
``failure.json``      the wait-for report of a run that was given up
``events*.json.gz``   the last events of each process of such a run, for ``rrfp replay``

In an object store ``run.lock/`` is a folder that stays, and holds the last holder. There the files that grow or are
drawn are written in a local folder, and copied up before each commit and at the end.
"""

import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from rrfp_jax.hf.model_folder import KEPT, files_are_kept
from rrfp_jax.observe.metrics import MetricsFile, cut_metrics, last_rows
from rrfp_jax.observe.output_files import check_file, check_folder, replacing
from rrfp_jax.observe.trackers import EVALUATION, STEP, TRACKER_FILES, TrackedMetrics, TrackedRun, TrackerConfig
from rrfp_jax.runtime import WaitForReport
from rrfp_jax.runtime.event_log import PATTERN as LOG_PATTERN
from rrfp_jax.runtime.event_log import RunLog, log_name, write_log
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.storage import BucketPath, check_bucket, located, working_folder
from rrfp_jax.training._run_lock import lock_of

CONFIG, METRICS, TRACE, CHECKPOINTS, PROFILE_FOLDER = (
    "config.yaml",
    "metrics.jsonl",
    "trace.json",
    "checkpoints",
    "profile",
)
_PICTURE, _FAILURE = "timeline.png", "failure.json"
_LOG = logging.getLogger(__name__)


class RunDirectory:
    """Writes the files of one run, each of them whole. The first method that writes makes the folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.place = located(path)
        """The directory, which may be in an object store."""
        self.path = working_folder(self.place) if isinstance(self.place, BucketPath) else self.place
        """The local folder of its files but checkpoints."""
        self.lock = lock_of(self.place)
        self._sent: dict[str, tuple[int, int]] | None = None
        """Sizes and times of the local files that were copied up. None: this object does not copy, as they may be of an
        earlier run."""

    def check(self) -> None:
        """Raises ValueError, with the remedy, unless all files of a run can be written; creates nothing."""
        if isinstance(self.place, BucketPath):
            check_bucket(self.place, "run_dir")
        check_folder(self.path, "run_dir")
        for name in (CONFIG, METRICS, _PICTURE, TRACE, _FAILURE):
            check_file(self.path / name, "the run's file")

    def start(self, config: Mapping[str, Any], *, from_step: int = 0) -> None:
        """Makes the folder if it is missing, writes the configuration, and removes the report of an earlier failure.

        Rows of the metrics file from ``from_step`` on are dropped: those steps are trained again.

        Raises ValueError if the folder or a file in it cannot be made after all.
        """
        try:
            with replacing(self.path / CONFIG) as path:
                path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
            # They would be taken for reports of this run.
            for name in (_FAILURE, *(path.name for path in self.place.glob(LOG_PATTERN))):
                for folder in {self.path, self.place}:
                    (folder / name).unlink(missing_ok=True)
            cut_metrics(self.path / METRICS, from_step or -1)  # rows of an evaluation before all training have -1
        except OSError as error:
            raise ValueError(
                f"run_dir {self.place} cannot be written ({error.strerror}): name another folder"
            ) from None

    def leftovers(self) -> list[str]:
        """Returns the names of the files and folders that an earlier run has left here."""
        names = (
            CONFIG,
            METRICS,
            f"{METRICS}.damaged",
            *TRACKER_FILES,
            PROFILE_FOLDER,
            _PICTURE,
            TRACE,
            _FAILURE,
            CHECKPOINTS,
        )
        kept = (KEPT,) if files_are_kept(self.place) else ()
        logs = sorted(path.name for path in self.place.glob(LOG_PATTERN))
        return [name for name in (*names, *kept, *logs) if (self.place / name).exists()]

    def hold(self, *, to_clear: bool = False) -> None:
        """Takes the directory's lock before anything is changed here; ``to_clear``: the directory is to be emptied.

        Raises ValueError if another run has the lock, if the directory cannot be made, and if ``clear`` would have to
        remove something through a symbolic link.
        """
        try:
            self.lock.take()
        except OSError as error:
            raise ValueError(f"run_dir {self.place} cannot be made ({error.strerror}): name another folder") from None
        if isinstance(self.place, BucketPath):
            self._fetch(self.place)
            return
        # Under the lock, so that no other run changes the directory before it is cleared.
        links = [name for name in self.leftovers() if (self.path / name).is_symlink() and (self.path / name).is_dir()]
        if to_clear and links:
            self.lock.release()
            raise ValueError(
                f"run_dir {self.path} cannot be emptied: {links[0]} is a symbolic link to "
                f"{os.readlink(self.path / links[0])}, and nothing is removed through a link; empty that folder or "
                "remove the link yourself, or name another run_dir"
            )

    def clear(self) -> None:
        """Removes the files and folders of an earlier run, and nothing else."""
        for name in self.leftovers():
            path = self.place / name
            if isinstance(path, BucketPath):
                path.remove_tree()
                path.unlink(missing_ok=True)
                shutil.rmtree(self.path / name, ignore_errors=True)
                (self.path / name).unlink(missing_ok=True)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _fetch(self, place: BucketPath) -> None:
        """Makes the local folder that of the run in the object store: files of earlier runs go, the run's come."""
        try:
            shutil.rmtree(self.path, ignore_errors=True)
            for name in self.leftovers():
                if (place / name).is_file():
                    place.download(self.path, [name])
                elif name not in (CHECKPOINTS, PROFILE_FOLDER):
                    (place / name).download(self.path / name, (place / name).files())
            self._sent = self._stamps()
        except OSError as error:
            self.lock.release()
            raise ValueError(f"run_dir {place} cannot be read ({error.strerror}): try again") from None

    def send(self) -> None:
        """Copies the files that are new or changed to the object store that the run is in; an error is a warning."""
        if not isinstance(self.place, BucketPath) or self._sent is None:
            return
        stamps, sent = self._stamps(), self._sent
        try:
            self.place.upload(self.path, [name for name, stamp in stamps.items() if sent.get(name) != stamp])
            self._sent = stamps
        except OSError as error:
            _LOG.warning("files of the run are not in %s yet, only in %s: %s", self.place, self.path, error.strerror)

    def _stamps(self) -> dict[str, tuple[int, int]]:
        found = {path.relative_to(self.path).as_posix(): path.stat() for path in self.path.rglob("*") if path.is_file()}
        return {
            name: (status.st_size, status.st_mtime_ns)
            for name, status in found.items()
            if not any(part.startswith(".") for part in name.split("/"))  # one that is being written
        }

    def _send(self, path: Path) -> Path:
        """Copies one file of this process up; returns where it is."""
        place = self.place / path.relative_to(self.path)
        if isinstance(place, BucketPath):
            place.put(path.read_bytes())
        return place

    def fetch_metrics(self) -> None:
        """Gets the rows from the object store where another host has written them; on a disk they are here."""
        if not isinstance(self.place, BucketPath):
            return
        rows, here = (self.place / METRICS).read_bytes(), self.path / METRICS
        if not here.is_file() or not here.read_bytes().startswith(rows):
            with replacing(here) as path:
                path.write_bytes(rows)
        self._sent = self._stamps()

    def close(self) -> None:
        """Copies the last files up where this object has the lock, and gives it back."""
        if self.lock.is_held:
            self.send()
        self.lock.release()

    def tracked_metrics(
        self, config: Mapping[str, Any], trackers: Sequence[TrackerConfig] = (), *, first_step: int
    ) -> TrackedMetrics:
        """Returns the metrics file with the trackers that get its rows; ``first_step`` is the next to be trained."""
        shared: dict[str, Any] = {"path": self.path, "config": config, "first_step": first_step or -1}
        runs = [TrackedRun(**shared, settings=each) for each in trackers]
        return TrackedMetrics(MetricsFile(self.path / METRICS), runs)

    def write_timeline(self, timeline: Timeline, caption: str) -> None:
        """Writes the picture and the trace; one that cannot be made is named in a warning: it is not worth a run."""

        def draw() -> None:
            from rrfp_jax.observe.picture import draw_timelines  # takes long to load

            draw_timelines([(caption, timeline)], self.path / _PICTURE)

        def trace() -> None:
            from rrfp_jax.observe.chrome_trace import write_trace

            write_trace(timeline, self.path / TRACE)

        for name, write in ((_PICTURE, draw), (TRACE, trace)):
            try:
                write()
            except Exception as error:  # whatever a library for pictures may raise
                _LOG.warning("%s is left out: %s", self.path / name, " ".join(str(error).split()) or repr(error))

    def written(self) -> list[str]:
        """Returns the names of the files of a run's end that exist."""
        return [name for name in (CONFIG, METRICS, _PICTURE, TRACE) if (self.path / name).is_file()]

    def write_events(self, log: RunLog, num_ranks: int) -> Path:
        """Writes a process's last events, and returns the file's path."""
        path = self.path / log_name(log.rank or 0, num_ranks)
        write_log(log, path)
        return self._send(path)

    def write_failure(self, report: WaitForReport) -> Path:
        """Writes the report as JSON, and returns its path.

        The first report of a run counts: to a process that stood still and wakes up, all others seem to be lost.
        """
        if not (self.place / _FAILURE).exists():
            with replacing(self.path / _FAILURE) as path:
                path.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
        return self._send(self.path / _FAILURE)


_NOT_KNOWN: dict[str, Any] = {"bubble_fraction": None, "idle_s": {}, "peak_memory_bytes": (), "peak_host_bytes": ()}
_NUM_KEPT = 8
"""Rows that a rank keeps which does not write them; ranks are never more than three steps apart."""


class RunRows:
    """The rows of a run. The first rank that lives writes them; the others keep the latest, to go on from there.

    A context manager, which closes the file and the trackers.

    Args:
        path: the metrics file.
        is_first: returns whether this is the first rank that lives.
        open_metrics: opens the file and the trackers for rows from a step on.
        fetch: makes the file that of the first rank before, if that was on another disk.
    """

    def __init__(
        self,
        path: Path,
        is_first: Callable[[], bool],
        open_metrics: Callable[[int | None], TrackedMetrics],
        fetch: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._is_first, self._open, self._fetch = path, is_first, open_metrics, fetch
        self._kept: deque[dict[str, Any]] = deque(maxlen=_NUM_KEPT)
        self._written: set[tuple[Any, Any]] = set()
        """Steps and sets of rows that the first rank before has written; it may have been a little ahead."""
        self._metrics = open_metrics(None) if is_first() else None

    def write(self, row: dict[str, Any]) -> None:
        """Writes a row, or keeps it."""
        if self._metrics is None:
            # Numbers of all stages together are known to the first rank alone.
            self._kept.append({**row, **(_NOT_KNOWN if "idle_s" in row else {})})
            if self._is_first():
                self._take_over()
        elif _row_key(row) not in self._written:
            self._metrics.write(row)

    def _take_over(self) -> None:
        """Goes on after the last row that the first rank before has written."""
        # In a copy: that rank may have been stopped, and write to the old file when it continues.
        with suppress(OSError):
            self._fetch()
        with suppress(OSError), replacing(self._path) as copy:
            shutil.copyfile(self._path, copy)
        self._written = set(map(_row_key, last_rows(self._path)))
        rows = [row for row in self._kept if _row_key(row) not in self._written]
        self._metrics = self._open(rows[0][STEP] if rows else None)
        for row in rows:
            self._metrics.write(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._metrics is None and self._kept and kind is None and self._is_first():
            self._take_over()  # The first rank was lost after the last step.
        if self._metrics is not None:
            self._metrics.close(failed=kind is not None)


def _row_key(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row.get(STEP), row.get(EVALUATION)


def new_run_path(name: str, now: datetime) -> Path:
    """Returns a path under ``runs/`` that does not exist yet."""
    base = Path("runs") / f"{name}-{now:%Y%m%d-%H%M%S}"
    candidates = (base.with_name(f"{base.name}-{number}") for number in range(2, 1000))
    return base if not base.exists() else next(path for path in candidates if not path.exists())
