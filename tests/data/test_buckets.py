"""Buckets beside all other choices, and how much padding they leave on lengths as trainers see them."""

from collections.abc import Collection
from itertools import combinations, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.sample_lengths import sft_samples
from rrfp_jax.data.buckets import (
    CutSizes,
    best_buckets,
    cut_sizes,
    most_rows,
    occurring_pairs,
    pack_rows,
    padded,
    rounded_up,
    smallest_fitting,
)


def padding_fraction(lengths: Any, buckets: Collection[int]) -> float:
    """Which part of the padded data is padding."""
    return 1 - float(np.sum(lengths)) / float(padded(lengths, buckets).sum())


def total(lengths, buckets):
    return int(padded(lengths, buckets).sum())


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from([1, 4, 8]),
    st.one_of(st.none(), st.integers(40, 50)),
)
def test_no_other_choice_pads_less(lengths, num_buckets, multiple, largest):
    buckets = best_buckets(lengths, num_buckets, multiple=multiple, largest=largest)
    assert list(buckets) == sorted(set(buckets))
    assert len(buckets) <= num_buckets
    assert all(bucket % multiple == 0 for bucket in buckets)
    top = -(-(largest or max(lengths)) // multiple) * multiple
    assert buckets[-1] == top
    candidates = sorted({-(-length // multiple) * multiple for length in lengths} - {top})
    choices = (
        (*choice, top)
        for num in range(min(num_buckets, len(candidates) + 1))
        for choice in combinations(candidates, num)
    )
    assert total(lengths, buckets) == min(total(lengths, choice) for choice in choices)


def test_no_more_buckets_than_help():
    assert best_buckets([8, 8, 16], 5) == (8, 16)
    assert best_buckets([5, 7], 5, multiple=8) == (8,)
    assert best_buckets([5, 7], 5, multiple=8, largest=20) == (8, 24)
    assert best_buckets([], 3, largest=20) == (20,)


@pytest.mark.parametrize("num_samples", [7_000, pytest.param(70_706, marks=pytest.mark.slow)])
def test_five_buckets_leave_little_padding_on_published_lengths(num_samples):
    lengths = [sample.tokens for sample in islice(sft_samples(np.random.default_rng(0)), num_samples)]
    assert padding_fraction(lengths, best_buckets(lengths, 1)) > 0.53
    fractions = [padding_fraction(lengths, best_buckets(lengths, num, multiple=64)) for num in range(1, 6)]
    assert fractions == sorted(fractions, reverse=True)
    assert fractions[-1] <= 0.15
    # chosen on a part, they are hardly worse for the whole
    chosen = best_buckets(lengths[:2000], 5, multiple=64, largest=max(lengths))
    assert padding_fraction(lengths, chosen) < fractions[-1] + 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), r"there are no lengths .* give at least one"),
        (([3, 0], 1), r"a length is 0: give at least 1"),
        (([3], 0), r"num_buckets is 0 and multiple is 1: give at least 1"),
    ],
)
def test_nothing_to_choose_from_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        best_buckets(*arguments)
    with pytest.raises(ValueError, match="a length is 9, but the largest bucket is to be 8"):
        best_buckets([9], 1, largest=8)


def test_pairs_that_occur_and_those_that_are_always_there():
    sizes = [(3, 0), (9, 5), (4, 1)]
    assert occurring_pairs(sizes, texts=(4, 10), images=(2, 6)) == ((4, 0), (4, 2), (10, 6))
    pairs = occurring_pairs(sizes, texts=(4, 10), images=(2, 6), always=[(5, 0)])
    assert pairs == ((4, 0), (4, 2), (10, 0), (10, 6))
    assert smallest_fitting((3, 0), pairs) == (4, 0)
    assert smallest_fitting((3, 1), pairs) == (4, 2)
    assert smallest_fitting((2, 3), pairs) == (10, 6)
    assert smallest_fitting((10, 0), pairs) == (10, 0)


@given(st.data())
def test_whatever_is_within_the_largest_pairs_fits_one(data):
    texts = sorted(data.draw(st.sets(st.integers(1, 20), min_size=1, max_size=4)))
    images = sorted(data.draw(st.sets(st.integers(1, 20), min_size=1, max_size=4)))
    size = st.tuples(st.integers(1, texts[-1]), st.integers(0, images[-1]))
    largest = [(texts[-1], images[-1]), (texts[-1], 0)]
    pairs = occurring_pairs(data.draw(st.lists(size, max_size=5)), texts, images, always=largest)
    text, image = data.draw(size)
    fitting = smallest_fitting((text, image), pairs)
    assert fitting[0] >= text
    assert fitting[1] >= image
    assert (fitting[1] == 0) == (image == 0)


def test_what_is_too_large_is_refused():
    with pytest.raises(ValueError, match=r"text of 5 and images of 0 fit none of the buckets \[\(4, 0\)\]"):
        smallest_fitting((5, 0), [(4, 0)])
    with pytest.raises(ValueError, match=r"a length is 5, above all of the buckets \[4\]"):
        padded([5], [4])


def test_without_meshes_every_size_will_do() -> None:
    assert cut_sizes({}) == cut_sizes({"tensor": 4}) == CutSizes()


def test_rows_and_positions_divide_over_their_axes() -> None:
    """A decoder's positions over twice their axis; what goes from encoder to decoder over the axes of both."""
    assert cut_sizes({"tensor": 2, "fsdp": 2, "expert": 3, "context": 2}) == CutSizes(
        rows=6, length=4, image_rows=6, image_length=2
    )
    assert cut_sizes({"fsdp": 4}, {"fsdp": 6, "context": 3}) == CutSizes(rows=4, image_rows=12, image_length=3)


def test_sizes_are_rounded_up() -> None:
    assert [rounded_up(size, 4) for size in (0, 1, 4, 5)] == [0, 4, 4, 8]


LENGTHS = st.lists(st.integers(1, 16), max_size=30)


@given(LENGTHS, st.integers(16, 40))
def test_rows_hold_everything_once_without_overlap(lengths, capacity):
    packing = pack_rows(lengths, capacity)
    taken = [[False] * capacity for _ in range(packing.num_rows)]
    for length, row, offset in zip(lengths, packing.rows, packing.offsets, strict=True):
        places = slice(offset, offset + length)
        assert len(taken[row][places]) == length
        assert not any(taken[row][places])
        taken[row][places] = [True] * length
    assert all(any(row) for row in taken)
    assert sum(map(sum, taken)) == sum(lengths)


@given(LENGTHS, st.integers(16, 40), st.integers(0, 5), st.integers(0, 20))
def test_never_more_rows_than_foretold(lengths, capacity, more, larger):
    most = most_rows(len(lengths) + more, longest=16, total=sum(lengths) + larger, capacity=capacity)
    assert pack_rows(lengths, capacity).num_rows <= most


def test_longest_first_where_least_room_is_left():
    packing = pack_rows([2, 5, 3, 4], 7)
    assert packing == (2, (0, 0, 1, 1), (5, 0, 4, 0))


def test_what_is_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="a length of 9 does not fit into a row of 8: give longer rows"):
        pack_rows([1, 9], 8)
    with pytest.raises(ValueError, match="a length of 9 does not fit"):
        most_rows(1, longest=9, total=9, capacity=8)
