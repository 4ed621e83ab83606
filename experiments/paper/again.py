"""Measure questions a second time, and say whether the second rows agree with the first."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.paper.question import Question, Rows
from experiments.paper.repeats import AGREEING, disagreeing
from experiments.paper.rows import ORIGIN
from experiments.paper.run import measure_all, row_file, row_path

AGAIN = "again"
"""Name of the folder of the second measurement, inside that of the first."""


def measure_again(questions: Sequence[Question], folder: Path, console: Console, *, quick: bool, command: str) -> bool:
    """Returns whether all questions came out again. Raises ValueError for a question without rows to compare with."""
    for question in questions:
        if not row_file(question, folder).complete_rows():
            raise ValueError(f"{question.name} has not been measured in {folder}: run it without --again first")
    second = folder / AGAIN
    for question in questions:
        row_path(question, second).unlink(missing_ok=True)
    measure_all(questions, second, console, quick=quick, command=command)
    agree = True
    for question in questions:
        came, words = compared(question, *(row_file(question, where).complete_rows() for where in (folder, second)))
        agree &= came
        console.print(f"{question.name}: {words}")
    return agree


def compared(question: Question, once: Rows, again: Rows) -> tuple[bool, str]:
    """Returns whether the second rows agree with the first, and a sentence that says so."""
    if not again:
        return False, "the second run has no rows"
    if question.rounds is not None:
        ratios = question.rounds.ratios(once)
        found = disagreeing(ratios, question.rounds.ratios(again))
        words = f"{len(ratios) - len(found)} of {len(ratios)} ratios agree within their intervals"
        return len(found) <= (1 - AGREEING) * len(ratios), "; not ".join([words, *found])
    plain = {tuple(row[name] for name in row if name not in ORIGIN) for row in once}
    same = sum(tuple(row[name] for name in row if name not in ORIGIN) in plain for row in again)
    return same == len(again), f"{same} of {len(again)} rows are the same to the last digit"
