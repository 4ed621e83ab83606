"""Formula beside ideal table: the first two of the three levels at which schedules are compared.

The third, execution by the real core with links and jitter, is the simulator's. The levels may disagree; a ranking of
schedules holds only for the lengths (and links) that it names.
"""

from dataclasses import dataclass, replace

from rrfp_jax.schedules.formulas import Sizes, bubble_formulas, peak_formula
from rrfp_jax.schedules.registry import build_schedule, schedule_entry
from rrfp_jax.schedules.request import ScheduleRequest
from rrfp_jax.schedules.slots import SlotLengths, execute, per_stage


@dataclass(frozen=True, kw_only=True)
class Levels:
    """One schedule at one size and one set of lengths."""

    schedule: str
    published_rate: float | None
    """The paper's bubble rate, None where the paper gives none for these sizes and lengths."""
    fitted_rate: float | None
    """The rate by our own closed form of the ideal table."""
    table_rate: float
    """The bubble rate of the ideal table."""
    formula_peak: float | None
    """Activations of the fullest stage by formula, in those of one microbatch on a whole stage."""
    table_peak: float
    """The same of the table."""


def compare(name: str, request: ScheduleRequest, lengths: SlotLengths) -> Levels:
    """Both levels of a schedule; ``lengths`` are those of a whole stage, so that schedules do the same work.

    Formulas are for chains; where the request brings a graph there are none.
    They are also the profile of the automatic schedule. Raises ValueError where these sizes do not fit the schedule.
    """
    profile = (lengths.forward, lengths.input_gradient, lengths.weight_gradient)
    request = replace(request, durations_ms=profile)
    sizes = Sizes.of(name, request, lengths)
    table = build_schedule(name, request)
    cut = schedule_entry(name).chunk_parts
    parts = cut(request.num_stages) if cut else ()
    is_chain = request.graph is None
    peak = peak_formula(name) if is_chain else None
    return Levels(
        schedule=name,
        published_rate=_rate(name, sizes, published=True) if is_chain else None,
        fitted_rate=_rate(name, sizes, published=False) if is_chain else None,
        table_rate=execute(table, per_stage(table, lengths, parts)).bubble_rate,
        formula_peak=None if peak is None else max(peak.peak(sizes, stage) for stage in range(sizes.p)),
        table_peak=max(table.peak_activations(parts)),
    )


def _rate(name: str, sizes: Sizes, *, published: bool) -> float | None:
    rates = (formula.rate(sizes) for formula in bubble_formulas(name) if formula.published is published)
    return next((rate for rate in rates if rate is not None), None)
