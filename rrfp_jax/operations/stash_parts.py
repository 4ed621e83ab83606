"""How much of what chunks keep of a microbatch recompute makes again."""

from collections.abc import Iterable

import jax

from rrfp_jax.programs.batches import Bucket
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.chunk_plan import plan_chunk
from rrfp_jax.programs.remat import Remat, remat_of_chunks
from rrfp_jax.programs.shapes import derive_shapes
from rrfp_jax.programs.specs import num_bytes
from rrfp_jax.schedules import PipelineGraph


def part_made(
    chunks: Iterable[Chunk], graph: PipelineGraph, bucket: Bucket, *, remat: Remat | Iterable[Remat] = "none"
) -> float:
    """How much of what the chunks keep of a microbatch :func:`rrfp_jax.operations.recompute` makes again.

    It is worked out from the shapes of a microbatch's leaves, and nothing is compiled: the smallest part of any chunk
    with a backward, rounded down to whole percent.
    """
    own = tuple(chunks)
    policies = remat_of_chunks(remat if isinstance(remat, str) or callable(remat) else tuple(remat), len(own))
    shapes = derive_shapes(own, graph, bucket)
    parts = []
    for index, policy in enumerate(policies):
        if graph.has_backward(index):
            stash = plan_chunk(index, own, graph, shapes, remat=policy).residuals.specs
            total = num_bytes(jax.tree.leaves(stash))
            parts.append(max(0, total - num_bytes(shapes[index].inputs)) / max(1, total))
    return int(100 * min(parts)) / 100
