"""Rows that compare one schedule at three levels: where the levels disagree, and how rows are printed and written."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.common.console import make_table
from rrfp_jax.commands.simulate_reports import Formula
from rrfp_jax.schedules.formulas import Levels, PeakFormula

BUBBLE_TOLERANCE = 0.02
"""Difference above which two bubble rates disagree."""
PEAK_TOLERANCE = 0.02
"""Distance from 1 above which the ratio of two peaks is a disagreement."""

_RANKED = ("table", "strict", "hint")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Costs of running the table by the arbiters."""

    bubble: float
    """Bubble rate, mean over the steps."""
    peak: float
    """Activations of the fullest stage in any step, in those of one microbatch on a whole stage."""
    makespan_ms_mean: float
    """Time from first start to last end, mean over the steps."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of one schedule at all levels."""

    ideal: Levels
    """Figures of formula and ideal table."""
    formulas: Sequence[tuple[Formula, bool]]
    """All closed formulas, each with whether it holds here."""
    strict: Execution
    hint: Execution
    """Execution in which the table only ranks the ready tasks."""

    @property
    def bubbles(self) -> dict[str, float | None]:
        """Bubble rates by level; None where no formula holds."""
        return {
            "paper": self.ideal.published_rate,
            "closed form": self.ideal.fitted_rate,
            "table": max(0.0, self.ideal.table_rate),
            "strict": self.strict.bubble,
            "hint": self.hint.bubble,
        }

    @property
    def peaks(self) -> dict[str, float | None]:
        """Peaks by level; None where no formula holds."""
        by_formula = any(holds for formula, holds in self.formulas if isinstance(formula, PeakFormula))
        return {
            "formula": self.ideal.formula_peak if by_formula else None,
            "table": self.ideal.table_peak,
            "strict": self.strict.peak,
            "hint": self.hint.peak,
        }

    @property
    def bubble_disagrees(self) -> list[str]:
        """The levels whose bubble differs from the ideal table's."""
        return _far(self.bubbles, self.ideal.table_rate, BUBBLE_TOLERANCE)

    @property
    def peak_disagrees(self) -> list[str]:
        """The levels whose peak differs from the table's."""
        return _far(self.peaks, self.ideal.table_peak, PEAK_TOLERANCE * self.ideal.table_peak)


def places(rates: Sequence[float | None]) -> list[int]:
    """Returns the place of each bubble rate, 1 for the smallest; equal rates share one."""
    rounded = [round(rate or 0.0, 6) for rate in rates]
    return [1 + sum(other < rate for other in rounded) for rate in rounded]


def _far(levels: Mapping[str, float | None], expected: float, tolerance: float) -> list[str]:
    return [level for level, x in levels.items() if x is not None and abs(x - expected) > tolerance]


def show_levels(console: Console, rows: Sequence[Row], refused: Mapping[str, str], *, given: Mapping[str, Any]) -> None:
    """Prints all levels of all schedules, the best strict execution first."""
    rows = sorted(rows, key=lambda row: (round(row.strict.bubble, 6), row.ideal.schedule))
    _explain(console, given)
    console.print(_bubbles(rows), _peaks(rows), _formulas(rows))
    for name, reason in refused.items():
        console.print(f"{name} is left out: {reason}", soft_wrap=True)


def _bubbles(rows: Sequence[Row]) -> Table:
    table = make_table("bubble", "schedule", "paper", "closed form", "table", "strict", "hint", numeric=True)
    ranks = {level: places([row.bubbles[level] for row in rows]) for level in _RANKED}
    for number, row in enumerate(rows):
        cells = {level: _cell(rate, "{:.1%}", level in row.bubble_disagrees) for level, rate in row.bubbles.items()}
        for level in _RANKED:
            cells[level] += f" ({ranks[level][number]:2})"
        table.add_row(row.ideal.schedule, *cells.values())
    return table


def _peaks(rows: Sequence[Row]) -> Table:
    levels = ("formula", "table", "strict", "hint")
    table = make_table("peak memory, and makespan", "schedule", *levels, "strict ms", "hint ms", numeric=True)
    for row in rows:
        cells = [_cell(peak, "{:.4g}", level in row.peak_disagrees) for level, peak in row.peaks.items()]
        makespans_ms = (row.strict.makespan_ms_mean, row.hint.makespan_ms_mean)
        table.add_row(row.ideal.schedule, *cells, *(f"{ms:,.3f}" for ms in makespans_ms))
    return table


def _explain(console: Console, given: Mapping[str, Any]) -> None:
    slots, durations_ms = (", ".join(f"{x:g}" for x in given[name]) for name in ("slot_lengths", "durations_ms"))
    noise = f", jitter {given['jitter']}, {given['steps']} steps" if given["jitter"] else ""
    window = {"table": "the table's own peak", None: "the default"}.get(given["window"], given["window"])
    points, percent = f"{BUBBLE_TOLERANCE * 100:g} points of bubble", f"{PEAK_TOLERANCE:.0%} of memory"
    for line in (
        f"paper, closed form, table: in slots of {slots} for F, I, W of a whole stage; '-': no formula holds",
        f"strict, hint: the table executed, F, I, W {durations_ms} ms, {given['comm']} {given['comm_ms']:g} ms{noise}",
        f"hint: the table ranks what is ready; window: {window}",
        "(n): the schedule's place by bubble at that level, 1 is the smallest; equal ones share it",
        f"*: more than {points} or {percent} away from the column table",
    ):
        console.print(line, soft_wrap=True)


def as_json(rows: Sequence[Row], refused: Mapping[str, str]) -> dict[str, Any]:
    """Returns the report for programs: numbers by schedule and level, and the reasons of those that do not fit."""
    return {"schedules": {row.ideal.schedule: _row_as_json(row) for row in rows}, "refused": dict(refused)}


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        "formula": {
            "bubble_paper": row.bubbles["paper"],
            "bubble_closed_form": row.bubbles["closed form"],
            "peak": row.peaks["formula"],
            "formulas": [
                {"of": _subject(form), "text": form.text, "validity": form.where.text, "holds": holds}
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
            validity = form.where.text if holds else f"not here: {form.where.text}"
            table.add_row(row.ideal.schedule, _subject(form), form.text, validity)
    return table


def _subject(formula: Formula) -> str:
    if isinstance(formula, PeakFormula):
        return "peak"
    return "bubble, paper" if formula.published else "bubble, closed form"


def _cell(value: float | None, form: str, is_marked: bool) -> str:
    return ("-" if value is None else form.format(value)) + ("*" if is_marked else " ")
