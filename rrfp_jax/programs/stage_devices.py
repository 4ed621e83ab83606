"""The devices of one stage, and arrays that pass between its units and the stage as a whole.

A stage has ``data`` replicas of equally many devices each, which are a mesh. A unit's programs run on its devices,
joint programs of all replicas (adding up gradients, updating a sharded optimizer state) on all of them, as a mesh with
the axis ``data`` before those of a unit. Joining the units' arrays for that, and taking the result apart, only wraps
the buffers that are there.

The first collective of a set of devices makes its processes meet, which takes long and fails differently from later
ones. So every set is used once (:func:`connect`), at a time when all processes do nothing else, and by a collective of
the kind that programs will run on it: NCCL connects two devices when one first sends to the other.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Shard
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.stages import Compiled

from rrfp_jax.layout import TENSOR, Axes, describe_axes
from rrfp_jax.programs.program_text import ALL_TO_ALL, PERMUTE, Exchange, exchanges
from rrfp_jax.programs.shardings import DATA, WHOLE

_taking_apart = threading.Lock()


def shards_of(array: jax.Array) -> Sequence[Shard]:
    """Returns the shards of an array on the devices of this process.

    Every thread that may share an array with others asks for its shards here, or by :func:`shard_at`. JAX takes an
    array apart when its shards are first asked for, without a lock: two threads that do so at the same time both get
    too few or too many of them, and so does everybody afterwards (jaxlib 0.10.2, ``PyArray``'s ``_arrays``).
    """
    with _taking_apart:
        return array.addressable_shards


def shard_at(array: jax.Array, index: int) -> jax.Array:
    """Returns the data of one of :func:`shards_of` an array, by its place among them, as an array of one device."""
    with _taking_apart:
        return array.addressable_data(index)


class StageDevices:
    """The devices of one stage, of this process and of others.

    Args:
        devices: for every replica its devices, the same number for all.
        axes: those of a unit's mesh with their sizes, innermost first; empty: ``tensor`` alone.
        local: the replicas that this process hosts; None: those of which JAX says that it has devices. Where JAX
            knows this process's devices only, these stand for the devices of other replicas.

    Raises ValueError where they do not fit together.
    """

    def __init__(
        self, devices: Sequence[Sequence[jax.Device]], axes: Axes = (), *, local: Sequence[int] | None = None
    ) -> None:
        grid = np.array([list(row) for row in devices], dtype=object)
        if grid.ndim != 2 or not grid.size:
            raise ValueError(
                f"replicas have {[len(row) for row in devices]} devices: give the same number, 1 or more, for each"
            )
        self.data, self.unit_size = grid.shape
        names, sizes = zip(*reversed(axes or ((TENSOR, self.unit_size),)), strict=True)
        if prod(sizes) != self.unit_size:
            raise ValueError(f"the axes {describe_axes(axes)} do not make {self.unit_size} devices: mend their sizes")
        self.mesh = _mesh(grid.reshape(self.data, *sizes), (DATA, *names))
        self._unit_meshes = [_mesh(row.reshape(sizes), names) for row in grid]
        self._replica_of = {device: replica for replica, row in enumerate(grid) for device in row}
        if local is None:
            mine = jax.process_index()
            local = [r for r, row in enumerate(grid) if any(d.process_index == mine for d in row)]
        self.local_replicas = tuple(local)
        """The replicas of which this process holds devices, ascending."""

    def unit_mesh(self, replica: int) -> Mesh:
        """Returns the devices of one unit."""
        return self._unit_meshes[replica]

    def unit_sharding(self, replica: int, spec: PartitionSpec = WHOLE) -> Sharding:
        """Returns the sharding of an array on one unit; without ``spec`` it is whole on every device of the unit."""
        mesh = self._unit_meshes[replica]
        return SingleDeviceSharding(mesh.devices.item(0)) if self.unit_size == 1 else NamedSharding(mesh, spec)

    def sharding(self, spec: PartitionSpec = WHOLE) -> NamedSharding:
        """Returns the sharding of an array on the whole stage."""
        return NamedSharding(self.mesh, spec)

    def join(self, trees: Mapping[int, Any], partition: Any) -> Any:
        """Returns one tree of arrays on the whole stage from one tree for every local replica.

        ``partition`` has a ``PartitionSpec`` over a unit's axes for every leaf. Where the replicas' contents differ,
        the result is "replicated" in name only, and only programs that look at each replica's own may take it.
        """
        first, *others = (trees[replica] for replica in self.local_replicas)
        return jax.tree.map(lambda leaf, spec, *rest: self._join((leaf, *rest), spec), first, partition, *others)

    def per_replica(self, tree: Any) -> dict[int, Any]:
        """Returns the arrays of every local replica, from arrays on the whole stage that are not cut over ``data``."""
        leaves = [self._per_replica(leaf) for leaf in jax.tree.leaves(tree)]
        structure = jax.tree.structure(tree)
        return {r: jax.tree.unflatten(structure, [arrays[r] for arrays in leaves]) for r in self.local_replicas}

    def _join(self, arrays: Sequence[jax.Array], spec: PartitionSpec) -> jax.Array:
        shards = [shard.data for array in arrays for shard in shards_of(array)]
        return jax.make_array_from_single_device_arrays(arrays[0].shape, self.sharding(spec), shards)

    def _per_replica(self, array: jax.Array) -> dict[int, jax.Array]:
        shards: dict[int, list[jax.Array]] = {}
        for shard in shards_of(array):
            shards.setdefault(self._replica_of[shard.device], []).append(shard.data)
        if self.unit_size == 1:
            return {replica: only for replica, (only,) in shards.items()}
        assert isinstance(array.sharding, NamedSharding)
        spec = array.sharding.spec
        return {
            replica: jax.make_array_from_single_device_arrays(array.shape, self.unit_sharding(replica, spec), own)
            for replica, own in shards.items()
        }


def _mesh(devices: np.ndarray, names: Sequence[str]) -> Mesh:
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def connect(stages: Sequence[StageDevices], programs: Mapping[Mesh, Iterable[Compiled]]) -> None:
    """Runs a tiny collective on every set of devices on which programs have one, and waits for it.

    All processes call it, with all stages in the same order, and with the programs on every mesh of which they hold
    devices. The order makes sure that no processes wait in a circle. Blocks until this process has met its partners,
    for ever if one of them does not come.
    """
    for devices in stages:
        replicas = devices.local_replicas
        for mesh in [devices.unit_mesh(replica) for replica in replicas] + [devices.mesh] * bool(replicas):
            if met := exchanges(programs.get(mesh, ()), mesh.size):
                jax.block_until_ready(meeting(mesh, met)())


def meeting(mesh: Mesh, met: Sequence[Exchange]) -> Callable[[], Any]:
    """Returns a jitted function that uses each of these connections of a mesh once."""
    flat = _mesh(mesh.devices.reshape(-1), (DATA,))

    def meet() -> list[jax.Array]:
        # different on every device, so that XLA computes none of the results by itself
        own = jax.lax.axis_index(DATA) + jnp.zeros(max(len(group) for each in met for group in each.groups), jnp.int32)
        return [_exchanged(own, each) for each in met]

    return jax.jit(jax.shard_map(meet, mesh=flat, in_specs=(), out_specs=PartitionSpec(DATA), check_vma=False))


def _exchanged(own: jax.Array, through: Exchange) -> jax.Array:
    if through.kind == PERMUTE:
        return jax.lax.ppermute(own, DATA, through.groups)
    if through.kind == ALL_TO_ALL:
        own = own[: len(through.groups[0])]
        return jax.lax.all_to_all(own, DATA, 0, 0, axis_index_groups=through.groups, tiled=True)
    return jax.lax.psum(own, DATA, axis_index_groups=through.groups)
