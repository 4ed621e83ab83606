"""How a model's chunks form a pipeline: placement, graph, shared and frozen layers, and copies for two directions.

A chunk none of whose layers change runs its forward, and a backward only if a chunk before it trains; then that passes
the gradient through and does nothing else. In a chunk of which some layers change, the work for the gradients of the
others is left out: operations before the first layer that changes have no backward, unless the chunk sends a gradient
on. Frozen layers have neither accumulators nor optimizer state.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import jax

from rrfp_jax.field_rules import matches, nearest_name, with_type
from rrfp_jax.programs.chunk import Chunk, check_chunks, param_specs, trained_specs, whole_name
from rrfp_jax.programs.shapes import holders
from rrfp_jax.schedules import Edge, PipelineGraph, Placement, ScheduleTable


def fitted_placement(chunks: Sequence[Chunk], placement: Placement | None, table: ScheduleTable | None) -> Placement:
    """Returns the given placement, or the table's; raises ValueError where it does not fit the chunks."""
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
    """Returns the table's graph, or the model's own for one microbatch, with the parameters that are shared and frozen.

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
    tied = {name for chunk in chunks for name in chunk.tied}
    shared = tuple(sorted({tuple(holders(chunks, name)) for name in tied}))
    if any(chunk.frozen for chunk in chunks):
        _check_some_train(chunks)
    frozen = frozenset(index for index, chunk in enumerate(chunks) if _is_frozen(chunk))
    losses = frozenset(index for index, chunk in enumerate(chunks) if chunk.gives_loss)
    if table is None:
        if edges is None:
            edges = [Edge(c, c + 1) for c in range(len(chunks) - 1)]
        return PipelineGraph(len(chunks), 1, tuple(edges), shared=shared, frozen=frozen, losses=losses)
    graph = replace(table.graph, shared=shared, frozen=frozen, losses=losses)
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


def with_passes(
    graph: PipelineGraph, chunks: Sequence[Chunk], placement: Placement, *, deterministic: bool
) -> PipelineGraph:
    """Returns the graph with its passes: chunks on one stage whose layers are the same, all of them shared.

    Copies of a few layers stay copies. So do, in a deterministic run, chunks that do not feed each other, such as an
    embedding and a head that is tied to it: passes add up their gradients in one order, microbatch by microbatch, in
    which the head would wait for the embedding.
    """
    found: dict[Any, list[int]] = {}
    feeds = {(edge[0], edge[1]) for edge in graph.edges}
    for index, (chunk, stage) in enumerate(zip(chunks, placement.stage_of_chunk, strict=True)):
        layers = param_specs(chunk)
        if layers and chunk.shared.issuperset(layers) and not chunk.tied.isdisjoint(layers):
            key = (
                stage,
                frozenset(layers),
                chunk.frozen,
                None if chunk.own.names is None else (*chunk.own.names.items(),),
            )
            group = found.setdefault(key, [])
            if not group or not deterministic or any((other, index) in feeds for other in group):
                group.append(index)
    return replace(graph, passes=tuple(tuple(group) for group in found.values() if len(group) > 1))


def as_held(chunks: Sequence[Chunk], graph: PipelineGraph) -> tuple[Chunk, ...]:
    """Returns the chunks as they hold parameters: those of later passes hold none, and what only passes of one chunk
    share is not shared."""
    if not graph.passes:
        return tuple(chunks)
    found = []
    for index, chunk in enumerate(chunks):
        if graph.holder(index) != index:
            found.append(replace(chunk, init=_nothing, shared=frozenset(), frozen=frozenset()))
            continue
        others = {name for c, other in enumerate(chunks) if graph.holder(c) != index for name in other.shared}
        found.append(replace(chunk, shared=chunk.shared & others))
    return tuple(found)


def _nothing(key: jax.Array) -> dict[str, Any]:
    del key
    return {}


def mirrored(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Returns the chunks twice, for bidirectional schedules: the copies share all their layers with the originals."""

    def tied(chunk: Chunk, suffix: str) -> Chunk:
        return replace(chunk, name=chunk.name + suffix, shared=frozenset(param_specs(chunk)))

    chunks = check_chunks(chunks)
    return [*(tied(chunk, "") for chunk in chunks), *(tied(chunk, " (copy)") for chunk in chunks)]


def _edge_text(edges: Sequence[Edge]) -> str:
    return ", ".join(f"{e.source}->{e.target}" for e in sorted(edges))


# -- freezing ----------------------------------------------------------------------------------------------------------


def freeze(chunks: Sequence[Chunk], patterns: Sequence[str]) -> list[Chunk]:
    """Returns the chunks with the layers frozen that some pattern names, beside those that are frozen already.

    A pattern is a layer's name (``projector``), the beginning of a name up to a dot (``vision`` for ``vision.patches``
    and ``vision.layers.3``), or a glob as :mod:`fnmatch` has it (``decoder.layers.[0-7]``, ``*norm``), in which ``*``
    matches dots too.

    Raises ValueError, in one sentence with the remedy, for a pattern that matches no layer, and where nothing would be
    left to train.
    """
    chunks, named = check_chunks(chunks), cast(Any, patterns)
    given = list(named) if isinstance(named, Iterable) else [named]
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(f"the layers to freeze are given as {with_type(patterns)}: give a list of patterns")
    layers = [tuple(param_specs(chunk)) for chunk in chunks]
    names = list(dict.fromkeys(whole_name(name) for own in layers for name in own))
    for pattern in given:
        if not any(matches(pattern, name) for name in names):
            raise ValueError(f"no layer matches {pattern!r}, which is to be frozen: {nearest_name(pattern, names)}")
    frozen = [
        replace(chunk, frozen=chunk.frozen.union(n for n in own if any(matches(p, whole_name(n)) for p in given)))
        for chunk, own in zip(chunks, layers, strict=True)
    ]
    if any(chunk.frozen for chunk in frozen):
        _check_some_train(frozen)
    return frozen


def _check_some_train(chunks: Sequence[Chunk]) -> None:
    """Raises ValueError for chunks all of whose layers are frozen."""
    if all(_is_frozen(chunk) for chunk in chunks):
        raise ValueError("every layer of the model is frozen, and nothing is left to train: freeze fewer layers")


def _is_frozen(chunk: Chunk) -> bool:
    """Whether none of the chunk's parameters change, as in a chunk that has none."""
    return not jax.tree.leaves(trained_specs(chunk))
