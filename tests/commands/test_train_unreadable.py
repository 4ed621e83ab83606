"""Runs whose data cannot be read, or whose steps come to nothing: what was trained is saved, and the code says why."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.commands.running import run_command
from tests.multiprocess.launching import launched
from tests.multiprocess.runs import QUICK_TO_COMPILE, committed


def config(folder: Path, **own: Any) -> Path:
    """Two stages, four elements a step, in their order."""
    sections: dict[str, Any] = {
        "model": {"vocab_size": 100, "hidden": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 8},
        "data": {"object": "tests.commands.broken_data:Elements", "batch_size": 4, "num_microbatches": 2},
        "pipeline": {"num_stages": 2},
        "optimizer": {"learning_rate": 1e-2},
        "run": {"steps": 8, "platform": "cpu"},
    }
    sections["data"] |= {"shuffle": False, **own}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return path


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_what_was_trained_is_saved_and_the_same_command_goes_on_once_the_data_is_mended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--config", config(tmp_path, arguments={"broken": [13, 21]}), "--run-dir", run)
    ended = run_command("train", "--trust", *options)
    assert ended.returncode == 8, ended.stderr
    assert ended.stderr.endswith(
        "error: element 13 of tests.commands.broken_data:Elements cannot be read (ValueError: it is torn): mend the "
        "data set\nsaved after step 2; the same command goes on from there\n"
    )
    assert committed(run) == [3]
    assert not (run / "run.lock").exists()
    again = run_command("train", "--trust", *options)  # at once, and nothing is lost
    assert again.returncode == 8, again.stderr
    assert committed(run) == [3]
    spared = run_command("train", "--trust", *options, "--max-bad-samples", 2)
    assert spared.returncode == 0, spared.stderr
    assert "going on after 3 steps" in spared.stdout
    assert "left out: element 21 of tests.commands.broken_data:Elements cannot be read" in spared.stderr
    assert "2 samples were left out, as they could not be read" in spared.stdout
    assert [row["bad_samples"] for row in rows_of(run)] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [row["step"] for row in rows_of(run)] == list(range(8))


@pytest.mark.slow
def test_what_the_system_refuses_once_ends_no_run(tmp_path: Path) -> None:
    path = config(tmp_path, arguments={"stale": [9]})
    ended = run_command("train", "--trust", "--config", path, "--run-dir", tmp_path / "run", "--steps", 4)
    assert ended.returncode == 0, ended.stderr
    assert "Stale file handle): mend the data set; trying again in 0.2 s" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("max_bad", "code", "last"), [(0, 8, 3), (2, 0, 8)])
def test_all_ranks_save_at_the_same_step(max_bad: int, code: int, last: int, tmp_path: Path) -> None:
    path = config(tmp_path, arguments={"broken": [13, 21]}, max_bad_samples=max_bad)
    command = ("train", "--trust", "--config", path, "--run-dir", tmp_path / "run")
    with launched("--processes", 2, "--", *command, **QUICK_TO_COMPILE) as run:
        assert run.wait(180) == code, run.text
    assert committed(tmp_path / "run")[-1] == last, run.text


@pytest.mark.slow
def test_a_data_set_that_iterates_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    """On two processes, then on one of another layout, and without an interruption."""
    path = config(tmp_path, object="tests.commands.broken_data:Stream")
    options = ("train", "--trust", "--config", path, "--optimizer.schedule", "constant", "--run-dir")
    command = (*options, tmp_path / "run")
    with launched("--processes", 2, "--", *command, "--steps", 5, **QUICK_TO_COMPILE) as run:
        assert run.wait(180) == 0, run.text
    on = run_command(*command, "--steps", 12, "--num-stages", 1, "--num-microbatches", 4)
    assert on.returncode == 0, on.stderr
    assert "going on after 5 steps" in on.stdout
    drawn = [int(line.split()[1]) for line in on.stdout.splitlines() if line.startswith("drew ")]
    assert drawn[:6] == [0, 1, 2, 3, 20, 21], "the first batch tells the shapes"
    whole = run_command(*options, tmp_path / "whole", "--steps", 12)
    assert whole.returncode == 0, whole.stderr
    losses = [[row["loss"] for row in rows_of(tmp_path / name)] for name in ("run", "whole")]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert len({*losses[1]}) == 12


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("most", "told"), [(3, 3), (50, 8)])
def test_steps_that_are_not_finite_end_a_run_with_a_code_of_their_own(most: int, told: int, tmp_path: Path) -> None:
    path = config(tmp_path, arguments={"weight": 0.0})
    run = tmp_path / "run"
    ended = run_command("train", "--trust", "--config", path, "--run-dir", run, "--max-skipped-in-row", most)
    assert ended.returncode == 9, ended.stderr
    num_steps = len(rows_of(run))
    assert told <= num_steps <= told + 1
    assert f"error: the last {num_steps} steps changed nothing (" in ended.stderr
    assert committed(run) == [num_steps]
