"""Stages with different numbers of replicas in real processes, each with a JAX of its own."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launching import PATIENCE_S, eventually, launched
from tests.multiprocess.runs import QUICK_TO_COMPILE, outcome_of, training_config

REPLICAS = ("--replicas", "1,2", "--reduce", "messages")


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(config: Path, run: Path, processes: int, *options: object) -> str:
    arguments = ("--processes", processes, "--", "experiments.train", "--config", config, "--run-dir", run, *options)
    with launched(*arguments, **QUICK_TO_COMPILE) as launcher:
        assert launcher.wait(200) == 0, launcher.text
    return launcher.text


@pytest.mark.slow
def test_a_run_with_one_replica_of_the_first_stage_goes_on_from_equal_ones_and_back(tmp_path: Path) -> None:
    config = training_config(tmp_path, steps=6, decay_steps=6)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config, whole, 1)
    told = train(config, parts, 3, *REPLICAS, "--steps", 4)
    assert "each process has its own JAX" in told
    train(config, parts, 2, "--steps", 6)
    outcome_of(parts, 6).assert_close(outcome_of(whole, 6))


@pytest.mark.slow
def test_devices_in_another_order_and_evaluations(tmp_path: Path) -> None:
    config = training_config(tmp_path, steps=6, decay_steps=6)
    whole, own = tmp_path / "whole", tmp_path / "own"
    more = ("--evaluation.every", 2, "--held-out", 0.1)
    train(config, whole, 1, *more)
    train(config, own, 3, *REPLICAS, "--devices", "2,0,1", *more)
    outcome_of(own, 6).assert_close(outcome_of(whole, 6))
    evaluated = [[row["loss"] for row in rows_of(run) if "evaluation" in row] for run in (whole, own)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    assert len(evaluated[0]) == 3
    # A unit that there is not has no memory, and is no loss.
    steps = [row for row in rows_of(own) if "evaluation" not in row]
    assert all([peak > 0 for peak in row["peak_memory_bytes"]] == [True, True, False, True] for row in steps)
    assert all(not row.get("lost_units") for row in steps)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "goes_on"), [(1, True), (2, True), (0, False)])
def test_a_rank_that_is_lost_is_spared_where_its_stage_has_another(victim: int, goes_on: bool, tmp_path: Path) -> None:
    steps = 40
    config = training_config(tmp_path, steps=steps, decay_steps=steps)
    run = tmp_path / "run"
    arguments = ("--processes", 3, "--", "experiments.train", "--config", config, "--run-dir", run, *REPLICAS)
    with launched(*arguments, **QUICK_TO_COMPILE) as launcher:
        assert eventually(lambda: (run / "metrics.jsonl").exists() and len(rows_of(run)) > 2, PATIENCE_S)
        os.kill(launcher.ranks()[victim], signal.SIGKILL)
        assert (launcher.wait(120) == 0) == goes_on, launcher.text
    if goes_on:
        whole = tmp_path / "whole"
        train(config, whole, 1)
        outcome_of(run, steps).assert_close(outcome_of(whole, steps))
        assert rows_of(run)[-1]["lost_units"] == [{1: 1, 2: 3}[victim]]
