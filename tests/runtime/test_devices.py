"""Which devices a process may see, and whether all are there."""

import os

import pytest

from rrfp_jax.commands.common import process
from rrfp_jax.commands.common.process import start_alone
from rrfp_jax.costs.devices import SHARE_OF_GPU
from rrfp_jax.runtime import start_jax
from rrfp_jax.runtime.start_jax import (
    check_found_devices,
    check_same_platform,
    naming_neighbours,
    taking_part_of_memory,
    visible_devices,
)

HOSTS = ("a", "b", "a", "b", "c")


@pytest.mark.parametrize(
    ("rank", "environ", "expected"),
    [
        (0, {}, "0,1"),
        (2, {}, "2,3"),
        (3, {}, "2,3"),
        (4, {}, None),  # alone on its host
        (2, {"CUDA_VISIBLE_DEVICES": "6,7"}, None),  # a scheduler has dealt them out
        (2, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "2,3"),
        (2, {"ROCR_VISIBLE_DEVICES": "1,3"}, None),
    ],
)
def test_ranks_of_a_host_divide_its_devices(rank: int, environ: dict[str, str], expected: str | None):
    assert visible_devices(rank, HOSTS, 2, environ) == expected


@pytest.mark.parametrize(
    ("per_device", "expected"), [(1, ["0", "1", "2", "3"]), (2, ["0", "0", "1", "1"]), (4, ["0"] * 4)]
)
def test_ranks_that_share_a_device_see_the_same(per_device: int, expected: list[str]):
    seen = [visible_devices(rank, ("a",) * 4, 1, {}, per_device=per_device) for rank in range(4)]
    assert seen == expected


@pytest.mark.parametrize(
    ("per_device", "gib", "expected"),
    [
        (1, 80, "0.920"),  # as planned
        (4, 80, "0.221"),  # of the 76.8 GiB that four contexts leave
        (4, 16, "0.184"),
        (4, None, "0.184"),  # nothing tells, so a small one
    ],
)
def test_processes_take_what_their_contexts_leave(
    per_device: int, gib: int | None, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(start_jax, "smallest_gpu_bytes", lambda: None if gib is None else gib * 2**30)
    environ: dict[str, str] = {}
    with taking_part_of_memory(per_device, environ):
        assert environ == {"XLA_CLIENT_MEM_FRACTION": expected}
    assert not environ, "processes that are started later have GPUs of their own, or share one"
    given = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}
    with taking_part_of_memory(per_device, given):
        assert given == {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}
    assert given == {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}


def test_more_processes_than_a_device_holds_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start_jax, "smallest_gpu_bytes", lambda: 16 * 2**30)
    told = r"processes_per_device is 20, and the contexts .* fill a GPU of 16\.0 GiB"
    with pytest.raises(ValueError, match=told), taking_part_of_memory(20, {}):
        pass


def test_a_process_that_is_alone_takes_the_share_that_plans_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setattr(process, "check_plugin", lambda platform: None)
    read: list[float] = []
    monkeypatch.setattr(
        start_jax, "require_accelerator", lambda: read.append(float(os.environ["XLA_CLIENT_MEM_FRACTION"]))
    )
    start_alone(None)
    assert read == [SHARE_OF_GPU]
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


def test_missing_devices_are_named_on_every_rank():
    check_found_devices(1, 1, [0, 0, 1, 1, 1], 2, 2)
    for rank in range(3):
        with pytest.raises(
            ValueError, match=r"2 devices on each of 3 ranks \(6 in all\), but rank 1 has 1, rank 2 has 0"
        ):
            check_found_devices(rank, rank, [0, 0, 1], 3, 2)


def test_ranks_with_another_platform_than_the_first_are_named():
    check_same_platform({0: "gpu", 1: "gpu"})
    with pytest.raises(ValueError, match="rank 0 found gpu devices and rank 2 cpu devices: see rrfp doctor on both"):
        check_same_platform({0: "gpu", 1: "gpu", 2: "cpu"})


def test_other_numbers_than_jaxs_are_refused():
    with pytest.raises(ValueError, match="this is rank 1, but JAX calls it process 0"):
        check_found_devices(1, 0, [0, 1], 2, 1)


def test_a_failure_says_which_ranks_were_taken_for_neighbours():
    told = "ranks 0, 2 were taken for ranks of one host, a, whose GPUs they divide"
    with pytest.raises(ValueError, match=f"rank 2 has 0: start more; {told}"), naming_neighbours(2, HOSTS, None):
        raise ValueError("rank 2 has 0: start more")
    with pytest.raises(RuntimeError) as failed, naming_neighbours(2, HOSTS, "cuda"):
        raise RuntimeError("no supported devices found for platform CUDA")
    assert told in failed.value.__notes__[0]
    for rank, platform in ((4, None), (0, "cpu")):  # alone on its host; virtual devices
        with pytest.raises(ValueError, match=r"^short$"), naming_neighbours(rank, HOSTS, platform):
            raise ValueError("short")
