"""The batch of a step: the leaves that chunks read, microbatch by microbatch, and the shapes that these may have.

A leaf is an array ``[num_microbatches, ...]`` or, where microbatches differ, a list with an entry for each of them: an
array, or None where the microbatch lacks the leaf. A ``jax.ShapeDtypeStruct`` may stand for any array that this process
does not read.

A *bucket* is the shapes of all leaves of a microbatch; programs are compiled for the buckets of a run before the first
step. The part of it that a chunk reads decides on the programs that it needs, so buckets that differ in images only
share the programs of all chunks that see none. A microbatch that lacks a leaf skips the chunks that need it, and the
chunks that only these feed (:func:`absent_chunks`). Buckets follow from the data alone: padding changes how sums are
rounded, so a bucket must not depend on timing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.field_rules import with_type
from rrfp_jax.programs.chunk import Chunk, LeafOrder
from rrfp_jax.programs.shapes import describe_chunk, spec_text
from rrfp_jax.schedules import PipelineGraph

Bucket = dict[str, jax.ShapeDtypeStruct]
"""The shapes of one microbatch's leaves by name; what it lacks is missing."""
BatchLeaf = Any
"""A leaf of a step: for each microbatch an array, a spec or None."""
MAX_BUCKETS = 1 << 16
"""The number of buckets that fit: a bucket's number travels with every message, in two bytes."""


def _natural(length: int) -> np.ndarray:
    return np.arange(length)


class StepBatch(NamedTuple):
    """The batch of a step, as the stages get it."""

    leaves: Mapping[str, BatchLeaf] = {}
    """The leaves by name."""
    buckets: Sequence[int] = ()
    """For each microbatch the number of its bucket."""
    step: int | None = None
    """The training step on whose number random keys depend; None: the step's own number."""
    verifies: bool = False
    """Whether all microbatches are copies of one, which run under the same number, and nothing is updated."""
    numbers: Sequence[int] = ()
    """The microbatches' own numbers, by which random keys and the sum of losses go, where they come in another order
    than the caller's; empty: their places."""
    left_out: frozenset[tuple[int, int]] = frozenset()
    """The pairs of a chunk, numbered in one replica, and a microbatch's place whose weight gradient adds nothing."""
    params: Mapping[int, Any] | None = None
    """By chunk, the parameters that an evaluation in idle time reads; None: those of the stages."""

    def number(self, place: int) -> int:
        """Returns the own number of the microbatch in a place."""
        return self.numbers[place] if self.numbers else place


