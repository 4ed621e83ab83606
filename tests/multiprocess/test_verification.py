"""Runs that verify: a rank that computes wrongly ends all of them, and one that dies meanwhile ends none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess.launching import launched
from tests.multiprocess.runs import QUICK_TO_COMPILE, committed, training_config


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def run(folder: Path, how: str, rank: int, step: int, *, every: int | None = 4, **changes: Any) -> tuple[int, str]:
    changes = {"num_stages": 2, "replicas": 2, "steps": 14, "verify_every": every, "checkpoint_every": 3} | changes
    config = training_config(folder, **changes, silence_deadline_s=5)
    command = ("verifying", how, rank, step, "--config", config, "--run-dir", folder / "run")
    with launched("--processes", 4, "--max-restarts", 1, "--", *command, **QUICK_TO_COMPILE) as launcher:
        return launcher.wait(200), launcher.text


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["messages", "collective"])
def test_a_rank_that_computes_wrongly_ends_the_run(reduce: str, tmp_path: Path) -> None:
    code, text = run(tmp_path, "flip", 3, 6, reduce=reduce)
    assert code == 10, text
    first = 1 if reduce == "messages" else 2  # by messages neighbouring ranks hold a replica, else a stage
    assert (
        f"error: after 8 steps stage 1, replica 0 (rank {first}, cpu) and stage 1, replica 1 (rank 3, cpu) made "
        "different outputs in task 1F of the same inputs: a device computes wrongly; take it out, and go on from a "
        "checkpoint of at most 4 steps, after which all agreed" in text
    )
    assert "restart" not in text
    assert len(losses_of(tmp_path / "run")) == 8
    assert committed(tmp_path / "run") == [3, 6]


@pytest.mark.slow
def test_a_rank_that_dies_in_a_verification(tmp_path: Path) -> None:
    for name in ("plain", "struck"):
        (tmp_path / name).mkdir()
    code, text = run(tmp_path / "plain", "none", 0, 0, every=None, reduce="messages")
    assert code == 0, text
    code, text = run(tmp_path / "struck", "kill", 1, 4, reduce="messages")
    assert code == 0, text
    assert "rank 1 was lost, and the others went on" in text
    losses = losses_of(tmp_path / "struck" / "run")
    assert len(losses) == 14
    np.testing.assert_allclose(losses, losses_of(tmp_path / "plain" / "run"), rtol=1e-6)
    assert losses[:4] == losses_of(tmp_path / "plain" / "run")[:4]
