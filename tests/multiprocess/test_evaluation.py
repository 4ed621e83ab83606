"""Evaluations in four processes: no trace in training, the usual report where a rank dies, and an early end."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launching import launched
from tests.multiprocess.reports import rank_text
from tests.multiprocess.runs import QUICK_TO_COMPILE, committed, outcome_of, training_config

pytestmark = pytest.mark.slow

NUM_STEPS = 20
SETTINGS: dict[str, Any] = {"steps": NUM_STEPS, "num_stages": 4, "deterministic": True, "held_out": 0.3}
EVALUATION = ("--evaluation.every", 7, "--evaluation.when", "start", "--evaluation.keep-best", "true")

IDLE = ("--evaluation.every", 7, "--evaluation.when", "start+idle", "--transport", "transfer")


def train(folder: Path, num_processes: int, *options: object, program: tuple[object, ...] = ("train",)) -> Any:
    folder.mkdir(exist_ok=True)
    arguments = ("--config", training_config(folder, **SETTINGS), "--run-dir", folder / "run", *options)
    return launched("--processes", num_processes, "--", *program, *arguments, **QUICK_TO_COMPILE)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for line in lines if "evaluation" in (row := json.loads(line))]


def test_no_trace_and_the_same_losses_in_one_process_and_four(tmp_path: Path) -> None:
    runs = {"one": (1, EVALUATION), "four": (4, EVALUATION), "idle": (4, IDLE), "without": (4, ())}
    for name, (num_processes, options) in runs.items():
        with train(tmp_path / name, num_processes, *options) as launcher:
            assert launcher.wait(400) == 0, launcher.text
    first, *others = [outcome_of(tmp_path / name / "run", NUM_STEPS) for name in runs]
    for other in others:
        first.assert_same(other)
    one, four, idle = (rows_of(tmp_path / name) for name in ("one", "four", "idle"))
    assert [row["step"] for row in four] == [-1, 6, 13, 19]
    for rows in (four, idle):
        assert [(r["step"], r["loss"], r["tokens"]) for r in rows] == [(r["step"], r["loss"], r["tokens"]) for r in one]


LONG = ("--evaluation.when", "start", "--evaluation.batches", 60)
"""Several steps' worth before the first one that trains: step 1 of the stages is one of them."""


def test_an_error_in_an_evaluation_names_it_everywhere(tmp_path: Path) -> None:
    with train(tmp_path, 4, *LONG, program=("faulty", "raise", 2, "train")) as launcher:
        assert launcher.wait(300) not in (0, None)
        assert not launcher.living()
        assert re.search(r"evaluation after 0 steps: 2F\d+ on stage 2 failed: .*injected", launcher.text)
        report = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert len(report["stages"]) == 4


def test_a_rank_killed_during_an_evaluation_is_reported(tmp_path: Path) -> None:
    with train(tmp_path, 4, *LONG, program=("faulty", "hang", 2, "train")) as launcher:
        launcher.numbers(r"running (\d+)", 3)  # the last one waits for what hangs
        os.kill(launcher.ranks()[2], signal.SIGKILL)
        assert launcher.wait(60) == 137
        assert not launcher.living()
        assert "rank 2 (stage 2) was lost" in rank_text(launcher, 0)
        report = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert report["lost_ranks"] == [2]


def test_a_run_told_to_stop_in_an_evaluation_ends_soon_and_goes_on_with_it(tmp_path: Path) -> None:
    often = ("--evaluation.every", 2, "--evaluation.batches", 400)
    with train(tmp_path, 2, *often, program=("faulty", "slow", 1, "train")) as launcher:
        launcher.numbers(r"step +(1) ", 1)
        time.sleep(2)  # within the evaluation behind it, which takes minutes
        launcher.signal(signal.SIGTERM)
        assert launcher.wait(60) == 7, launcher.text
    assert committed(tmp_path / "run") == [2]
    assert rows_of(tmp_path) == []
    with train(tmp_path, 2, "--evaluation.every", 2, "--steps", 3) as launcher:
        assert launcher.wait(200) == 0, launcher.text
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


def test_a_rank_killed_with_an_evaluation_in_idle_time_under_way_is_reported(tmp_path: Path) -> None:
    with train(tmp_path, 4, *IDLE, "--evaluation.batches", 400, "--steps", 1000) as launcher:
        launcher.numbers(r"step +(3) ", 1)
        os.kill(launcher.ranks()[2], signal.SIGKILL)
        assert launcher.wait(60) == 137
        assert not launcher.living()
        assert "rank 2 (stage 2) was lost" in rank_text(launcher, 0)


def test_a_run_told_to_stop_does_not_wait_for_an_evaluation_in_idle_time(tmp_path: Path) -> None:
    often = ("--evaluation.every", 2, "--evaluation.batches", 400, "--evaluation.when", "idle", "--steps", 1000)
    with train(tmp_path, 2, *often, program=("faulty", "slow", 1, "train")) as launcher:
        launcher.numbers(r"step +(2) ", 1)
        launcher.signal(signal.SIGTERM)
        assert launcher.wait(60) == 7, launcher.text
        assert "the evaluation after 2 steps has no rows: the run was stopped" in launcher.text
    assert len(committed(tmp_path / "run")) == 1
    assert rows_of(tmp_path) == []


def test_replicas_that_stand_for_each_other_evaluate_between_steps(tmp_path: Path) -> None:
    with train(tmp_path, 4, *IDLE, "--num-stages", 2, "--replicas", 2, "--reduce", "messages") as launcher:
        assert launcher.wait(60) == 2
        assert "a run that goes on without lost ranks evaluates between steps" in launcher.text
