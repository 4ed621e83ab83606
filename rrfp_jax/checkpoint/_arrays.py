"""The arrays of a checkpoint: their names, and the pieces of them that a process writes.

A name is a tuple of texts, the layer first, then the path of the array inside it: ``("layers.0", "params", "attention",
"query")``. Stages, ranks and layouts are no part of it, so a checkpoint fits every cut of the model. Where a chunk
holds a part of a layer, the name of the part comes first in memory, and the layer's own in files. Shards of a layer
keep their names in files too, and are joined when these are read. Where replicas have parameters of their own, the
layers of all but the first have the replica behind a sign: ``layers.0@1``.

Pieces are copied to host memory before they are written: the next update may then take over an array's buffers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.programs.chunk import shard_named, whole_name
from rrfp_jax.programs.shardings import HOST_MEMORY
from rrfp_jax.programs.stage_devices import shards_of

ArrayName = tuple[str, ...]
PARAMS, OPTIMIZER = "params", "optimizer"
"""The second text of the name of parameters, and of optimizer state."""
_Item = TypeVar("_Item")


def leaf_name(path: Iterable[Any]) -> ArrayName:
    """Returns the name of a leaf from its path in a pytree."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def layer_of_replica(layer: str, replica: int) -> str:
    """Returns the name of a layer, or of a part of one, of which each replica has its own."""
    whole = whole_name(layer)
    return f"{whole}@{replica}{layer[len(whole) :]}" if replica else layer


def stored_name(name: ArrayName) -> ArrayName:
    """Returns the name that an array has in files."""
    return name if shard_named(name[0]) is not None else whole_array(name)


def whole_array(name: ArrayName) -> ArrayName:
    """Returns the name that an array has in a whole layer."""
    return (whole_name(name[0]), *name[1:])


def shown_name(name: ArrayName) -> str:
    """Returns a name as messages show it: ``layers.0/params/attention/query``."""
    return "/".join(name)


def named_leaves(tree: Any) -> dict[ArrayName, Any]:
    """Returns the leaves of a pytree by name; raises ValueError if two have the same one."""
    named: dict[ArrayName, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = leaf_name(path)
        if named.setdefault(name, leaf) is not leaf:
            raise ValueError(f"two arrays have the name {shown_name(name)}: name them differently")
    return named


def nested(leaves: Mapping[ArrayName, Any]) -> dict[str, Any]:
    """Returns named leaves as dictionaries in dictionaries, as Orbax reads and writes them.

    Orbax joins the texts of a name by dots; raises ValueError if two names become one by that.
    """
    tree: dict[str, Any] = {}
    joined: dict[str, ArrayName] = {}
    for name, leaf in leaves.items():
        other = joined.setdefault(".".join(name), name)
        if other != name:
            raise ValueError(
                f"{shown_name(name)} and {shown_name(other)} cannot be told apart in a checkpoint, which joins names "
                "by dots: rename one"
            )
        inner = tree
        for key in name[:-1]:
            inner = inner.setdefault(key, {})
        inner[name[-1]] = leaf
    return tree


@dataclass(frozen=True)
class HostArray:
    """An array with the pieces of it that this process writes. To JAX it is a leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype
    piece_shape: tuple[int, ...]
    """The shape of every piece, on this and other processes; the pieces tile the array."""
    pieces: tuple[tuple[tuple[slice, ...], Any], ...]
    """The slices of each piece and its elements: an array, or an object with ``nbytes`` that NumPy reads as one."""

    @property
    def nbytes(self) -> int:
        """Bytes of this process's pieces."""
        return sum(piece.nbytes for _, piece in self.pieces)


def copy_to_host(arrays: Mapping[ArrayName, jax.Array], writes: Mapping[ArrayName, bool]) -> dict[ArrayName, HostArray]:
    """Copies the pieces that this process writes: none where ``writes`` is False, else one copy of each piece.

    If several devices hold a piece, the one with the lowest replica number writes it, on whatever process it is.
    Typed random keys become their data. Empty arrays are left out, since they have no elements to write.
    """
    plain = {
        name: jax.random.key_data(array) if is_random_key(array) else array
        for name, array in arrays.items()
        if array.size
    }
    shards = {
        name: [shard for shard in shards_of(array) if shard.replica_id == 0] if writes[name] else []
        for name, array in plain.items()
    }
    # All copies are under way before the first is waited for.
    for own in shards.values():
        for shard in own:
            shard.data.copy_to_host_async()
    return {
        name: HostArray(
            shape=array.shape,
            dtype=np.dtype(array.dtype),
            piece_shape=array.sharding.shard_shape(array.shape),
            pieces=tuple((shard.index, own_copy(shard.data)) for shard in shards[name]),
        )
        for name, array in plain.items()
    }


def own_copy(piece: jax.Array) -> np.ndarray:
    """Returns the elements in host memory that outlives the piece; copied once.

    Elements from an accelerator are a copy already. On the CPU, and of arrays in host memory, JAX shows its own buffer,
    which the next update overwrites.
    """
    elements = np.asarray(piece)
    is_shown = any(device.platform == "cpu" for device in piece.devices()) or piece.sharding.memory_kind == HOST_MEMORY
    return elements.copy() if is_shown else elements


def size_batches(sized: Iterable[tuple[_Item, int]], limit_bytes: int) -> Iterator[list[_Item]]:
    """Yields items in their order, as many at a time as fit the limit; one that is larger comes alone."""
    batch: list[_Item] = []
    held_bytes = 0
    for item, num_bytes in sized:
        if batch and held_bytes + num_bytes > limit_bytes:
            yield batch
            batch, held_bytes = [], 0
        batch.append(item)
        held_bytes += num_bytes
    yield batch


def sharded_zeros(spec: Any) -> jax.Array:
    """Returns zeros, made piece by piece, so that no process waits for others that share the array."""
    piece = np.zeros(spec.sharding.shard_shape(spec.shape), spec.dtype)
    return jax.make_array_from_callback(spec.shape, spec.sharding, lambda _: piece)


def is_random_key(array: Any) -> bool:
    """Returns whether an array or spec holds typed random keys."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))
