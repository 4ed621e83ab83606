"""Rows that nothing overlaps in, and the most of them that can be needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.data.row_packing import most_rows, pack_rows

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
