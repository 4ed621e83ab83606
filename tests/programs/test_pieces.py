"""Gradients cut into pieces, added up replica by replica, and joined: against sums of NumPy's."""

from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.pieces import PieceLayout
from rrfp_jax.programs.shapes import num_bytes
from rrfp_jax.programs.updates import PieceUpdates
from rrfp_jax.schedules import PipelineGraph, chain
from tests.programs.grids import grids_of

DATA = 3
SHAPES = {"matrix": (8, 6), "vector": (3,), "empty": (0, 2), "scalar": ()}


def holder(name: str, shapes: dict[str, tuple[int, ...]] = SHAPES, *, tied: bool = False) -> Chunk:
    """A chunk with a layer of its own, and one that it shares; two devices share matrices by columns."""
    layers = {name: shapes} | ({"tied": {"matrix": (4, 2), "vector": (5,)}} if tied else {})
    return Chunk(
        name=name,
        init=lambda key: {layer: {n: jnp.ones(shape) for n, shape in own.items()} for layer, own in layers.items()},
        apply=lambda params, inputs, leaves, *, key: (jnp.float32(0), jnp.float32(0)),
        shared=frozenset({"tied"} if tied else ()),
        partition=lambda params, axes: jax.tree.map(
            lambda leaf: PartitionSpec(None, "tensor") if len(leaf.shape) == 2 and leaf.shape[0] else PartitionSpec(),
            params,
        ),
    )


