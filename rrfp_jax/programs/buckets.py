"""The shapes that microbatches of a run may have, numbered: programs are compiled for these, before the first message.

A *bucket* is the shapes of all leaves of a microbatch. What a chunk reads of it decides on the programs that it needs,
so buckets that differ in images only share the programs of all chunks that see none. A microbatch that lacks a leaf
skips the chunks that need it, and what only these feed (:func:`absent_chunks`).

Buckets follow from the data alone: padding changes how sums are rounded, so a bucket must not depend on timing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax.field_rules import with_type
from rrfp_jax.programs.batches import Bucket, Leaf, buckets_of, num_microbatches
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.shapes import describe_chunk
from rrfp_jax.programs.specs import describe
from rrfp_jax.schedules import PipelineGraph

MAX_BUCKETS = 1 << 16
"""A bucket's number travels with every message, in two bytes."""


class Buckets:
    """The buckets of a run. Raises ValueError for none, or too many.

    Args:
        chunks: of the model; leaves that none of them reads do not count.
        buckets: in any order, also several times; the numbers follow their first mention, so every process must give
            the same.
    """

    def __init__(self, chunks: Sequence[Chunk], buckets: Iterable[Mapping[str, Any]]) -> None:
        read = {name for chunk in chunks for name in chunk.leaves}
        self.specs: list[Bucket] = []
        """By number."""
        self._numbers: dict[Any, int] = {}
        for bucket in buckets:
            own = {name: _spec(name, leaf) for name, leaf in bucket.items() if name in read}
            if self._numbers.setdefault(_key(own), len(self.specs)) == len(self.specs):
                self.specs.append(own)
        if not 0 < len(self.specs) <= MAX_BUCKETS:
            raise ValueError(f"{len(self.specs)} buckets are given: give 1 to {MAX_BUCKETS}")

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal buckets in the same order."""
        return tuple(self._numbers)

    def numbers(self, leaves: Mapping[str, Leaf]) -> tuple[int, ...]:
        """The bucket of every microbatch of a batch; raises ValueError, naming the microbatch, where it has none."""
        known, names = self._numbers, sorted(leaves)
        if all(isinstance(leaves[name], np.ndarray) for name in names):  # of which all microbatches are alike
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
    """The chunks that a microbatch with these leaves skips. Raises ValueError where another chunk then lacks its input,
    or has nobody to read its output."""
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
    """The chunks that lack a leaf, or all inputs that they need."""
    absent: set[int] = set()
    for index, chunk in enumerate(chunks):
        required = graph.required_predecessors(index)
        if not set(chunk.leaves) <= {*leaves, *chunk.optional_leaves} or (required and absent.issuperset(required)):
            absent.add(index)
    return absent


def _is_unread(index: int, graph: PipelineGraph, absent: Collection[int]) -> bool:
    """Whether a chunk runs for nobody."""
    successors = graph.successors(index)
    return index not in absent and bool(successors) and set(successors) <= set(absent)


def leaves_to_lack(chunks: Sequence[Chunk], graph: PipelineGraph) -> frozenset[str]:
    """The leaves without which, alone or with others, a microbatch still runs, on the chunks that are left."""
    every = {name for chunk in chunks for name in chunk.leaves}
    return frozenset(name for name in every if _runs_without(name, every, chunks, graph))


def _runs_without(name: str, every: set[str], chunks: Sequence[Chunk], graph: PipelineGraph) -> bool:
    """Without the leaf, and without those that are read only by chunks which then run for nobody."""
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


def _spec(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise ValueError(
            f"a bucket has {with_type(leaf)} for leaf {name!r}: give an array of one microbatch, or its spec"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _key(bucket: Bucket) -> Any:
    return tuple(sorted([(name, leaf.shape, leaf.dtype) for name, leaf in bucket.items()]))


def _text(bucket: Bucket) -> str:
    return ", ".join(f"{name} {describe(leaf)}" for name, leaf in sorted(bucket.items())) or "nothing"


def _names(leaves: Collection[str]) -> str:
    return f"the leaves {', '.join(sorted(leaves))}" if leaves else "no leaf"
