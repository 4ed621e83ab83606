"""Accelerators by name, and the parts of their peaks that programs get."""

import re

import pytest

from rrfp_jax.costs.devices import DEVICES, Efficiencies, device_like, device_of


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