def leaves_read(
    chunks: Sequence[Chunk],
    batch: Mapping[str, Any],
    *,
    may_lack: Collection[str] = (),
    copied_for: Collection[int] | None = None,
) -> dict[str, BatchLeaf]:
    """Returns the leaves of ``batch`` that the chunks read, copied into NumPy arrays (specs stay specs).

    They are copied because a step reads its batch while the caller may already refill the buffers for the next. Where
    chunks read positions in another order than the batch has them, they are reordered here. Of leaves that none of the
    chunks ``copied_for`` (None: all) reads only the shape is kept. ``may_lack`` names the leaves that microbatches may
    lack (:func:`leaves_to_lack`).

    Raises ValueError for a missing leaf, one without a microbatch axis or with anything but arrays, for different
    numbers of microbatches, and for leaves that a chunk ``copied_for`` refuses (``check_leaves``).
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
    own = [chunk for index, chunk in enumerate(chunks) if copied_for is None or index in copied_for]
    copied, orders = {name for chunk in own for name in chunk.leaves}, _orders(chunks)
    leaves = {name: _kept(batch[name], orders.get(name), is_copied=name in copied) for name in present}
    checks = [chunk.check_leaves for chunk in own if chunk.check_leaves is not None]
    for m in range(num_microbatches(leaves) if checks else 0):
        there = {name: entries[m] for name, entries in leaves.items() if entries[m] is not None}
        for check in checks:
            check(there, f"microbatch {m} of the batch")
    return leaves


def _orders(chunks: Sequence[Chunk]) -> dict[str, LeafOrder]:
    orders: dict[str, LeafOrder] = {}
    for chunk in chunks:
        for name in chunk.leaves:
            if orders.setdefault(name, chunk.leaf_orders.get(name, _natural)) != chunk.leaf_orders.get(name, _natural):
                raise ValueError(f"chunks read {name!r} in different orders: give all of them the same `leaf_orders`")
    return {name: order for name, order in orders.items() if order is not _natural}


def buckets_of(leaves: Mapping[str, BatchLeaf]) -> list[Bucket]:
    """Returns the bucket of every microbatch, in order."""
    return [
        {name: _spec(entries[m]) for name, entries in leaves.items() if entries[m] is not None}
        for m in range(num_microbatches(leaves))
    ]


def num_microbatches(leaves: Mapping[str, BatchLeaf]) -> int:
    """Returns how many microbatches these leaves have."""
    return len(next(iter(leaves.values())))


def in_order(leaves: Mapping[str, BatchLeaf], order: Sequence[int]) -> dict[str, BatchLeaf]:
    """Returns the leaves with their microbatches in this order, none of them copied."""
    return {name: [leaf[number] for number in order] for name, leaf in leaves.items()}


class _Alike(Sequence[jax.ShapeDtypeStruct]):
    """A leaf that is not here: microbatches of one shape."""

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


def _check_array(name: str, leaf: Any) -> None:
    """Raises ValueError for an array that has no values to copy, or would lose some."""
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(
            f"{name} is a tracer of jit, grad or vmap: a pipeline runs programs of its own, so give it arrays, outside "
            "of what JAX traces"
        )
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(f"{name} is a deleted array, which a jit has taken over (donate_argnums): give a copy of it")
    if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        raise ValueError(
            f"{name} holds typed random keys: give their numbers, jax.random.key_data(keys), or let the chunk read "
            "`key` (uses_key=True)"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise ValueError(
            f"{name} is a masked array, whose mask no chunk would see: fill it, and give the mask as a leaf"
        )


def _kept(leaf: Any, order: LeafOrder | None, *, is_copied: bool) -> BatchLeaf:
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


# -- buckets -----------------------------------------------------------------------------------------------------------


class Buckets:
    """The buckets of a run, numbered. Raises ValueError for none, or too many.

    Args:
        chunks: of the model; leaves that none of them reads do not count.
        buckets: in any order, also several times; the numbers follow their first mention, so every process must give
            the same.
    """

    def __init__(self, chunks: Sequence[Chunk], buckets: Iterable[Mapping[str, Any]]) -> None:
        read = {name for chunk in chunks for name in chunk.leaves}
        self.specs: list[Bucket] = []
        """The buckets by number."""
        self._numbers: dict[Any, int] = {}
        for bucket in buckets:
            own = {name: _bucket_spec(name, leaf) for name, leaf in bucket.items() if name in read}
            if self._numbers.setdefault(_key(own), len(self.specs)) == len(self.specs):
                self.specs.append(own)
        if not 0 < len(self.specs) <= MAX_BUCKETS:
            raise ValueError(f"{len(self.specs)} buckets are given: give 1 to {MAX_BUCKETS}")

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for equal buckets in the same order."""
        return tuple(self._numbers)

    def numbers(self, leaves: Mapping[str, BatchLeaf]) -> tuple[int, ...]:
        """Returns the bucket of every microbatch of a batch; raises ValueError, naming a microbatch that has none."""
        known, names = self._numbers, sorted(leaves)
        # the microbatches of one array are alike, so one look-up serves all of them
        if all(isinstance(leaves[name], np.ndarray) for name in names):
            key = tuple([(name, leaves[name].shape[1:], leaves[name].dtype) for name in names])
            if key in known:
                return (known[key],) * len(leaves[names[0]])
        found = []
        for microbatch in range(num_microbatches(leaves)):
            entries = [(name, leaves[name][microbatch]) for name in names]
            key = tuple([(name, entry.shape, entry.dtype) for name, entry in entries if entry is not None])
            if key not in known:
                raise ValueError(self._refusal(microbatch, buckets_of(leaves)[microbatch]))
            found.append(known[key])
        return tuple(found)

    def _refusal(self, microbatch: int, bucket: Bucket) -> str:
        here = f"microbatch {microbatch} of the batch is {_text(bucket)}"
        if len(self) == 1:
            return (
                f"{here}, but the programs were compiled for {_text(self.specs[0])}: pad every batch to one shape, or "
                "prepare the pipeline for the buckets of the data"
            )
        known = "; ".join(_text(spec) for spec in self.specs[:8])
        return (
            f"{here}, which is none of the {len(self)} buckets that programs were compiled for ({known}"
            f"{'; ...' if len(self) > 8 else ''}): pad it to one of them, or prepare the pipeline for it too"
        )


