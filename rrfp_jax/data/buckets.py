"""Rows of one length, and the few sizes for which a run is compiled, so that data of many sizes is padded least.

Every size is a program, so a run has a fixed set of them, its *buckets*, and smaller microbatches are padded up to one.
The best at most ``k`` out of ``n`` different lengths are found exactly: with the lengths in ascending order, the
lengths between two chosen ones are padded to the upper one, so the least cost of covering the first ``j`` lengths with
``b`` buckets is the least over ``i < j`` of covering the first ``i`` with ``b - 1`` and the others with length ``j``.
That is ``k n**2 / 2`` additions, done ``n`` at a time.

Buckets follow from the data alone, never from timing: padding changes rounding, and all processes must find the same.

Sizes are also rounded up to multiples, so that the devices of a stage's mesh share all of a microbatch. A size that
does not divide is whole on every device, which then repeats the work of the others.

**Rows** are filled by best fit, longest first: each sequence goes where it leaves the least free. No row is opened
while another has enough left, so any two rows together hold more than one row's capacity, and every row but the last
holds ``capacity // longest`` sequences or more. From these two follows the most rows that any data needs
(``most_rows``), which buckets must be able to hold.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import lcm, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rrfp_jax.layout import CONTEXT, EXPERT, FSDP

SizePair = tuple[int, int]
"""A size of text and a size of images; 0 where there are no images."""


def best_buckets(
    lengths: ArrayLike, num_buckets: int, *, multiple: int = 1, largest: int | None = None
) -> tuple[int, ...]:
    """Returns at most ``num_buckets`` lengths, ascending, to which the ``lengths`` (a sample of the data) are padded
    least.

    Each is one of the lengths rounded up to a ``multiple``; the last one is the longest, or ``largest`` where data
    longer than the sample may come. Fewer buckets are taken where more would save nothing.

    Raises ValueError where there is nothing to choose from, or a length is less than 1 or above ``largest``.
    """
    sample = np.asarray(lengths, np.int64).reshape(-1)
    if num_buckets < 1 or multiple < 1:
        raise ValueError(f"num_buckets is {num_buckets} and multiple is {multiple}: give at least 1 of both")
    if not sample.size and largest is None:
        raise ValueError("there are no lengths to choose buckets for: give at least one, or the largest")
    if sample.size and sample.min() < 1:
        raise ValueError(f"a length is {sample.min()}: give at least 1")
    if largest is not None and sample.size and sample.max() > largest:
        raise ValueError(f"a length is {sample.max()}, but the largest bucket is to be {largest}: give at least that")
    rounded = -(-sample // multiple) * multiple
    candidates, counts = np.unique(rounded, return_counts=True)
    if largest is not None:
        top = -(-largest // multiple) * multiple
        if not candidates.size or candidates[-1] < top:
            candidates, counts = np.append(candidates, top), np.append(counts, 0)
    return tuple(int(candidates[index]) for index in _best_indices(candidates, counts, num_buckets))


def _best_indices(lengths: NDArray[np.int64], counts: NDArray[np.int64], num_buckets: int) -> list[int]:
    """Returns the indices to choose of ascending ``lengths`` that occur ``counts`` times; the last one always."""
    num = len(lengths)
    below = np.concatenate([[0], np.cumsum(counts)])  # how many are shorter than each length
    costs = lengths * below[1:]  # one bucket for the lengths up to each
    came_from: list[NDArray[np.int64]] = []
    totals = [int(costs[-1])]
    for _ in range(1, min(num_buckets, num)):
        longer, previous = costs.copy(), np.full(num, -1)
        for last in range(1, num):
            covered = costs[:last] + lengths[last] * (below[last + 1] - below[1 : last + 1])
            best = int(np.argmin(covered))
            if covered[best] < costs[last]:
                longer[last], previous[last] = covered[best], best
        costs = longer
        came_from.append(previous)
        totals.append(int(costs[-1]))
    chosen = [num - 1]
    for previous in reversed(came_from[: totals.index(min(totals))]):
        if previous[chosen[-1]] >= 0:
            chosen.append(int(previous[chosen[-1]]))
    return chosen[::-1]


def padded(lengths: ArrayLike, buckets: Collection[int]) -> NDArray[np.int64]:
    """Returns the smallest bucket that holds each of the ``lengths``. Raises ValueError where one is above all
    buckets."""
    sample, ascending = np.asarray(lengths, np.int64), np.unique(np.asarray(list(buckets), np.int64))
    if not ascending.size or (sample.size and sample.max() > ascending[-1]):
        raise ValueError(f"a length is {sample.max()}, above all of the buckets {ascending.tolist()}: add a larger one")
    return ascending[np.searchsorted(ascending, sample)]


def occurring_pairs(
    sizes: Iterable[SizePair], texts: Collection[int], images: Collection[int], *, always: Collection[SizePair] = ()
) -> tuple[SizePair, ...]:
    """Returns the buckets of two dimensions that a sample of the data falls into, ascending: texts x (images or none).

    ``texts`` and ``images`` are the buckets of each; ``always`` are sizes whose pairs are among the result whether
    they occur or not, such as the largest that may come.
    """
    pairs = {
        (int(padded(text, texts)), int(padded(image, images)) if image else 0) for text, image in (*always, *sizes)
    }
    return tuple(sorted(pairs))


def smallest_fitting(size: SizePair, pairs: Sequence[SizePair]) -> SizePair:
    """Returns the pair of the least text, then of the least images, that holds ``size``; without images one without.

    Raises ValueError where it fits none of the ``pairs``.
    """
    text, image = size
    fitting = [pair for pair in pairs if pair[0] >= text and (pair[1] >= image if image else pair[1] == 0)]
    if not fitting:
        raise ValueError(
            f"text of {text} and images of {image} fit none of the buckets {list(pairs)}: add a larger one"
        )
    return min(fitting)


_ROW_AXES = (FSDP, EXPERT)
"""Mesh axes over which the rows of a microbatch are cut."""


class CutSizes(NamedTuple):
    """The number of which each size of a microbatch is to be a multiple."""

    rows: int = 1
    length: int = 1
    """Length of rows, in tokens."""
    image_rows: int = 1
    image_length: int = 1
    """Length of rows of images, in features."""


def cut_sizes(mesh: Mapping[str, int], encoder_mesh: Mapping[str, int] | None = None) -> CutSizes:
    """Returns the multiples for a decoder's stages on ``mesh``, and an encoder's on ``encoder_mesh`` (None: the same).

    A decoder deals the positions of a sequence out in twice as many pieces as ``context`` has devices
    (:mod:`rrfp_jax.models.cuts`). Features of images pass from one mesh to the other, and are cut on both.
    """
    meshes = [mesh, mesh if encoder_mesh is None else encoder_mesh]
    rows = [prod(each.get(axis, 1) for axis in _ROW_AXES) for each in meshes]
    context = mesh.get(CONTEXT, 1)
    return CutSizes(
        rows=rows[0],
        length=2 * context if context > 1 else 1,
        image_rows=lcm(*rows),
        image_length=lcm(*(each.get(CONTEXT, 1) for each in meshes)),
    )


def rounded_up(size: int, multiple: int) -> int:
    """Returns the least multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