def gradients_of(chunk: Chunk, seed: int) -> Any:
    """Sums of very different sizes, so that the order of adding shows."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-4, 5)
    return jax.tree.map(
        lambda leaf: (scale * rng.standard_normal(leaf.shape)).astype(np.float32), chunk.init(jax.random.key(0))
    )


def updates_of(chunks: list[Chunk], graph: PipelineGraph, tensor: int) -> list[list[PieceUpdates]]:
    """By replica and chunk."""
    grids = grids_of(jax.devices(), 1, DATA if tensor == 1 else 2, tensor)
    return [
        [
            PieceUpdates(
                index,
                chunks,
                graph,
                optimizer=optax.adam(1e-2),
                sharding=grids[0].unit_sharding(replica),
                replica=replica,
                num_replicas=grids[0].data,
            )
            for index in range(len(chunks))
        ]
        for replica in range(grids[0].data)
    ]


def put(updates: PieceUpdates, gradients: Any) -> Any:
    return jax.tree.map(jax.device_put, gradients, updates._at(updates._partition))


def ascending(trees: list[Any]) -> Any:
    total = trees[0]
    for tree in trees[1:]:
        total = jax.tree.map(np.add, total, tree)
    return total


def assert_equal(some: Any, others: Any) -> None:
    assert jax.tree.structure(some) == jax.tree.structure(others)
    for one, other in zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@settings(max_examples=10)
@given(sizes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5), num_pieces=st.integers(1, 7))
def test_pieces_have_one_shape_and_join_to_what_was_cut(sizes: list[list[int]], num_pieces: int) -> None:
    chunk = holder("only", {f"p{number}": tuple(shape) for number, shape in enumerate(sizes)})
    layout, gradients = PieceLayout([chunk], 0, {}, num_pieces), gradients_of(chunk, 0)
    pieces = layout.cut(gradients)
    assert all(jax.tree.map(jnp.shape, piece) == jax.tree.map(jnp.shape, layout.spec) for piece in pieces)
    assert num_bytes(layout.spec) * num_pieces < num_bytes(gradients) + 4 * num_pieces
    assert_equal(layout.join(pieces), gradients)


@pytest.mark.parametrize("tensor", [1, 2])
def test_sums_are_ascending_and_norms_those_of_all_pieces(tensor: int) -> None:
    chunks = [holder("first", tied=True), holder("last", {"matrix": (70000, 4)}, tied=True)]
    updates = updates_of(chunks, chain(2, 4, shared=((0, 1),)), tensor)
    num_replicas = len(updates)
    terms = [[gradients_of(chunk, 2 * r + c) for c, chunk in enumerate(chunks)] for r in range(num_replicas)]
    cuts = [
        [each.cut(put(each, g)) for each, g in zip(own, mine, strict=True)]
        for own, mine in zip(updates, terms, strict=True)
    ]
    tied = ascending([ascending([mine[c]["tied"] for c in (0, 1)]) for mine in terms])
    for chunk in (0, 1):
        sums, norms = [], []
        for number in range(num_replicas):

            def arrived(replica: int, sharer: int, number: int = number, chunk: int = chunk) -> Any:
                piece = cuts[replica][sharer][number]
                return piece if sharer == chunk else jax.tree.map(np.asarray, piece.shared)

            # Those of other replicas come as NumPy's, or lie on this unit.
            met = {(r, c): arrived(r, c) for r in range(num_replicas) for c in (0, 1)}
            there = {at: each if at[0] == number else jax.tree.map(np.asarray, each) for at, each in met.items()}
            total, norm = updates[number][chunk].add(there)
            sums.append(jax.tree.map(np.asarray, total))
            norms.append(float(norm))
        expected = ascending([mine[chunk] for mine in terms]) | {"tied": tied}
        assert_equal(updates[0][chunk].join(sums), expected)
        counted = expected if chunk == 0 else {"last": expected["last"]}
        squares = sum(float(np.sum(leaf.astype(np.float64) ** 2)) for leaf in jax.tree.leaves(counted))
        np.testing.assert_allclose(sum(norms), squares, rtol=1e-5)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.one_in(2)
def test_bytes_are_those_of_the_arrays_on_one_device(tensor: int) -> None:
    chunks = [holder("first", tied=True), holder("last", {"matrix": (6, 4), "vector": (7,)}, tied=True)]
    updates = updates_of(chunks, chain(2, 4, shared=((0, 1),)), tensor)
    everywhere = [(replica, chunk) for replica in range(len(updates)) for chunk in (0, 1)]
    for at in everywhere:
        each = updates[at[0]][at[1]]
        cuts = {(r, c): updates[r][c].cut(put(updates[r][c], gradients_of(chunks[c], r))) for r, c in everywhere}
        pieces, sums = cuts[at], put(each, gradients_of(chunks[at[1]], 0))
        found, num_replicas = each.piece_bytes, len(updates)
        # Each of those that live adds up every piece that it gets, of all others that live, whoever is lost.
        others = [
            [
                cuts[o][piece] if o[1] == at[1] else cuts[o][piece].shared
                for piece in range(0, num_replicas, len(living))
                for o in everywhere
                if o != at and o[0] in living
            ]
            for living in ({at[0], *rest} for n in range(num_replicas) for rest in combinations(range(num_replicas), n))
        ]
        assert num_bytes(pieces) == len(pieces) * found.piece == found.made["cut"] == found.made["join"]
        assert found.lasting == max(map(num_bytes, others)) + num_bytes(pieces) - num_bytes(sums)
        assert found.made["reduce"] == num_bytes(pieces[0].shared)


def test_replicas_that_take_no_part_are_left_out() -> None:
    chunk = holder("only")
    updates = updates_of([chunk], chain(1, 6), 1)
    for replica, living in [(1, (1, 2)), (1, (0, 1)), (2, (2,))]:
        gradients = {r: gradients_of(chunk, r) for r in living}
        totals = []
        for number in range(DATA):
            terms = {r: updates[r][0].cut(put(updates[r][0], gradients[r]))[number] for r in living}
            arrived = {(r, 0): piece if r == replica else jax.tree.map(np.asarray, piece) for r, piece in terms.items()}
            totals.append(updates[replica][0].add(arrived)[0])
        assert_equal(updates[replica][0].join(totals), ascending([*gradients.values()]))


def test_the_norm_says_that_an_update_cannot_be_finite() -> None:
    chunk = holder("only")
    grid = grids_of(jax.devices(), 1, 2, 1)[0]
    optimizer = optax.sgd(lambda count: jnp.where(count == 0, jnp.nan, 0.1))
    each = PieceUpdates(
        0,
        [chunk],
        chain(1, 2),
        optimizer=optimizer,
        sharding=grid.unit_sharding(0),
        replica=0,
        num_replicas=2,
    )
    gradients = gradients_of(chunk, 0)
    state = (optimizer.init(gradients),)
    norms = []
    for number in range(2):
        pieces = each.cut(put(each, gradients))
        norms.append(float(each.add({(0, 0): pieces[number], (1, 0): pieces[1 - number]}, state)[1]))
    assert all(np.signbit(norm) for norm in norms)
