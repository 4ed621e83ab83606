"""How a model's chunks form a pipeline: placement, graph, shared parameters, and copies for two directions."""

from collections.abc import Sequence
from dataclasses import replace

from rrfp_jax.programs.chunk import Chunk, param_specs
from rrfp_jax.programs.shapes import holders
from rrfp_jax.schedules import ScheduleTable
from rrfp_jax.tasks import Edge, PipelineGraph, Placement


def fitted_placement(chunks: Sequence[Chunk], placement: Placement | None, table: ScheduleTable | None) -> Placement:
    """The placement given, or the table's; raises ValueError where it does not fit the chunks."""
    if placement is None:
        if table is None:
            raise ValueError("no placement is given: pass placement=linear(num_stages), looped(...), or a schedule")
        placement = table.placement
    if placement.num_chunks != len(chunks):
        raise ValueError(
            f"{len(chunks)} chunks do not fit a placement of {placement.num_chunks} chunks on {placement.num_stages} "
            f"stages: cut the model into {placement.num_chunks} chunks"
        )
    return placement


def model_graph(
    chunks: Sequence[Chunk],
    edges: Sequence[Edge] | None,
    table: ScheduleTable | None,
) -> PipelineGraph:
    """The table's graph, or the model's own for one microbatch, with the parameters that are shared.

    ``edges`` None means the table's, or a chain. Raises ValueError where table, edges and chunks differ.
    """
    num_chunks, shared = len(chunks), _shared_groups(chunks)
    if table is None:
        if edges is None:
            edges = [Edge(c, c + 1) for c in range(num_chunks - 1)]
        return PipelineGraph(num_chunks, 1, tuple(edges), shared=shared)
    graph = replace(table.graph, shared=shared)
    if edges is not None and set(edges) != set(graph.edges):
        raise ValueError(
            f"schedule {table.name!r} is for the edges {_edge_text(graph.edges)}, the model has "
            f"{_edge_text(edges)}: build the schedule for these"
        )
    if not all(any(set(copies) <= set(group) for group in shared) for copies in table.graph.shared):
        raise ValueError(
            f"schedule {table.name!r} runs copies of the model in opposite directions: give the chunks twice, "
            "as mirrored(chunks) makes them"
        )
    return graph


def mirrored(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks twice, for bidirectional schedules: the copies share all their layers with the originals."""

    def tied(chunk: Chunk, suffix: str) -> Chunk:
        return replace(chunk, name=chunk.name + suffix, shared=frozenset(param_specs(chunk)))

    return [*(tied(chunk, "") for chunk in chunks), *(tied(chunk, " (copy)") for chunk in chunks)]


def _shared_groups(chunks: Sequence[Chunk]) -> tuple[tuple[int, ...], ...]:
    names = sorted({name for chunk in chunks for name in chunk.shared})
    return tuple(sorted({tuple(holders(chunks, name)) for name in names}))


def _edge_text(edges: Sequence[Edge]) -> str:
    return ", ".join(f"{e.source}->{e.target}" for e in sorted(edges))
