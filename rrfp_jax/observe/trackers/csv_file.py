"""``metrics.csv``: a column for every name, a line for every row.

A cell holds what JSON would: ``0.5``, ``true``, text as it is; it is empty where a row has no such name, and where the
value is null. When a run goes on, and when a row brings a name that is new, the file is written again from
``metrics.jsonl``, in one piece.
"""

import csv
import json
from collections.abc import Iterable
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from rrfp_jax.observe.output_files import replacing
from rrfp_jax.observe.trackers.columns import EVALUATION, STEP, Row, flat
from rrfp_jax.observe.trackers.interface import TrackedRun, Tracker

NAME = "metrics.csv"


def start(run: TrackedRun) -> Tracker:
    """Write the file anew with the rows that count."""
    return _CsvFile(run.path / NAME, run.past)


class _CsvFile:
    def __init__(self, path: Path, past: Iterable[Row]) -> None:
        self._path = path
        self._columns: dict[str, None] = dict.fromkeys([STEP])
        for row in past:
            self._columns |= dict.fromkeys(flat(row))
        self._file = self._written_again(flat(row) for row in past)

    def write(self, row: Row) -> None:
        values = flat(row)
        if values.keys() <= self._columns.keys():
            self._append(values)
            return
        self._columns |= dict.fromkeys(values)
        self._file.close()
        with self._path.open(newline="", encoding="utf-8") as file:
            cells = (_values(line) for line in csv.DictReader(file))
            self._file = self._written_again(chain(cells, [values]))

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - the file tells of rows only
        self._file.close()

    def _append(self, values: dict[str, Any]) -> None:
        csv.writer(self._file).writerow([_cell(values.get(name)) for name in self._columns])
        self._file.flush()

    def _written_again(self, rows: Iterable[dict[str, Any]]) -> TextIOWrapper:
        with replacing(self._path) as path, path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self._columns)
            writer.writerows([_cell(row.get(name)) for name in self._columns] for row in rows)
        return self._path.open("a", newline="", encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _values(cells: dict[str, str]) -> dict[str, Any]:
    """A line as it was written; of texts there is only the name of an evaluation's set."""
    return {name: cell if name == EVALUATION else json.loads(cell) for name, cell in cells.items() if cell}
