"""Processes killed while they do nothing but save: no committed step is lost, and no other looks committed."""

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rrfp_jax.checkpoint import Checkpoints
from tests.multiprocess.checkpoint_process import layout_of, restore, start_ranks


def live_and_die(folder: Path, layout: str, number: int, num_ranks: int, chance: random.Random) -> int:
    """Start the ranks, kill one of them at a random moment, and the others soon after; the last step known committed.

    The others are killed as a launcher would do it: they have nobody to save with any more.
    """
    processes = start_ranks(folder, ["live", layout, str(number)], num_ranks)
    last = chance.randrange(2, 6)
    lines: list[str] = []
    assert processes[0].stdout is not None
    for line in processes[0].stdout:
        lines.append(line)
        last -= line.startswith("committed")
        if not last:
            break
    time.sleep(chance.random() * 0.15)
    chance.choice(processes).send_signal(signal.SIGKILL)
    time.sleep(chance.random() * 0.1)
    for process in processes:
        process.kill()
    lines += [line for process in processes for line in finished(process)]
    steps = [int(line.split()[1]) for line in lines if line.startswith("committed") and line.endswith("\n")]
    assert len(steps) > 1, "".join(lines)
    return max(steps)


def finished(process: subprocess.Popen[str]) -> list[str]:
    return process.communicate(timeout=60)[0].splitlines(keepends=True)


def check_lives(
    folder: Path, layouts: list[str], num_ranks: int, chance: random.Random, directory: Path | None = None
) -> None:
    directory = directory or folder / "checkpoints"
    for number, layout in enumerate(layouts):
        committed = live_and_die(folder, layout, number, num_ranks, chance)
        owners, pieces = layout_of("apart", 0, 1)
        found = Checkpoints(directory, owners)
        assert restore(found, pieces) in (committed, committed + 1)
        found.close()


def test_a_process_killed_while_saving(tmp_path: Path) -> None:
    check_lives(tmp_path, ["apart", "apart"], 1, random.Random(1))


@pytest.mark.slow
def test_one_of_two_processes_killed_while_saving(tmp_path: Path) -> None:
    check_lives(tmp_path, ["mixed"], 2, random.Random(2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_many_lives(tmp_path: Path, num_ranks: int) -> None:
    check_lives(tmp_path, ["apart", "together", "mixed", "together"] * 5, num_ranks, random.Random(num_ranks))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_many_lives_in_a_bucket(tmp_path: Path, bucket: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINTS", str(bucket))
    layouts = ["apart", "together", "mixed"] * 5
    check_lives(tmp_path, layouts, num_ranks, random.Random(num_ranks), bucket)
