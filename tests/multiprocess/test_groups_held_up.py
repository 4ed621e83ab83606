"""Processes that share a stage run one sequence of tasks, however each of them is held up; without agreement they do
not."""

import json
from pathlib import Path

import pytest

from tests.multiprocess.launching import launched

RUNS = 50
PATIENCE_S = 240.0


def sequences(folder: Path, protocol: str, runs: int) -> list[list[list[str]]]:
    """By rank and run the tasks in the order in which they ran."""
    with launched("--processes", 4, "--", "held_up", folder, protocol, runs) as launcher:
        assert launcher.wait(PATIENCE_S) == 0, launcher.text
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["leader", "propose"])
def test_both_processes_of_a_stage_run_one_sequence(protocol: str, tmp_path: Path) -> None:
    first, second, third, fourth = sequences(tmp_path, protocol, RUNS)
    assert (first, third) == (second, fourth)
    assert len({tuple(run) for run in first}) > RUNS / 4  # the runs differ, so that agreeing says something


@pytest.mark.slow
def test_without_agreement_they_diverge(tmp_path: Path) -> None:
    first, second, *_ = sequences(tmp_path, "off", RUNS)
    assert sum(one != other for one, other in zip(first, second, strict=True)) > RUNS / 4
