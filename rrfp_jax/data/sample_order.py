"""The item of a data set, or of several, that each sample of a run is, by the sample's number alone.

**Epochs.** Items are counted over the whole run: item ``n`` of the run is item ``order(n // num)[n % num]`` of the data
set, and step ``s`` takes ``batch_size`` of them from ``s * batch_size`` on. A step may therefore span two epochs, and
nothing is left out.

An order is never written down: ``order(epoch)[place]`` is computed from the place, in the same memory for ten items and
for ten billion. The place's bits are cut into two halves, and by turns each half is changed by a keyed function of the
other (a Feistel network). That permutes the numbers of so many bits, whatever the function; the keys come from (seed,
epoch). With as few bits as hold ``num``, more than half of these numbers are below it; a number that is not is put
through again until it is (cycle walking: Black and Rogaway 2002), which permutes the numbers below ``num``.

**Mixtures.** Which of several sources a sample comes from follows from its number and the weights of the sources. The
sources are the leaves of a binary tree. Of the first ``m`` samples that reach a node, its left side gets ``m * share``
rounded, and the right side the others; so each sample goes one way, and how many went that way before is known without
counting. Nothing is drawn, and every stretch of the run has about the right shares.

How far a source can be from its weight: rounding moves a node's left side, and so its right side, by at most 1/2. That
reaches a leaf times the leaf's share of that node. With ``a_0`` the leaf's weight and ``a_i`` the weight of its i-th
ancestor, the leaf is off by at most ``1/2 * (a_0/a_0 + a_0/a_1 + a_0/a_2 ...)``, one term for each level. In a Huffman
tree (the two lightest nodes are joined first) each node's sibling is at least as heavy as either of its children, as it
would have been joined before; so ``a_(i+1) >= a_i + a_(i-1)``, and the ancestors grow as Fibonacci's numbers: the terms
are at most 1, 1, 1/2, 1/3, 1/5, 1/8 ... Their sum is below 3.36. So after any number of samples **a source is off by at
most 1/2 of a sample where there are two, by 1 where there are three, and by less than 1.7 whatever their number and
weights**.

**Parts.** A fraction of the items may be held out for evaluation, at the end of the data or by a checksum of each item.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import lcm
from typing import Literal, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Part = Literal["train", "held_out"]
TRAIN: Part = "train"
HELD_OUT: Part = "held_out"

_ROUNDS = 8
_LEAST_BITS = 5
"""Fewest bits of a place; with fewer, some orders of a handful of items would come more often than others."""
_BYTES_PER_KEY = 8
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Odd numbers that mix well (Steele, Lea and Flood 2014)."""
_SAFE = 2**62  # whole numbers up to here leave int64 a reserve


# --------------------------------------------------------------------------------------------------------------- parts


def num_trained(num: int, held_out: float) -> int:
    """Returns how many of ``num`` items are trained on where the fraction ``held_out``, rounded up, is held out."""
    return int(num * (1 - Fraction(str(held_out))))


def is_held_out(key: str, fraction: float) -> bool:
    """Returns whether the sample with this key is held out: by the key's CRC-32 alone, so the same in every run and on
    every machine, whatever else the data holds."""
    return crc32(key.encode(errors="surrogatepass")) < fraction * 2**32


def refuse_nothing_held_out(part: Part, held_out: float) -> None:
    """Raise ValueError where the part that is held out is asked for, and none is."""
    if part == HELD_OUT and not held_out:
        raise ValueError("held_out is 0, so nothing is kept for evaluation: give a fraction, for example 0.01")


# -------------------------------------------------------------------------------------------------------------- epochs


def places_of_step(step: int, batch_size: int) -> NDArray[np.int64]:
    """Returns the numbers in the run of a step's items, ``[batch_size]``; raises ValueError for a negative step.

    Of a data set with ``num`` items, those from number ``num`` on have come before.
    """
    if step < 0:
        raise ValueError(f"step is {step}: give 0 or more")
    return np.arange(step * batch_size, (step + 1) * batch_size)


def items_of(step: int, *, batch_size: int, num: int, seed: int) -> NDArray[np.int64]:
    """Returns which of ``num`` items step ``step`` takes, ``[batch_size]``. Raises ValueError for a negative step."""
    return items_at(places_of_step(step, batch_size), num=num, seed=seed)


