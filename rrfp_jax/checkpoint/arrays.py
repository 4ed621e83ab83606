"""The arrays of a checkpoint: their names, and what a process writes of them.

A name is a tuple of texts, the layer first, then the way to the array inside it: ``("layers.0", "params", "attention",
"query")``. Stages, ranks and layouts are no part of it, so a checkpoint fits every cut of the model.

What is written is copied to host memory before: the next update may then take over an array's buffers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.programs.stage_devices import shards_of

Name = tuple[str, ...]
PARAMS, OPTIMIZER = "params", "optimizer"
"""What a layer's arrays are part of; the second text of their names."""
_T = TypeVar("_T")


def name_of(path: Iterable[Any]) -> Name:
    """The name of a leaf, from its path in a pytree."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def describe(name: Name) -> str:
    """For messages: ``layers.0/params/attention/query``."""
    return "/".join(name)


def named_leaves(tree: Any) -> dict[Name, Any]:
    """The leaves of a pytree by name; raises ValueError where two have the same one."""
    named: dict[Name, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if named.setdefault(name_of(path), leaf) is not leaf:
            raise ValueError(f"two arrays have the name {describe(name_of(path))}: name them differently")
    return named


def nested(leaves: Mapping[Name, Any]) -> dict[str, Any]:
    """Named leaves as dictionaries in dictionaries, as Orbax reads and writes them.

    Orbax joins the texts of a name by dots; raises ValueError where two names become one by that.
    """
    tree: dict[str, Any] = {}
    joined: dict[str, Name] = {}
    for name, leaf in leaves.items():
        other = joined.setdefault(".".join(name), name)
        if other != name:
            raise ValueError(
                f"{describe(name)} and {describe(other)} cannot be told apart in a checkpoint, which joins names by "
                "dots: rename one"
            )
        inner = tree
        for key in name[:-1]:
            inner = inner.setdefault(key, {})
        inner[name[-1]] = leaf
    return tree


@dataclass(frozen=True)
class HostArray:
    """An array as a checkpoint sees it, with the pieces that this process writes. To JAX it is a leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype
    piece_shape: tuple[int, ...]
    """The shape of every piece, on this and other processes; they tile the array."""
    pieces: tuple[tuple[tuple[slice, ...], Any], ...]
    """Where each piece lies, and its elements: an array, or what NumPy reads as one and knows its ``nbytes``."""

    @property
    def nbytes(self) -> int:
        """Bytes of this process's pieces."""
        return sum(piece.nbytes for _, piece in self.pieces)


def copy_to_host(arrays: Mapping[Name, jax.Array], writes: Mapping[Name, bool]) -> dict[Name, HostArray]:
    """Copy what this process writes of each array: no piece where ``writes`` is False, else one copy of each piece.

    Of pieces that several devices hold, the one with the lowest replica number counts, on whatever process it is.
    Typed random keys become their data. Empty arrays are left out: nothing of them could be written.
    """
    plain = {name: _plain(array) for name, array in arrays.items() if array.size}
    shards = {
        name: [shard for shard in shards_of(array) if shard.replica_id == 0] if writes[name] else []
        for name, array in plain.items()
    }
    for own in shards.values():
        for shard in own:
            shard.data.copy_to_host_async()
    return {
        name: HostArray(
            shape=array.shape,
            dtype=np.dtype(array.dtype),
            piece_shape=array.sharding.shard_shape(array.shape),
            pieces=tuple((shard.index, owned(shard.data)) for shard in shards[name]),
        )
        for name, array in plain.items()
    }


def owned(piece: jax.Array) -> np.ndarray:
    """The elements in host memory that outlives the piece; copied once.

    What comes from an accelerator is a copy already. On the CPU JAX shows its own buffer, which the next update writes.
    """
    elements = np.asarray(piece)
    return elements.copy() if any(device.platform == "cpu" for device in piece.devices()) else elements


def batches(sized: Iterable[tuple[_T, int]], limit_bytes: int) -> Iterator[list[_T]]:
    """Things with their bytes, in their order, as many at a time as fit the limit; one that is larger goes alone."""
    batch: list[_T] = []
    held_bytes = 0
    for thing, num_bytes in sized:
        if batch and held_bytes + num_bytes > limit_bytes:
            yield batch
            batch, held_bytes = [], 0
        batch.append(thing)
        held_bytes += num_bytes
    yield batch


def zeros(spec: Any) -> jax.Array:
    """Made piece by piece, so that no process waits for others that share the array."""
    piece = np.zeros(spec.sharding.shard_shape(spec.shape), spec.dtype)
    return jax.make_array_from_callback(spec.shape, spec.sharding, lambda _: piece)


def _plain(array: jax.Array) -> jax.Array:
    return jax.random.key_data(array) if is_key(array) else array


def is_key(array: Any) -> bool:
    """Whether an array or spec holds typed random keys."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))
