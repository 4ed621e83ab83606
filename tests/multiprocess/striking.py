"""Training runs with one process per unit, whose ranks are killed or stopped, and how such runs are checked."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.multiprocess.launching import Launched, launched
from tests.multiprocess.runs import QUICK_TO_COMPILE, Outcome, committed, outcome_of, restored, training_config

NUM_SEEDS = int(os.environ.get("RRFP_CHAOS_SEEDS", "3"))
"""How many runs the tests strike that draw their strikes from seeds."""
SILENCE_S, PATIENCE_S = 5.0, 120.0


@dataclass(frozen=True)
class StruckTraining:
    """A configuration of ``rrfp train`` that saves and evaluates every few steps."""

    replicas: int
    steps: int
    save_every: int
    evaluate_every: int
    keep: int = 3
    num_microbatches: int = 4
    verify_every: int | None = None
    learning_rate: float = 5e-3
    num_stages: int = 2
    batch_size: int = 8
    shares: bool = False
    """Whether replicas share the optimizer state."""
    is_deterministic: bool = False

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.replicas

    def stage_of(self, rank: int) -> int:
        return rank % self.num_stages

    def launched(self, folder: Path, run: Path, *, max_restarts: int = 0, **variables: str) -> Any:
        """The launcher of a run, as a context manager."""
        changes: dict[str, Any] = {"num_stages": self.num_stages, "replicas": self.replicas, "reduce": "messages"}
        changes |= {"steps": self.steps, "checkpoint_every": self.save_every, "keep_checkpoints": self.keep}
        changes |= {"num_microbatches": self.num_microbatches, "held_out": 0.3, "silence_deadline_s": SILENCE_S}
        changes |= {"learning_rate": self.learning_rate}
        changes |= {"batch_size": self.batch_size, "shard": self.shares, "deterministic": self.is_deterministic}
        config = training_config(folder, **changes)
        places = ("--max-restarts", max_restarts, "--processes", self.num_ranks)
        command = (*places, "--", "experiments.train", "--config", config, "--run-dir", run)
        evaluated = ("--evaluation.every", self.evaluate_every, "--evaluation.when", "start")
        verified = () if self.verify_every is None else ("--verify-every", self.verify_every)
        return launched(*command, *evaluated, *verified, **QUICK_TO_COMPILE, **variables)

    def unharmed(self, folder: Path) -> "Unharmed":
        """The run that others are compared with."""
        with self.launched(folder, folder / "run") as launcher:
            assert launcher.wait(300) == 0, launcher.text
        return Unharmed(outcome_of(folder / "run", self.steps), evaluations_of(folder / "run"))

    def check(
        self, run: Path, launcher: Launched, lost: list[int], unharmed: "Unharmed", *, at_the_end: Sequence[int] = ()
    ) -> None:
        """Checks a run that has ended after these ranks were lost, some perhaps after the last step."""
        assert named_as_lost(launcher) == sorted([*lost, *at_the_end]), launcher.text
        outcome = outcome_of(run, self.steps)  # each step has one row
        np.testing.assert_allclose(outcome.losses, unharmed.outcome.losses, rtol=1e-6)
        outcome.assert_close(unharmed.outcome)
        if self.is_deterministic:
            outcome.assert_same(unharmed.outcome)
        np.testing.assert_allclose(evaluations_of(run), unharmed.evaluations, rtol=1e-6)
        assert committed(run)[-1] == self.steps
        for step in committed(run):
            restored(run, step)
        last = [row for row in rows_of(run) if "evaluation" not in row][-1]
        assert last["lost_units"] == sorted(lost)  # a rank is a unit


@dataclass(frozen=True)
class Unharmed:
    """What a run that nobody has struck has come to."""

    outcome: Outcome
    evaluations: list[tuple[int, float]]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The whole rows of a run, which may go on."""
    with suppress(OSError):
        return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]
    return []


def num_rows(run: Path) -> int:
    with suppress(OSError):
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def evaluations_of(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows_of(run) if "evaluation" in row]


def named_as_lost(launcher: Launched) -> list[int]:
    """The ranks without which the others went on, by the launcher's last words."""
    said = [line.split() for line in launcher.own_lines() if "was lost, and the others went on" in line]
    return sorted(int(words[1]) for words in said)


def is_declared(launcher: Launched, rank: int) -> bool:
    """Whether a rank was declared lost."""
    return any(line.startswith(f"rank {rank} declared lost:") for line in launcher.own_lines())


def assert_same(own: tuple[list[float], Any], unharmed: tuple[list[float], Any]) -> None:
    """Losses, and parameters by chunk, of one rank and of a run that nobody has struck."""
    np.testing.assert_allclose(own[0], unharmed[0], rtol=1e-6)
    for chunk, held in own[1].items():
        jax.tree.map(
            lambda mine, all_: np.testing.assert_allclose(mine, all_, rtol=1e-5, atol=1e-5), held, unharmed[1][chunk]
        )
