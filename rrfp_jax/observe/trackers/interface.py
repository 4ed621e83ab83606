"""What a tracker is, and what it is told at its start."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rrfp_jax.observe.output_files import replacing
from rrfp_jax.observe.trackers.columns import Row
from rrfp_jax.observe.trackers.config import TrackingConfig
from rrfp_jax.record_files import parse_json, read_record


class Tracker(Protocol):
    """Gets the rows of a run; made by ``start`` in its module. All calls come from one thread, its own."""

    def write(self, row: Row) -> None:
        """The next row. What it raises has the tracker left out from then on."""

    def close(self, *, failed: bool) -> None:
        """There are no more rows, because the run has ended, or ``failed``; returns once all are written."""


@dataclass(frozen=True)
class PastRows:
    """The rows that a run has written before it went on; read where they are needed, for they may be many."""

    path: Path
    """``metrics.jsonl``."""
    num_bytes: int
    """Up to where it was past when the run went on."""

    def __iter__(self) -> Iterator[Row]:
        if not self.num_bytes:
            return
        with self.path.open("rb") as file:
            while file.tell() < self.num_bytes:
                yield json.loads(file.readline())

    def digest(self) -> "RowDigest":
        """Of all of them."""
        digest = RowDigest()
        for row in self:
            digest.add(row)
        return digest


class RowDigest:
    """Tells whether two sequences of rows are the same."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, row: Row) -> None:
        self._hash.update(json.dumps(row).encode() + b"\n")

    def __str__(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as its trackers see it."""

    path: Path
    """Its directory."""
    config: Mapping[str, Any]
    """Resolved, as plain data by section."""
    first_step: int
    """Whatever a tracker holds of this step and of later ones will be written again."""
    past: PastRows
    """All rows of earlier steps that count."""
    settings: TrackingConfig

    @property
    def name(self) -> str:
        """What people call it."""
        return self.settings.name or self.path.absolute().name

    def state(self, tracker: str) -> dict[str, Any]:
        """What a tracker has kept about the run when it last ran; empty where it has not, or where that is damaged."""
        try:
            state = parse_json(read_record(self.path / state_name(tracker))[0])
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def keep_state(self, tracker: str, state: Mapping[str, Any]) -> None:
        """Keep plain data for the next start."""
        with replacing(self.path / state_name(tracker)) as path:
            path.write_text(json.dumps(dict(state)), encoding="utf-8")


def state_name(tracker: str) -> str:
    """The file in the run directory with what a tracker keeps."""
    return f"{tracker}.json"
