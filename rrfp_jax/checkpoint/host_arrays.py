"""What a process writes of an array, copied to host memory: the next update may then take over the array's buffers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.checkpoint.names import Name


@dataclass(frozen=True)
class HostArray:
    """An array as a checkpoint sees it, with the pieces that this process writes. To JAX it is a leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype
    piece_shape: tuple[int, ...]
    """The shape of every piece, on this and other processes; they tile the array."""
    pieces: tuple[tuple[tuple[slice, ...], np.ndarray], ...]
    """Where each piece lies, and its elements."""

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
        name: [shard for shard in array.addressable_shards if shard.replica_id == 0] if writes[name] else []
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
            pieces=tuple((shard.index, np.array(shard.data)) for shard in shards[name]),
        )
        for name, array in plain.items()
    }


def _plain(array: jax.Array) -> jax.Array:
    return jax.random.key_data(array) if is_key(array) else array


def is_key(array: Any) -> bool:
    """Whether an array or spec holds typed random keys."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))
