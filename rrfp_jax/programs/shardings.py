"""How the arrays of a chunk are spread over the devices of one unit (one replica of one stage).

What passes between chunks (activations, their gradients), batch leaves and scalars is whole on every device of the
unit: its sharding is the *boundary*. Parameters, and with them accumulators and optimizer state, are cut along the mesh
axis ``tensor`` as the chunk's ``partition`` says. What stays inside a chunk, such as a stash, lies as the compiler of
the program that makes it decides.

A unit of one device has a ``SingleDeviceSharding`` as its boundary, and nothing is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from rrfp_jax.programs.chunk import Chunk, param_specs
from rrfp_jax.programs.shapes import describe_chunk, holders
from rrfp_jax.programs.specs import Specs, describe

DATA = "data"
"""The mesh axis over the replicas of a stage."""
TENSOR = "tensor"
"""The mesh axis over the devices of a unit."""
WHOLE = PartitionSpec()
"""The partition of an array that every device holds whole."""


@dataclass(frozen=True)
class UnitShardings:
    """The shardings of one chunk on its unit; made by :func:`unit_shardings`."""

    boundary: Sharding
    """Of activations, their gradients, batch leaves and scalars: whole on every device."""
    partition: Any
    """A ``PartitionSpec`` for every parameter."""

    @property
    def mesh(self) -> Mesh | None:
        """None for a unit of one device."""
        return mesh_of(self.boundary)

    @property
    def params(self) -> Any:
        """The sharding of every parameter, and of its accumulator."""
        return place(self.partition, self.boundary)

    @property
    def chosen(self) -> Sharding | None:
        """For results that stay inside the chunk: None, which lets the compiler choose, where there is a choice."""
        return self.boundary if self.mesh is None else None


def mesh_of(boundary: Sharding) -> Mesh | None:
    """The mesh of a unit, or None for a unit of one device."""
    return boundary.mesh if isinstance(boundary, NamedSharding) and isinstance(boundary.mesh, Mesh) else None


def place(partition: Any, boundary: Sharding) -> Any:
    """The shardings that a tree of ``PartitionSpec`` means on the devices of ``boundary``."""
    mesh = mesh_of(boundary)
    if mesh is None:
        return jax.tree.map(lambda _: boundary, partition)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition)


def unit_shardings(chunks: Sequence[Chunk], index: int, boundary: Sharding) -> UnitShardings:
    """The shardings of chunk ``index`` on a unit; raises ValueError where they are not possible."""
    mesh = mesh_of(boundary)
    if mesh is not None and (mesh.axis_names != (TENSOR,) or boundary != NamedSharding(mesh, WHOLE)):
        raise ValueError(
            f"{describe_chunk(chunks, index)} cannot be placed by {boundary}: give a SingleDeviceSharding, or a "
            f"NamedSharding that is whole on every device of a mesh with the axis {TENSOR!r}"
        )
    num_shards = 1 if mesh is None else mesh.shape[TENSOR]
    return UnitShardings(boundary, param_partition(chunks, index, num_shards))


def param_partition(chunks: Sequence[Chunk], index: int, num_shards: int) -> Any:
    """A ``PartitionSpec`` for every parameter of chunk ``index`` on a unit of ``num_shards`` devices.

    Raises ValueError, naming the chunk, for one that does not fit the parameter, or differs between two copies.
    """
    partition = _own_partition(chunks, index, num_shards)
    for name in chunks[index].shared if num_shards > 1 else ():
        owner = holders(chunks, name)[0]
        if _own_partition(chunks, owner, num_shards)[name] != partition[name]:
            raise ValueError(
                f"{describe_chunk(chunks, owner)} and {describe_chunk(chunks, index)} share {name!r} but cut it "
                f"differently over {num_shards} devices: let `partition` of both say the same"
            )
    return partition


def _own_partition(chunks: Sequence[Chunk], index: int, num_shards: int) -> Any:
    chunk = chunks[index]
    params = param_specs(chunk)
    if num_shards == 1 or chunk.partition is None:
        return jax.tree.map(lambda _: WHOLE, params)
    partition = chunk.partition(params, num_shards)
    if _paths(partition) != _paths(params):
        raise ValueError(
            f"`partition` of {describe_chunk(chunks, index)} returns another tree than its parameters: give one "
            "PartitionSpec for every parameter"
        )
    for (path, spec), leaf in zip(jax.tree.leaves_with_path(partition), jax.tree.leaves(params), strict=True):
        if not _fits(spec, leaf, num_shards):
            raise ValueError(
                f"{describe_chunk(chunks, index)} cannot cut its parameter {jax.tree_util.keystr(path)}, "
                f"{describe(leaf)}, as {spec} over {num_shards} devices: name the axis {TENSOR!r} once, at a "
                f"dimension that {num_shards} divides, or leave the parameter whole"
            )
    return partition


def _paths(tree: Any) -> list[Any]:
    return [path for path, _ in jax.tree.leaves_with_path(tree)]


def _fits(spec: Any, leaf: jax.ShapeDtypeStruct, num_shards: int) -> bool:
    if not isinstance(spec, PartitionSpec) or len(spec) > len(leaf.shape):
        return False
    cut = [dim for dim, axis in enumerate(spec) if axis is not None]
    return len(cut) <= 1 and all(spec[dim] == TENSOR and leaf.shape[dim] % num_shards == 0 for dim in cut)


def state_partition(state: Specs, params: Specs, partition: Any) -> Any:
    """A ``PartitionSpec`` for every array of an optimizer's state.

    What has the shape of a parameter and a path that ends in the parameter's, as moments do, is cut like it; anything
    else is whole.
    """
    known = {
        tuple(path): (leaf.shape, spec)
        for (path, leaf), spec in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(partition), strict=True)
    }

    def spec_of_state(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        for start in range(len(path) + 1):
            shape, spec = known.get(tuple(path[start:]), (None, WHOLE))
            if shape == leaf.shape:
                return spec
        return WHOLE

    return jax.tree.map_with_path(spec_of_state, state)


def shared_out(partition: Any, specs: Specs, num_replicas: int) -> Any:
    """The partition where every array is cut over the axis ``data`` too, along its first free dimension that divides.

    Arrays without such a dimension stay as they are. This is what ZeRO-1 does to the optimizer state (Rajbhandari et
    al. 2020).
    """

    def cut(spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        axes = [*spec, *[None] * (len(leaf.shape) - len(spec))]
        for dim, size in enumerate(leaf.shape):
            if axes[dim] is None and size and size % num_replicas == 0:
                axes[dim] = DATA
                return PartitionSpec(*axes)
        return spec

    return jax.tree.map(cut, partition, specs)


def spread(specs: Specs, shardings: Any) -> Specs:
    """The shapes with their shardings: one or none for all, or a tree of them."""
    if shardings is None or isinstance(shardings, Sharding):
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=shardings), specs)
    return jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), specs, shardings)


def shardings_of(tree: Any) -> Any:
    """The sharding of every array or spec."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
