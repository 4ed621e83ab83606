"""Runs that are told to stop or are killed, and go on: the result is that of a run that nobody interrupted."""

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands.running import run_command
from tests.multiprocess.launching import Launched, eventually, launched
from tests.multiprocess.runs import (
    QUICK_TO_COMPILE,
    Outcome,
    committed,
    copy_run,
    is_saving,
    outcome_of,
    training_config,
)

NUM_STEPS = 20
EXACT: dict[str, Any] = {"deterministic": True, "checkpoint_every": 5, "steps": NUM_STEPS}


def train(folder: Path, num_processes: int, *launcher: object, program: tuple[object, ...] = (), **changes: Any) -> Any:
    """A launched run in ``folder/run``."""
    folder.mkdir(exist_ok=True)
    config = training_config(folder, **EXACT | changes)
    command = program or ("experiments.train",)
    arguments = ("--config", config, "--run-dir", folder / "run")
    return launched("--processes", num_processes, *launcher, "--", *command, *arguments, **QUICK_TO_COMPILE)


def uninterrupted(folder: Path, num_processes: int, **changes: Any) -> Outcome:
    with train(folder, num_processes, **changes) as launcher:
        assert launcher.wait(300) == 0, launcher.text
    return outcome_of(folder / "run", NUM_STEPS)


