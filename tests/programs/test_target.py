"""The device that programs are made for."""

import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from rrfp_jax.costs.devices import DEVICES, SHARE_OF_GPU
from rrfp_jax.programs.target import Target, current_target, devices_for, memory_bytes_of, tracing_for

HOPPER = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", is_nvidia=True, capability=(9, 0))


def device(platform: str, version: str, kind: str, **more: Any) -> Any:
    """A device as JAX describes it."""
    client = SimpleNamespace(platform_version=version)
    return SimpleNamespace(platform=platform, client=client, device_kind=kind, memory_stats=lambda: None, **more)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        # JAX's GPU backends are plugins of PJRT's C interface, which puts its own name first.
        (device("gpu", "PJRT C API\ncuda 12080", "NVIDIA H100 80GB HBM3", compute_capability="9.0"), (True, (9, 0))),
        (device("gpu", "PJRT C API\ncuda 12080", "Tesla V100-SXM2-32GB", compute_capability="7.0"), (True, (7, 0))),
        (device("gpu", "NVIDIA A100 80GB SXM", "NVIDIA A100 80GB SXM", compute_capability="8.0"), (True, (8, 0))),
        (device("gpu", "PJRT C API\nrocm 60300", "AMD Instinct MI300X"), (False, None)),
        (device("tpu", "PJRT C API\nTFRT TPU v5", "TPU v5"), (False, None)),
    ],
)
def test_a_device_says_whether_it_is_nvidia_s(told: Any, expected: tuple[bool, tuple[int, int] | None]) -> None:
    target = Target.of(told)
    assert (target.is_nvidia, target.capability) == expected
    assert (target.platform, target.kind) == (told.platform, told.device_kind)


def test_the_target_is_the_running_backend_unless_a_thread_says_otherwise() -> None:
    here = Target.of(jax.local_devices()[0])
    with tracing_for(HOPPER), ThreadPoolExecutor(1) as other:
        assert current_target() is HOPPER
        assert other.submit(current_target).result() == here
    assert current_target() == here


def test_the_memory_of_a_device_that_is_not_here_is_that_of_its_record() -> None:
    def refuse() -> None:
        raise NotImplementedError("a compile-only device has no memory")

    absent = device("gpu", "cuda", "NVIDIA H100 80GB HBM3")
    absent.memory_stats = refuse
    assert memory_bytes_of(absent) == DEVICES["h100"].num_bytes == int(84_942_979_072 * SHARE_OF_GPU)
    present = device("gpu", "cuda", "NVIDIA H100 80GB HBM3")
    present.memory_stats = lambda: {"bytes_limit": 2**36}
    assert memory_bytes_of(present) == 2**36


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("Unknown backend")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("h10", "there is no device 'h10': did you mean h100?"),
        ("l40s", "programs cannot be compiled for l40s: choose among a100, a100-40gb, h100, h200, b200, tpu-v4,"),
        ("h100", "this environment cannot compile for NVIDIA H100 SXM: "),
        ("v5p", "this environment cannot compile for TPU v5p: "),
    ],
)
def test_a_target_that_cannot_be_had_is_refused_with_the_remedy(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}"):
        devices_for(name, 1)


@pytest.mark.usefixtures("no_compiler")
def test_a_missing_compiler_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ValueError, match=r"'make setup ACCELERATOR=cuda12' installs the compiler"):
        devices_for("h100", 8)
