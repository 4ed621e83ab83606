"""What levels prints: the rates and peaks side by side, the formulas, and the schedules that do not fit."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.durations import Profile
from experiments.levels_rows import BUBBLE_TOLERANCE, PEAK_TOLERANCE, Formula, Row, places
from experiments.tables import make_table
from rrfp_jax.schedules.formulas import PeakFormula

_RANKED = ("table", "strict", "hint")


def show_levels(
    console: Console, rows: Sequence[Row], refused: Mapping[str, str], *, slots: Profile, durations_ms: Profile
) -> None:
    """All levels of all schedules, the best strict execution first."""
    rows = sorted(rows, key=lambda row: (round(row.strict.bubble, 6), row.ideal.schedule))
    ranks = {level: places([row.bubbles[level] for row in rows]) for level in _RANKED}
    headings = ("schedule", "paper", "closed form", "table", "strict", "hint")
    bubbles = make_table("bubble", *headings, numeric=True)
    peaks = make_table("peak memory", "schedule", "formula", "table", "strict", "hint", numeric=True)
    for number, row in enumerate(rows):
        marked = row.bubble_disagrees
        bubbles.add_row(
            row.ideal.schedule,
            *(
                _cell(rate, "{:.1%}", level in marked) + (f" ({ranks[level][number]:2})" if level in _RANKED else "")
                for level, rate in row.bubbles.items()
            ),
        )
        marked = row.peak_disagrees
        peaks.add_row(row.ideal.schedule, *(_cell(x, "{:.4g}", level in marked) for level, x in row.peaks.items()))
    console.print(bubbles, peaks, _formulas(rows))
    console.print(f"formula and table: F, I, W of a whole stage are {_three(slots)}")
    console.print(f"strict and hint: the table executed, with {_three(durations_ms)} ms; hint: it ranks what is ready")
    console.print("paper, closed form: '-' where none holds; (n): place by bubble, equal ones share it")
    console.print(
        f"*: more than {BUBBLE_TOLERANCE * 100:g} points of bubble, or {PEAK_TOLERANCE:.0%} of memory, from the table"
    )
    for name, reason in refused.items():
        console.print(f"{name} is left out: {reason}", soft_wrap=True)


def as_json(rows: Sequence[Row], refused: Mapping[str, str]) -> dict[str, Any]:
    """The same for programs: numbers by schedule and level, and the reasons of those that do not fit."""
    return {"schedules": {row.ideal.schedule: _row_as_json(row) for row in rows}, "refused": dict(refused)}


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        "formula": {
            "bubble_paper": row.bubbles["paper"],
            "bubble_closed_form": row.bubbles["closed form"],
            "peak": row.peaks["formula"],
            "formulas": [
                {"of": _subject(form), "text": form.text, "validity": form.validity, "holds": holds}
                for form, holds in row.formulas
            ],
        },
        "table": {"bubble": row.bubbles["table"], "peak": row.peaks["table"]},
        "strict": asdict(row.strict),
        "hint": asdict(row.hint),
        "bubble_disagrees": row.bubble_disagrees,
        "peak_disagrees": row.peak_disagrees,
    }


def _formulas(rows: Sequence[Row]) -> Table:
    title = "formulas (p stages, m microbatches, v chunks per stage, stage s)"
    table = make_table(title, "schedule", "of", "formula", "holds for")
    for row in rows:
        for form, holds in row.formulas:
            validity = form.validity if holds else f"not here: {form.validity}"
            table.add_row(row.ideal.schedule, _subject(form), form.text, validity)
    return table


def _subject(formula: Formula) -> str:
    if isinstance(formula, PeakFormula):
        return "peak"
    return "bubble, paper" if formula.published else "bubble, closed form"


def _cell(value: float | None, form: str, is_marked: bool) -> str:
    return ("-" if value is None else form.format(value)) + ("*" if is_marked else " ")


def _three(lengths: Profile) -> str:
    return ", ".join(f"{length:g}" for length in lengths)
