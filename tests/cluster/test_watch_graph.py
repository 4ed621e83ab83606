"""Whoever vanishes, the rest of the graph along which losses are told stays in one piece, and nobody has many links."""

import random
from collections.abc import Collection
from itertools import combinations

import pytest

from rrfp_jax.cluster.failure_detector import watched


def hops(num_ranks: int, gone: Collection[int] = ()) -> int | None:
    """How far the farthest of those who are left is from the first of them; None where it cannot be reached."""
    left = set(range(num_ranks)) - set(gone)
    start = min(left)
    seen, edge, count = {start}, {start}, 0
    while len(seen) < len(left):
        edge = {other for rank in edge for other in watched(rank, num_ranks)} & left - seen
        if not edge:
            return None
        seen |= edge
        count += 1
    return count


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 6, 7, 8, 16, 37, 64, 100, 1024, 4096])
def test_everybody_watches_those_who_watch_it_and_four_at_most(num_ranks: int) -> None:
    for rank in range(num_ranks):
        others = watched(rank, num_ranks)
        assert rank not in others
        assert len(others) <= 4
        assert all(rank in watched(other, num_ranks) for other in others)
    assert (distance := hops(num_ranks)) is not None
    assert distance <= num_ranks**0.5 + 1


@pytest.mark.parametrize("num_ranks", [4, 5, 6, 7, 8, 9, 10, 11, 12, 17])
def test_any_three_may_vanish(num_ranks: int) -> None:
    for gone in combinations(range(num_ranks), 3):
        assert hops(num_ranks, gone) is not None, gone


def test_any_three_may_vanish_of_many() -> None:
    chance = random.Random(0)
    for _ in range(300):
        num_ranks = chance.randint(20, 300)
        start = chance.randrange(num_ranks)  # near each other, where it is hardest
        near = [*range(start - 3, start + 4), *(start + s * round(num_ranks**0.5) for s in (-1, 1))]
        gone = {rank % num_ranks for rank in chance.sample(near, 3)}
        assert hops(num_ranks, gone) is not None, (num_ranks, gone)


@pytest.mark.parametrize("num_ranks", [24, 64, 100, 256])
def test_one_host_of_any_size_may_vanish_and_two_small_ones(num_ranks: int) -> None:
    stride = round(num_ranks**0.5)
    for size in (2, stride - 1, stride, num_ranks // 2, num_ranks - 2):
        for start in range(0, num_ranks, 7):
            host = {(start + i) % num_ranks for i in range(size)}
            assert hops(num_ranks, host) is not None, (start, size)
    small = stride - 1
    for first in range(0, stride, 4):  # all others look the same
        for second in range(num_ranks):
            hosts = {(start + i) % num_ranks for start in (first, second) for i in range(small)}
            assert hops(num_ranks, hosts) is not None, (first, second)
