"""Putting things of different lengths into rows of one length.

Best fit, longest first: each goes where it leaves the least room. No row is opened while another has room, so any two
rows together hold more than one row's capacity, and every row but the last holds ``capacity // longest`` things or
more. From these two follows what the worst data can need (``most_rows``), which is what buckets must be able to hold.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple


class Packing(NamedTuple):
    """The place of each of some things."""

    num_rows: int
    rows: tuple[int, ...]
    """The row of each, from 0."""
    offsets: tuple[int, ...]
    """The beginning of each in its row."""


def pack_rows(lengths: Sequence[int], capacity: int) -> Packing:
    """Puts things of these lengths into as few rows of ``capacity`` as best fit decreasing finds; the same every time.

    Raises ValueError where one is longer than a row.
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a length of {max(lengths)} does not fit into a row of {capacity}: give longer rows")
    rows, offsets = [0] * len(lengths), [0] * len(lengths)
    free: list[tuple[int, int]] = []  # (room left, row), ascending
    num_rows = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect_left(free, (lengths[index], -1))
        if at < len(free):
            room, row = free.pop(at)
        else:
            room, row, num_rows = capacity, num_rows, num_rows + 1
        rows[index], offsets[index] = row, capacity - room
        insort(free, (room - lengths[index], row))
    return Packing(num_rows, tuple(rows), tuple(offsets))


def most_rows(num: int, *, longest: int, total: int, capacity: int) -> int:
    """Returns how many rows ``pack`` needs at most for up to ``num`` things of up to ``longest``, together up to
    ``total``."""
    if not num or not total:
        return 0
    if longest > capacity:
        raise ValueError(f"a length of {longest} does not fit into a row of {capacity}: give longer rows")
    by_number = -(-num // (capacity // longest))
    by_total = max(1, -(-2 * total // capacity) - 1)  # two rows or more hold over half of what they could
    return min(by_number, by_total)
