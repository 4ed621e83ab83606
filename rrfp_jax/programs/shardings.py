"""How the arrays of a chunk are spread over the devices of one unit (one replica of one stage).

A unit's devices are a mesh with named axes of the user's choice. Some names have a meaning here:

``tensor``
    the parameters that the chunk's ``partition`` cuts over it, usually every layer's matrices;
``fsdp``
    rows of a microbatch are cut over it, and all parameters along their first dimension that is free and divides, with
    their gradients and optimizer state (ZeRO-3, Rajbhandari et al. 2020). Programs gather the parameters that they
    compute with;
``expert``
    rows of a microbatch, and the parameters that ``partition`` cuts over it;
``context``
    the second dimension of arrays that pass between chunks: the positions of a sequence.

The *boundary* of a unit is the sharding of arrays that are whole on each of its devices: scalars and vectors. Arrays
that pass between chunks (activations, their gradients, batch leaves) are cut over rows and positions where these
divide, and whole where not (:func:`passing`). Parameters, and with them accumulators and optimizer state, are cut as
the chunk's ``partition`` says. Arrays that stay inside a chunk, such as residuals, lie as the compiler of the program
that makes them decides.

A unit of one device has a ``SingleDeviceSharding`` as its boundary, and nothing is cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from rrfp_jax.layout import CONTEXT, EXPERT, FSDP
from rrfp_jax.programs.chunk import Chunk, param_specs
from rrfp_jax.programs.shapes import Specs, describe_chunk, holders, spec_text

DATA = "data"
"""The mesh axis over the replicas of a stage."""
WHOLE = PartitionSpec()
"""The partition of an array that every device holds whole."""
_CUT_BY = ((FSDP, EXPERT), (CONTEXT,))
"""The axes over which the first dimensions of arrays that pass between chunks are cut."""


@dataclass(frozen=True)
class UnitShardings:
    """The shardings of one chunk on its unit; made by :func:`unit_shardings`."""

    boundary: Sharding
    """The sharding of arrays that are whole on every device."""
    partition: Any
    """A ``PartitionSpec`` for every parameter."""

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the unit; None for a unit of one device."""
        return mesh_of(self.boundary)

    @property
    def params(self) -> Any:
        """The sharding of every parameter, and of its accumulator."""
        return place(self.partition, self.boundary)

    @property
    def chosen(self) -> Sharding | None:
        """The sharding of results that stay inside the chunk: None, the compiler's choice, where there is a choice."""
        return self.boundary if self.mesh is None else None


def mesh_of(boundary: Sharding) -> Mesh | None:
    """Returns the mesh of a unit, or None for a unit of one device."""
    return boundary.mesh if isinstance(boundary, NamedSharding) and isinstance(boundary.mesh, Mesh) else None


def place(partition: Any, boundary: Sharding) -> Any:
    """Returns the shardings that a tree of ``PartitionSpec`` means on the devices of ``boundary``."""
    mesh = mesh_of(boundary)
    if mesh is None:
        return jax.tree.map(lambda _: boundary, partition)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition)


def passing(boundary: Sharding, spec: Any) -> Sharding:
    """Returns the sharding of an array that passes between chunks, or comes from the batch, given its shape."""
    mesh = mesh_of(boundary)
    if mesh is None or len(spec.shape) < 2:
        return boundary
    cut = [_dividing(mesh.shape, axes, size) for axes, size in zip(_CUT_BY, spec.shape, strict=False)]
    return NamedSharding(mesh, PartitionSpec(*cut)) if any(cut) else boundary


def row_axes(mesh: Mapping[str, int], num_rows: int) -> tuple[str, ...]:
    """Returns the axes of a unit over which a microbatch of so many rows is cut; none where it is whole everywhere."""
    return _dividing(mesh, _CUT_BY[0], num_rows) or ()


def _dividing(mesh: Mapping[str, int], axes: Sequence[str], size: int) -> tuple[str, ...] | None:
    """Returns the axes that the mesh has, if all of them together divide a dimension of this size."""
    there = tuple(axis for axis in axes if mesh.get(axis, 1) > 1)
    return there if there and size and size % prod(mesh[axis] for axis in there) == 0 else None


def all_passing(boundary: Sharding, specs: Specs) -> Any:
    """Returns the shardings of all arrays of a tree that passes between chunks: one for all where none is cut."""
    shardings = jax.tree.map(lambda spec: passing(boundary, spec), specs)
    return boundary if all(each is boundary for each in jax.tree.leaves(shardings)) else shardings


def unit_shardings(chunks: Sequence[Chunk], index: int, boundary: Sharding) -> UnitShardings:
    """Returns the shardings of chunk ``index`` on a unit; raises ValueError where they are not possible."""
    mesh = mesh_of(boundary)
    if mesh is not None and boundary != NamedSharding(mesh, WHOLE):
        raise ValueError(
            f"{describe_chunk(chunks, index)} cannot be placed by {boundary}: give a SingleDeviceSharding, or a "
            "NamedSharding that is whole on every device of a mesh"
        )
    return UnitShardings(boundary, param_partition(chunks, index, axes_of(mesh)))


def axes_of(mesh: Mesh | None) -> dict[str, int]:
    """Returns the axes of a unit, or of a stage without that over its replicas, with their sizes."""
    return {} if mesh is None else {axis: size for axis, size in mesh.shape.items() if axis != DATA}


