"""The batch of a step: the leaves that chunks read, and the one shape that programs are compiled for."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax.programs.chunk import Chunk

BatchSpec = dict[str, jax.ShapeDtypeStruct]
"""Leaves [num_microbatches, ...] by name."""


def leaves_read(
    chunks: Sequence[Chunk], batch: Mapping[str, Any], *, copied_for: Collection[int] | None = None
) -> dict[str, Any]:
    """The leaves of ``batch`` that the chunks read, copied into NumPy arrays (specs stay specs).

    A step reads its batch while the caller may already refill the buffers for the next. Of leaves that none of the
    chunks ``copied_for`` (None: all) reads only the shape is kept.

    Raises ValueError for a missing leaf, one without a microbatch axis, or different numbers of microbatches.
    """
    wanted = sorted({name for chunk in chunks for name in chunk.leaves})
    if not wanted:
        raise ValueError("no chunk reads a batch leaf, so no batch says how many microbatches there are: let one read")
    missing = [name for name in wanted if name not in batch]
    if missing:
        raise ValueError(f"the batch lacks {', '.join(missing)}: it has {', '.join(sorted(batch)) or 'nothing'}")
    for name in wanted:
        if not getattr(batch[name], "shape", ()):
            raise ValueError(f"batch leaf {name!r} has no microbatch axis: give an array [num_microbatches, ...]")
    sizes = {name: batch[name].shape[0] for name in wanted}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"batch leaves have different numbers of microbatches: {sizes}; make all of them equal")
    if 0 in sizes.values():
        raise ValueError(f"the batch has 0 microbatches: {', '.join(wanted)} must hold at least 1")
    own = {
        name for index, chunk in enumerate(chunks) if copied_for is None or index in copied_for for name in chunk.leaves
    }
    specs = spec_of_batch({name: batch[name] for name in wanted})
    return {
        name: np.array(batch[name]) if name in own and not isinstance(batch[name], jax.ShapeDtypeStruct) else spec
        for name, spec in specs.items()
    }


def spec_of_batch(leaves: Mapping[str, Any]) -> BatchSpec:
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}


def num_microbatches(spec: BatchSpec) -> int:
    return next(iter(spec.values())).shape[0]


def spec_of_microbatch(spec: BatchSpec) -> BatchSpec:
    """The leaves of one microbatch."""
    return {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in spec.items()}


def check_same_shapes(leaves: Mapping[str, Any], spec: BatchSpec) -> None:
    """Raise ValueError where a batch differs from the one that programs were compiled for."""
    for name, leaf in leaves.items():
        if leaf.shape != spec[name].shape or leaf.dtype != spec[name].dtype:
            raise ValueError(
                f"batch leaf {name!r} is {leaf.dtype}{list(leaf.shape)}, but the programs were compiled for "
                f"{spec[name].dtype}{list(spec[name].shape)}: pad every batch to one shape"
            )
