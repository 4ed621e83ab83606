"""One schedule at three levels, and where they disagree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rrfp_jax.schedules import ScheduleRequest
from rrfp_jax.schedules.formulas import BubbleFormula, PeakFormula, Sizes, bubble_formulas, peak_formula
from rrfp_jax.schedules.levels import Levels
from rrfp_jax.schedules.slots import SlotLengths

BUBBLE_TOLERANCE = 0.02
"""Bubble rates that differ by more disagree."""
PEAK_TOLERANCE = 0.02
"""Peaks whose ratio differs from 1 by more disagree."""

Formula = BubbleFormula | PeakFormula


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What it costs to run the table by the arbiters."""

    bubble: float
    """The bubble rate, mean over the steps."""
    peak: float
    """Activations of the fullest stage in any step, in those of one microbatch on a whole stage."""
    makespan_ms_mean: float
    """First start to last end, mean over the steps."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule."""

    ideal: Levels
    """Formula and ideal table."""
    formulas: Sequence[tuple[Formula, bool]]
    """All closed formulas, each with whether it holds here."""
    strict: Execution
    hint: Execution
    """The table ranks what is ready."""

    @property
    def bubbles(self) -> dict[str, float | None]:
        """By level; None where no formula holds."""
        return {
            "paper": self.ideal.published_rate,
            "closed form": self.ideal.fitted_rate,
            "table": max(0.0, self.ideal.table_rate),
            "strict": self.strict.bubble,
            "hint": self.hint.bubble,
        }

    @property
    def peaks(self) -> dict[str, float | None]:
        """By level; None where no formula holds."""
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


def formulas_of(name: str, request: ScheduleRequest, lengths: SlotLengths) -> list[tuple[Formula, bool]]:
    """The closed formulas of a schedule, each with whether it holds for these sizes and lengths of a whole stage."""
    sizes, peak = Sizes.of(name, request, lengths), peak_formula(name)
    formulas: list[Formula] = [*bubble_formulas(name), *([peak] if peak else [])]
    return [(formula, formula.holds(sizes)) for formula in formulas]


def places(rates: Sequence[float | None]) -> list[int]:
    """The place of each bubble rate, 1 for the smallest; equal rates share one."""
    rounded = [round(rate or 0.0, 6) for rate in rates]
    return [1 + sum(other < rate for other in rounded) for rate in rounded]


def _far(levels: Mapping[str, float | None], expected: float, tolerance: float) -> list[str]:
    return [level for level, x in levels.items() if x is not None and abs(x - expected) > tolerance]
