"""The option of the train command."""

import json

import pytest

from tests.commands.running import run_afresh

DEBUG = "tpu_gpu_configs/cpu/debug.yaml"
SMALL = ("--hidden", 32, "--mlp-dim", 128, "--length", 64, "--max-bytes", 200_000)


@pytest.mark.slow
def test_training_with_recompute_has_the_same_losses_in_less_memory(tmp_path):
    found = {}
    for name, more in {"plain": (), "again": ("--recompute", 0)}.items():
        options = ("--schedule", "1f1b", "--hint", "schedule", "--window", "null", "--deterministic", "true", *more)
        done = run_afresh("train", "--config", DEBUG, *SMALL, *options, "--steps", 2, "--run-dir", tmp_path / name)
        assert done.returncode == 0, done.stderr
        found[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in found["again"]] == [row["loss"] for row in found["plain"]]
    assert found["again"][-1]["peak_memory_bytes"][0] < found["plain"][-1]["peak_memory_bytes"][0]


def test_recompute_and_remat_full_exclude_each_other(tmp_path):
    done = run_afresh("train", "--config", DEBUG, "--recompute", 0, "--remat", "full", "--schedule", "1f1b")
    assert done.returncode == 2
    assert "recompute and remat full both compute forwards again" in done.stderr
