"""Where the arrays lie that a stage keeps of a microbatch, and which of them are its own."""

from typing import Any, NamedTuple

import jax

from rrfp_jax.schedules import PipelineGraph, Placement

_HOST_KINDS = ("pinned_host", "unpinned_host")
"""JAX's names for memory of the host."""


class Held(NamedTuple):
    """Bytes on the devices of a stage and in host memory."""

    device: int
    host: int


def held_by(stash: Any) -> Held:
    """Where the arrays of a stash lie; NumPy arrays are views of what lies on a device."""
    on_device = on_host = 0
    for leaf in jax.tree.leaves(stash):
        if isinstance(leaf, jax.Array) and leaf.sharding.memory_kind in _HOST_KINDS:
            on_host += leaf.nbytes
        else:
            on_device += leaf.nbytes
    return Held(on_device, on_host)


def owns_inputs(chunk: int, graph: PipelineGraph, placement: Placement) -> bool:
    """Whether what a chunk reads is nobody else's once it has run: from its only predecessor, on another stage."""
    sources = graph.predecessors(chunk)
    return len(sources) == 1 and placement.stage_of_chunk[sources[0]] != placement.stage_of_chunk[chunk]
