"""The container images: their files pass a linter, build from what .dockerignore lets in, and run what Kubernetes asks.

Where no builder answers, the build is done step by step in a folder: what the files say, without the isolation.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from rrfp_jax.commands.main import module_of
from rrfp_jax.commands.training.config import load_train_config
from rrfp_jax.version import __version__
from tests.environment import of_child

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tpu_gpu_configs/containers"
FILES = sorted(FOLDER.glob("Dockerfile.*"))
EXTRAS = {"Dockerfile.cpu": [], "Dockerfile.cuda": ["cuda13"], "Dockerfile.tpu": ["tpu"]}
EACH = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


class Step(NamedTuple):
    """An instruction and what follows it."""

    word: str
    rest: str


def stages_of(file: Path) -> list[list[Step]]:
    """The instructions of each stage, continued lines joined, without comments; the FROM first."""
    lines = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    steps = [Step(*line.split(maxsplit=1)) for line in lines.replace("\\\n", " ").splitlines() if line.strip()]
    starts = [number for number, step in enumerate(steps) if step.word == "FROM"]
    return [steps[start:end] for start, end in zip(starts, [*starts[1:], len(steps)], strict=True)]


def copied(steps: list[Step]) -> list[list[str]]:
    return [shlex.split(step.rest) for step in steps if step.word == "COPY" and "--from" not in step.rest]


def settings(steps: list[Step], word: str) -> dict[str, str]:
    pairs = [pair for step in steps if step.word == word for pair in shlex.split(step.rest)]
    return dict(pair.split("=", 1) for pair in pairs)


def last(steps: list[Step], word: str) -> str:
    return [step.rest for step in steps if step.word == word][-1]


def lint(file: Path) -> subprocess.CompletedProcess[str]:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert linter, "make dev installs hadolint"
    return subprocess.run([linter, file], capture_output=True, text=True, check=False, timeout=60)


def test_there_is_a_file_for_every_platform() -> None:
    assert [file.name for file in FILES] == [*EXTRAS]


@EACH
def test_the_linter_finds_nothing(file: Path) -> None:
    done = lint(file)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_linter_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN pip install jax\nRUN cd /tmp\n")
    done = lint(tmp_path / "Dockerfile")
    assert done.returncode != 0
    assert {"DL3007", "DL3013", "DL3042", "DL3003"} <= {*re.findall(r"DL\d+", done.stdout)}


@EACH
def test_the_image_runs_rrfp_as_a_user_without_rights_on_volumes_of_its_own(file: Path) -> None:
    build, image = stages_of(file)
    assert build[0].rest == "${BASE} AS build"
    assert image[0].rest == "${BASE}", "nothing that only the build needs comes into the image"
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user := last(image, "USER"))
    assert f"--uid {user.partition(':')[0]} " in " ".join(step.rest for step in image if step.word == "RUN")
    assert (last(image, "ENTRYPOINT"), last(image, "CMD")) == ('["rrfp"]', '["--help"]')
    assert yaml.safe_load(last(image, "VOLUME")) == [settings(image, "ENV")["RRFP_COMPILE_CACHE"], "/runs"]
    assert last(image, "WORKDIR") == "/", "runs/ below it is the volume"
    labels = settings(image, "LABEL")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert labels["org.opencontainers.image.title"] == project["name"]
    assert labels["org.opencontainers.image.licenses"] == project["license"]
    assert [step.word for step in image].index("USER") > max(n for n, step in enumerate(image) if step.word == "RUN")


def test_only_the_image_for_gpus_asks_the_runtime_for_the_driver() -> None:
    asked = {file.name for file in FILES if "NVIDIA_DRIVER_CAPABILITIES" in settings(stages_of(file)[1], "ENV")}
    assert asked == {"Dockerfile.cuda"}
    env = settings(stages_of(FOLDER / "Dockerfile.cuda")[1], "ENV")
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["NVIDIA_DRIVER_CAPABILITIES"]) == ("all", "compute,utility")


@EACH
def test_dependencies_are_installed_from_the_pins_before_the_code_is_copied(file: Path) -> None:
    build = stages_of(file)[0]
    code = next(n for n, step in enumerate(build) if step.word == "COPY" and step.rest.startswith("rrfp_jax"))
    (needed,) = [step.rest for step in build[:code] if "requirements/needed" in step.rest]
    assert re.findall(r"requirements/needed([^>]*)>", needed)[0].split() == EXTRAS[file.name]
    pins = re.findall(r"-c (\S+)", needed)
    expected = ["", *(f"-{extra}" for extra in EXTRAS[file.name])]
    assert pins == [f"requirements/constraints-py312{accelerator}.txt" for accelerator in expected]
    assert all((ROOT / path).is_file() for path in pins)
    assert settings(build, "ENV")["PIP_NO_CACHE_DIR"] == "1"


@EACH
def test_what_is_copied_exists_and_is_all_that_dockerignore_lets_in(file: Path) -> None:
    sources = {source for *sources, _ in copied(stages_of(file)[0]) for source in sources}
    assert all((ROOT / source).exists() for source in sources)
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == sources


def test_what_is_needed_is_told_with_the_extras() -> None:
    def needed(*extras: str) -> list[str]:
        command = [sys.executable, ROOT / "requirements/needed", *extras]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert needed() == project["dependencies"]
    assert any(each.startswith("jax[cuda13]") for each in needed("cuda13"))
    assert needed("tpu")[-1].startswith("jax[tpu]")


@pytest.mark.parametrize(("job_set", "platform"), [("jobset.yaml", "cuda"), ("jobset_tpu.yaml", "tpu")])
def test_a_job_set_runs_an_image_that_can_be_built_as_its_user_on_its_volumes(job_set: str, platform: str) -> None:
    text = (FOLDER.parent / "kubernetes" / job_set).read_text()
    (replicated,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"].endswith(f"/rrfp-jax:{platform}")
    assert f"containers/Dockerfile.{platform}" in text, "it says how the image is made"
    image = stages_of(FOLDER / f"Dockerfile.{platform}")[1]
    assert container["command"][:1] == yaml.safe_load(last(image, "ENTRYPOINT"))
    user, group = map(int, last(image, "USER").split(":"))
    security = pod["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (user, group, group)
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {*yaml.safe_load(last(image, "VOLUME"))} <= mounts


def test_the_commands_of_the_readme_build_these_files_and_are_taken_by_rrfp() -> None:
    text = (FOLDER.parent / "README.md").read_text().replace("\\\n", " ")
    built = re.findall(r"^docker build -f (\S+) -t \S+ \.$", text, re.MULTILINE)
    assert built
    assert all((ROOT / path).is_file() for path in built)
    commands = [shlex.split(line) for line in re.findall(r"^docker run .* rrfp-jax:cuda +(.*)$", text, re.MULTILINE)]
    assert {words[0] for words in commands} == {"train", "launch"}
    for name, *words in commands:
        arguments = import_module(module_of(name)).make_parser().parse_args(words)
        if name == "train":
            load_train_config(arguments.config, {})


# -- the build -------------------------------------------------------------------------------------------------------


def builder() -> str | None:
    """A program that builds images here, and answers."""
    for name in filter(shutil.which, ("docker", "podman", "buildah")):
        with suppress(subprocess.SubprocessError):
            subprocess.run([name, "info"], capture_output=True, check=True, timeout=60)
            return name
    return None


@pytest.mark.slow
@EACH
def test_the_image_builds_and_runs(file: Path) -> None:
    program = builder()
    if program is None:
        pytest.skip("no docker, podman or buildah answers here: the image was not built")
    tag = f"rrfp-jax-test:{file.suffix[1:]}"
    subprocess.run([program, "build", "-f", file, "-t", tag, ROOT], check=True, timeout=3000)
    if program == "buildah":
        return
    run = [program, "run", "--rm", tag]
    assert subprocess.run([*run, "--version"], capture_output=True, text=True, check=True).stdout.strip() == __version__
    if file.suffix == ".cpu":
        subprocess.run([*run, "train", "--config", "cpu/debug", "--steps", "2"], check=True, timeout=600)


def python_of_the_image() -> str | None:
    names = [sys.executable, *(shutil.which(f"python3.{minor}") for minor in (12, 13))]
    check = "import sys; sys.exit(sys.version_info < (3, 12))"
    works = (name for name in names if name and not subprocess.run([name, "-c", check], check=False).returncode)
    return next(works, None)


@pytest.mark.slow
def test_the_steps_of_the_build_do_what_they_say(tmp_path: Path) -> None:
    """In a folder that stands for the root of the file system, with an interpreter that stands for the base image's."""
    if (python := python_of_the_image()) is None:
        pytest.skip("no Python 3.12 here, which the pins of the images are for")
    subprocess.run([python, "-m", "venv", tmp_path / "usr"], check=True)
    env = of_child("PYTHONPATH", "VIRTUAL_ENV", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    env["XLA_FLAGS"] = ""  # those of the tests are for this interpreter's JAX
    env["PATH"] = f"{tmp_path / 'usr/bin'}:{env['PATH']}"
    here = tmp_path
    for step in stages_of(FOLDER / "Dockerfile.cpu")[0]:
        if step.word == "ENV":
            env |= dict(pair.split("=", 1) for pair in shlex.split(step.rest))
        elif step.word == "WORKDIR":
            here = tmp_path / step.rest.lstrip("/")
            here.mkdir(parents=True)
        elif step.word == "COPY":
            _copy(shlex.split(step.rest), here)
        elif step.word == "RUN":
            command = step.rest.replace("/opt/rrfp", str(tmp_path / "opt/rrfp"))
            subprocess.run(["sh", "-ec", command], cwd=here, env=env, check=True, timeout=1200)
    shutil.rmtree(here)
    rrfp = [tmp_path / "opt/rrfp/bin/rrfp"]
    told = subprocess.run([*rrfp, "--version"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == __version__
    train = [*rrfp, "train", "--config", "cpu/debug", "--steps", "2", "--batch-size", "8", "--run-dir", "run"]
    subprocess.run(train, cwd=tmp_path, env=env, check=True, timeout=600)
    assert not (tmp_path / "opt/rrfp/bin/pip").exists()
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


def _copy(words: list[str], here: Path) -> None:
    """As an image builder does: a folder's content goes into the folder that is named, links stay links."""
    *sources, target = words
    for source in sources:
        if (ROOT / source).is_dir():
            leave_out = shutil.ignore_patterns("__pycache__", "containers")
            shutil.copytree(ROOT / source, here / target, symlinks=True, ignore=leave_out)
        else:
            shutil.copy(ROOT / source, here / target)
