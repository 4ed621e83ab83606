"""Routes: every element reaches every rank that needs it once, from one that has it, and the work is shared evenly."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.runtime.transports.edges import (
    Box,
    Spread,
    intersection,
    route_array,
    route_message,
    sender_for,
    shape_of,
    slices_within,
)

WHOLE = ((0, 8), (0, 12))


def grid(shape: tuple[int, ...], cuts: tuple[int, ...], ranks: list[int], order: list[int] | None = None) -> Spread:
    """An array cut into a grid, whose tiles are dealt out to ``ranks`` in turn, each as often as there are devices."""
    tiles = [
        tuple((i * n // c, (i + 1) * n // c) for i, n, c in zip(index, shape, cuts, strict=True))
        for index in np.ndindex(*cuts)
    ]
    order = order or list(range(len(ranks)))
    return Spread(boxes=tuple(tiles[k % len(tiles)] for k in order), ranks=tuple(ranks))


def replicated(ranks: list[int], shape: tuple[int, ...] = (8, 12)) -> Spread:
    return grid(shape, (1,) * len(shape), ranks)


def senders(source: Spread, target: Spread) -> dict[int, list[int]]:
    """From whom each receiver gets something."""
    found: dict[int, list[int]] = {}
    for piece in route_array(source, target):
        found.setdefault(piece.receiver, []).append(piece.sender)
    return found


def test_replicated_to_replicated_shares_the_work() -> None:
    assert senders(replicated([0, 1]), replicated([2, 3, 4, 5])) == {2: [0], 3: [0], 4: [1], 5: [1]}
    assert senders(replicated([0, 1, 2, 3]), replicated([4, 5])) == {4: [0], 5: [2]}


def test_who_holds_it_keeps_its_own() -> None:
    assert senders(replicated([0, 1]), replicated([1, 2])) == {1: [1], 2: [1]}


def test_shard_to_shard() -> None:
    rows = lambda ranks: grid((8, 12), (len(ranks), 1), ranks)  # noqa: E731
    assert senders(rows([0, 1]), rows([2, 3])) == {2: [0], 3: [1]}
    assert senders(rows([0, 1]), rows([2, 3, 4, 5])) == {2: [0], 3: [0], 4: [1], 5: [1]}
    assert senders(rows([0, 1]), replicated([2])) == {2: [0, 1]}
    columns = grid((8, 12), (1, 2), [2, 3])
    assert senders(rows([0, 1]), columns) == {2: [0, 1], 3: [0, 1]}


def test_devices_of_one_rank_share_what_comes() -> None:
    """Two devices per rank: each of the receiving rank's boxes comes once."""
    pieces = route_array(replicated([0, 0]), replicated([1, 1, 2, 2]))
    assert [(piece.box, piece.sender, piece.receiver) for piece in pieces] == [(WHOLE, 0, 1), (WHOLE, 0, 2)]


def test_a_message_without_elements_has_a_part_for_every_receiver() -> None:
    empty = Spread(boxes=(((0, 0), (0, 4)),) * 2, ranks=(0, 1))
    there = Spread(boxes=(((0, 0), (0, 4)),) * 2, ranks=(2, 3))
    assert route_message([(empty, there)], (0, 1), (2, 3)) == {(0, 2): (), (1, 3): ()}
    assert route_message([], (0,), (1, 2)) == {(0, 1): (), (0, 2): ()}


def test_scalars_have_one_element() -> None:
    scalar = Spread(boxes=((),), ranks=(0,))
    (piece,) = route_array(scalar, Spread(boxes=((), ()), ranks=(1, 1)))
    assert (shape_of(piece.box), piece.sender, piece.receiver) == ((), 0, 1)


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (4, 8), (8, 4)])
def test_plain_data_is_shared_evenly(num_senders: int, num_receivers: int) -> None:
    here, there = range(num_senders), range(10, 10 + num_receivers)
    loads = Counter(sender_for(here, there, receiver) for receiver in there)
    assert max(loads.values()) == math.ceil(num_receivers / num_senders)
    assert sender_for(range(3), range(2, 5), 2) == 2


SHAPE = (8, 12)
CUTS = st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (8, 1), (2, 3), (1, 12)])


@st.composite
def spreads(draw: st.DrawFn, first_rank: int) -> Spread:
    """A cut, each tile held by one to three devices, which belong to one to four ranks."""
    cuts = draw(CUTS)
    num_devices = math.prod(cuts) * draw(st.integers(1, 3))
    num_ranks = draw(st.integers(1, 4))
    ranks = [first_rank + device * num_ranks // num_devices for device in range(num_devices)]
    return grid(SHAPE, cuts, ranks, draw(st.permutations(range(num_devices))))


@given(source=spreads(0), target=spreads(2), seed=st.integers(0, 9))
def test_every_rank_can_put_its_shards_together(source: Spread, target: Spread, seed: int) -> None:
    array = np.random.default_rng(seed).integers(0, 100, SHAPE)
    cut = lambda box: array[tuple(slice(*span) for span in box)]  # noqa: E731
    held = {(rank, box): cut(box) for box, rank in zip(source.boxes, source.ranks, strict=True)}
    made: dict[tuple[int, Box], np.ndarray] = {}
    times: dict[tuple[int, Box], np.ndarray] = {}
    for box, rank in zip(target.boxes, target.ranks, strict=True):
        made[rank, box] = np.full(shape_of(box), -1)
        times[rank, box] = np.zeros(shape_of(box), int)
    for piece in route_array(source, target):
        data = held[piece.sender, piece.source][slices_within(piece.box, piece.source) or ...]
        where = slices_within(piece.box, piece.target) or ...
        made[piece.receiver, piece.target][where] = data
        times[piece.receiver, piece.target][where] += 1
    for (rank, box), value in made.items():
        np.testing.assert_array_equal(value, cut(box))
        assert (times[rank, box] == 1).all()
        own = [b for b, r in zip(source.boxes, source.ranks, strict=True) if r == rank]
        for piece in route_array(source, target):
            if (piece.receiver, piece.target) == (rank, box) and any(intersection(piece.box, b) for b in own):
                assert piece.sender == rank