class Packing(NamedTuple):
    """The places of sequences in rows."""

    num_rows: int
    rows: tuple[int, ...]
    """The row of each, from 0."""
    offsets: tuple[int, ...]
    """The beginning of each in its row."""


def pack_rows(lengths: Sequence[int], capacity: int) -> Packing:
    """Packs sequences of these lengths into as few rows of ``capacity`` as best fit decreasing finds; the same every
    time.

    Raises ValueError where one is longer than a row.
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a length of {max(lengths)} does not fit into a row of {capacity}: give longer rows")
    rows, offsets = [0] * len(lengths), [0] * len(lengths)
    free: list[tuple[int, int]] = []  # (space left, row), ascending
    num_rows = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect_left(free, (lengths[index], -1))
        if at < len(free):
            space, row = free.pop(at)
        else:
            space, row, num_rows = capacity, num_rows, num_rows + 1
        rows[index], offsets[index] = row, capacity - space
        insort(free, (space - lengths[index], row))
    return Packing(num_rows, tuple(rows), tuple(offsets))


def most_rows(num: int, *, longest: int, total: int, capacity: int) -> int:
    """Returns how many rows :func:`pack_rows` needs at most for up to ``num`` sequences of up to ``longest``, together
    up to ``total``."""
    if not num or not total:
        return 0
    if longest > capacity:
        raise ValueError(f"a length of {longest} does not fit into a row of {capacity}: give longer rows")
    by_number = -(-num // (capacity // longest))
    by_total = max(1, -(-2 * total // capacity) - 1)  # two rows or more hold over half of what they could
    return min(by_number, by_total)
