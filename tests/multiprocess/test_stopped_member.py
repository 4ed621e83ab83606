"""A member of a stage that spans processes stops: the others name it soon, with the deadlines as they come. One that is
busy for as long, or gets hardly any processor, is not named."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.multiprocess.launching import Launched, eventually, launched
from tests.multiprocess.reports import rank_text, survivors_end
from tests.multiprocess.runs import QUICK_TO_COMPILE, committed, is_saving, training_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEFAULTS = {"silence_deadline_s": 60, "progress_deadline_s": 600}
NAMED_S = 30.0
"""Half the deadline. On a quiet machine it takes 7 s, and at most 10 s are promised."""
START_S = 200.0


def start(folder: Path, *fault: object, num_ranks: int = 4, **changes: object) -> tuple[object, ...]:
    config = training_config(folder, **{"mesh": {"tensor": 2}, "num_stages": num_ranks // 2} | DEFAULTS | changes)
    return (
        *("--processes", num_ranks, "--bind", "none", "--", "faulty", *(fault or ("none", 0))),
        *("train", "--config", config, "--run-dir", folder / "run"),
    )


def rows(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def reached(launcher: Launched, folder: Path, num_rows: int) -> None:
    assert eventually(lambda: rows(folder) >= num_rows or launcher.process.poll() is not None, START_S)
    assert launcher.process.poll() is None, launcher.text


@pytest.mark.parametrize(("moment", "rank"), [("step", 1), ("step", 2), ("save", 1)])
def test_a_stopped_member_is_named_by_all_others_with_host_and_remedy(moment: str, rank: int, tmp_path: Path) -> None:
    changes = {"checkpoint_every": 10} if moment == "save" else {}
    with launched(*start(tmp_path, steps=100_000, **changes), **QUICK_TO_COMPILE) as launcher:
        reached(launcher, tmp_path, 20)
        if moment == "save":
            assert eventually(lambda: bool(committed(tmp_path / "run")) and is_saving(tmp_path / "run"))
        pids = launcher.ranks()
        os.kill(pids.pop(rank), signal.SIGSTOP)
        ended_s = survivors_end(pids.values(), time.monotonic())
        assert launcher.wait() == 5
    print(f"rank {rank} stopped in a {moment}: all others had ended after {ended_s:.1f} s")
    assert ended_s < NAMED_S
    for other in pids:
        text = rank_text(launcher, other)
        assert f"rank {rank} (stage {rank // 2}) was lost: silent for " in text
        assert " and takes no connection: see on " in text
        assert "last heard: stage " in text
    assert json.loads((tmp_path / "run" / "failure.json").read_text())["lost_ranks"] == [rank]


def test_a_member_whose_python_is_held_up_is_waited_for(tmp_path: Path) -> None:
    with launched(*start(tmp_path, "hold", 1, num_ranks=2, steps=10), **QUICK_TO_COMPILE) as launcher:
        assert launcher.wait(START_S) == 0, launcher.text
    assert rows(tmp_path) == 10
    assert "stage 0 runs " in rank_text(launcher, 0)  # a warning tells of the wait
    assert "lost" not in launcher.text


def test_a_member_that_hardly_gets_a_processor_is_waited_for(tmp_path: Path) -> None:
    with launched(*start(tmp_path, num_ranks=2, steps=100_000), **QUICK_TO_COMPILE) as launcher:
        reached(launcher, tmp_path, 20)
        pid = launcher.ranks()[1]
        for _ in range(5):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(3.0)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)
        reached(launcher, tmp_path, rows(tmp_path) + 20)
        launcher.signal(signal.SIGTERM)
        launcher.wait()
    assert "lost" not in launcher.text, launcher.text
