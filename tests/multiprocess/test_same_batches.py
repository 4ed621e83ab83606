"""Token sets, mixed and packed: the same batches on 1, 2 and 4 ranks, also after a kill and in another layout."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.commands.running import ROOT, run_afresh
from tests.data.token_sets import VOCAB, token_set
from tests.environment import of_child

NUM_MORE = 4


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Two small token sets of which the first is used up within eleven steps."""
    for seed, num_documents in enumerate((60, 150)):
        lengths = np.random.default_rng(seed).integers(1, 40, size=num_documents).tolist()
        token_set(tmp_path / f"set{seed}", lengths, seed)
    sections: dict[str, Any] = {
        "model": {"vocab_size": VOCAB, "hidden": 16, "num_layers": 4, "num_heads": 2, "mlp_dim": 16, "init_std": 0.2},
        "data": {
            "kind": "tokens",
            "path": [str(tmp_path / "set0"), str(tmp_path / "set1")], "weights": [2, 1], "length": 32, "pack": True,
            "batch_size": 8, "num_microbatches": 4, "held_out": 0.1,
        },
        "pipeline": {"num_stages": 2},
        "optimizer": {"learning_rate": 1e-3, "final_learning_rate": 1e-3},
        "run": {"steps": 100_000, "checkpoint_every": 1, "platform": "cpu"},
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def rows_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def killed(config: Path, run: Path, num_rows: int) -> int:
    """Train in one process, and be killed once so many steps are recorded; how many there are then."""
    words = [sys.executable, "-m", "experiments.train", "--config", config, "--run-dir", run]
    with subprocess.Popen(list(map(str, words)), cwd=ROOT, env=of_child(), stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and len(rows_of(run)) < num_rows:
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    return len(rows_of(run))


def go_on(config: Path, run: Path, num_ranks: int, steps: int, *options: object) -> None:
    command = ("experiments.train", "--config", config, "--run-dir", run, "--steps", steps, *options)
    done = run_afresh("launch", "--processes", num_ranks, "--", *command, timeout_s=480)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_batches_are_the_same_on_any_number_of_ranks_and_after_a_kill(config: Path, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    steps = killed(config, run, 4) + NUM_MORE
    go_on(config, run, 2, steps, "--num-stages", 4, "--data.num-microbatches", 8)
    steps += NUM_MORE
    go_on(config, run, 4, steps, "--replicas", 2, "--backward", "split", "--hint", "bfw", "--data.num-microbatches", 2)
    straight = run_afresh("train", "--config", config, "--steps", steps, "--run-dir", whole, timeout_s=480)
    assert straight.returncode == 0, straight.stderr
    told, expected = rows_of(run), rows_of(whole)
    assert [row["step"] for row in told] == [*range(steps)]
    np.testing.assert_allclose([row["loss"] for row in told], [row["loss"] for row in expected], rtol=2e-5)
    assert len({round(row["loss"], 4) for row in expected}) == steps
    for name in ("model_flops", "token_padding"):
        assert [row[name] for row in told] == pytest.approx([row[name] for row in expected]), name
