"""The sizes of all chunks and devices, told by the processes to each other, so that all judge alike what fits."""

from collections.abc import Mapping
from dataclasses import astuple

from rrfp_jax.planning.memory import ChunkBytes
from rrfp_jax.runtime.memory import device_limits
from rrfp_jax.runtime.process import Process


def gather_sizes(
    process: Process, own: Mapping[int, ChunkBytes]
) -> tuple[dict[int, ChunkBytes], dict[int, int | None]]:
    """The sizes of every chunk of all replicas, from those hosted here, and the memory of every unit's device."""
    limits = device_limits([process.own_device(unit) for unit in process.units])
    told = [[[chunk, *astuple(each)] for chunk, each in own.items()], [*zip(process.units, limits, strict=True)]]
    sizes: dict[int, ChunkBytes] = {}
    known: dict[int, int | None] = {}
    for chunks, units in process.gather("sizes", told).values():
        sizes |= {chunk: ChunkBytes.from_tuple(row) for chunk, *row in chunks}
        known |= dict(units)
    return sizes, known