def param_partition(chunks: Sequence[Chunk], index: int, axes: Mapping[str, int]) -> Any:
    """Returns a ``PartitionSpec`` for every parameter of chunk ``index`` on a unit with these axes.

    Raises ValueError, naming the chunk, for one that does not fit the parameter, or differs between two copies.
    """
    partition = _own_partition(chunks, index, axes)
    for name in chunks[index].shared if prod(axes.values()) > 1 else ():
        owner = holders(chunks, name)[0]
        if _own_partition(chunks, owner, axes)[name] != partition[name]:
            raise ValueError(
                f"{describe_chunk(chunks, owner)} and {describe_chunk(chunks, index)} share {name!r} but cut it "
                f"differently over {_words(axes)}: let `partition` of both say the same"
            )
    return partition


def _own_partition(chunks: Sequence[Chunk], index: int, axes: Mapping[str, int]) -> Any:
    """Returns the partition of the chunk itself, with free dimensions cut over ``fsdp``."""
    chunk = chunks[index]
    params = param_specs(chunk)
    if prod(axes.values()) == 1:
        return jax.tree.map(lambda _: WHOLE, params)
    partition = jax.tree.map(lambda _: WHOLE, params) if chunk.partition is None else chunk.partition(params, axes)
    if _paths(partition) != _paths(params):
        raise ValueError(
            f"`partition` of {describe_chunk(chunks, index)} returns another tree than its parameters: give one "
            "PartitionSpec for every parameter"
        )
    for (path, spec), leaf in zip(jax.tree.leaves_with_path(partition), jax.tree.leaves(params), strict=True):
        if not _fits(spec, leaf, axes):
            raise ValueError(
                f"{describe_chunk(chunks, index)} cannot cut its parameter {jax.tree_util.keystr(path)}, "
                f"{spec_text(leaf)}, as {spec} over {_words(axes)}: name axes of the mesh, each once, at dimensions "
                "that they divide, or leave the parameter whole"
            )
    size = axes.get(FSDP, 1)
    return shared_out(partition, params, size, axis=FSDP) if size > 1 else partition


def _words(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())


def _paths(tree: Any) -> list[Any]:
    return [path for path, _ in jax.tree.leaves_with_path(tree)]


def _fits(spec: Any, leaf: jax.ShapeDtypeStruct, axes: Mapping[str, int]) -> bool:
    if not isinstance(spec, PartitionSpec) or len(spec) > len(leaf.shape):
        return False
    named = axes_of_spec(spec)
    return (
        len(set(named)) == len(named)
        and axes.keys() >= set(named)
        and all(leaf.shape[dim] % prod(axes[axis] for axis in axes_at(spec, dim)) == 0 for dim in range(len(spec)))
    )


def axes_of_spec(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns all axes over which an array is cut, dimension by dimension."""
    return tuple(axis for dim in range(len(spec)) for axis in axes_at(spec, dim))


def axes_at(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    """Returns the axes over which a dimension is cut."""
    entry = spec[dim]
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def gathered(sharding: Sharding) -> Sharding:
    """Returns the sharding of a parameter that is no more cut over ``fsdp``."""
    mesh = mesh_of(sharding)
    if mesh is None or mesh.shape.get(FSDP, 1) == 1:
        return sharding
    assert isinstance(sharding, NamedSharding)
    spec = sharding.spec
    kept = [tuple(axis for axis in axes_at(spec, dim) if axis != FSDP) or None for dim in range(len(spec))]
    return NamedSharding(mesh, PartitionSpec(*kept))


def state_partition(state: Specs, params: Specs, partition: Any) -> Any:
    """Returns a ``PartitionSpec`` for every array of an optimizer's state.

    An array that has the shape of a parameter and a path that ends in the parameter's, as moments do, is cut like it;
    any other is whole.
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


def shared_out(partition: Any, specs: Specs, num_parts: int, axis: str = DATA) -> Any:
    """Returns the partition with every array cut over one more axis, along its first free dimension that divides.

    Arrays without such a dimension stay as they are, and so do those that are cut over the axis already. Over ``data``
    this is the way in which ZeRO-1 cuts the optimizer state (Rajbhandari et al. 2020).
    """

    def cut(spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        axes = [*spec, *[None] * (len(leaf.shape) - len(spec))]
        if axis in axes_of_spec(spec):
            return spec
        for dim, size in enumerate(leaf.shape):
            if axes[dim] is None and size and size % num_parts == 0:
                axes[dim] = axis
                return PartitionSpec(*axes)
        return spec

    return jax.tree.map(cut, partition, specs)


HOST_MEMORY = "pinned_host"
"""JAX's name for memory of the host that devices copy from and to by themselves."""


def sharding_on_host(sharding: Sharding) -> Sharding:
    """Returns the sharding in the memory of the devices' hosts; raises ValueError where JAX has none there."""
    devices: set[Any] = sharding.device_set
    device = next(iter(devices))
    # Devices that are not here may name no memories.
    if (kinds := {memory.kind for memory in device.addressable_memories()}) and HOST_MEMORY not in kinds:
        raise ValueError(
            f"an optimizer on the host needs memory of kind {HOST_MEMORY}, which JAX does not have for "
            f"{device.device_kind}: leave on_host, or optimizer.state_on_host, out"
        )
    return sharding.with_memory_kind(HOST_MEMORY)


def spread(specs: Specs, shardings: Any) -> Specs:
    """Returns the shapes with their shardings: one or none for all, or a tree of them."""
    if shardings is None or isinstance(shardings, Sharding):
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=shardings), specs)
    return jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), specs, shardings)


def shardings_of(tree: Any) -> Any:
    """Returns the sharding of every array or spec."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
