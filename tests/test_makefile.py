"""``make setup`` speaks while it installs, and for which accelerator; the installer is a stand-in that records."""

import os
import re
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
        command = ["make", f"VENV={self.path}", *(words if "wheels" in words else ("setup", *words))]
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
    assert done.stderr.startswith(f"error: ACCELERATOR is '{words}': give one of cpu, cuda12, cuda13, tpu, system\n")
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


# -- without a network -----------------------------------------------------------------------------------------------


def test_wheels_are_collected_for_another_host(setup: Setup, tmp_path: Path) -> None:
    done = setup.run("wheels", f"WHEELS={tmp_path}/w", "ACCELERATOR=cuda12", driver=None)
    assert done.returncode == 0, done.stderr
    (asked,) = setup.asked()
    assert asked == f"wheel --wheel-dir {tmp_path}/w setuptools -c {PINS}.txt -c {PINS}-cuda12.txt .[cuda12]"
    assert not (setup.path / ".accelerator").exists(), "this host's own environment stays as it is"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "w"
    folder.mkdir()
    (folder / "accelerator").write_text("cuda12\n")
    (folder / f"numpy-2.4.0-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-linux_x86_64.whl").touch()
    return folder


def test_setup_installs_from_collected_wheels_alone(setup: Setup, wheels: Path) -> None:
    done = setup.run(f"WHEELS={wheels}", driver="535.1")
    assert done.returncode == 0, done.stderr
    offline = f"--no-index --find-links {wheels}"
    assert setup.asked() == [with_pins("cuda12")[0].replace("install ", f"install {offline} ")]


def test_wheels_for_something_else_are_refused_with_the_command_that_helps(setup: Setup, wheels: Path) -> None:
    done = setup.run(f"WHEELS={wheels}", driver="580.65.06")
    assert (
        f"error: '{wheels}' is for cuda12, and JAX is to be for cuda13: run 'make setup ACCELERATOR=cuda12"
        in done.stderr
    )
    (python,) = wheels.glob("numpy-*")
    python.rename(wheels / "numpy-2.4.0-cp310-cp310-linux_x86_64.whl")
    done = setup.run(f"WHEELS={wheels}", "ACCELERATOR=cuda12")
    assert f"error: '{wheels}' is for another Python than Python 3." in done.stderr
    assert f"collect with PYTHON=python3.{sys.version_info.minor}\n" in done.stderr
    done = setup.run(f"WHEELS={wheels}/nothing", "ACCELERATOR=cpu")
    assert f"error: '{wheels}/nothing' holds no wheels: run 'make wheels WHEELS=FOLDER'" in done.stderr
    assert setup.asked() == []


# -- the JAX of an image ---------------------------------------------------------------------------------------------


@pytest.fixture
def image(setup: Setup) -> Setup:
    """Its Python has packages of its own, which the environment sees."""
    settings = setup.path / "pyvenv.cfg"
    settings.write_text(settings.read_text().replace("site-packages = false", "site-packages = true"))
    (setup.packages / "pip/__init__.py").touch()  # else that of the Python of this host goes before it
    fake_package(setup.packages, "numpy", "2.2.0")
    return setup


def test_the_jax_of_an_image_stays(image: Setup) -> None:
    for name in ("jax", "jaxlib", "jax-cuda12-plugin"):
        fake_package(image.packages, name, "0.11.0.dev5+vendor")
    done = image.run("ACCELERATOR=system", driver="580.65.06")
    assert done.returncode == 0, done.stderr
    assert re.match(r"JAX 0\.11\.0\.dev5\+vendor of \S+, as ACCELERATOR says\n", done.stdout)
    pins = image.path / "constraints.txt"
    assert image.asked() == [f"install -c {pins} -e ."]
    kept = pins.read_text().splitlines()
    assert {"jax==0.11.0.dev5+vendor", "jaxlib==0.11.0.dev5+vendor"} <= set(kept)
    assert not [line for line in kept if line.startswith("numpy==")]
    assert [line for line in kept if line.startswith("flax==")]
    assert image.run(driver="580.65.06").stdout.startswith("make: Nothing to be done"), "the choice stays"


@pytest.mark.parametrize(
    ("version", "told"), [(None, "has no JAX, and 0.10.2 or newer"), ("0.9.9", "has JAX 0.9.9, and 0.10.2 or newer")]
)
def test_an_image_whose_jax_is_of_no_use_is_refused(image: Setup, version: str | None, told: str) -> None:
    if version is not None:
        fake_package(image.packages, "jax", version)
    done = image.run("ACCELERATOR=system")
    assert done.returncode != 0
    assert f"{told} is needed: take another image, or JAX from its packages by another ACCELERATOR" in done.stderr
    assert image.asked() == []


def test_an_environment_that_hides_the_image_is_refused(setup: Setup) -> None:
    done = setup.run("ACCELERATOR=system")
    assert f"error: the environment {setup.path} does not see the packages of its Python: remove it by" in done.stderr
    assert setup.asked() == []


# -- for real --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_clone_is_set_up_from_its_wheels_without_a_network(tmp_path: Path) -> None:
    clone, folder = tmp_path / "clone", tmp_path / "w"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "VENV"))}

    def make(*words: str, **environ: str) -> str:
        command = ["make", f"PYTHON={sys.executable}", f"WHEELS={folder}", "ACCELERATOR=cpu", *words]
        done = subprocess.run(command, cwd=clone, env=kept | environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    make("wheels", "VENV=collecting")
    assert list(folder.glob("rrfp_jax-*.whl"))
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    make("setup", **nowhere)
    run = [clone / ".venv/bin/python", "-c", "import jax, rrfp_jax; print(rrfp_jax.__file__)"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(clone / "rrfp_jax/__init__.py")
