"""Accelerators by name, and the parts of their peaks that programs get."""

import re

import pytest

from rrfp_jax.costs.devices import DEVICES, Efficiencies, device_like, device_of, fitted_device


@pytest.mark.parametrize(
    ("name", "known"),
    [("h100", "h100"), ("H200", "h200"), ("A100 40GB", "a100-40gb"), ("v5e", "tpu-v5e"), ("tpu_v6e", "tpu-v6e")],
)
def test_names_may_be_written_in_several_ways(name: str, known: str) -> None:
    assert device_of(name) is DEVICES[known]


@pytest.mark.parametrize(
    ("name", "said"), [("h10", "did you mean h100?"), ("v5", "did you mean tpu-v5"), ("abacus", "")]
)
def test_an_unknown_device_is_told_which_are_known(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"there is no device {name!r}: {said}")) as caught:
        device_of(name)
    assert str(caught.value).endswith(", ".join(DEVICES))


def test_a_device_is_quickest_in_bfloat16_and_near_devices_are_reached_first() -> None:
    for device in DEVICES.values():
        assert device.float32_flops <= device.flops
        near, far = (device.links(number, Efficiencies(links=0.5)) for number in (device.per_host, 1000))
        assert near.gb_per_s == device.near_gb_per_s / 2
        assert far.gb_per_s == device.far_gb_per_s / 2


def test_efficiencies_are_fitted_from_one_measurement() -> None:
    fitted = Efficiencies(compute=0.6, memory=0.8).fitted(10.0, 12.0)
    assert (fitted.compute, fitted.memory) == (pytest.approx(0.5), pytest.approx(0.8 * 10 / 12))
    assert Efficiencies(compute=0.6, memory=0.8).fitted(10.0, 7.0).memory == 1.0


@pytest.mark.parametrize(
    ("measured_ms", "problem"),
    [(5.0, "the measured layers take 5 ms, and at its peak the device takes 6 ms"), (0.0, "give positive numbers")],
)
def test_what_no_device_does_is_refused(measured_ms: float, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Efficiencies(compute=0.6).fitted(10.0, measured_ms)


def test_parts_are_parts() -> None:
    with pytest.raises(ValueError, match=re.escape("compute is 1.5: give a number above 0 and at most 1")):
        Efficiencies(compute=1.5)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("cpu", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_what_jax_calls_a_device(kind: str, name: str | None) -> None:
    assert device_like(kind) == (None if name is None else DEVICES[name])


def test_a_device_without_a_record_is_as_quick_as_it_was_measured() -> None:
    device = fitted_device("a host", [(1e9, 1e8), (3e9, 1e8)], 10.0)
    seconds = [
        max(flops / device.flops, num_bytes / device.memory_gb_per_s / 1e9)
        for flops, num_bytes in [(1e9, 1e8), (3e9, 1e8)]
    ]
    assert sum(seconds) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="give one that computes and was timed"):
        fitted_device("a host", [(0.0, 1e8)], 10.0)
