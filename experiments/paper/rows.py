"""Measured rows as lines of a CSV file: each cell's rows are added in one go, so that a killed run goes on.

A *cell* is the unit of measuring, named by its settings; it has one row for each method compared in it. Beside its
figures a row says how it came about: command, version, machine.
"""

import csv
import io
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rrfp_jax.version import __version__

Value = str | int | float
Cell = Mapping[str, Value]
"""Settings of a cell, plain values by name."""
ROWS_OF_CELL = "rows"
"""Column with the number of the cell's rows, so that a cell which was cut off is measured again."""
_PROGRAMS = ("rrfp_jax", "experiments")
"""Folders whose code produces the rows. Changes of rows and reports themselves leave the version as it is."""
ORIGIN = ("version", "machine", "command")


class RowFile:
    """Rows of one question. Raises ValueError where the file has other columns than this version writes."""

    def __init__(self, path: Path, settings: Sequence[str], figures: Sequence[str]) -> None:
        self.path, self.settings = path, tuple(settings)
        self.columns = (*settings, *figures, ROWS_OF_CELL, *ORIGIN)
        self.rows = self._read()

    def has(self, cell: Cell) -> bool:
        """Returns whether all rows of this cell are there."""
        return self._key(cell) in self._complete()

    def add(self, cell: Cell, measured: Sequence[Mapping[str, Value]], command: str) -> None:
        """Appends the rows of a cell, and has them on the disk before it returns."""
        origin = dict(zip(ORIGIN, (version(), machine(), command), strict=True))
        rows = [{**cell, **figures, ROWS_OF_CELL: len(measured), **origin} for figures in measured]
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            writer.writeheader()
        writer.writerows(rows)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())
        self.rows += [{name: str(value) for name, value in row.items()} for row in rows]

    def complete_rows(self) -> list[dict[str, str]]:
        """Returns the rows of whole cells."""
        complete = self._complete()
        return [row for row in self.rows if self._key(row) in complete]

    def _complete(self) -> set[tuple[str, ...]]:
        counts: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            counts[self._key(row)] = counts.get(self._key(row), 0) + 1
        return {self._key(row) for row in self.rows if counts[self._key(row)] == int(row[ROWS_OF_CELL])}

    def _key(self, cell: Mapping[str, Value]) -> tuple[str, ...]:
        return tuple(str(cell[name]) for name in self.settings)

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        if not text.endswith("\n"):  # a kill came in the middle of a line
            text = text[: text.rfind("\n") + 1]
            self.path.write_text(text, encoding="utf-8")
        reader = csv.DictReader(io.StringIO(text))
        if tuple(reader.fieldnames or ()) != self.columns:
            raise ValueError(f"{self.path} has other columns than this version writes: move it away, or give --fresh")
        rows = list(reader)
        self._drop_cut_off(rows)
        return rows

    def _drop_cut_off(self, rows: list[dict[str, str]]) -> None:
        """Removes the rows of a cell that was cut off, so that measuring it again does not double them."""
        self.rows = rows
        complete = self._complete()
        whole = [row for row in rows if self._key(row) in complete]
        if len(whole) < len(rows):
            text = io.StringIO()
            writer = csv.DictWriter(text, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(whole)
            self.path.write_text(text.getvalue(), encoding="utf-8")
            rows[:] = whole


def selected(rows: Iterable[Mapping[str, str]], **wanted: Value) -> list[Mapping[str, str]]:
    """Returns the rows with these values."""
    texts = {name: str(value) for name, value in wanted.items()}
    return [row for row in rows if all(row[name] == text for name, text in texts.items())]


@cache
def version() -> str:
    """Returns the package's version, and in a checkout its commit, with a mark where its programs differ from that."""
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10}
    try:
        commit = subprocess.run([*git, "describe", "--always"], check=True, **options).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *_PROGRAMS], check=False, **options).returncode
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__} ({commit}{'-dirty' if changed else ''})"


@cache
def machine() -> str:
    """Returns a description of the machine that measures the figures."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores of {model}, Python {platform.python_version()}"
