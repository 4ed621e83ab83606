"""Which partitions are accepted, and how optimizer states follow them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.shapes import num_bytes
from rrfp_jax.programs.shardings import gathered, param_partition, passing, shared_out, state_partition, unit_shardings
from rrfp_jax.programs.stage_devices import StageDevices
from rrfp_jax.programs.state import initial_state, state_specs

COLUMNS, WHOLE = PartitionSpec(None, "tensor"), PartitionSpec()


def chunk(partition: Callable[..., Any] | None, **options: Any) -> Chunk:
    return Chunk(
        name="product",
        init=lambda key: {"product": {"matrix": jax.random.normal(key, (6, 10)), "bias": jnp.zeros(5)}},
        apply=lambda params, inputs, leaves, *, key: inputs,
        partition=partition,
        **options,
    )


def by(matrix: Any, bias: Any = WHOLE) -> Callable[..., Any]:
    return lambda params, axes: {"product": {"matrix": matrix, "bias": bias}}


def test_without_a_partition_every_device_holds_all() -> None:
    assert set(jax.tree.leaves(param_partition([chunk(None)], 0, {"tensor": 2}))) == {WHOLE}
    assert set(jax.tree.leaves(param_partition([chunk(by(COLUMNS))], 0, {"tensor": 1}))) == {WHOLE}
    assert param_partition([chunk(by(COLUMNS))], 0, {"tensor": 2})["product"]["matrix"] == COLUMNS


@pytest.mark.parametrize(
    ("matrix", "bias"),
    [
        (WHOLE, PartitionSpec("tensor")),  # 2 does not divide 5
        (PartitionSpec("data"), WHOLE),
        (PartitionSpec("tensor", "tensor"), WHOLE),
        (PartitionSpec(None, None, "tensor"), WHOLE),
        ("tensor", WHOLE),
    ],
)
def test_a_partition_that_does_not_fit_is_refused_by_name(matrix: Any, bias: Any) -> None:
    with pytest.raises(ValueError, match=r"chunk 0 \(product\) cannot cut its parameter .*over tensor 2"):
        param_partition([chunk(by(matrix, bias))], 0, {"tensor": 2})


def test_a_partition_must_name_every_parameter() -> None:
    with pytest.raises(ValueError, match=r"`partition` of chunk 0 \(product\) returns another tree"):
        param_partition([chunk(lambda params, axes: {"product": COLUMNS})], 0, {"tensor": 2})


def test_copies_must_be_cut_alike() -> None:
    shared = frozenset({"product"})
    chunks = [chunk(by(COLUMNS), shared=shared), chunk(None, shared=shared)]
    with pytest.raises(ValueError, match="share 'product' but cut it differently over tensor 2"):
        param_partition(chunks, 1, {"tensor": 2})


def mesh_of_axes(**axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values()), tuple(axes))


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        ({"fsdp": 2, "tensor": 2}, (4, 6, 8), PartitionSpec(("fsdp",), None)),
        ({"fsdp": 2, "expert": 2}, (4, 6), PartitionSpec(("fsdp", "expert"), None)),
        ({"context": 2, "fsdp": 2}, (4, 6, 8), PartitionSpec(("fsdp",), ("context",))),
        ({"context": 2, "fsdp": 2}, (3, 6, 8), PartitionSpec(None, ("context",))),
        ({"fsdp": 2, "expert": 2}, (6, 6), WHOLE),
        ({"fsdp": 2}, (4,), WHOLE),
        ({"fsdp": 2}, (0, 6), WHOLE),
        ({"tensor": 2}, (4, 6), WHOLE),
    ],
)
def test_what_passes_is_cut_by_rows_and_positions_that_divide(
    axes: dict[str, int], shape: tuple[int, ...], expected: PartitionSpec
) -> None:
    boundary = NamedSharding(mesh_of_axes(**axes), WHOLE)
    found = passing(boundary, jax.ShapeDtypeStruct(shape, np.float32))
    assert found.is_equivalent_to(NamedSharding(boundary.mesh, expected), len(shape))  # type: ignore[arg-type]


def test_fsdp_cuts_what_is_free_and_programs_gather_it() -> None:
    mesh = mesh_of_axes(fsdp=2, tensor=2)
    cut = param_partition([chunk(by(COLUMNS))], 0, dict(mesh.shape))
    assert cut["product"] == {"matrix": PartitionSpec("fsdp", "tensor"), "bias": WHOLE}
    whole = gathered(NamedSharding(mesh, cut["product"]["matrix"]))
    assert whole.is_equivalent_to(NamedSharding(mesh, COLUMNS), 2)
    assert param_partition([chunk(None)], 0, {"fsdp": 5})["product"]["bias"] == PartitionSpec("fsdp")


def test_a_partition_may_name_any_axis_that_is_there() -> None:
    by_both = by(PartitionSpec(("expert", "tensor"), None))
    assert (
        param_partition([chunk(by_both)], 0, {"expert": 3, "tensor": 2})["product"]["matrix"]
        == by_both({}, {})["product"]["matrix"]
    )
    with pytest.raises(ValueError, match="over tensor 2 x fsdp 2: name axes of the mesh"):
        param_partition([chunk(by_both)], 0, {"tensor": 2, "fsdp": 2})


def test_only_boundaries_that_are_whole_are_taken() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    with pytest.raises(ValueError, match="whole on every device of a mesh"):
        unit_shardings([chunk(None)], 0, NamedSharding(mesh, PartitionSpec("tensor")))


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=2)])
def test_moments_are_cut_like_their_parameters_and_nothing_else_is(optimizer: Any) -> None:
    params = {"product": {"matrix": jax.ShapeDtypeStruct((6, 10), jnp.float32)}}
    state = jax.eval_shape(optimizer.init, params)
    partition = state_partition(state, params, {"product": {"matrix": COLUMNS}})
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(partition), strict=True):
        assert spec == (COLUMNS if leaf.shape == (6, 10) else WHOLE)


def test_replicas_share_the_first_free_dimension_that_divides() -> None:
    def shared(spec: PartitionSpec, *shape: int, data: int = 2) -> PartitionSpec:
        return shared_out(spec, jax.ShapeDtypeStruct(shape, jnp.float32), data)

    assert shared(COLUMNS, 6, 10) == PartitionSpec("data", "tensor")
    assert shared(PartitionSpec("tensor"), 6, 10) == PartitionSpec("tensor", "data")
    assert shared(WHOLE, 3, 10) == PartitionSpec(None, "data")
    assert shared(COLUMNS, 3, 10) == COLUMNS
    assert shared(WHOLE) == WHOLE


@pytest.mark.parametrize("tensor", [1, 2])
def test_specs_describe_the_state_and_bits_do_not_depend_on_the_devices(tensor: int) -> None:
    chunks, optimizer = (chunk(by(COLUMNS)),), optax.adamw(1e-2)
    sharding = StageDevices([jax.devices()[:tensor]]).unit_sharding(0)
    state = initial_state(chunks, 0, optimizer, key=jax.random.key(3), sharding=sharding, trains=True)
    specs = state_specs(chunks, 0, optimizer, sharding=sharding, trains=True)
    for name in ("params", "optimizer_state", "accumulators"):
        held, described = getattr(state, name), getattr(specs, name)
        assert jax.tree.structure(held) == jax.tree.structure(described)
        for leaf, spec in zip(jax.tree.leaves(held), jax.tree.leaves(described), strict=True):
            assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype)
            assert leaf.sharding.is_equivalent_to(spec.sharding, leaf.ndim)
        assert num_bytes(held) == num_bytes(described)
    assert num_bytes(state.params) == 4 * (60 // tensor + 5)
    plain = jax.jit(chunks[0].init)(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, state.params, plain)
