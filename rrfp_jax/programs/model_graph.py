"""How a model's chunks form a pipeline: placement, graph, shared parameters, and copies for two directions."""

from collections.abc import Sequence
from dataclasses import replace

from rrfp_jax.programs.chunk import Chunk, check_chunks, param_specs
from rrfp_jax.programs.freezing import check_some_train, is_frozen
from rrfp_jax.programs.shapes import holders
from rrfp_jax.schedules import Edge, PipelineGraph, Placement, ScheduleTable


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
    """The table's graph, or the model's own for one microbatch, with the parameters that are shared and frozen.

    ``edges`` None means the table's, or a chain. Raises ValueError where table, edges and chunks differ, and where
    layers are frozen and nothing is left to train.
    """
    graph = _joined(chunks, edges, table)
    if any(chunk.frozen for chunk in chunks) and not any(map(graph.trains, range(graph.num_chunks))):
        raise ValueError(
            "no gradient reaches a layer that is not frozen, and nothing is left to train: freeze fewer layers, or let "
            "the edges to them carry gradients"
        )
    return graph


def _joined(chunks: Sequence[Chunk], edges: Sequence[Edge] | None, table: ScheduleTable | None) -> PipelineGraph:
    num_chunks, shared, frozen = len(chunks), _shared_groups(chunks), _frozen_chunks(chunks)
    if table is None:
        if edges is None:
            edges = [Edge(c, c + 1) for c in range(num_chunks - 1)]
        return PipelineGraph(num_chunks, 1, tuple(edges), shared=shared, frozen=frozen)
    graph = replace(table.graph, shared=shared, frozen=frozen)
    if edges is not None and {edge[:2] for edge in edges} == {edge[:2] for edge in graph.edges}:
        graph = replace(graph, edges=tuple(edges))
    elif edges is not None:
        raise ValueError(
            f"schedule {table.name!r} is for the edges {_edge_text(graph.edges)}, the model has "
            f"{_edge_text(edges)}: build the schedule for these"
        )
    copied = [set(holders(chunks, name)) for name in sorted({name for chunk in chunks for name in chunk.shared})]
    if not all(any(set(copies) <= each for each in copied) for copies in table.graph.shared):
        raise ValueError(
            f"schedule {table.name!r} runs copies of the model in opposite directions: give the chunks twice, "
            "as mirrored(chunks) makes them"
        )
    return graph


def mirrored(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks twice, for bidirectional schedules: the copies share all their layers with the originals."""

    def tied(chunk: Chunk, suffix: str) -> Chunk:
        return replace(chunk, name=chunk.name + suffix, shared=frozenset(param_specs(chunk)))

    chunks = check_chunks(chunks)
    return [*(tied(chunk, "") for chunk in chunks), *(tied(chunk, " (copy)") for chunk in chunks)]


def _shared_groups(chunks: Sequence[Chunk]) -> tuple[tuple[int, ...], ...]:
    names = sorted({name for chunk in chunks for name in chunk.tied})
    return tuple(sorted({tuple(holders(chunks, name)) for name in names}))


def _frozen_chunks(chunks: Sequence[Chunk]) -> frozenset[int]:
    """The chunks none of whose parameters change; raises ValueError where layers are frozen, and nothing trains."""
    if any(chunk.frozen for chunk in chunks):
        check_some_train(chunks)
    return frozenset(index for index, chunk in enumerate(chunks) if is_frozen(chunk))


def _edge_text(edges: Sequence[Edge]) -> str:
    return ", ".join(f"{e.source}->{e.target}" for e in sorted(edges))
