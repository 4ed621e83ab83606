"""What levels prints: the rates and peaks side by side, the formulas, and the schedules that do not fit."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.console import make_table
from experiments.levels_rows import BUBBLE_TOLERANCE, PEAK_TOLERANCE, Formula, Row, places
from rrfp_jax.schedules.formulas import PeakFormula

_RANKED = ("table", "strict", "hint")


def show_levels(console: Console, rows: Sequence[Row], refused: Mapping[str, str], *, given: Mapping[str, Any]) -> None:
    """All levels of all schedules, the best strict execution first."""
    rows = sorted(rows, key=lambda row: (round(row.strict.bubble, 6), row.ideal.schedule))
    console.print(_bubbles(rows), _peaks(rows), _formulas(rows))
    _explain(console, given)
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
        f"(n): place by bubble, equal ones share it; *: more than {points} or {percent} from the table",
    ):
        console.print(line, soft_wrap=True)


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
