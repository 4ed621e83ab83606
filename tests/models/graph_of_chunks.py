"""Runs a graph of chunks as one whole model."""

from typing import Any

import jax

from rrfp_jax.models.vision_language import ChunkGraph
from rrfp_jax.programs.chunk import Params, param_specs


def run_graph(graph: ChunkGraph, params: Params, leaves: dict[str, Any]) -> Any:
    """The loss and its weight; chunks get the leaves that they read, and do not exist where they lack one.

    ``params`` are those of all chunks by layer name.
    """
    outputs: dict[int, Any] = {}
    for number, chunk in enumerate(graph.chunks):
        if not set(chunk.leaves) - chunk.optional_leaves <= set(leaves):
            continue
        sources = [edge for edge in graph.edges if edge.target == number]
        if any(edge.source not in outputs and not edge.is_optional for edge in sources):
            continue
        inputs = tuple(outputs.get(edge.source) for edge in sources)
        read = {name: leaves[name] for name in chunk.leaves if name in leaves}
        own = {name: params[name] for name in param_specs(chunk)}
        outputs[number] = chunk.apply(own, inputs if len(inputs) > 1 else next(iter(inputs), None), read, key=None)
    return outputs[len(graph.chunks) - 1]


def start(graph: ChunkGraph, seed: int = 0) -> Params:
    """The initial parameters of all chunks by layer name."""
    return {name: layer for chunk in graph.chunks for name, layer in chunk.init(jax.random.key(seed)).items()}
