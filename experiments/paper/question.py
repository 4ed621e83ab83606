"""Question of the evaluation: which cells to measure, how to measure one, and how to write about the rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.paper.repeats import Rounds
from experiments.paper.rows import Cell, Value

Measured = Sequence[Mapping[str, Value]]
"""Figures of each method of a cell."""
Rows = Sequence[Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Question that one section of the report answers."""

    name: str
    title: str
    settings: tuple[str, ...]
    """Names of the columns that identify a cell."""
    figures: tuple[str, ...]
    """Names of the columns that a method's row has beside them."""
    cells: Callable[[bool], Sequence[Cell]]
    """Function that returns the cells to measure, given whether quickly."""
    measure: Callable[[Cell], Measured]
    """Function that measures a cell, in a process of its own, so it is a function of a module."""
    write: Callable[[Rows, Path], str]
    """Function that returns the section's text from the rows and draws pictures into the given folder."""
    is_timed: bool = False
    """Whether the real runtime is measured, one cell at a time and with nothing beside it."""
    rounds: Rounds | None = None
    """Repetitions of a timed question; None: the measured figures are no times."""
    lacks: Callable[[], str | None] = lambda: None
    """Function that names, in a sentence, a requirement which this machine lacks; None: nothing is missing."""
