"""What simulate and emulate print about engines beside compute, and about memory that operations move."""

from collections.abc import Iterator, Mapping
from typing import Any


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
    """What these columns mean, and which engine holds the step up."""
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
