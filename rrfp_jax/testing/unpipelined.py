"""A model of chunks as one function, without anything of the pipeline: what a pipeline's results are compared with."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rrfp_jax.programs.chunk import Chunk, Params, param_specs
from rrfp_jax.schedules import Edge


def run_unpipelined(
    chunks: Sequence[Chunk], params: Params, leaves: Mapping[str, Any], *, edges: Sequence[Edge] | None = None
) -> Any:
    """What the last chunk returns of one microbatch: the summed loss, its weight, and named sums where it has them.

    Differentiable, and meant to be jitted.

    Args:
        chunks: in their order; the last one returns the loss.
        params: of all chunks, by layer name.
        leaves: what the microbatch has. A chunk that lacks one which it needs does not exist, as in a pipeline.
        edges: which chunk feeds which; None: a chain.
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
