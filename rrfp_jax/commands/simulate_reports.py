"""The reports of simulate: one run in detail, several side by side, the list of names, and the view of one schedule.

The view's slots and formulas take the durations of a *whole stage*: those of a chunk, times the chunks of a stage.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from rrfp_jax.commands.common.console import make_table
from rrfp_jax.commands.studies import RULES, Profile, chunk_durations
from rrfp_jax.core import READY, SCHEDULE, STRICT, Ordering, hint_names
from rrfp_jax.schedules import ScheduleRequest, schedule_entry, schedule_names
from rrfp_jax.schedules.formulas import (
    BubbleFormula,
    PeakFormula,
    Sizes,
    bubble_formulas,
    compare,
    peak_formula,
)
from rrfp_jax.schedules.registry import build_schedule, chunks_per_stage
from rrfp_jax.schedules.slots import SlotLengths, drawing, execute, per_stage
from rrfp_jax.schedules.timeline import IdleReason
from rrfp_jax.simulation import Costs, Machine, Simulation, simulate

_HINT_MEANINGS = {
    "bf": "rounds of one backward, then one forward; smaller chunk first among forwards (the paper's default)",
    "bf-deep": "as bf, but the larger chunk first among forwards (the default with several chunks per stage)",
    "fb": "rounds of one forward, then one backward",
    "b-priority": "any ready backward before any forward",
    "f-priority": "any ready forward before any backward",
    "bfw": "bf on a split backward: a weight gradient runs where nothing else can",
    SCHEDULE: "rank in the table of --schedule",
}


def show_names(console: Console) -> None:
    """Print every schedule and every hint."""
    schedules = make_table("schedules", "name", "backward", "chunks per stage", "placement", "needs", "source")
    for name in schedule_names():
        entry = schedule_entry(name)
        shape, backward = entry.shape, "I + W" if entry.split_backward else "B"
        chunks = f"{shape.chunks_per_stage}{'' if shape.fixed_chunks else ' or other'}"
        schedules.add_row(name, backward, chunks, shape.words, entry.constraints, entry.source)
    hints = make_table("hints", "name", "meaning")
    for name in hint_names():
        hints.add_row(name, _HINT_MEANINGS[name])
    console.print(schedules, hints)


def show_run(console: Console, label: str, result: Mapping[str, Any], bounds: Sequence[str]) -> None:
    """Print the figures of one run, and those of its stages."""
    makespans = result["makespan_ms"]
    bubbles, idle = result["stage_bubbles"], result["idle_ms"]
    spread = f" ({min(makespans):,.3f} to {max(makespans):,.3f})" if len(makespans) > 1 else ""
    numbers = make_table(f"{label}, {len(makespans)} {'steps' if len(makespans) > 1 else 'step'}", "", "", header=False)
    numbers.add_row("makespan", f"{result['makespan_ms_mean']:,.3f} ms{spread}")
    numbers.add_row("step time", f"{result['step_ms_mean']:,.3f} ms")
    numbers.add_row("bubble", f"{result['bubble_fraction']:.2%}")
    numbers.add_row("lower bound", f"{result['lower_bound_ms']:,.3f} ms for any order")
    if result["upper_bound_ms"] is not None:
        numbers.add_row("upper bound", f"{result['upper_bound_ms']:,.3f} ms for bf, by the paper")
    if "optimum_ms" in result:
        proof = "proven" if result["optimum_is_proven"] else "best found in time, not proven"
        numbers.add_row("optimum", f"{result['optimum_ms']:,.3f} ms ({proof})")
    reasons = [reason for reason in IdleReason if any(stage.get(reason) for stage in idle)]
    engines = engine_columns(result, has_memory=True)
    headings = ("stage", "bubble", "may hold", "in flight", "memory", *engines, *(f"{r} ms" for r in reasons))
    stages = make_table("stages", *headings, numeric=True)
    for stage, bubble in enumerate(bubbles):
        stages.add_row(
            str(stage),
            f"{bubble:.2%}",
            bounds[stage],
            str(result["peak_in_flight"][stage]),
            f"{result['peak_memory'][stage]:.4g}",
            *(cells[stage] for cells in engines.values()),
            *(f"{idle[stage].get(reason, 0.0):,.1f}" for reason in reasons),
        )
    console.print(numbers, stages)
    console.print(
        "in flight, memory: most microbatches held at once, counted whole and by their chunks; may hold: the limit of "
        "the one (window) or the other (footprint); ms: idle time per step, by reason"
    )
    for line in engines_in_words(result):
        console.print(line, soft_wrap=True)


def show_comparison(console: Console, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print several runs, one per row."""
    headings = ("order", "makespan ms", "of the first", "bubble", "in flight", "memory", "work ms", "lower bound ms")
    table = make_table("comparison", *headings, numeric=True)
    first = next(iter(results.values()))
    for label, result in results.items():
        table.add_row(
            label,
            f"{result['makespan_ms_mean']:,.3f}",
            f"{result['makespan_ms_mean'] / first['makespan_ms_mean']:.3f}" if first["makespan_ms_mean"] else "-",
            f"{result['bubble_fraction']:.2%}",
            str(max(result["peak_in_flight"])),
            f"{max(result['peak_memory']):.4g}",
            f"{result['work_ms']:,.3f}",
            f"{result['lower_bound_ms']:,.3f}",
        )
    console.print(table)
    console.print("in flight, memory: of the stage that holds most, in microbatches; work: of all stages, per step")
    for label, result in results.items():
        if result.get("bottleneck"):
            console.print(f"{label}: {result['bottleneck']}", soft_wrap=True)
    if any(abs(r["work_ms"] - first["work_ms"]) > 1e-6 * first["work_ms"] for r in results.values()):
        console.print("the work differs: durations are those of a chunk, and not all entries have equally many")


