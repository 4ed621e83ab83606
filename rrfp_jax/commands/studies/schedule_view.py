"""The view of one schedule, ``rrfp simulate --schedule NAME --show``: its rows, its memory, its formulas, and one step.

Slots and formulas take the durations of a *whole stage*: those of a chunk, times the chunks of a stage.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from rrfp_jax.commands.common.console import make_table
from rrfp_jax.commands.studies.durations import Profile
from rrfp_jax.commands.studies.machine import RULES, chunk_durations
from rrfp_jax.core import READY, STRICT, Ordering
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, schedule_entry
from rrfp_jax.schedules.formulas import (
    BubbleFormula,
    Levels,
    PeakFormula,
    Sizes,
    bubble_formulas,
    compare,
    peak_formula,
)
from rrfp_jax.schedules.registry import build_schedule, chunks_per_stage
from rrfp_jax.schedules.slots import SlotLengths, drawing, execute, per_stage
from rrfp_jax.simulation import Costs, Machine, Simulation, simulate

Formula = BubbleFormula | PeakFormula


def formulas_of(name: str, request: ScheduleRequest, lengths: SlotLengths) -> list[tuple[Formula, bool]]:
    """Returns the closed formulas of a schedule, each with whether it holds for these sizes and lengths of a whole
    stage. Formulas are for chains: a request with a graph has none."""
    if request.graph is not None:
        return []
    sizes, peak = Sizes.of(name, request, lengths), peak_formula(name)
    formulas: list[Formula] = [*bubble_formulas(name), *([peak] if peak else [])]
    return [(formula, formula.where.holds(sizes)) for formula in formulas]


@dataclass(frozen=True, kw_only=True)
class ScheduleView:
    """One schedule at one size, with the steps that the simulator has run of it."""

    request: ScheduleRequest
    """The sizes, and F, I and W of a whole stage in milliseconds."""
    table: ScheduleTable
    levels: Levels
    formulas: Sequence[tuple[Formula, bool]]
    parts: tuple[int, ...]
    """Relative sizes of the chunks; empty where all are equal."""
    strict: Simulation
    foresight: Simulation

    def print_json(self) -> None:
        """Print the view as one JSON object on one line."""
        table, levels = self.table, self.levels
        view = {
            "schedule": table.name,
            "rows": [[*map(str, order)] for order in table.orders],
            "stage_of_chunk": [*table.placement.stage_of_chunk],
            "peak_activations": [*table.peak_activations(self.parts)],
            "peak_in_flight": [*table.peak_in_flight()],
            "bubble": {"paper": levels.published_rate, "closed_form": levels.fitted_rate, "table": levels.table_rate},
            "formulas": [{"text": formula.text, "holds": holds} for formula, holds in self.formulas],
            "step_ms": {"strict": _step_ms(self.strict), "foresight": _step_ms(self.foresight)},
        }
        print(json.dumps(view), flush=True)

    def print_text(self, console: Console, *, has_slots: bool) -> None:
        """Print the view for people; ``has_slots`` draws the ideal slots below the rows."""
        table, levels, entry = self.table, self.levels, schedule_entry(self.table.name)
        backward = "I and W" if table.graph.split else "B"
        console.print(f"{table.name}: {entry.shape.words}; backward {backward}; source: {entry.source}", soft_wrap=True)
        for stage, order in enumerate(table.orders):
            console.print(f"stage {stage}: {' '.join(map(str, order))}", soft_wrap=True)
        if has_slots:
            slots = execute(table, per_stage(table, SlotLengths(*self.request.durations_ms), self.parts))
            shortest = min(end - start for start, end in slots.spans.values() if end > start)
            console.print(drawing(slots, shortest), soft_wrap=True, end="")

        stages = make_table("stages", "stage", "chunks", "tasks", "activations", "microbatches", numeric=True)
        held = zip(table.peak_activations(self.parts), table.peak_in_flight(), strict=True)
        for stage, (activations, microbatches) in enumerate(held):
            chunks = ", ".join(map(str, table.placement.chunks_of_stage[stage]))
            stages.add_row(str(stage), chunks, str(len(table.orders[stage])), f"{activations:g}", str(microbatches))
        console.print(stages)

        for formula, holds in self.formulas:
            console.print(f"formula {formula.text}: {'holds' if holds else 'does not hold'} ({formula.where.text})")
        closed_form = (levels.fitted_rate, "our closed form")
        rates = (levels.published_rate, "published"), closed_form, (levels.table_rate, "ideal slots")
        peaks = (levels.formula_peak, "formula"), (levels.table_peak, "table")
        steps = (_step_ms(self.strict), "strict"), (_step_ms(self.foresight), "with foresight")
        console.print("bubble: " + ", ".join(f"{rate:.1%} ({name})" for rate, name in rates if rate is not None))
        console.print("most activations: " + ", ".join(f"{n:g} ({name})" for n, name in peaks if n is not None))
        console.print("simulated step: " + ", ".join(f"{ms:.6g} ms ({name})" for ms, name in steps))


def view_schedule(name: str, request: ScheduleRequest, machine: Machine) -> ScheduleView:
    """Build the table of a schedule and simulate one step of it, strictly and with foresight.

    ``request`` has the durations of one chunk. Raises ValueError, with the remedy, where the sizes do not fit.
    """
    if name.endswith(".csv"):
        raise ValueError(f"show has nothing to say of {name} beyond its rows: name a schedule, or simulate the table")
    if not sum(request.durations_ms):
        raise ValueError("these durations-ms leave nothing to do: give at least one number above 0")
    times = chunks_per_stage(name, request)
    forward_ms, input_gradient_ms, weight_gradient_ms = request.durations_ms
    of_stage_ms: Profile = (times * forward_ms, times * input_gradient_ms, times * weight_gradient_ms)
    request = replace(request, durations_ms=of_stage_ms)
    lengths, entry = SlotLengths(*of_stage_ms), schedule_entry(name)
    table = build_schedule(name, request)
    parts = entry.chunk_parts(request.num_stages) if entry.chunk_parts else ()
    costs = Costs(durations_ms=chunk_durations(table, of_stage_ms, parts))

    def step(consume: str) -> Simulation:
        order = Ordering(schedule=table, consume=consume).resolve(table.placement, table.graph)
        return simulate(order.arbiters(RULES), costs, machine=machine)

    return ScheduleView(
        request=request,
        table=table,
        levels=compare(name, request, lengths),
        formulas=formulas_of(name, request, lengths),
        parts=parts,
        strict=step(STRICT),
        foresight=step(READY),
    )


def _step_ms(simulation: Simulation) -> float:
    return simulation.timeline.makespan_s() * 1e3
