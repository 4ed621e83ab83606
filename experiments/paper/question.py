"""A question of the evaluation: which cells to measure, how to measure one, and what to write about the rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.paper.repeats import Rounds
from experiments.paper.rows import Cell, Value

Measured = Sequence[Mapping[str, Value]]
"""The figures of each method of a cell."""
Rows = Sequence[Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Question:
    """One of the report's sections."""

    name: str
    title: str
    settings: tuple[str, ...]
    """The columns that name a cell."""
    figures: tuple[str, ...]
    """The columns that a method's row has beside them."""
    cells: Callable[[bool], Sequence[Cell]]
    """The cells to measure; given whether quickly."""
    measure: Callable[[Cell], Measured]
    """Measures a cell; in a process of its own, so a function of a module."""
    write: Callable[[Rows, Path], str]
    """The section's text from the rows; pictures go into the folder given."""
    is_timed: bool = False
    """Whether the real runtime is measured: then one cell at a time, and nothing beside it."""
    rounds: Rounds | None = None
    """How a timed question is repeated; None: what it measures is no time."""
    lacks: Callable[[], str | None] = lambda: None
    """What it needs and this machine has not, in a sentence; None: nothing."""
