"""The batch of a step: the leaves that chunks read, microbatch by microbatch.

A leaf is an array ``[num_microbatches, ...]`` or, where microbatches differ, a list with an entry for each of them: an
array, or None where the microbatch lacks the leaf. A ``jax.ShapeDtypeStruct`` may stand for any array that this process
does not read.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.field_rules import with_type
from rrfp_jax.programs.chunk import Chunk, LeafOrder

Bucket = dict[str, jax.ShapeDtypeStruct]
"""The shapes of one microbatch's leaves by name; what it lacks is missing."""
Leaf = Any
"""A leaf of a step: by microbatch number an array, a spec or None."""


def _natural(length: int) -> np.ndarray:
    return np.arange(length)


class StepBatch(NamedTuple):
    """What the stages get of a step."""

    leaves: Mapping[str, Leaf] = {}
    """By name, an array of each microbatch."""
    buckets: Sequence[int] = ()
    """By microbatch, the number of its bucket."""
    step: int | None = None
    """The training step on whose number random keys depend; None: the step's own number."""


def leaves_read(
    chunks: Sequence[Chunk],
    batch: Mapping[str, Any],
    *,
    may_lack: Collection[str] = (),
    copied_for: Collection[int] | None = None,
) -> dict[str, Leaf]:
    """The leaves of ``batch`` that the chunks read, copied into NumPy arrays (specs stay specs).

    A step reads its batch while the caller may already refill the buffers for the next. Where chunks read positions in
    another order than they are in the batch, that is done here. Of leaves that none of the
    chunks ``copied_for`` (None: all) reads only the shape is kept. ``may_lack`` names the leaves that microbatches may
    lack (:func:`rrfp_jax.programs.buckets.leaves_to_lack`).

    Raises ValueError for a missing leaf, one without a microbatch axis or with anything but arrays, for different
    numbers of microbatches, and for what a chunk ``copied_for`` refuses (``check_leaves``).
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch is {with_type(batch)}: give a dictionary from the names of leaves to arrays")
    wanted = sorted({name for chunk in chunks for name in chunk.leaves})
    if not wanted:
        raise ValueError("no chunk reads a batch leaf, so no batch says how many microbatches there are: let one read")
    missing = [name for name in wanted if name not in batch and name not in may_lack]
    if missing:
        raise ValueError(f"the batch lacks {', '.join(missing)}: it has {', '.join(sorted(batch)) or 'nothing'}")
    present = [name for name in wanted if name in batch]
    sizes = {name: _num_entries(name, batch[name]) for name in present}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"batch leaves have different numbers of microbatches: {sizes}; make all of them equal")
    _check_complete({name: batch[name] for name in present if name not in may_lack})
    if 0 in sizes.values():
        raise ValueError(f"the batch has 0 microbatches: {', '.join(present)} must hold at least 1")
    own = {
        name for index, chunk in enumerate(chunks) if copied_for is None or index in copied_for for name in chunk.leaves
    }
    orders = _orders(chunks)
    leaves = {name: _kept(batch[name], orders.get(name), is_copied=name in own) for name in present}
    _check_values([chunk for index, chunk in enumerate(chunks) if copied_for is None or index in copied_for], leaves)
    return leaves


def _check_values(chunks: Sequence[Chunk], leaves: Mapping[str, Leaf]) -> None:
    checks = [chunk.check_leaves for chunk in chunks if chunk.check_leaves is not None]
    for m in range(num_microbatches(leaves) if checks else 0):
        own = {name: entries[m] for name, entries in leaves.items() if entries[m] is not None}
        for check in checks:
            check(own, f"microbatch {m} of the batch")


def _orders(chunks: Sequence[Chunk]) -> dict[str, LeafOrder]:
    orders: dict[str, LeafOrder] = {}
    for chunk in chunks:
        for name in chunk.leaves:
            if orders.setdefault(name, chunk.leaf_orders.get(name, _natural)) != chunk.leaf_orders.get(name, _natural):
                raise ValueError(f"chunks read {name!r} in different orders: give all of them the same `leaf_orders`")
    return {name: order for name, order in orders.items() if order is not _natural}


def buckets_of(leaves: Mapping[str, Leaf]) -> list[Bucket]:
    """The bucket of every microbatch, in order."""
    return [
        {name: _spec(entries[m]) for name, entries in leaves.items() if entries[m] is not None}
        for m in range(num_microbatches(leaves))
    ]


def num_microbatches(leaves: Mapping[str, Leaf]) -> int:
    """How many microbatches these leaves have."""
    return len(next(iter(leaves.values())))


class _Alike(Sequence[jax.ShapeDtypeStruct]):
    """So many microbatches of one shape, of a leaf that is not here."""

    def __init__(self, spec: jax.ShapeDtypeStruct, number: int) -> None:
        self._spec, self._number = spec, number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: Any) -> Any:
        return self._spec


def _check_complete(leaves: Mapping[str, Any]) -> None:
    for name, leaf in leaves.items():
        lacking = [m for m, entry in enumerate(leaf) if entry is None] if isinstance(leaf, list | tuple) else []
        if lacking:
            raise ValueError(f"microbatch {lacking[0]} lacks {name!r}, which every microbatch needs: add it")


def _num_entries(name: str, leaf: Any) -> int:
    if isinstance(leaf, list | tuple):
        for m, entry in enumerate(leaf):
            if entry is not None:
                _check_array(f"microbatch {m} of batch leaf {name!r}", entry)
            if entry is not None and not (hasattr(entry, "shape") and hasattr(entry, "dtype")):
                raise ValueError(
                    f"microbatch {m} of batch leaf {name!r} is of type {type(entry).__name__}: give an array, or None "
                    "where the microbatch lacks it"
                )
        return len(leaf)
    _check_array(f"batch leaf {name!r}", leaf)
    if not getattr(leaf, "shape", ()):
        raise ValueError(f"batch leaf {name!r} has no microbatch axis: give an array [num_microbatches, ...]")
    return int(leaf.shape[0])


def _check_array(what: str, leaf: Any) -> None:
    """Raise ValueError for an array that has no values to copy, or would lose some."""
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(
            f"{what} is a tracer of jit, grad or vmap: a pipeline runs programs of its own, so give it arrays, outside "
            "of what JAX traces"
        )
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(f"{what} is a deleted array, which a jit has taken over (donate_argnums): give a copy of it")
    if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        raise ValueError(
            f"{what} holds typed random keys: give their numbers, jax.random.key_data(keys), or let the chunk read "
            "`key` (uses_key=True)"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise ValueError(
            f"{what} is a masked array, whose mask no chunk would see: fill it, and give the mask as a leaf"
        )


def _kept(leaf: Any, order: LeafOrder | None, *, is_copied: bool) -> Leaf:
    if isinstance(leaf, list | tuple):
        return [None if entry is None else _copied(entry, order) if is_copied else _spec(entry) for entry in leaf]
    if is_copied and not isinstance(leaf, jax.ShapeDtypeStruct):
        return _copied(leaf, order, axis=2)
    return _Alike(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), leaf.shape[0])


def _copied(entry: Any, order: LeafOrder | None, axis: int = 1) -> Any:
    if isinstance(entry, jax.ShapeDtypeStruct):
        return entry
    return np.array(entry) if order is None else np.take(np.asarray(entry), order(entry.shape[axis]), axis=axis)


def _spec(entry: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(entry.shape, entry.dtype)
