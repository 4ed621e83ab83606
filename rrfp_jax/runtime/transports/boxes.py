"""Boxes: the index ranges of an array that a device holds, or that a message carries.

A box has one ``(start, stop)`` per dimension; that of a scalar is empty. Boxes of one sharding are equal or disjoint,
and together they cover the array.
"""

import math
from collections.abc import Sequence

Box = tuple[tuple[int, int], ...]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of an index as ``jax.sharding.Sharding.devices_indices_map`` gives it."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def intersection(one: Box, other: Box) -> Box | None:
    """The elements that are in both boxes; None where there are none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def num_elements(box: Box) -> int:
    return math.prod(shape_of(box))


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...] | None:
    """Where ``inner`` lies in an array that holds ``outer``; None where it is all of it."""
    if inner == outer:
        return None
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inner, outer, strict=True))
