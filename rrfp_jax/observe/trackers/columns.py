"""Rows as flat names and values, for trackers that know nothing nested.

``step`` stays ``step``. A list becomes ``peak_memory_bytes/0``, ``peak_memory_bytes/1`` ..., an object ``idle_s/fill``.
The rows that evaluation writes have the name of their set under ``evaluation``; their numbers become
``evaluation/NAME/loss`` wherever rows of both kinds share one name space.
"""

from collections.abc import Iterator, Mapping
from typing import Any

STEP, EVALUATION = "step", "evaluation"
Row = Mapping[str, Any]
"""One object of ``metrics.jsonl``, of plain JSON values."""


def flat(row: Row) -> dict[str, Any]:
    """Every value of a row that is no object or list, by its flat name."""
    return dict(_flat(row, ""))


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row by their names, the step left out; true is 1, and what is null or text does not appear."""
    prefix = f"{EVALUATION}/{row[EVALUATION]}/" if EVALUATION in row else ""
    return {
        f"{prefix}{name}": float(value)
        for name, value in flat(row).items()
        if name not in (STEP, EVALUATION) and isinstance(value, int | float)
    }


def step_of(row: Row) -> int:
    """The step of a row."""
    return int(row[STEP])


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _flat(item, f"{name}/{index}")
    else:
        yield name, value
