"""Learning rates of a real run: killed and gone on, every schedule ends as if nothing had happened."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.training.optimizer import learning_rate_schedule
from rrfp_jax.training.run_config import CONSTANT, SCHEDULES, OptimizerConfig
from tests.commands.running import ROOT, run_afresh
from tests.commands.test_train import DEBUG, SMALL, rows_of
from tests.environment import of_child

STEPS, WARMUP = 150, 20
EXACT = ("step", "loss", "grad_norm", "learning_rate", "skipped", "num_skipped")
"""What does not depend on how long a step took."""


def kill(at: str, *options: object) -> None:
    """Begin a run, and kill it once it prints a line that starts so."""
    command = [sys.executable, "-m", "experiments.train", *map(str, options)]
    with subprocess.Popen(command, cwd=ROOT, env=of_child(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith(at) for line in process.stdout), "the run has ended before"
        process.kill()
        process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_was_killed_in_the_warm_up_and_later_ends_as_one_that_was_not(schedule: str, tmp_path: Path) -> None:
    final = None if schedule == CONSTANT else 1e-4
    fields: dict[str, Any] = {"learning_rate": 3e-3, "final_learning_rate": final, "warmup_steps": WARMUP}
    given = {name.replace("_", "-"): "null" if value is None else value for name, value in fields.items()}
    options = (
        *("--config", DEBUG, *SMALL, "--num-stages", 2, "--steps", STEPS, "--checkpoint-every", 7),
        *("--optimizer.schedule", schedule),
        *(part for name, value in given.items() for part in (f"--optimizer.{name}", value)),
    )
    run, whole = tmp_path / "run", tmp_path / "whole"
    kill("step    10 ", *options, "--run-dir", run)
    assert len(rows_of(run)) < STEPS
    kill("step    60 ", *options, "--run-dir", run)
    assert len(rows_of(run)) < STEPS
    for directory in (run, whole):
        done = run_afresh("train", *options, "--run-dir", directory, timeout_s=900)
        assert done.returncode == 0, done.stderr
    expected, found = ([{name: row[name] for name in EXACT} for row in rows_of(each)] for each in (whole, run))
    assert found == expected

    rates = learning_rate_schedule(OptimizerConfig(schedule=schedule, **fields), STEPS)
    told = [row["learning_rate"] for row in expected]
    assert told == pytest.approx([float(rates(step)) for step in range(STEPS)], rel=1e-6)
    assert told[WARMUP - 1] < told[WARMUP] == pytest.approx(3e-3)
