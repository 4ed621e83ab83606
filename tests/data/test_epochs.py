"""Orders that are computed place by place."""

import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from rrfp_jax.data.epochs import items_at, items_of

LARGE = 2_441_406_250


@pytest.mark.parametrize("num", [1, 2, 3, 31, 32, 33, 1000, 4097])
def test_every_epoch_visits_each_item_once(num):
    items = items_at(np.arange(3 * num), num=num, seed=7).reshape(3, num)
    assert (np.sort(items, axis=1) == np.arange(num)).all()
    if num > 30:
        assert len({epoch.tobytes() for epoch in items}) == 3


def test_any_place_alone_is_the_same_as_among_others():
    whole = items_at(np.arange(250), num=100, seed=1)
    assert [int(items_at(np.array([place]), num=100, seed=1)[0]) for place in range(250)] == whole.tolist()
    assert items_of(3, batch_size=60, num=100, seed=1).tolist() == whole[180:240].tolist()


def test_orders_differ_by_seed_epoch_and_source():
    first = items_at(np.arange(64), num=64, seed=0)
    for other in (
        items_at(np.arange(64), num=64, seed=1),
        items_at(np.arange(64, 128), num=64, seed=0),
        items_at(np.arange(64), num=64, seed=0, source=1),
    ):
        assert (first == other).sum() < 8


def test_all_orders_of_a_few_items_are_about_as_likely():
    epochs = items_at(np.arange(4 * 2400), num=4, seed=0).reshape(2400, 4)
    counts = Counter(map(tuple, epochs.tolist()))
    assert set(counts) == set(permutations(range(4)))
    expected = 2400 / 24
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 50  # 23 on average


def test_neighbours_in_the_order_have_nothing_to_do_with_each_other():
    items = items_at(np.arange(20_000), num=10**6, seed=0)
    assert abs(np.corrcoef(items[1:], items[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(items, np.arange(20_000))[0, 1]) < 0.03
    assert np.histogram(items, bins=20, range=(0, 10**6))[0].std() < 100  # 31 on average


def test_the_order_of_billions_takes_no_memory():
    items_of(10**6, batch_size=64, num=LARGE, seed=0)
    tracemalloc.start()
    items = items_of(10**6 + 1, batch_size=64, num=LARGE, seed=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(items.tolist())) == 64
    assert items.min() >= 0
    assert items.max() < LARGE
    assert peak < 2**18


def test_the_order_is_the_same_for_ever():
    """Pinned: another order would make resumed runs see other data."""
    assert items_of(1, batch_size=6, num=10, seed=3).tolist() == [2, 6, 9, 8, 1, 0]
    assert items_of(10**6, batch_size=3, num=LARGE, seed=3).tolist() == [2376110061, 2132289285, 2182543007]
