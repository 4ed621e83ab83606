"""The wheel: one package with commands and presets, which work in an empty folder of a machine without the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from email import message_from_bytes
from pathlib import Path

import pytest

from rrfp_jax.commands.main import COMMANDS
from rrfp_jax.version import __version__
from tests.drawn_words import preset_data
from tests.environment import of_child

ROOT = Path(__file__).parents[1]
SOURCES = ("rrfp_jax", "experiments", "tests", "tpu_gpu_configs", "pyproject.toml", "README.md", "LICENSE")
TINY = ("--hidden", 32, "--mlp-dim", 64, "--num-heads", 2, "--num-kv-heads", 1, "--length", 16, "--batch-size", 8)
"""Options that make a preset small."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what ``python -m build`` makes of a copy: source archive first, then the wheel from that."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=leave_out)
        else:
            shutil.copy(source, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_it_holds_one_package_with_presets_and_stubs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"rrfp_jax", f"rrfp_jax-{__version__}.dist-info"}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "rrfp_jax").rglob("*.py")}
    assert files <= set(names)
    presets = {str(path.relative_to(ROOT / "tpu_gpu_configs")) for path in (ROOT / "tpu_gpu_configs").rglob("*.*")}
    assert {f"rrfp_jax/presets/{name}" for name in presets} <= set(names)
    assert {"rrfp_jax/py.typed", "rrfp_jax/__init__.pyi"} <= set(names)


def test_its_metadata(wheel: Path) -> None:
    folder = f"rrfp_jax-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(f"{folder}/METADATA"))
        assert archive.read(f"{folder}/entry_points.txt").decode().split() == [
            "[console_scripts]",
            "rrfp",
            "=",
            "rrfp_jax.commands.main:main",
        ]
    assert (metadata["Name"], metadata["Version"]) == ("rrfp-jax", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert any(each.startswith("jax>=") for each in metadata.get_all("Requires-Dist", []))
    assert metadata.get_payload().startswith("# RRFP for JAX")


def test_the_source_archive_builds_without_the_checkout(built: Path) -> None:
    """The presets, which are a link in the checkout, are files in it."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        preset = archive.getmember(f"rrfp_jax-{__version__}/rrfp_jax/presets/cpu/debug.yaml")
    assert preset.isfile()


def test_a_command_finds_its_presets_in_the_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = of_child() | {"PYTHONPATH": str(tmp_path / "installed")}
    code = "import rrfp_jax; print(rrfp_jax.__file__); from rrfp_jax.commands.main import main; main()"
    command = [sys.executable, "-c", code, "train", "--config", "cpu/debug", "--batch-size", "7"]
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.startswith(str(tmp_path / "installed"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), "the preset was found, and the option refused"
    assert "batch-size 7" in done.stderr
    assert not list(empty.iterdir())


WRITES_A_LOG = """
from pathlib import Path

import numpy as np

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.schedules import chain, linear
from rrfp_jax.testing import emulate

order = Ordering(hint="bf").resolve(linear(2), chain(2, 4))
arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.ALL))
emulate(arbiters, np.ones((2, 2, 4, 3)), 2, log_steps=2, events=Path("log.json.gz"))
"""


@pytest.mark.slow
def test_every_command_works_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment with nothing else, in an empty folder, with two ranks too."""
    environment = bare_environment()
    python, empty = tmp_path / "env" / "bin" / "python", tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True, env=environment)
    pins = ROOT / "requirements" / f"constraints-py{'311' if sys.version_info < (3, 12) else '312'}.txt"
    install = [python, "-m", "pip", "install", "--quiet", "--no-input", "-c", pins, wheel]
    subprocess.run(install, check=True, env=environment, timeout=900)
    empty.mkdir()
    called = set()

    def rrfp(*arguments: object) -> str:
        called.add(arguments[0])
        command = [str(python.parent / "rrfp"), *map(str, arguments)]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, check=False, timeout=300)
        assert done.returncode == 0, f"{command}: {done.stdout.decode()}{done.stderr.decode()}"
        return done.stdout.decode()

    sizes = ("--num-stages", 2, "--num-microbatches", 4)
    assert __version__ in rrfp("--version")
    assert all(name in rrfp("--help") for name in COMMANDS)
    rrfp("train", "--config", "cpu/debug", "--steps", 3, *TINY, "--run-dir", "alone")
    launched = ("launch", "--processes", 2, "--", "train", "--config", "cpu/debug", "--steps", 3, *TINY)
    rrfp(*launched, "--run-dir", "two")
    assert len(rows_of(empty / "alone")) == len(rows_of(empty / "two")) == 3
    assert rows_of(empty / "alone")[-1]["loss"] == pytest.approx(rows_of(empty / "two")[-1]["loss"], rel=1e-5)
    assert "zb-h1" in rrfp("simulate", *sizes, "--compare", "1f1b:strict,zb-h1", "--timeline", "pages/compare.html")
    subprocess.run([python, "-c", WRITES_A_LOG], cwd=empty, env=environment, check=True, timeout=300)
    assert "F" in rrfp("replay", "log.json.gz", "--microbatch", 1)
    rrfp("convert", "export", "alone", "hub")
    rrfp("convert", "import", "hub", "imported")
    rrfp("train", "--config", "cpu/multimodal", "--steps", 2, "--data.path", preset_data(), "--run-dir", "seeing")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("A pipeline of stages.\n" * 2000)
    rrfp("tokenize", tmp_path / "texts", "--out", "tokens")
    of_tokens = {"path": "tokens", "batch-size": 4, "num-microbatches": 2, "pack": "false"}
    options = [part for name, value in of_tokens.items() for part in (f"--data.{name}", value)]
    rrfp("train", "--config", "cpu/text", "--steps", 2, "--vocab-size", 256, *options, "--run-dir", "text")
    assert "perplexity" in rrfp("evaluate", "text", "--batches", 1)
    rrfp("sample", "text", "--prompt", "A pipe", "--max-tokens", 4)
    rrfp("convert", "export", "text", "exported")
    rrfp("convert", "import", "exported", "again")
    assert "1f1b" in rrfp("simulate", *sizes, "--schedule", "1f1b", "--show")
    rrfp("profile", "--config", "text/config.yaml", "--repeats", 2, "--output", "costs.json")
    rrfp("plan", "--costs", "costs.json", "--devices", 2, "--microbatches", 4, "--schedules", "1f1b")
    assert "cpu/debug" in rrfp("config", "--list")
    assert "microbatches that a stage may hold" in rrfp("config", "--explain", "pipeline.window")
    assert "complete" in rrfp("config", "--completion", "bash")
    assert __version__ in rrfp("doctor", "--run-dir", "alone")
    assert set(COMMANDS) <= called
    assert sorted(path.name for path in empty.iterdir()) == [
        "again",
        "alone",
        "costs.json",
        "exported",
        "hub",
        "imported",
        "log.json.gz",
        "pages",
        "seeing",
        "text",
        "tokens",
        "two",
    ]


def bare_environment() -> Mapping[str, str]:
    """Nothing that leads to the checkout or to this interpreter's packages."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if each != scripts)
    return of_child(*left_out) | {"PATH": path}


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
