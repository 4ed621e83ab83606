"""Brings up the connections behind collectives before the first message.

The first collective of a set of devices makes its processes meet, which takes long and fails differently from later
ones. So every set is used once, at a time when all processes do nothing else.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rrfp_jax.programs.grid import StageGrid
from rrfp_jax.programs.shardings import WHOLE


def connect(grids: Sequence[StageGrid]) -> None:
    """Run a tiny collective on every mesh of which this process holds devices, and wait for it.

    All processes call it, with the grids of all stages in the same order. The order makes sure that nobody waits in a
    circle. Returns when this process has met its partners; hangs if one of them does not come.
    """
    for grid in grids:
        for replica in grid.local_replicas:
            if grid.tensor > 1:
                _meet(grid.unit_mesh(replica))
        if grid.data > 1 and grid.local_replicas:
            _meet(grid.mesh)


def _meet(mesh: Mesh) -> None:
    """One collective over each axis of the mesh, and one over all of them."""

    def sums(one: jax.Array) -> list[jax.Array]:
        axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
        return [jax.lax.psum(one, axis) for axis in (*axes, tuple(axes))]

    program = jax.jit(
        jax.shard_map(lambda: sums(jnp.int32(1)), mesh=mesh, in_specs=(), out_specs=WHOLE, check_vma=False)
    )
    jax.block_until_ready(program())
