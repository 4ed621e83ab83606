"""Spare processes take the places of ranks that are started again, and nothing is left of them."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launching import Launched, eventually
from tests.multiprocess.runs import QUICK_TO_COMPILE, committed, training_config
from tests.multiprocess.striking import num_rows


@contextmanager
def training(folder: Path, num_processes: int, restarts: int, **changes: Any) -> Iterator[Launched]:
    """A run that goes on for long."""
    config = training_config(folder, **{"checkpoint_every": 5, "keep_checkpoints": 2, "steps": 100_000, **changes})
    places = ("--processes", num_processes, "--max-restarts", restarts, "--grace-s", 10)
    command = (*places, "--", "train", "--config", config, "--run-dir", folder / "run")
    with closing(Launched(*command, module="with_spares", **QUICK_TO_COMPILE)) as launcher:
        assert eventually(lambda: bool(committed(folder / "run")), 120), launcher.text
        yield launcher


def files_of(launcher: Launched) -> int:
    return len(os.listdir(f"/proc/{launcher.process.pid}/fd"))


def is_held_back(process: int) -> bool:
    """Whether a process gives way to others, where the system weighs sessions."""
    path = Path(f"/proc/{process}/autogroup")
    return path.exists() and path.read_text().split()[-1] not in ("0", "")


def started(launcher: Launched, said: str) -> dict[int, int]:
    """The ranks after the launcher has said that it starts some again."""
    assert eventually(lambda: said in launcher.text, 60), launcher.text
    assert eventually(lambda: len(launcher.ranks()) == 2, 60), launcher.text
    return launcher.ranks()


@pytest.mark.slow
def test_spare_processes_become_ranks(tmp_path: Path) -> None:
    with training(tmp_path, 2, 1) as launcher:
        spares, ranks = launcher.spares(2), launcher.ranks()
        assert all(os.sched_getaffinity(spare) in [*map(os.sched_getaffinity, ranks.values())] for spare in spares)
        assert not any(b"RRFP_RUN_KEY" in Path(f"/proc/{spare}/environ").read_bytes() for spare in spares)
        os.kill(ranks[1], signal.SIGKILL)
        ranks = started(launcher, "restart 1 of at most 1")
        assert sorted(ranks.values()) == sorted(spares)
        assert all(os.getpriority(os.PRIO_PROCESS, rank) == 0 for rank in ranks.values())
        assert eventually(lambda: not any(is_held_back(rank) for rank in ranks.values()))
        launcher.numbers(r"going on after (\d+) steps", 1)
        assert eventually(lambda: len(set(committed(tmp_path / "run"))) == 2, 60)
        (last,) = launcher.numbers(r"^step +(\d+) ", 1)[-1:]
        assert eventually(lambda: launcher.numbers(r"^step +(\d+) ", 1)[-1] > last, 60), launcher.text
        launcher.signal(signal.SIGTERM)
        assert launcher.wait() == 7, launcher.text
        assert "told to stop: saved after step" in launcher.text
        assert not launcher.living()


@pytest.mark.slow
def test_spare_processes_that_cannot_serve_are_replaced(tmp_path: Path) -> None:
    with training(tmp_path, 2, 3) as launcher:
        dead, stopped = launcher.spares(2)
        num_files = files_of(launcher)
        os.kill(dead, signal.SIGTERM)
        os.kill(stopped, signal.SIGSTOP)
        assert eventually(lambda: dead not in launcher.living())
        os.kill(launcher.ranks()[0], signal.SIGKILL)
        ranks = started(launcher, "restart 1 of at most 3")
        assert not {dead, stopped} & {*ranks.values()}
        assert stopped not in launcher.living()
        spares = launcher.spares(2)
        assert files_of(launcher) == num_files
        launcher.numbers(r"going on after (\d+) steps", 1)
        os.kill(launcher.ranks()[1], signal.SIGKILL)
        assert sorted(started(launcher, "restart 2 of at most 3").values()) == sorted(spares)
        launcher.numbers(r"going on after (\d+) steps", 2)
        launcher.spares(2)
        assert files_of(launcher) == num_files
        launcher.signal(signal.SIGINT)
        assert launcher.wait() == 130, launcher.text
        assert not launcher.living()
        assert "had not begun" not in launcher.text


@pytest.mark.slow
def test_a_spare_process_comes_back_for_a_lost_rank(tmp_path: Path) -> None:
    layout = {"num_stages": 2, "replicas": 2, "reduce": "messages"}
    with training(tmp_path, 4, 2, **layout) as launcher:
        spares, rank = launcher.spares(4), launcher.ranks()[3]
        os.kill(rank, signal.SIGKILL)
        assert eventually(lambda: "rank 3 is back" in launcher.text, 120), launcher.text
        assert launcher.ranks()[3] in spares
        others = launcher.spares(4)
        assert len({*others} - {*spares}) == 1
        before = num_rows(tmp_path / "run")
        assert eventually(lambda: num_rows(tmp_path / "run") > before, 60)
        launcher.signal(signal.SIGTERM)
        assert launcher.wait() == 7, launcher.text
        assert not launcher.living()


@pytest.mark.slow
def test_spare_processes_die_with_their_launcher(tmp_path: Path) -> None:
    with training(tmp_path, 2, 1) as launcher:
        launcher.spares(2)
        launcher.signal(signal.SIGKILL)
        assert eventually(lambda: not launcher.living(), 5.0)
