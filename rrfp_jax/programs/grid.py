"""The devices of one stage, and arrays that pass between its units and the stage as a whole.

A stage has ``data`` replicas of ``tensor`` devices each. A unit's programs run on its own devices; what all replicas do
together (adding up gradients, updating a sharded optimizer state) runs on all of them, as a mesh with the axes ``data``
and ``tensor``. Joining the units' arrays for that, and parting the result, only wraps the buffers that are there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from rrfp_jax.programs.shardings import DATA, TENSOR, WHOLE


class StageGrid:
    """The devices of one stage, of this process and of others.

    Args:
        devices: for every replica its devices along the tensor axis, the same number for all.
    """

    def __init__(self, devices: Sequence[Sequence[jax.Device]]) -> None:
        grid = np.array([list(row) for row in devices], dtype=object)
        if grid.ndim != 2 or not grid.size:
            raise ValueError(
                f"replicas have {[len(row) for row in devices]} devices: give the same number, 1 or more, for each"
            )
        self.data, self.tensor = grid.shape
        self.mesh = Mesh(grid, (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)
        self._unit_meshes = [Mesh(row, (TENSOR,), axis_types=(AxisType.Auto,)) for row in grid]
        self._replica_of = {device: replica for replica, row in enumerate(grid) for device in row}
        mine = jax.process_index()
        self.local_replicas = tuple(r for r, row in enumerate(grid) if any(d.process_index == mine for d in row))
        """The replicas of which this process holds devices, ascending."""

    def unit_mesh(self, replica: int) -> Mesh:
        """The devices of one unit, with the axis ``tensor``."""
        return self._unit_meshes[replica]

    def unit_sharding(self, replica: int, spec: PartitionSpec = WHOLE) -> Sharding:
        """The sharding of an array on one unit; without ``spec`` it is whole on every device of the unit."""
        mesh = self._unit_meshes[replica]
        return SingleDeviceSharding(mesh.devices[0]) if self.tensor == 1 else NamedSharding(mesh, spec)

    def sharding(self, spec: PartitionSpec = WHOLE) -> NamedSharding:
        """The sharding of an array on the whole stage."""
        return NamedSharding(self.mesh, spec)

    def join(self, trees: Mapping[int, Any], partition: Any) -> Any:
        """One tree of arrays on the whole stage from one tree for every local replica.

        ``partition`` has a ``PartitionSpec`` over ``tensor`` for every leaf. Where the replicas' contents differ, the
        result is "replicated" in name only, and only programs that look at each replica's own may take it.
        """
        first, *others = (trees[replica] for replica in self.local_replicas)
        return jax.tree.map(lambda leaf, spec, *rest: self._join((leaf, *rest), spec), first, partition, *others)

    def part(self, tree: Any) -> dict[int, Any]:
        """The arrays of every local replica, from arrays on the whole stage that are not cut over ``data``."""
        leaves = [self._part(leaf) for leaf in jax.tree.leaves(tree)]
        structure = jax.tree.structure(tree)
        return {r: jax.tree.unflatten(structure, [parts[r] for parts in leaves]) for r in self.local_replicas}

    def _join(self, arrays: Sequence[jax.Array], spec: PartitionSpec) -> jax.Array:
        shards = [shard.data for array in arrays for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(arrays[0].shape, self.sharding(spec), shards)

    def _part(self, array: jax.Array) -> dict[int, jax.Array]:
        shards: dict[int, list[jax.Array]] = {}
        for shard in array.addressable_shards:
            shards.setdefault(self._replica_of[shard.device], []).append(shard.data)
        if self.tensor == 1:
            return {replica: only for replica, (only,) in shards.items()}
        assert isinstance(array.sharding, NamedSharding)
        spec = array.sharding.spec
        return {
            replica: jax.make_array_from_single_device_arrays(array.shape, self.unit_sharding(replica, spec), own)
            for replica, own in shards.items()
        }
