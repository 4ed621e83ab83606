"""Which of several sources each sample of a run comes from, by weight, computed from the sample's number alone.

The sources are the leaves of a binary tree. Of the first ``m`` samples that reach a node, its left side gets
``m * share`` rounded, and the right side the others; so each sample goes one way, and how many went that way before is
known without counting. Nothing is drawn, and every stretch of the run has about the right shares.

How far a source can be from its weight: rounding moves a node's left side, and so its right side, by at most 1/2. That
reaches a leaf times the leaf's share of that node. With ``a_0`` the leaf's weight and ``a_i`` the weight of its i-th
ancestor, the leaf is off by at most ``1/2 * (a_0/a_0 + a_0/a_1 + a_0/a_2 ...)``, one term for each level. In a Huffman
tree (the two lightest nodes are joined first) each node's sibling is at least as heavy as either of its children, as it
would have been joined before; so ``a_(i+1) >= a_i + a_(i-1)``, and the ancestors grow as Fibonacci's numbers: the terms
are at most 1, 1, 1/2, 1/3, 1/5, 1/8 ... Their sum is below 3.36. So after any number of samples **a source is off by at
most 1/2 of a sample where there are two, by 1 where there are three, and by less than 1.7 whatever their number and
weights**.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SAFE = 2**62


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
        self._tree = _tree([int(weight * unit) for weight in exact])

    def sources(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For samples ``start`` to ``start + count - 1`` of the run: the source of each, and how many samples that
        source gave before it. Both ``[count]``."""
        sources, numbers = np.empty(count, np.int64), np.empty(count, np.int64)
        waiting = [(self._tree, start, np.arange(count))]
        while waiting:
            node, before, at = waiting.pop()
            if isinstance(node, int):
                sources[at], numbers[at] = node, np.arange(before, before + len(at))
                continue
            gone_left, goes_left = _left(node, before, len(at))
            waiting.append((node.left, gone_left, at[goes_left]))
            waiting.append((node.right, before - gone_left, at[~goes_left]))
        return sources, numbers


def _tree(weights: Sequence[int]) -> _Node | int:
    """Huffman's tree; of equally heavy nodes the older ones are joined first."""
    heap: list[tuple[int, int, _Node | int]] = [(weight, number, number) for number, weight in enumerate(weights)]
    heapify(heap)
    for number in range(len(weights), 2 * len(weights) - 1):
        (right_weight, _, right), (left_weight, _, left) = heappop(heap), heappop(heap)
        weight = left_weight + right_weight
        heappush(heap, (weight, number, _Node(weight, left_weight, left, right)))
    return heap[0][2]


def _left(node: _Node, before: int, count: int) -> tuple[int, NDArray[np.bool_]]:
    """How many of the first ``before`` samples went left, and which of the next ``count`` do."""
    # round(m * left / weight) in whole numbers, halves upwards; the part before the first sample may be huge
    gone_left, rest = divmod(2 * before * node.left_weight + node.weight, 2 * node.weight)
    is_small = 2 * node.weight * (count + 2) < _SAFE
    steps = np.arange(count + 1, dtype=np.int64 if is_small else object)
    more = (steps * (2 * node.left_weight) + rest) // (2 * node.weight)
    return gone_left, np.diff(more).astype(bool)
