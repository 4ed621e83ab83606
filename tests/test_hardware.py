"""What a host calls for, and what may be installed beside what is there; seen as ``make setup`` does, without JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

from rrfp_jax import hardware
from rrfp_jax.hardware import choose, find_hardware, install_command
from tests.fake_hosts import NO_DRIVER, fake_package, fake_smi


@pytest.fixture(autouse=True)
def nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither GPU nor TPU nor plugin but those that a test puts there."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(hardware.find_hardware, "__defaults__", (tmp_path / "root",))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed")])


def make_tpus(root: Path, *devices: str) -> None:
    for number, device in enumerate(devices):
        folder = root / f"sys/bus/pci/devices/0000:00:0{number}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "device").write_text(f"{device}\n")


@pytest.mark.parametrize(
    ("driver", "accelerator", "is_too_old"),
    [
        ("580.65.06", "cuda13", False),
        ("610.1", "cuda13", False),
        ("579.99", "cuda12", False),
        ("525.60.13", "cuda12", False),
        ("524.1", "cuda12", True),
        ("470.57.02", "cuda12", True),
    ],
)
def test_the_driver_decides(driver: str, accelerator: str, is_too_old: bool, tmp_path: Path) -> None:
    fake_smi(tmp_path / "bin", driver)
    found = find_hardware()
    assert (found.accelerator, found.driver, found.is_too_old) == (accelerator, driver, is_too_old)
    assert driver in found.why


def test_a_driver_without_nvidia_smi_is_known_by_what_it_leaves_in_proc(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "proc/driver/nvidia").mkdir(parents=True)
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n"
    (root / "proc/driver/nvidia/version").write_text(line)
    assert find_hardware().accelerator == "cpu", "a driver, and no GPU"
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    assert find_hardware().driver == "535.104.05"


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert choose("") == (
        "cpu",
        "JAX for cpu: no NVIDIA GPU (no nvidia-smi) and no TPU found; ACCELERATOR=... takes another",
    )
    (tmp_path / "bin/nvidia-smi").touch(mode=0o600)
    assert "(no nvidia-smi)" in find_hardware().why, "none that this user may run"
    fake_smi(tmp_path / "bin", None)
    assert NO_DRIVER.rstrip(".") in find_hardware().why
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert find_hardware().accelerator == "cpu"


def test_tpus_are_known_by_their_pci_devices(tmp_path: Path) -> None:
    make_tpus(tmp_path / "root", "0x0042")
    assert find_hardware().accelerator == "cpu", "a network card of the same maker"
    make_tpus(tmp_path / "other", "0x0042", "0x0063", "0x007c")
    found = find_hardware(tmp_path / "other")
    assert (found.accelerator, found.why) == ("tpu", "2 TPU chips")


def test_what_the_user_says_is_taken_with_a_note(tmp_path: Path) -> None:
    fake_smi(tmp_path / "bin", "535.1")
    assert choose("cuda12") == ("cuda12", "JAX for cuda12, as ACCELERATOR says")
    chosen, line = choose("cuda13")
    assert chosen == "cuda13"
    assert line.endswith("note that it needs NVIDIA driver 580, and this host has 535.1")
    assert choose("cpu")[0] == "cpu"


def test_a_driver_that_is_too_old_is_refused_with_the_way_out(tmp_path: Path) -> None:
    fake_smi(tmp_path / "bin", "470.57.02")
    with pytest.raises(ValueError, match=r"driver 470.57.02 is older than .*'make setup ACCELERATOR=cpu'"):
        choose("")


@pytest.mark.parametrize("wanted", ["cuda12,cuda13", "cuda", "gpu", "CPU"])
def test_anything_else_is_refused(wanted: str) -> None:
    with pytest.raises(ValueError, match=f"ACCELERATOR is '{wanted}': give one of cpu, cuda12, cuda13, tpu"):
        choose(wanted)


def test_two_cuda_plugins_side_by_side_are_refused(tmp_path: Path) -> None:
    fake_smi(tmp_path / "bin", "580.1")
    fake_package(tmp_path / "installed", "jax-cuda12-plugin")
    for wanted in ("", "cuda13"):
        with pytest.raises(ValueError, match=r"holds jax-cuda12-plugin 0.10.2 and is to be for cuda13") as refused:
            choose(wanted)
        assert "-m pip uninstall -y jax-cuda12-plugin jax-cuda12-pjrt && make setup ACCELERATOR=cuda13'" in str(
            refused.value
        )
        assert str(refused.value).endswith("or keep it by 'make setup ACCELERATOR=cuda12'")
    with pytest.raises(ValueError, match="JAX would take the device: run"):
        choose("cpu")
    assert choose("cuda12")[0] == "cuda12"
    assert choose("tpu")[0] == "tpu", "JAX can have it beside CUDA"
    fake_package(tmp_path / "installed", "jax-cuda13-plugin")
    for wanted, other in (("", "12"), ("cuda13", "12"), ("cuda12", "13")):
        with pytest.raises(ValueError, match=f"uninstall -y jax-cuda{other}-plugin jax-cuda{other}-pjrt && make setup"):
            choose(wanted)


def test_a_tpu_is_left_out_only_where_its_library_is(tmp_path: Path) -> None:
    fake_package(tmp_path / "installed", "libtpu", "0.0.50")
    with pytest.raises(
        ValueError, match=r"holds libtpu 0.0.50 and is to be for cpu, .* pip uninstall -y libtpu && make"
    ):
        choose("cpu")
    assert choose("")[0] == "tpu"
    assert choose("cuda13")[0] == "cuda13"


def test_an_environment_stays_what_it_is_where_no_accelerator_is_found(tmp_path: Path) -> None:
    """As on the login node of a cluster."""
    fake_package(tmp_path / "installed", "jax-cuda12-plugin")
    assert choose("")[0] == "cuda12"


def test_what_is_to_be_run_differs_with_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("tpu") == "make setup ACCELERATOR=tpu"
    monkeypatch.setattr(hardware, "__file__", str(tmp_path / "site-packages/rrfp_jax/hardware.py"))
    assert install_command("tpu").endswith('-m pip install "rrfp-jax[tpu]"')


def test_it_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", hardware.__file__, "tpu", str(tmp_path / "chosen")]
    assert subprocess.run(command, check=True, capture_output=True, timeout=60).stderr == b""
    assert (tmp_path / "chosen").read_text() == "tpu\n"


def test_the_smallest_gpu_tells_how_much_memory_there_is(tmp_path: Path) -> None:
    assert hardware.smallest_gpu_bytes() is None
    fake_smi(tmp_path / "bin", "81559; echo 16384")
    assert hardware.smallest_gpu_bytes() == 16384 * 2**20
    fake_smi(tmp_path / "bin", "[N/A]")
    assert hardware.smallest_gpu_bytes() is None
