"""R over many replicas of a small chunk: the order of sums, what is consumed, and what comes out where."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.shardings import WHOLE
from rrfp_jax.programs.stage_devices import StageDevices
from rrfp_jax.programs.update_functions import Tie, reduce_function
from rrfp_jax.programs.updates import Reduced, StageUpdates
from rrfp_jax.schedules import PipelineGraph, chain
from tests.programs.grids import grids_of

DATA = 4


def holder(name: str, *, shared: bool) -> Chunk:
    """A chunk with one matrix that two devices share by columns, and a vector that no number of devices divides."""
    return Chunk(
        name=name,
        init=lambda key: {"tied" if shared else name: {"matrix": jnp.ones((8, 6)), "vector": jnp.ones(3)}},
        apply=lambda params, inputs, leaves, *, key: (jnp.float32(0), jnp.float32(0)),
        shared=frozenset({"tied"} if shared else ()),
        partition=lambda params, axes: jax.tree.map(
            lambda leaf: PartitionSpec(None, "tensor") if len(leaf.shape) == 2 else PartitionSpec(), params
        ),
    )


def terms(seed: int) -> list[dict[str, np.ndarray]]:
    """The accumulators of every replica; their sum depends on the order in which they are added."""
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.integers(-4, 5, DATA)
    return [
        {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}
        for scale in scales
    ]


SHAPES = {"matrix": (8, 6), "vector": (3,)}


def ascending_sum(arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def placed(grid: StageDevices, programs: StageUpdates, name: str, arrays: list[Any]) -> dict[int, Any]:
    specs = {"matrix": PartitionSpec(None, "tensor"), "vector": PartitionSpec()}
    return {
        r: {name: {n: jax.device_put(a, grid.unit_sharding(r, specs[n])) for n, a in layer.items()}}
        for r, layer in enumerate(arrays)
    }


def reduce_alone(*, ordered: bool, shard_optimizer: bool, tensor: int = 2) -> tuple[Reduced, dict[int, Any]]:
    (grid,) = grids_of(jax.devices(), 1, DATA, tensor)
    programs = StageUpdates(
        0,
        [holder("own", shared=False)],
        chain(1, DATA),
        optimizer=optax.adam(1e-2),
        devices=grid,
        ordered=ordered,
        shard_optimizer=shard_optimizer,
    )
    accumulators = placed(grid, programs, "own", terms(0))
    return programs.reduce(accumulators), accumulators


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_ordered_sums_are_ascending_and_the_norm_is_theirs(shard_optimizer: bool) -> None:
    reduced, accumulators = reduce_alone(ordered=True, shard_optimizer=shard_optimizer)
    expected = {name: ascending_sum([layer[name] for layer in terms(0)]) for name in SHAPES}
    results = [reduced.gradients] if shard_optimizer else list(reduced.accumulators.values())
    for result in results:
        jax.tree.map(np.testing.assert_array_equal, result["own"], expected)
    if shard_optimizer:
        assert {s.data.shape for s in reduced.gradients["own"]["matrix"].addressable_shards} == {(2, 3)}
        assert not any(leaf.any() for leaf in jax.tree.leaves(reduced.accumulators))
    norm = sum(float(np.sum(np.square(array, dtype=np.float64))) for array in expected.values())
    np.testing.assert_allclose(float(reduced.squared_norm), norm, rtol=1e-6)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(accumulators))


def test_unordered_sums_are_cut_over_the_replicas_with_the_optimizer_state() -> None:
    """By a reduce-scatter, which adds up and does not divide."""
    reduced, _ = reduce_alone(ordered=False, shard_optimizer=True)
    assert {s.data.shape for s in reduced.gradients["own"]["matrix"].addressable_shards} == {(2, 3)}
    norm = 0.0
    for name in SHAPES:
        arrays = [layer[name].astype(np.float64) for layer in terms(0)]
        np.testing.assert_allclose(reduced.gradients["own"][name], sum(arrays), atol=1e-5 * np.abs(arrays).max())
        norm += float(np.sum(np.square(sum(arrays))))
    np.testing.assert_allclose(float(reduced.squared_norm), norm, rtol=1e-5)
    assert not any(leaf.any() for leaf in jax.tree.leaves(reduced.accumulators))


def test_unordered_sums_are_the_same_on_all_replicas() -> None:
    reduced, _ = reduce_alone(ordered=False, shard_optimizer=False, tensor=1)
    first, *others = reduced.accumulators.values()
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
    for name in SHAPES:
        arrays = [layer[name].astype(np.float64) for layer in terms(0)]
        np.testing.assert_allclose(first["own"][name], sum(arrays), atol=1e-5 * np.abs(arrays).max())
    assert {leaf.sharding for leaf in jax.tree.leaves(first)} == {jax.sharding.SingleDeviceSharding(jax.devices()[0])}


def test_copies_of_a_shared_layer_end_with_equal_bits_and_are_not_consumed() -> None:
    chunks = [holder("first", shared=True), holder("second", shared=True)]
    graph = PipelineGraph(2, DATA, (), shared=((0, 1),))
    grids = grids_of(jax.devices(), 2, DATA, 1)
    programs = [
        StageUpdates(c, chunks, graph, optimizer=optax.adam(1e-2), devices=grids[c], ordered=False) for c in (0, 1)
    ]
    held = [placed(grids[c], programs[c], "tied", terms(c)) for c in (0, 1)]
    numbers = jax.device_get(held)
    sums = []
    for c in (0, 1):
        shared = {r: (numbers[0][r], numbers[1][r]) for r in range(DATA)}
        shared = {r: tuple(None if o == c else part for o, part in enumerate(parts)) for r, parts in shared.items()}
        sums.append(programs[c].reduce(held[c], shared))
    assert float(sums[1].squared_norm) == 0
    per_replica = [jax.tree.map(np.add, numbers[0][r], numbers[1][r]) for r in range(DATA)]
    expected = jax.tree.map(lambda *arrays: ascending_sum(list(arrays)), *per_replica)
    for reduced in sums:
        for layers in reduced.accumulators.values():
            jax.tree.map(np.testing.assert_array_equal, layers, expected)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(held))


def test_one_infinite_gradient_in_one_replica_shows_in_the_norm() -> None:
    (grid,) = grids_of(jax.devices(), 1, DATA, 1)
    programs = StageUpdates(
        0, [holder("own", shared=False)], chain(1, DATA), optimizer=optax.sgd(1.0), devices=grid, shard_optimizer=True
    )
    spoilt = terms(0)
    spoilt[2]["vector"][1] = np.inf
    assert float(programs.reduce(placed(grid, programs, "own", spoilt)).squared_norm) == np.inf


def test_joining_and_parting_touches_no_buffer() -> None:
    (grid,) = grids_of(jax.devices(), 1, 2, 2)
    spec = PartitionSpec(None, "tensor")
    arrays = {r: jax.device_put(np.full((4, 6), r), grid.unit_sharding(r, spec)) for r in range(2)}
    parted = grid.per_replica(grid.join(arrays, spec))
    for r, array in arrays.items():
        np.testing.assert_array_equal(parted[r], array)
        assert parted[r].sharding == array.sharding
        pointers = [
            [shard.data.unsafe_buffer_pointer() for shard in each.addressable_shards] for each in (array, parted[r])
        ]
        assert pointers[0] == pointers[1]


def test_replicas_must_have_the_same_number_of_devices() -> None:
    with pytest.raises(ValueError, match=r"replicas have \[2, 1\] devices"):
        StageDevices([jax.devices()[:2], jax.devices()[2:3]])


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1])
def test_ordered_sums_of_large_gradients_hold_no_copy_for_every_replica(size: int) -> None:
    (grid,) = grids_of(jax.devices(), 1, DATA, 1)
    alone = Tie(names=(), sharing=(0,), own_position=0, uncounted=frozenset())
    function = reduce_function(alone, grid.mesh, {"own": WHOLE}, (), ordered=True)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=size).astype(np.float32) for _ in range(DATA)]
    parts = {r: jax.device_put(array, grid.unit_sharding(r)) for r, array in enumerate(arrays)}
    program = jax.jit(function).lower({"own": grid.join(parts, WHOLE)}, ()).compile()
    layers, _ = program({"own": grid.join(parts, WHOLE)}, ())
    np.testing.assert_array_equal(layers["own"], ascending_sum(arrays))
    analysis = program.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 0.8 * DATA * arrays[0].nbytes
