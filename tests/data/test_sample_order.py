"""Orders that are computed place by place."""

import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.data.sample_order import Mixture, items_at, items_of

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


BOUNDS = {1: 0.0, 2: 0.5, 3: 1.0}
"""By the number of sources; of more of them each may be 1.7 samples off."""


@given(st.lists(st.floats(2**-10, 1000, width=16), min_size=1, max_size=12))
def test_every_prefix_has_the_right_shares(weights):
    sources, numbers = Mixture(weights).sources(0, 800)
    taken = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, 801)[:, None] * np.array(weights) / sum(weights)
    assert abs(taken - wanted).max() <= BOUNDS.get(len(weights), 1.7) + 1e-6
    assert (numbers == taken[np.arange(800), sources] - 1).all()


@given(st.lists(st.floats(2**-10, 1000, width=16), min_size=1, max_size=12), st.integers(0, 700), st.integers(0, 100))
def test_any_stretch_alone_is_the_same_as_within_the_run(weights, start, count):
    mixture = Mixture(weights)
    for whole, part in zip(mixture.sources(0, 800), mixture.sources(start, count), strict=True):
        assert (whole[start : start + count] == part).all()


def test_far_into_a_run_with_weights_of_many_digits():
    start = 10**15
    sources, numbers = Mixture([0.1234567890123456, 1, 3]).sources(start, 64)
    for source, weight in enumerate([0.1234567890123456, 1, 3]):
        assert abs(numbers[sources == source][0] - start * (weight / 4.1234567890123456)) < 4  # of floating point


def test_weights_mean_their_decimals():
    sources, _ = Mixture([0.7, 0.2, 0.1]).sources(0, 30)
    assert np.bincount(sources).tolist() == [21, 6, 3]


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [float("inf")], [float("nan")]])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(ValueError, match="give at least one, each above 0"):
        Mixture(weights)
