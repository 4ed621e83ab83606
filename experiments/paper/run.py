"""Measure the cells of questions. Cells that are there are kept, simulated ones run on all cores, real ones alone."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.paper.question import Measured, Question
from experiments.paper.rows import Cell, RowFile
from rrfp_jax.waiting import end_with_parent

QUICK, FULL = "quick", "full"
_LINE_EVERY_S = 20.0
"""Seconds between lines of progress where no bar can be drawn."""


PARTS = "results"
"""Name of the folder of rows and pictures, beside the report."""


def row_file(question: Question, folder: Path) -> RowFile:
    """Returns the rows of a question; ``folder`` is the report's."""
    return RowFile(row_path(question, folder), question.settings, question.figures)


def row_path(question: Question, folder: Path) -> Path:
    """Returns the path of a question's rows."""
    return folder / PARTS / f"{question.name}.csv"


def measure_all(
    questions: Sequence[Question], folder: Path, console: Console, *, quick: bool, command: str
) -> dict[str, int]:
    """Measures the missing cells. Returns how many cells of each question were measured now."""
    files = {question.name: row_file(question, folder) for question in questions}
    measured = {}
    for question in questions:
        if (lack := question.lacks()) is not None:
            console.print(f"{question.name}: not measured, it {lack}")
            continue
        rows = files[question.name]
        measured[question.name] = _measure(question, question.cells(quick), rows, console, command)
        for number, more in enumerate(question.rounds.further(quick) if question.rounds else (), 1):
            if question.rounds is None or question.rounds.is_settled(rows.complete_rows()):
                break
            console.print(f"{question.name}: intervals are still wide, round {number} more")
            measured[question.name] += _measure(question, more, rows, console, command)
    return measured


def _measure(question: Question, cells: Sequence[Cell], rows: RowFile, console: Console, command: str) -> int:
    """Measures the cells that are not there yet and returns how many they are."""
    missing = [cell for cell in cells if not rows.has(cell)]
    console.print(f"{question.name}: {len(cells)} cells, {len(cells) - len(missing)} of them there already")
    with _Report(console, question.name, len(missing)) as report:
        for cell, found in _measured(question, missing):
            rows.add(cell, found, command)
            report.advance()
    return len(missing)


def _measured(question: Question, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Measured]]:
    """Yields each cell with its figures, in the order in which they come."""
    if question.is_timed or len(cells) < 2:
        for cell in cells:
            yield cell, question.measure(cell)
        return
    cores, context = len(os.sched_getaffinity(0)), get_context("forkserver")
    with ProcessPoolExecutor(cores, mp_context=context, initializer=end_with_parent) as pool:
        waiting: dict[Future[Measured], Cell] = {pool.submit(question.measure, cell): cell for cell in cells}
        try:
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield waiting.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _Report:
    """Progress of measuring: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console, name: str, total: int) -> None:
        self._console, self._name, self._total, self._done = console, name, total, 0
        self._told_s = time.monotonic()
        self._bar = Progress(
            TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
        )
        self._bar.disable = not console.is_terminal
        self._task = self._bar.add_task(name, total=total)

    def __enter__(self) -> "_Report":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        self._done += 1
        self._bar.advance(self._task)
        now_s = time.monotonic()
        if self._bar.disable and now_s - self._told_s >= _LINE_EVERY_S:
            self._told_s = now_s
            self._console.print(f"{self._name}: {self._done} of {self._total} cells")
