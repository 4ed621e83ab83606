"""What activations weigh, and how much room they have, by the same sums as the forecast of memory.

A microbatch takes ``ChunkBytes.per_microbatch`` on a chunk from the start of its F to the end of its B or W: the larger
of its stash and of what I owes to W, and the gradient that may wait. Beside those in flight activations wait for their
F, at most as many as the sending chunk can have in flight.
"""

from collections.abc import Sequence
from math import inf

from rrfp_jax.costs import CutModel


def activation_weight(cut: CutModel, chunk: int) -> int:
    """Bytes that a microbatch takes on a chunk, from the start of its F to the end of its B or W."""
    return cut.chunk_bytes[chunk].per_microbatch


def activation_weights(cut: CutModel) -> tuple[int, ...]:
    """Those of all chunks."""
    return tuple(activation_weight(cut, chunk) for chunk in range(cut.placement.num_chunks))


def room_for_activations(cut: CutModel, limits: Sequence[float | None]) -> tuple[float, ...]:
    """What microbatches in flight may take on each stage of so many bytes; None: as much as there is.

    It may be negative, where not even parameters fit.
    """
    sizes, stages = cut.chunk_bytes, cut.placement.chunks_of_stage
    room = [inf if limit is None else float(limit) for limit in limits]
    for stage, chunks in enumerate(stages):
        room[stage] -= sum(sizes[chunk].fixed for chunk in chunks)
        room[stage] -= max(sizes[chunk].temporaries + sizes[chunk].outputs for chunk in chunks)
    left = list(room)
    for stage, chunks in enumerate(stages):
        for chunk in chunks:
            if chunk > 0:
                sender = room[cut.placement.stage_of_chunk[chunk - 1]]
                left[stage] -= sizes[chunk].inputs * _most_in_flight(cut, chunk - 1, sender)
    return tuple(left)


def _most_in_flight(cut: CutModel, chunk: int, room: float) -> int:
    """Microbatches that a chunk can hold in so much room."""
    weight, m = activation_weight(cut, chunk), cut.num_microbatches
    return m if weight <= 0 or room == inf else min(m, max(0, int(room // weight)))
