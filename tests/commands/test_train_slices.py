"""Runs whose sequences pass the stages in slices: ``rrfp train --schedule seq1f1b:2``."""

import json
from pathlib import Path

import pytest

from tests.commands.running import run_command

SMALL = (
    "--config", "cpu/debug", "--num-layers", 2, "--hidden", 16, "--num-heads", 2, "--mlp-dim", 32, "--length", 256,
    "--batch-size", 4, "--num-microbatches", 4, "--num-stages", 2, "--hint", "null", "--window", "null",
)  # fmt: skip


def losses(run: Path, *options: object) -> list[float]:
    result = run_command("train", *SMALL, "--run-dir", run, *options)
    assert result.returncode == 0, result.stderr
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_goes_on_in_other_slices_and_learns_what_whole_sequences_teach(tmp_path: Path) -> None:
    base = losses(tmp_path / "whole", "--steps", 4)
    sliced = losses(tmp_path / "sliced", "--steps", 2, "--schedule", "seq1f1b:2")
    sliced = losses(tmp_path / "sliced", "--steps", 4, "--schedule", "1f1b:2:equal")
    assert sliced == pytest.approx(base, rel=1e-5)


def refusal(*options: object) -> str:
    result = run_command("train", *SMALL, "--steps", 1, *options)
    assert result.returncode == 2
    return result.stderr


def test_slices_below_a_tile_are_refused_before_anything_starts(tmp_path: Path) -> None:
    said = refusal("--run-dir", tmp_path, "--schedule", "seq1f1b:3")
    assert "3 slices of 256 tokens leave one with 0, and the kernels' tile has 128: give at most 2" in said


def test_schedules_without_slices_refuse_them(tmp_path: Path) -> None:
    assert "runs sequences whole: leave slices out, or take" in refusal("--run-dir", tmp_path, "--schedule", "zb-v:2")
