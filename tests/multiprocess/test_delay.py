"""Four processes whose steps overlap: the bits of a run in one process, also after one of them was killed."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.runtime.event_log import read_log
from rrfp_jax.runtime.replay import replay_run
from tests.multiprocess.launching import Launched, eventually
from tests.multiprocess.runs import Outcome, committed, ended, started

STEPS = 24
SETTINGS: dict[str, Any] = {
    "num_stages": 4, "steps": STEPS, "checkpoint_every": 4, "delay": 1, "hint": "bfw", "deterministic": True,
    "held_out": 0.3,
}  # fmt: skip
EVALUATED = ("--evaluation.every", 6, "--evaluation.batches", 2)


def start(folder: Path, num_processes: int, *, max_restarts: int = 0, **changes: Any) -> Launched:
    return started(folder, num_processes, SETTINGS | changes, *EVALUATED, max_restarts=max_restarts)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("alone")
    return ended(start(folder, 1), folder, STEPS)


@pytest.mark.slow
def test_four_processes_have_the_bits_of_one(alone: Outcome, tmp_path: Path) -> None:
    ended(start(tmp_path, 4), tmp_path, STEPS).assert_same(alone)


@pytest.mark.slow
def test_four_processes_with_delays_by_stage_have_the_bits_of_one(tmp_path: Path) -> None:
    one, four = (
        ended(start(tmp_path / name, number, delay="by-stage"), tmp_path / name, STEPS)
        for name, number in (("one", 1), ("four", 4))
    )
    four.assert_same(one)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_run_goes_on_as_if_unharmed(alone: Outcome, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    launcher = start(tmp_path, 4, max_restarts=1)
    assert eventually(lambda: len(committed(tmp_path / "run")) > chance.randrange(2), 200), launcher.text
    time.sleep(chance.random() * 0.5)
    os.kill(launcher.ranks()[chance.randrange(4)], signal.SIGKILL)
    ended(launcher, tmp_path, STEPS).assert_same(alone)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [1, "by-stage"])
def test_the_events_of_a_run_that_failed_replay(tmp_path: Path, delay: int | str) -> None:
    launcher = start(tmp_path, 4, delay=delay)
    try:
        assert eventually(lambda: committed(tmp_path / "run"), 200), launcher.text
        os.kill(launcher.ranks()[2], signal.SIGKILL)
        assert launcher.wait(100), launcher.text
    finally:
        launcher.close()
    logs = [read_log(path) for path in (tmp_path / "run").glob("events*.json.gz")]
    assert sorted(log.rank for log in logs) == [0, 1, 3]
    assert [stage.difference or stage.refusal for stage in replay_run(logs).stages] == [None] * 3
