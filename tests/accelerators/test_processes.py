"""Processes that share one accelerator: buffers by each transport, and a process killed while they travel."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launching import eventually, launched
from tests.multiprocess.runs import training_config

START_S, CLOSED_S = 300.0, 10.0
NUM_STEPS = 6


def config(folder: Path, accelerator: str, **changes: Any) -> Path:
    """A run of four stages whose processes share the first device."""
    folder.mkdir(exist_ok=True)
    platform = "cpu" if accelerator == "cpu" else None
    settings = {"num_stages": 4, "devices": 1, "platform": platform, "steps": NUM_STEPS, "window": 4} | changes
    return training_config(folder, **settings)


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def only_gpus(accelerator: str) -> None:
    if accelerator == "tpu":
        pytest.skip("a TPU belongs to one process")


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize("transport", ["auto", "sockets", "transfer"])
def test_two_processes_train_what_one_does(accelerator: str, transport: str, tmp_path: Path) -> None:
    losses = []
    for num_processes in (1, 2):
        path = config(
            tmp_path / str(num_processes), accelerator, transport=transport, processes_per_device=num_processes
        )
        run = tmp_path / f"run {num_processes}"
        arguments = ("--processes", num_processes, "--", "experiments.train", "--config", path, "--run-dir", run)
        with launched(*arguments) as launcher:
            assert launcher.wait(START_S) == 0, launcher.text
        losses.append(losses_of(run))
    assert len(losses[0]) == NUM_STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize("transport", ["sockets", "transfer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_killed_while_buffers_travel(accelerator: str, transport: str, rank: int, tmp_path: Path) -> None:
    """Both end soon, and say which of them it was."""
    path = config(tmp_path / "c", accelerator, transport=transport, processes_per_device=2, steps=100_000, length=128)
    run = tmp_path / "run"
    with launched("--processes", 2, "--", "experiments.train", "--config", path, "--run-dir", run) as launcher:
        assert eventually(lambda: "step     4  loss" in launcher.text, START_S), launcher.text
        pids = launcher.ranks()
        os.kill(pids[rank], signal.SIGKILL)
        killed_s = time.monotonic()
        code = launcher.wait(START_S)
        ended_s = time.monotonic() - killed_s
        assert not launcher.living()
    assert code == 137
    assert ended_s < CLOSED_S
    assert f"rank {rank}: code 137" in launcher.text
    assert f"rank {1 - rank}: code 5, lost another rank" in launcher.text
