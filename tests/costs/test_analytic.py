"""Times of layers by a roofline."""

from dataclasses import replace

import pytest

from rrfp_jax.costs.devices import Device, Efficiencies, Roofline
from rrfp_jax.costs.flops import Flops
from rrfp_jax.costs.layer_sizes import LayerSizes

DEVICE = Device(
    name="made-up",
    title="made up",
    kind="tpu",
    flops=1e12,
    float32_flops=1e11,
    memory_gb_per_s=100.0,
    num_bytes=10**9,
    near_gb_per_s=10.0,
    far_gb_per_s=1.0,
    per_host=4,
)
HALF = Efficiencies(compute=0.5, memory=0.5, links=0.5, sum_ms=1.0)
SIZES = LayerSizes(
    flops=Flops(with_parameters=1e9, among_activations=1e8),
    num_params=10**6,
    moved_bytes=(1e6, 2e8, 1e6),
    owed_bytes=7,
    stash_bytes=5,
    sums=(2, 1),
    sum_bytes=10**6,
)


def test_the_longer_of_computing_and_moving_counts() -> None:
    costs = Roofline(device=DEVICE, efficiencies=HALF).costs(SIZES, fixed_bytes=9, param_bytes=4)
    assert costs.forward_ms == pytest.approx(2.2)  # 1.1e9 operations at half of 1e12
    assert costs.input_gradient_ms == pytest.approx(4.0)  # 200 MB at half of 100 GB/s
    assert costs.weight_gradient_ms == pytest.approx(2.0)
    assert costs.update_ms == pytest.approx(10**6 * 32 / 50e9 * 1e3)
    assert costs.flops == pytest.approx(3.3e9)
    assert (costs.fixed_bytes, costs.gradient_bytes) == (9, 4 * 10**6)


def test_devices_that_share_a_layer_compute_parts_and_sum_up() -> None:
    costs = Roofline(device=DEVICE, efficiencies=HALF, tensor=4).costs(SIZES, fixed_bytes=9, param_bytes=4)
    assert costs.forward_ms == pytest.approx(
        2.2 / 4 + 2 * (1.5 * 0.2 + 1.0)
    )  # 1 MB at half of 10 GB/s, 3/4 of it twice
    far = Roofline(device=DEVICE, efficiencies=HALF, tensor=8).costs(SIZES, fixed_bytes=9, param_bytes=4)
    assert far.forward_ms == pytest.approx(2.2 / 8 + 2 * (1.75 * 2.0 + 1.0))


def test_what_is_computed_again_takes_time_and_is_no_operation_of_the_model() -> None:
    sizes = replace(SIZES, moved_bytes=(0.0, 0.0, 0.0), recomputed=SIZES.flops)
    roofline = Roofline(device=DEVICE, efficiencies=HALF)
    costs = roofline.costs(sizes, fixed_bytes=9, param_bytes=4)
    assert costs.input_gradient_ms == pytest.approx(2.4 + 2.2)
    assert costs.flops == pytest.approx(3.3e9)
    first = roofline.costs(replace(sizes, returns_gradient=False), fixed_bytes=9, param_bytes=4)
    assert (first.input_gradient_ms, first.weight_gradient_ms) == (0.0, pytest.approx(2.0 + 2.2))


def test_frozen_layers_pass_a_gradient_on_or_have_none() -> None:
    roofline = Roofline(device=DEVICE, efficiencies=HALF)
    frozen = roofline.costs(SIZES, fixed_bytes=4, param_bytes=4, trains=False)
    assert (frozen.weight_gradient_ms, frozen.owed_bytes, frozen.gradient_bytes, frozen.update_ms) == (0, 0, 0, 0)
    assert frozen.input_gradient_ms > 0
    first = roofline.costs(SIZES, fixed_bytes=4, param_bytes=4, trains=False, has_backward=False)
    assert (first.input_gradient_ms, first.stash_bytes) == (0, 0)


def test_float32_is_slower() -> None:
    quick, slow = (
        Roofline(device=DEVICE, efficiencies=HALF, is_float32=each).task_ms(1e9, 0.0) for each in (False, True)
    )
    assert slow == pytest.approx(10 * quick)
