"""On a host with a GPU that JAX does not use, what starts JAX there ends with one sentence and the command to run.

The host is pretended, JAX and the commands are real.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.runtime.jax_environment import check_plugin, idle_plugin
from tests.commands.running import ROOT, run_command, sentence
from tests.environment import of_child
from tests.fake_hosts import fake_package, fake_plugin, fake_smi
from tests.multiprocess.runs import training_config

CPU_ONLY = (
    "this host has a GPU (NVIDIA driver 580.65.06), but the installed JAX is for CPU only: run "
    "'make setup ACCELERATOR=cuda13', or take platform cpu"
)
REFUSES = "raise RuntimeError('no CUDA runtime here')"
GIVES_UP = (
    "from jax._src import xla_bridge; xla_bridge.register_backend_factory('other', lambda: 1 / 0, fail_quietly=False)"
)


class Host:
    """A host with this driver, and an environment with what ``packages`` has."""

    def __init__(self, folder: Path, driver: str) -> None:
        self._path, self.packages = fake_smi(folder / "bin", driver), folder / "packages"

    def run(self, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **of_child("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"),
            "PATH": f"{self._path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{self.packages}",
            **variables,
        }
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture
def host(tmp_path: Path) -> Callable[[str], Host]:
    return lambda driver: Host(tmp_path, driver)


START = "from rrfp_jax.commands.common.process import start_alone; start_alone(None)"


def training(folder: Path, **changes: object) -> list[object]:
    """A run that would need more devices than there are."""
    return ["--config", training_config(folder, platform=None, steps=1, **changes), "--run-dir", folder / "run"]


def test_training_is_refused_before_devices_are_counted(host: Callable[[str], Host], tmp_path: Path) -> None:
    done = host("580.65.06").run("-m", "experiments.train", *training(tmp_path, num_stages=4))
    assert sentence(done) == f"error: {CPU_ONLY}"


def test_ranks_are_refused_and_so_is_the_run(host: Callable[[str], Host], tmp_path: Path) -> None:
    """At least the first; those that have not come so far need not be waited for."""
    train = training(tmp_path, num_stages=2)
    done = host("525.60.13").run("-m", "experiments.launch", "--processes", 2, "--", "train", *train)
    assert done.returncode == 2, done.stderr
    told = [line for line in done.stderr.splitlines() if "] error: " in line]
    assert 1 <= len(told) <= 2
    for line in told:
        assert line.startswith("[rank ")
        assert CPU_ONLY.replace("580.65.06", "525.60.13").replace("cuda13", "cuda12") in line


def test_a_plugin_that_fails_is_named(host: Callable[[str], Host], tmp_path: Path) -> None:
    there = host("580.65.06")
    fake_plugin(there.packages, REFUSES)
    error = there.run("-c", START).stderr.splitlines()[-1]
    assert "jax-cuda13-plugin 0.10.2 is installed, but it fails to load, so JAX sees CPU devices only" in error
    assert "(JAX's messages above say why)" in error
    assert "install it again by '" in error
    assert "pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt && make setup ACCELERATOR=cuda13'" in error


@pytest.mark.slow
def test_what_jax_gives_up_for_is_told(host: Callable[[str], Host], tmp_path: Path) -> None:
    there = host("580.65.06")
    fake_plugin(there.packages, GIVES_UP)
    done = there.run("-m", "experiments.bench_device", "--accelerator")
    assert "fails to load, so JAX sees CPU devices only (JAX says: Unable to initialize backend 'other'" in sentence(
        done
    )


@pytest.mark.slow
@pytest.mark.parametrize("body", [REFUSES, GIVES_UP])
def test_a_plugin_that_fails_on_several_ranks_ends_the_run(
    host: Callable[[str], Host], tmp_path: Path, body: str
) -> None:
    there = host("580.65.06")
    fake_plugin(there.packages, body)
    done = there.run("-m", "experiments.launch", "--processes", 2, "--", "train", *training(tmp_path, num_stages=2))
    assert done.returncode == 2, done.stderr
    assert "error: this host has NVIDIA driver 580.65.06 and jax-cuda13-plugin 0.10.2 is installed, but" in done.stderr


def test_emulation_goes_on(here: Callable[[str], Path]) -> None:
    here("580.65.06")
    sizes = ("--num-stages", 2, "--num-microbatches", 2, "--durations-ms", "0,0,0", "--steps", 1)
    done = run_command("emulate", *sizes, "--json")
    assert done.returncode == 0, done.stderr


def test_reading_is_refused_too(here: Callable[[str], Path], tmp_path: Path) -> None:
    here("580.65.06")
    trained = load_train_config("cpu/multimodal", {"run.platform": None}).as_dict()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(trained))
    assert sentence(run_command("reading", tmp_path)) == f"error: {CPU_ONLY}"


@pytest.mark.slow
def test_runs_on_the_cpu_go_on(host: Callable[[str], Host], tmp_path: Path) -> None:
    config = training_config(tmp_path, steps=1, platform="cpu")
    done = host("580.65.06").run("-m", "experiments.train", "--config", config, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """This process on a host with a driver; returns where packages can be put."""

    def pretend(driver: str) -> Path:
        monkeypatch.setenv("PATH", f"{fake_smi(tmp_path / 'bin', driver)}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        return tmp_path / "packages"

    return pretend


def test_both_plugins_are_named_with_the_command_that_leaves_one(here: Callable[[str], Path]) -> None:
    packages = here("535.1")
    for number in (12, 13):
        fake_package(packages, f"jax-cuda{number}-plugin")
    with pytest.raises(ValueError, match=r"jax-cuda12-plugin 0.10.2 and jax-cuda13-plugin 0.10.2 are both installed"):
        check_plugin(None)
    with pytest.raises(ValueError, match=r"keep cuda12 by '.* -m pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt'"):
        check_plugin(None)
    check_plugin("cpu")


@pytest.mark.parametrize(
    ("plugins", "driver", "remedy"),
    [
        ([13], "580.65.06", "let the container see the driver's libraries and devices, "),
        ([13], "535.1", "take an image for this driver, or run 'make clean && make setup ACCELERATOR=cuda12'"),
        ([12, 13], "535.1", "keep cuda12 by 'make clean && make setup ACCELERATOR=cuda12'"),
    ],
)
def test_plugins_of_an_image_are_not_to_be_taken_out_of_it(
    here: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plugins: list[int],
    driver: str,
    remedy: str,
) -> None:
    packages = here(driver)
    for number in plugins:
        fake_package(packages, f"jax-cuda{number}-plugin")
    (tmp_path / ".accelerator").write_text("system\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    told = idle_plugin({}, None)
    assert told is not None
    assert remedy in told
    assert "uninstall" not in told


@pytest.mark.parametrize(("name", "value"), [("JAX_PLATFORMS", "cpu"), ("CUDA_VISIBLE_DEVICES", "")])
def test_who_hides_the_gpu_is_not_told_of_it(
    here: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    here("580.65.06")
    with pytest.raises(ValueError, match="for CPU only"):
        check_plugin(None)
    monkeypatch.setenv(name, value)
    check_plugin(None)


def test_a_driver_that_no_plugin_could_use_is_to_be_updated(here: Callable[[str], Path]) -> None:
    here("470.57.02")
    with pytest.raises(ValueError, match=r"driver 470.57.02, which is older than JAX needs .*: update it"):
        check_plugin(None)
