"""Every command of the documentation is read by its parser, and runs, unless it is listed here with the reason."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rrfp_jax.commands.main import COMMANDS, module_of
from rrfp_jax.commands.training.config import load_train_config, overrides_of
from tests.documentation.blocks import ROOT, Block, blocks, languages, module_and_flags
from tests.environment import of_child

NOT_RUN = {
    "pip install ": "installs",
    "make train": "installs; tests/test_makefile.py has what is special to it, and the command behind it runs below",
    "make train-multimodal": "takes minutes; its commands run below",
    "source .venv/bin/activate": "the tests run in an environment already",
    "python -m experiments.launch --nodes 2": "needs two hosts",
    "python -m experiments.launch --supervise": "needs ranks that others have started",
    "rrfp train --config gpu/one_node_8 --compile-for": "needs the compiler for the card; tests/targets compiles it",
    "python -m experiments.train --config tpu_gpu_configs/gpu/": "needs a GPU",
    "python -m experiments.launch --processes 4 -- experiments.train --config tpu_gpu_configs/gpu/": "needs a GPU",
    "docker ": "needs Docker, and a GPU",
    "make wheels": "downloads; tests/test_makefile.py runs it, and make setup from what it collects",
    "make setup WHEELS=": "the same",
    "sbatch ": "needs SLURM; tests/commands/test_presets.py runs the scripts",
    "mounts=": "needs Pyxis",
    "RRFP=": "needs SLURM and a container",
    "enroot ": "needs Enroot",
    "python -m venv /tmp/torch": "downloads torch",
    "python -m experiments.bench_torch": "needs torch",
    "python -m experiments.bench --only": "takes minutes",
    "rrfp tokenize --show runs/tokens": "takes a token set that is there; test_your_text.py runs it",
    "rrfp train --config cpu/text --steps 150": "the same",
    "rrfp evaluate runs/mine": "the same",
    'rrfp sample runs/mine --prompt "A stage': "the same",
    "python -m experiments.levels --systems 3x3 --output": "takes minutes; tests/experiments/test_systems.py runs it",
}
"""Beginnings of commands that are not run here, and why; those that have a parser are read by it all the same."""

FAILED_RUN = (
    "python -m experiments.emulate --num-stages 4 --num-microbatches 8 --steps 2 --durations-ms 1,1,1 "
    "--events runs/mine/events-rank0.json.gz"
)
MEASURED_RUN = "rrfp train --config cpu/debug --steps 4 --held-out 0.1 --run-dir runs/measured"
IMPORTED_MODEL = (
    "python -m experiments.train --config cpu/debug --steps 1 --run-dir runs/made-here && "
    "rrfp convert export runs/made-here runs/downloaded && rrfp convert import runs/downloaded runs/imported"
)
BEFORE = {
    "python -m experiments.replay runs/mine": FAILED_RUN,
    "rrfp evaluate runs/measured": MEASURED_RUN,
    "python -m experiments.train --config cpu/debug --steps 5 --init-from runs/imported": IMPORTED_MODEL,
}
"""What a block takes for granted, by the beginning of its first command."""

FOLDERS = ("tpu_gpu_configs", "docs")
"""Of the checkout, which examples read."""

CONSOLE = blocks("console")


def is_run(command: str) -> bool:
    return not command.startswith(tuple(NOT_RUN))


def test_every_block_names_its_language():
    assert languages() <= {"console", "python", "json", "yaml", "text"}


def test_what_is_no_command_of_this_project_is_listed():
    foreign = [
        f"{block}: {command}"
        for block in CONSOLE
        for command in filter(is_run, block.commands)
        if module_and_flags(command) is None and not command.startswith("export ")
    ]
    assert foreign == [], "say in NOT_RUN why they are not run"


def test_every_reason_has_a_command():
    every = [command for block in CONSOLE for command in block.commands]
    assert [start for start in (*NOT_RUN, *BEFORE) if not any(one.startswith(start) for one in every)] == []


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_parsers_take_every_command(block: Block, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    for command in block.commands:
        # A host's number and name, and a configuration of the reader's own.
        parse(re.sub(r"\.\.\.$", "tpu_gpu_configs/cpu/debug.yaml", command.replace("-rank I ", "-rank 0 ")))


def parse(command: str) -> None:
    """Read a command as its own parser does, and the configuration of a training run as well."""
    if command.startswith("make "):
        subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, check=True, capture_output=True)
    if (found := module_and_flags(command)) is None:
        return
    name, flags = found
    module = f"experiments.{name}.__main__" if (ROOT / "experiments" / name).is_dir() else f"experiments.{name}"
    # A module of experiments adds options to the command of its name, or only runs it.
    if name in COMMANDS and (
        command.startswith("rrfp ") or not hasattr(importlib.import_module(module), "make_parser")
    ):
        module = module_of(name)
    arguments = importlib.import_module(module).make_parser().parse_args(flags)
    if name == "train" and not arguments.config.startswith("runs/"):  # what a command before it writes
        load_train_config(arguments.config, overrides_of(arguments))
    if name == "launch" and arguments.command:
        is_ours = arguments.command[0] in COMMANDS
        parse(" ".join([*(["rrfp"] if is_ours else ["python", "-m"]), *arguments.command]))


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("block", [one for one in CONSOLE if any(map(is_run, one.commands))], ids=str)
def test_blocks_run_as_they_stand_but_for_fewer_steps(block: Block, tmp_path: Path):
    for name in FOLDERS:
        (tmp_path / name).symlink_to(ROOT / name)
    before = [command for start, command in BEFORE.items() if block.commands[0].startswith(start)]
    script = "\n".join([*before, *map(fewer_steps, filter(is_run, block.commands))])
    environment = of_child("JAX_DISABLE_MOST_OPTIMIZATIONS") | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-eux", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-6000:]
    written = {path.name for path in tmp_path.iterdir()} - {*FOLDERS, "runs", "run.key"}
    assert not written, "outside runs/"


def fewer_steps(command: str) -> str:
    """A fifth of the steps of a training run, or two where it does not say how many."""
    if "experiments.train" not in command:
        return command
    fewer = re.sub(r"--steps (\d+)", lambda given: f"--steps {int(given[1]) // 5}", command)
    return fewer if "--steps" in fewer else f"{fewer} --steps 2"
