"""One schedule at three levels, and where they disagree."""

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp_jax.schedules import ScheduleRequest
from rrfp_jax.schedules.formulas import BubbleFormula, PeakFormula, Sizes, bubble_formulas, peak_formula
from rrfp_jax.schedules.slots import SlotLengths

BUBBLE_TOLERANCE = 0.02
"""Bubble rates that differ by more disagree."""
PEAK_TOLERANCE = 0.02
"""Peaks whose ratio differs from 1 by more disagree."""


@dataclass(frozen=True, kw_only=True)
class FormulaRow:
    """What the closed formulas of a schedule say; None outside their validity, or without any."""

    bubbles: Sequence[tuple[BubbleFormula, float | None]]
    """All of them with their rates, the paper's first."""
    peak_formula: PeakFormula | None
    peak: float | None
    peak_bound: float | None
    """Outside its validity the peak formula is still an upper bound."""

    def rate(self, *, published: bool) -> float | None:
        """The rate by the paper, or by our own closed form of the ideal table."""
        return next((rate for form, rate in self.bubbles if form.published is published and rate is not None), None)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What one way to run the table costs."""

    bubble: float
    """The bubble rate, mean over the steps."""
    peak: float
    """Activations of the fullest stage, in those of one microbatch on a whole stage."""
    makespan: float
    """First start to last end, mean over the steps: milliseconds, of the ideal table in the unit of its slots."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule."""

    schedule: str
    formula: FormulaRow
    table: Execution
    """The ideal slot table."""
    strict: Execution
    hint: Execution
    """The table ranks what is ready."""

    @property
    def bubbles(self) -> dict[str, float | None]:
        """By level."""
        return {
            "paper": self.formula.rate(published=True),
            "closed form": self.formula.rate(published=False),
            "table": self.table.bubble,
            "strict": self.strict.bubble,
            "hint": self.hint.bubble,
        }

    @property
    def peaks(self) -> dict[str, float | None]:
        """By level."""
        return {
            "formula": self.formula.peak,
            "table": self.table.peak,
            "strict": self.strict.peak,
            "hint": self.hint.peak,
        }

    @property
    def bubble_disagrees(self) -> list[str]:
        """The levels whose bubble differs from the ideal table's."""
        expected = self.table.bubble
        return [k for k, rate in self.bubbles.items() if rate is not None and abs(rate - expected) > BUBBLE_TOLERANCE]

    @property
    def peak_disagrees(self) -> list[str]:
        """The levels whose peak differs from the table's."""
        expected = self.table.peak
        return [k for k, x in self.peaks.items() if x is not None and abs(x - expected) > PEAK_TOLERANCE * expected]


def formula_row(name: str, request: ScheduleRequest, lengths: SlotLengths) -> FormulaRow:
    """The formulas of a schedule at these sizes; ``lengths`` are those of a whole stage."""
    sizes = Sizes.of(name, request, lengths)
    peak = peak_formula(name)
    bound = None if peak is None else float(max(peak.peak(sizes, stage) for stage in range(sizes.p)))
    return FormulaRow(
        bubbles=[(formula, formula.rate(sizes)) for formula in bubble_formulas(name)],
        peak_formula=peak,
        peak=bound if peak is not None and peak.holds(sizes) else None,
        peak_bound=bound,
    )


def places(rates: Sequence[float]) -> list[int]:
    """The place of each bubble rate, 1 for the smallest; equal rates share one."""
    rounded = [round(rate, 6) for rate in rates]
    return [1 + sum(other < rate for other in rounded) for rate in rounded]
