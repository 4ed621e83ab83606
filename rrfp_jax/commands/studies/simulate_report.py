"""The tables that simulate prints: one run in detail, several side by side, and the list of names."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from rrfp_jax.commands.common.console import make_table
from rrfp_jax.core import SCHEDULE, hint_names
from rrfp_jax.schedules import schedule_entry, schedule_names
from rrfp_jax.schedules.timeline import IdleReason

HINT_MEANINGS = {
    "bf": "rounds of one backward, then one forward; smaller chunk first among forwards (the paper's default)",
    "bf-deep": "as bf, but the larger chunk first among forwards (the default with several chunks per stage)",
    "fb": "rounds of one forward, then one backward",
    "b-priority": "any ready backward before any forward",
    "f-priority": "any ready forward before any backward",
    "bfw": "bf on a split backward: a weight gradient runs where nothing else can",
    SCHEDULE: "rank in the table of --schedule",
}


def show_names(console: Console) -> None:
    """Every schedule and every hint."""
    schedules = make_table("schedules", "name", "backward", "chunks per stage", "placement", "needs", "source")
    for name in schedule_names():
        entry = schedule_entry(name)
        shape = entry.shape
        schedules.add_row(
            name,
            "I + W" if entry.split_backward else "B",
            f"{entry.shape.chunks_per_stage}"
            if entry.shape.fixed_chunks
            else f"{entry.shape.chunks_per_stage} or other",
            shape.words,
            entry.constraints,
            entry.source,
        )
    hints = make_table("hints", "name", "meaning")
    for name in hint_names():
        hints.add_row(name, HINT_MEANINGS[name])
    console.print(schedules, hints)


def show_run(console: Console, label: str, result: Mapping[str, Any], bounds: Sequence[str]) -> None:
    """One run: its numbers, and its stages."""
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
    """Several runs, one per row."""
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
    """Columns of the table of stages, by their headings: one for each engine that any stage has, and, where operations
    move memory, the peaks of the device (left out with ``has_memory``: the table has it already) and the host."""
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
