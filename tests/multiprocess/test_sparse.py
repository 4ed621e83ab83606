"""Four processes whose replicas average a share of their parameters: the bits of a run in one process, also after one
of them was killed, and a share of the bytes of gradients."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launching import Launched, eventually, launched
from tests.multiprocess.runs import Outcome, committed, ended, started

STEPS = 24
SETTINGS: dict[str, Any] = {
    "num_stages": 2, "replicas": 2, "reduce": {"share": 0.05, "tau": 3}, "hint": "bfw", "deterministic": True,
    "steps": STEPS, "checkpoint_every": 4, "held_out": 0.3,
}  # fmt: skip
EVALUATED = ("--evaluation.every", 6, "--evaluation.batches", 2)


def start(folder: Path, num_processes: int, *, max_restarts: int = 0) -> Launched:
    return started(folder, num_processes, SETTINGS, *EVALUATED, max_restarts=max_restarts)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("alone")
    return ended(start(folder, 1), folder, STEPS)


@pytest.mark.slow
def test_four_processes_have_the_bits_of_one(alone: Outcome, tmp_path: Path) -> None:
    ended(start(tmp_path, 4), tmp_path, STEPS).assert_same(alone)
    assert sum("@1" in name[0] for name in alone.arrays) == len(alone.arrays) / 2  # every replica is saved


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_run_goes_on_as_if_unharmed(alone: Outcome, tmp_path: Path, seed: int) -> None:
    """All ranks start again: nobody else has the state of a replica that is lost."""
    chance = random.Random(seed)
    launcher = start(tmp_path, 4, max_restarts=1)
    assert eventually(lambda: len(committed(tmp_path / "run")) > chance.randrange(2), 200), launcher.text
    time.sleep(chance.random() * 0.5)
    os.kill(launcher.ranks()[chance.randrange(4)], signal.SIGKILL)
    ended(launcher, tmp_path, STEPS).assert_same(alone)


@pytest.mark.slow
def test_a_share_of_the_bytes_of_gradients_is_sent(tmp_path: Path) -> None:
    with launched("--processes", 2, "--", "sending", tmp_path) as launcher:
        assert launcher.wait(400) == 0, launcher.text
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for sparse, whole, num_arrays in found:
        # A row of each array may lack elements, and a piece may be filled up.
        assert 0.05 * whole <= sparse <= 0.05 * whole + 8 * num_arrays
