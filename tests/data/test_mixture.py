"""Shares of sources: near their weights after any number of samples, and known without counting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.data.mixture import Mixture

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
