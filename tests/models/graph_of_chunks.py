"""A graph of chunks as one whole model."""

from typing import Any

import jax

from rrfp_jax.models.model import ChunkGraph
from rrfp_jax.programs.chunk import Params
from rrfp_jax.testing import run_unpipelined


def run_graph(graph: ChunkGraph, params: Params, leaves: dict[str, Any]) -> Any:
    """The loss and its weight; ``params`` are those of all chunks by layer name."""
    return run_unpipelined(graph.chunks, params, leaves, edges=graph.edges)


def start(graph: ChunkGraph, seed: int = 0) -> Params:
    """The initial parameters of all chunks by layer name."""
    return {name: layer for chunk in graph.chunks for name, layer in chunk.init(jax.random.key(seed)).items()}