def train_alone(folder: Path, **changes: Any) -> str:
    """What a run of one process, which nobody launches, prints until it has ended."""
    folder.mkdir(exist_ok=True)
    result = run_command(
        "train", "--config", training_config(folder, **EXACT | changes), "--run-dir", folder / "run", timeout_s=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_killed_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_told_to_stop_goes_on_in_another_layout_with_the_same_bits(is_killed_first: bool, runs_at: Path) -> None:
    folder = runs_at / "interrupted"
    slowed = ("faulty", "slow", 1, "train")
    with train(folder, 2, "--max-restarts", 2, program=slowed, num_layers=2) as launcher:
        if is_killed_first:
            assert eventually(lambda: 5 in committed(folder / "run"))
            os.kill(launcher.ranks()[1], signal.SIGKILL)
            assert eventually(lambda: re.search("going on after (5|10) steps", launcher.text) is not None)
            assert not (folder / "run" / "timeline.png").exists(), "a restart is not kept waiting for a picture"
        launcher.numbers(r"step +([6-9]|1\d) ", 1)
        launcher.signal(signal.SIGTERM)
        assert launcher.wait() == 7, launcher.text
        assert not launcher.living()
    (last,) = committed(folder / "run")[-1:]
    assert f"told to stop: saved after step {last - 1}; the same command goes on from there" in launcher.text
    assert "not restarted after code 7" in launcher.text
    alike = {"num_layers": 2, "num_stages": 1, "chunks_per_stage": 2}
    assert f"going on after {last} steps" in train_alone(folder, **alike)
    train_alone(runs_at / "whole", **alike)
    outcome_of(folder / "run", NUM_STEPS).assert_same(outcome_of(runs_at / "whole" / "run", NUM_STEPS))


LAYOUTS = {
    "4 stages": {"num_stages": 4},
    "2 stages, 2 replicas": {"num_stages": 2, "replicas": 2, "shard": True},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_killed_process_changes_nothing(layout: dict[str, Any], runs_at: Path) -> None:
    """Ten runs, half of them killed while they save; twenty with both layouts."""
    chance = random.Random(str(layout))
    started_s = time.monotonic()
    expected = uninterrupted(runs_at / "whole", 4, **layout)
    usual_s = time.monotonic() - started_s
    num_killed = 0
    for number in range(10):
        folder = runs_at / str(number)
        with train(folder, 4, "--max-restarts", 1, "--grace-s", 30, **layout) as launcher:
            victim = _kill_one(launcher, folder / "run", chance, usual_s=None if number % 2 else usual_s)
            assert launcher.wait(300) == 0, launcher.text
            assert not launcher.living()
        if victim is not None:
            num_killed += 1
            assert f"rank {victim} (code 137, killed by SIGKILL)" in launcher.text
        outcome_of(folder / "run", NUM_STEPS).assert_same(expected)
    assert num_killed > 7  # the others had ended before their time came


def _kill_one(launcher: Launched, run: Path, chance: random.Random, *, usual_s: float | None) -> int | None:
    """Kill a random rank: at a random time, or while a random one of the checkpoints is written. None: it was over."""
    assert eventually(lambda: len(launcher.ranks()) == 4)
    if usual_s is not None:
        time.sleep(chance.uniform(0.0, usual_s))
    else:
        num_before = chance.randrange(4)
        assert eventually(lambda: len(committed(run)) >= min(num_before, 3) and is_saving(run))
        time.sleep(chance.uniform(0.0, 0.3))
    rank = chance.randrange(4)
    pids = launcher.ranks()
    if rank not in pids:
        return None
    os.kill(pids[rank], signal.SIGKILL)
    return rank


ALIKE = {
    "the same, another schedule": (4, {"num_stages": 4, "schedule": "zb-h1", "consume": "strict"}),
    "2 stages with 2 chunks": (2, {"num_stages": 2, "chunks_per_stage": 2, "hint": "bfw"}),
    "1 device": (1, {"num_stages": 1, "chunks_per_stage": 4, "backward": "split"}),
}
"""All with split backwards: in one piece they may round otherwise, as they do with JAX 0.12."""
OTHERS = {
    "2 stages, tensor 2": (4, {"num_stages": 2, "mesh": {"tensor": 2}}),
    "2 stages of 1 and 3 layers": (2, {"num_stages": 2, "layout": "Et|t*3L"}),
    "1 stage": (1, {"num_stages": 1}),
    "1 stage, fsdp 4": (4, {"num_stages": 1, "mesh": {"fsdp": 4}}),
    "2 replicas": (4, {"num_stages": 2, "replicas": 2}),
    "2 replicas, shared optimizer state": (4, {"num_stages": 2, "replicas": 2, "shard": True}),
}


MESHES: list[tuple[int, dict[str, int]]] = [
    (4, {"tensor": 2, "fsdp": 2}),
    (4, {"fsdp": 4}),
    (4, {"expert": 2, "fsdp": 2}),
    (4, {"context": 2, "tensor": 2}),
    (1, {"fsdp": 4}),
    (4, {"tensor": 2, "fsdp": 2}),
]
"""Numbers of processes, and the mesh of each of two stages."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_checkpoint_moves_from_mesh_to_mesh(runs_at: Path) -> None:
    """Each goes on from the middle of the run before; tests/test_pipeline_meshes.py has every pair, in one process."""
    runs = [runs_at / str(number) for number in range(len(MESHES))]
    (num_processes, mesh), *others = MESHES
    alike = {"num_stages": 2, "keep_checkpoints": 10, "batch_size": 16}
    expected = uninterrupted(runs[0], num_processes, mesh=mesh, **alike)
    for before, folder, (num_processes, mesh) in zip(runs, runs[1:], others, strict=False):
        copy_run(before / "run", folder / "run", steps=[15, 20])
        with train(folder, num_processes, mesh=mesh, **alike) as launcher:
            assert launcher.wait(300) == 0, launcher.text
        assert "going on after 10 steps" in launcher.text
        outcome_of(folder / "run", NUM_STEPS).assert_close(expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_checkpoint_goes_on_in_every_layout(runs_at: Path) -> None:
    """With four rows in a microbatch, which divide over four devices."""
    options = {"backward": "split", "keep_checkpoints": 10, "batch_size": 16}
    expected = uninterrupted(runs_at / "whole", 4, num_stages=4, **options)
    for number, (name, (num_processes, layout)) in enumerate((ALIKE | OTHERS).items()):
        folder = runs_at / str(number)
        copy_run(runs_at / "whole" / "run", folder / "run", steps=[15, 20])
        with train(folder, num_processes, **layout, batch_size=16) as launcher:
            assert launcher.wait(300) == 0, launcher.text
        assert "going on after 10 steps" in launcher.text
        outcome = outcome_of(folder / "run", NUM_STEPS)
        if name in ALIKE:
            outcome.assert_same(expected)
        else:
            outcome.assert_close(expected)
