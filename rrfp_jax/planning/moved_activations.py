"""How many activations a stage has under way at most, and how many of them may lie in host memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rrfp_jax.schedules import PipelineGraph, Task, TaskKind


@dataclass(frozen=True, kw_only=True)
class MovedActivations:
    """Of one stage whose operations move memory, in activations of a chunk and microbatch."""

    under_way: int
    """Between the start of F and the end of the backward at most, wherever they lie."""
    on_host: int
    """In host memory at most."""


def moved_activations(
    graph: PipelineGraph, chunks: Iterable[int], row: Sequence[Task] | None
) -> MovedActivations | None:
    """Those of a stage with these chunks; None where no operation frees any of them.

    ``row`` is what the stage computes in this very order; None: it keeps to none, and may have everything under way.
    """
    moving = [op for op in graph.ops if op.frees]
    pairs = [(c, m) for c in chunks if graph.has_backward(c) for m in graph.microbatches(c)]
    if not any(op.exists(*pair) for op in moving for pair in pairs):
        return None
    on_host = {pair for pair in pairs if any(op.keeps_on_host and op.exists(*pair) for op in moving)}
    if row is None:
        return MovedActivations(under_way=len(pairs), on_host=len(on_host))
    return MovedActivations(under_way=_peak(graph, row, set(pairs)), on_host=_peak(graph, row, on_host))


def _peak(graph: PipelineGraph, row: Sequence[Task], pairs: set[tuple[int, int]]) -> int:
    held = peak = 0
    for kind, chunk, m in row:
        if (chunk, m) in pairs:
            held += kind is TaskKind.F
            peak = max(peak, held)
            held -= kind is graph.accumulating_kind(chunk)
    return peak
