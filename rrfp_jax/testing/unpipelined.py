"""A model of chunks as one function without a pipeline, to compare a pipeline's results with."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rrfp_jax.programs.chunk import Chunk, Params, param_specs
from rrfp_jax.schedules import Edge


def run_unpipelined(
    chunks: Sequence[Chunk], params: Params, leaves: Mapping[str, Any], *, edges: Sequence[Edge] | None = None
) -> Any:
    """Returns the last chunk's output for one microbatch: the summed loss, its weight, and named sums if it has them.

    The function is differentiable, and meant to be jitted.

    Args:
        chunks: in their order; the last one returns the loss.
        params: the parameters of all chunks, by layer name.
        leaves: the microbatch's leaves by name. A chunk that lacks a leaf which it needs is left out, as in a pipeline.
        edges: edges from chunk to chunk; None: a chain.
    """
    if edges is None:
        edges = [Edge(source, target) for source, target in pairwise(range(len(chunks)))]
    outputs: dict[int, Any] = {}
    for number, chunk in enumerate(chunks):
        sources = [edge for edge in edges if edge.target == number]
        lacks_leaf = not set(chunk.leaves) - chunk.optional_leaves <= set(leaves)
        if lacks_leaf or any(edge.source not in outputs and not edge.is_optional for edge in sources):
            continue
        inputs = tuple(outputs.get(edge.source) for edge in sources)
        read = {name: leaves[name] for name in chunk.leaves if name in leaves}
        own = {name: params[name] for name in param_specs(chunk)}
        outputs[number] = chunk.apply(own, inputs if len(inputs) > 1 else next(iter(inputs), None), read, key=None)
    return outputs[len(chunks) - 1]