def items_at(numbers: NDArray[np.int64], *, num: int, seed: int, source: int = 0) -> NDArray[np.int64]:
    """Returns which of ``num`` items are the items ``numbers`` of the run, counted from 0, ``[len(numbers)]``.

    ``source`` tells data sets apart that are gone through beside each other, so that equally long ones differ.
    """
    epochs, places = np.divmod(numbers, num)
    different, which = np.unique(epochs, return_inverse=True)
    keys = np.array([_keys(seed, source, epoch) for epoch in different.tolist()])[which].T
    items = places.astype(np.uint64)
    num_bits = max(_LEAST_BITS, (num - 1).bit_length())
    outside = np.arange(len(items))
    while len(outside):  # cycle walking
        items[outside] = _permuted(items[outside], keys[:, outside], num_bits)
        outside = outside[items[outside] >= num]
    return items.astype(np.int64)


def _permuted(items: NDArray[np.uint64], keys: NDArray[np.uint64], num_bits: int) -> NDArray[np.uint64]:
    """Returns items ``[n]`` permuted among the numbers of ``num_bits`` bits, each by its own ``keys`` ``[rounds,
    n]``."""
    low = num_bits // 2
    halves = [items & np.uint64((1 << low) - 1), items >> np.uint64(low)]
    unused = [np.uint64(64 - low), np.uint64(64 - (num_bits - low))]
    for number, key in enumerate(keys):
        one, other = number % 2, 1 - number % 2
        mixed = (halves[other] ^ key) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _SECOND
        halves[one] = halves[one] ^ (mixed >> unused[one])
    return (halves[1] << np.uint64(low)) | halves[0]


@lru_cache(maxsize=1024)
def _keys(seed: int, source: int, epoch: int) -> NDArray[np.uint64]:
    # A digest is the same for ever, so a run that resumes with another NumPy sees the same order.
    text = f"{seed} {source} {epoch}".encode()
    digest = hashlib.blake2b(text, digest_size=_ROUNDS * _BYTES_PER_KEY).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


# ------------------------------------------------------------------------------------------------------------ mixtures


class _Node(NamedTuple):
    """Several sources; a number in place of a node is one of them."""

    weight: int
    left_weight: int
    left: "_Node | int"
    right: "_Node | int"


class Mixture:
    """Sources by weight; see the module's text. Weights are positive, and their sum may be any number.

    Raises ValueError for no weights, and for one that is not positive.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or not all(0 < weight < float("inf") for weight in weights):
            raise ValueError(f"the weights are {list(weights)}: give at least one, each above 0")
        exact = [Fraction(str(weight)) for weight in weights]  # 0.1 means a tenth
        unit = lcm(*(weight.denominator for weight in exact))
        # Of equally heavy nodes the older ones are joined first, so that the tree is the same everywhere.
        heap: list[tuple[int, int, _Node | int]]
        heap = [(int(weight * unit), number, number) for number, weight in enumerate(exact)]
        heapify(heap)
        for number in range(len(exact), 2 * len(exact) - 1):
            (right_weight, _, right), (left_weight, _, left) = heappop(heap), heappop(heap)
            weight = left_weight + right_weight
            heappush(heap, (weight, number, _Node(weight, left_weight, left, right)))
        self._tree = heap[0][2]

    def sources(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the source of each sample ``start`` to ``start + count - 1`` of the run, and how many samples that
        source gave before it. Both are int64 ``[count]``."""
        sources, numbers = np.empty(count, np.int64), np.empty(count, np.int64)
        waiting = [(self._tree, start, np.arange(count))]
        while waiting:
            node, before, at = waiting.pop()
            if isinstance(node, int):
                sources[at], numbers[at] = node, np.arange(before, before + len(at))
                continue
            # round(m * left / weight) in whole numbers, halves upwards; the part before the first sample may be huge
            gone_left, rest = divmod(2 * before * node.left_weight + node.weight, 2 * node.weight)
            is_small = 2 * node.weight * (len(at) + 2) < _SAFE
            steps = np.arange(len(at) + 1, dtype=np.int64 if is_small else object)
            more = (steps * (2 * node.left_weight) + rest) // (2 * node.weight)
            goes_left = np.diff(more).astype(bool)
            waiting.append((node.left, gone_left, at[goes_left]))
            waiting.append((node.right, before - gone_left, at[~goes_left]))
        return sources, numbers
