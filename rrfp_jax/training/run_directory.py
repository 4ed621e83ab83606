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


class RunDirectory:
    """Writes one run's files, each of them whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"run_dir {self.path} is a file: name a folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"run_dir {self.path} cannot be made ({error.strerror}): name another folder") from None

    def num_rows(self) -> int:
        """How many steps earlier runs have written to the metrics file."""
        metrics = self.path / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def write_config(self, config: Mapping[str, Any]) -> None:
        self._write_text("config.yaml", yaml.safe_dump(dict(config), sort_keys=False))

    def metrics(self) -> MetricsFile:
        """The metrics file, opened for appending."""
        return MetricsFile(self.path / "metrics.jsonl")

    def write_timeline(self, timeline: Timeline, caption: str) -> None:
        draw_timelines([(caption, timeline)], self.path / "timeline.png")
        write_trace(timeline, self.path / "trace.json")

    def write_failure(self, report: WaitForReport) -> Path:
        self._write_text("failure.json", json.dumps(report.as_dict(), indent=2) + "\n")
        return self.path / "failure.json"

    def _write_text(self, name: str, text: str) -> None:
        with replacing(self.path / name) as path:
            path.write_text(text)


def new_run_path(name: str, now: datetime) -> Path:
    """A path under ``runs/`` that does not exist yet."""
    base = Path("runs") / f"{name}-{now:%Y%m%d-%H%M%S}"
    candidates = (base.with_name(f"{base.name}-{number}") for number in range(2, 1000))
    return base if not base.exists() else next(path for path in candidates if not path.exists())
