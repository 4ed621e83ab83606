"""The directory of a run: its configuration, its metrics, its timeline, and the report of a failure.

``config.yaml``       the resolved configuration
``metrics.jsonl``     one object per step
``timeline.png``      picture of the last steps
``trace.json``        the same for ui.perfetto.dev
``failure.json``      the wait-for report, if the run had to be given up
"""

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from rrfp_jax.observe.files import replacing
from rrfp_jax.observe.metrics import MetricsFile
from rrfp_jax.observe.picture import draw_timelines
from rrfp_jax.observe.trace import write_trace
from rrfp_jax.runtime import WaitForReport
from rrfp_jax.timeline import Timeline
from rrfp_jax.training.paths import check_file, check_folder

CONFIG, METRICS, PICTURE, TRACE, FAILURE = "config.yaml", "metrics.jsonl", "timeline.png", "trace.json", "failure.json"


class RunDirectory:
    """Writes one run's files, each of them whole; the folder is made by the first method that writes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def check(self) -> None:
        """Raise ValueError, with the remedy, unless all files of a run can be written; creates nothing."""
        check_folder(self.path, "run_dir")
        for name in (CONFIG, METRICS, PICTURE, TRACE, FAILURE):
            check_file(self.path / name, "the run's file")

    def start(self, config: Mapping[str, Any]) -> None:
        """Make the folder where it is missing, write the configuration, and remove the report of an earlier failure.

        Raises ValueError where the folder or a file in it cannot be made after all.
        """
        try:
            self._write_text(CONFIG, yaml.safe_dump(dict(config), sort_keys=False))
            (self.path / FAILURE).unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"run_dir {self.path} cannot be written ({error.strerror}): name another folder") from None

    def num_rows(self) -> int:
        """How many steps earlier runs have written to the metrics file."""
        metrics = self.path / METRICS
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def metrics(self) -> MetricsFile:
        """The metrics file, opened for appending."""
        return MetricsFile(self.path / METRICS)

    def write_timeline(self, timeline: Timeline, caption: str) -> None:
        """Write the picture and the trace."""
        draw_timelines([(caption, timeline)], self.path / PICTURE)
        write_trace(timeline, self.path / TRACE)

    def write_failure(self, report: WaitForReport) -> Path:
        """Write the report as JSON, and return its path."""
        self._write_text(FAILURE, json.dumps(report.as_dict(), indent=2) + "\n")
        return self.path / FAILURE

    def _write_text(self, name: str, text: str) -> None:
        with replacing(self.path / name) as path:
            path.write_text(text, encoding="utf-8")


def new_run_path(name: str, now: datetime) -> Path:
    """A path under ``runs/`` that does not exist yet."""
    base = Path("runs") / f"{name}-{now:%Y%m%d-%H%M%S}"
    candidates = (base.with_name(f"{base.name}-{number}") for number in range(2, 1000))
    return base if not base.exists() else next(path for path in candidates if not path.exists())
