"""``make setup`` speaks while it installs, and for which accelerator; the installer is a stand-in that records."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.fake_hosts import fake_package, fake_smi

ROOT = Path(__file__).parents[1]
PIP = """
import os, sys
print("Collecting numpy\\n  Downloading numpy.whl\\nnote: unimportant\\nCollecting jax")
with open(os.environ["ASKED"], "a") as asked:
    print(*sys.argv[1:], file=asked)
sys.exit(int(os.environ["CODE"]))
"""
PINS = f"requirements/constraints-{'py311' if sys.version_info < (3, 12) else 'py312'}"
PINNED = f"install -c {PINS}.txt -e ."
CHOSEN = "JAX for {0}: NVIDIA driver {1}; ACCELERATOR=... takes another\n"


WITHOUT_GPU = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this host has a GPU")


class Setup:
    """An environment with a pip that installs nothing, on a host of our choice."""

    def __init__(self, folder: Path) -> None:
        self.path, self._bin, self._asked = folder / "env", folder / "bin", folder / "asked"
        venv.create(self.path, symlinks=True)
        (self.packages,) = self.path.glob("lib/python*/site-packages")
        (self.packages / "pip").mkdir()
        (self.packages / "pip/__main__.py").write_text(PIP)

    def run(self, *words: str, driver: str | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
        fake_smi(self._bin, driver)
        left_out = ("MAKE", "MFLAGS", "PYTHON", "ACCELERATOR")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        kept |= {"CODE": str(code), "ASKED": str(self._asked), "PATH": f"{self._bin}{os.pathsep}{kept['PATH']}"}
        command = ["make", f"VENV={self.path}", "setup", *words]
        return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=False, timeout=60)

    def asked(self) -> list[str]:
        """What pip was asked since the last time."""
        lines = self._asked.read_text().splitlines() if self._asked.exists() else []
        self._asked.unlink(missing_ok=True)
        return [line.partition("--no-input ")[2] for line in lines]


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def with_pins(accelerator: str) -> list[str]:
    return [f"install -c {PINS}.txt -c {PINS}-{accelerator}.txt -e .[{accelerator}]"]


@WITHOUT_GPU
def test_it_says_how_long_it_takes_and_that_something_moves(setup: Setup) -> None:
    done = setup.run()
    assert done.returncode == 0, done.stderr
    chosen, *rest = done.stdout.splitlines()
    assert chosen.startswith("JAX for cpu: no NVIDIA GPU (nvidia-smi ends with code 9")
    assert rest == [f"installing the pinned dependencies into {setup.path} (about a minute)", "..."]
    assert setup.asked() == [PINNED]
    assert setup.run().stdout.startswith("make: Nothing to be done"), "it is installed already"


@WITHOUT_GPU
@pytest.mark.parametrize("code", [1, 2])
def test_what_pip_says_is_shown_where_it_fails(setup: Setup, code: int) -> None:
    done = setup.run(code=code)
    assert done.returncode != 0
    assert "note: unimportant" in done.stderr
    assert "error: pip could not install '.'; its output is above" in done.stderr
    assert not (setup.path / ".installed").exists()


@pytest.mark.parametrize(("driver", "accelerator"), [("580.65.06", "cuda13"), ("525.60.13", "cuda12")])
def test_the_driver_says_which_jax_is_installed(setup: Setup, driver: str, accelerator: str) -> None:
    done = setup.run(driver=driver)
    assert done.stdout.startswith(CHOSEN.format(accelerator, driver)), done.stderr
    assert setup.asked() == with_pins(accelerator)
    assert (ROOT / f"{PINS}-{accelerator}.txt").is_file()


@WITHOUT_GPU
def test_another_accelerator_is_installed_where_it_is_asked_for(setup: Setup) -> None:
    setup.run(driver=None)
    assert setup.asked() == [PINNED]
    for accelerator in ("tpu", "cuda12"):
        done = setup.run(f"ACCELERATOR={accelerator}", driver="580.65.06")
        assert done.stdout.startswith(f"JAX for {accelerator}, as ACCELERATOR says\n"), done.stderr
        assert setup.asked() == with_pins(accelerator)
    fake_package(setup.packages, "jax-cuda12-plugin")
    assert setup.run("ACCELERATOR=cuda12").returncode == 0
    assert setup.asked() == [], "it is what is there"


@pytest.mark.parametrize("words", ["cuda12,cuda13", "rocm"])
def test_what_is_no_accelerator_is_refused(setup: Setup, words: str) -> None:
    done = setup.run(f"ACCELERATOR={words}")
    assert done.returncode != 0
    assert done.stderr.startswith(f"error: ACCELERATOR is '{words}': give one of cpu, cuda12, cuda13, tpu\n")
    assert setup.asked() == []


@pytest.mark.parametrize("words", [[], ["ACCELERATOR=cuda13"]])
def test_a_second_cuda_plugin_is_refused(setup: Setup, words: list[str]) -> None:
    fake_package(setup.packages, "jax-cuda12-plugin")
    done = setup.run(*words, driver="580.65.06")
    assert done.returncode != 0
    command = f"{setup.path}/bin/python -m pip uninstall -y jax-cuda12-plugin jax-cuda12-pjrt"
    assert f"two CUDA plugins side by side break JAX: run '{command} && make setup ACCELERATOR=cuda13'" in done.stderr
    assert setup.asked() == []


def test_a_driver_that_is_too_old_is_refused(setup: Setup) -> None:
    done = setup.run(driver="470.57.02")
    assert done.returncode != 0
    assert done.stderr.startswith("error: NVIDIA driver 470.57.02 is older than JAX needs (525 for CUDA 12, 580")
    assert setup.asked() == []