def engine_columns(figures: Mapping[str, Any], *, has_memory: bool = False) -> dict[str, list[str]]:
    """Returns columns of the table of stages by their headings, one for each engine that any stage has.

    Where operations move memory, the peaks of the device and of the host follow; with ``has_memory`` the table has the
    device's already.
    """
    busy: list[dict[str, float]] = figures["engine_busy"]
    columns = {
        f"{lane} busy": [f"{of_stage[lane]:.1%}" if lane in of_stage else "-" for of_stage in busy]
        for lane in sorted({lane for of_stage in busy for lane in of_stage})
    }
    if "host_peak" in figures:
        if not has_memory:
            columns["memory"] = [f"{peak:.4g}" for peak in figures["peak_memory"]]
        columns["on host"] = [f"{peak:.4g}" for peak in figures["host_peak"]]
    return columns


def engines_in_words(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields sentences that explain these columns, and that name the engine that holds the step up."""
    if any(figures.get("engine_busy", ())):
        yield "busy: the share of the makespan in which an engine beside the stage runs its operations"
    if "host_peak" in figures:
        yield (
            "memory, on host: the most microbatches whose activations were on the device at once, which may hold "
            "bounds, and that operations had moved away"
        )
    if "makespan_ms_without_engines" in figures:
        yield f"if engines took no time, the makespan would be {figures['makespan_ms_without_engines']:,.3f} ms"
    if figures.get("bottleneck"):
        yield figures["bottleneck"]


Formula = BubbleFormula | PeakFormula


def formulas_of(name: str, request: ScheduleRequest, lengths: SlotLengths) -> list[tuple[Formula, bool]]:
    """Returns the closed formulas of a schedule, each with whether it holds for these sizes and lengths of a whole
    stage. Formulas are for chains: a request with a graph has none."""
    if request.graph is not None:
        return []
    sizes, peak = Sizes.of(name, request, lengths), peak_formula(name)
    formulas: list[Formula] = [*bubble_formulas(name), *([peak] if peak else [])]
    return [(formula, formula.where.holds(sizes)) for formula in formulas]


class ScheduleView:
    """One schedule at one size, with a step that the simulator runs of it, strictly and with foresight.

    Args:
        request: the sizes, and the durations of one chunk.

    Attributes:
        parts: relative sizes of the chunks; empty where all are equal.

    Raises ValueError, with the remedy, where the sizes do not fit.
    """

    def __init__(self, name: str, request: ScheduleRequest, machine: Machine) -> None:
        if name.endswith(".csv"):
            raise ValueError(
                f"show has nothing to say of {name} beyond its rows: name a schedule, or simulate the table"
            )
        if not sum(request.durations_ms):
            raise ValueError("these durations-ms leave nothing to do: give at least one number above 0")
        times = chunks_per_stage(name, request)
        forward_ms, input_gradient_ms, weight_gradient_ms = request.durations_ms
        of_stage_ms: Profile = (times * forward_ms, times * input_gradient_ms, times * weight_gradient_ms)
        request = replace(request, durations_ms=of_stage_ms)
        self.lengths, self.entry = SlotLengths(*of_stage_ms), schedule_entry(name)
        self.table = table = build_schedule(name, request)
        cut = self.entry.chunk_parts
        self.parts: tuple[int, ...] = cut(request.num_stages) if cut else ()
        self.levels, self.formulas = compare(name, request, self.lengths), formulas_of(name, request, self.lengths)
        costs = Costs(durations_ms=chunk_durations(table, of_stage_ms, self.parts))
        self.strict, self.foresight = (
            simulate(
                Ordering(schedule=table, consume=consume).resolve(table.placement, table.graph).arbiters(RULES),
                costs,
                machine=machine,
            )
            for consume in (STRICT, READY)
        )

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
        table, levels, entry = self.table, self.levels, self.entry
        backward = "I and W" if table.graph.split else "B"
        console.print(f"{table.name}: {entry.shape.words}; backward {backward}; source: {entry.source}", soft_wrap=True)
        for stage, order in enumerate(table.orders):
            console.print(f"stage {stage}: {' '.join(map(str, order))}", soft_wrap=True)
        if has_slots:
            slots = execute(table, per_stage(table, self.lengths, self.parts))
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


def _step_ms(simulation: Simulation) -> float:
    return simulation.timeline.makespan_s() * 1e3