def absent_chunks(chunks: Sequence[Chunk], graph: PipelineGraph, leaves: Collection[str]) -> frozenset[int]:
    """Returns the chunks that a microbatch with these leaves skips.

    Raises ValueError where another chunk then lacks its input, or has nobody to read its output.
    """
    absent = _skipped(chunks, graph, leaves)
    for index in range(len(chunks)):
        gone = [p for p in graph.required_predecessors(index) if p in absent]
        if gone and index not in absent:
            raise ValueError(
                f"a microbatch with {_names(leaves)} skips {describe_chunk(chunks, gone[0])}, whose output "
                f"{describe_chunk(chunks, index)} needs: make that edge optional, or give the microbatch all leaves"
            )
    for index in range(len(chunks)):
        if _is_unread(index, graph, absent) or (index in absent and not graph.successors(index)):
            raise ValueError(
                f"a microbatch with {_names(leaves)} has no loss, as nothing follows {describe_chunk(chunks, index)}: "
                "give it the leaves that the last chunks read"
            )
    return frozenset(absent)


def _skipped(chunks: Sequence[Chunk], graph: PipelineGraph, leaves: Collection[str]) -> set[int]:
    """Returns the chunks that lack a leaf, or all inputs that they need."""
    absent: set[int] = set()
    for index, chunk in enumerate(chunks):
        required = graph.required_predecessors(index)
        if not set(chunk.leaves) <= {*leaves, *chunk.optional_leaves} or (required and absent.issuperset(required)):
            absent.add(index)
    return absent


def _is_unread(index: int, graph: PipelineGraph, absent: Collection[int]) -> bool:
    """Whether a chunk runs, and all its successors are skipped."""
    successors = graph.successors(index)
    return index not in absent and bool(successors) and set(successors) <= set(absent)


def leaves_to_lack(chunks: Sequence[Chunk], graph: PipelineGraph) -> frozenset[str]:
    """Returns the leaves without which, alone or with others, a microbatch still runs, on the chunks that are left."""
    every = {name for chunk in chunks for name in chunk.leaves}
    return frozenset(name for name in every if _runs_without(name, every, chunks, graph))


def _runs_without(name: str, every: set[str], chunks: Sequence[Chunk], graph: PipelineGraph) -> bool:
    """Whether a microbatch runs without the leaf, and without leaves that are read only by chunks then unread."""
    leaves = every - {name}
    while True:
        skipped = _skipped(chunks, graph, leaves)
        unread = {c for c in range(len(chunks)) if _is_unread(c, graph, skipped)}
        read = {leaf for c in set(range(len(chunks))) - skipped - unread for leaf in chunks[c].leaves}
        rest = leaves - {leaf for c in unread for leaf in chunks[c].leaves if leaf not in read}
        if rest == leaves:
            break
        leaves = rest
    try:
        absent_chunks(chunks, graph, leaves)
    except ValueError:
        return False
    return True


def _bucket_spec(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise ValueError(
            f"a bucket has {with_type(leaf)} for leaf {name!r}: give an array of one microbatch, or its spec"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _key(bucket: Bucket) -> Any:
    return tuple(sorted([(name, leaf.shape, leaf.dtype) for name, leaf in bucket.items()]))


def _text(bucket: Bucket) -> str:
    return ", ".join(f"{name} {spec_text(leaf)}" for name, leaf in sorted(bucket.items())) or "nothing"


def _names(leaves: Collection[str]) -> str:
    return f"the leaves {', '.join(sorted(leaves))}" if leaves else "no leaf"
