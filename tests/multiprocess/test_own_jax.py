"""Processes with a JAX of their own, and those that start JAX together: the same bits, and the same checkpoints."""

from pathlib import Path

import jax
import numpy as np
import pytest

from tests.multiprocess.cases import Case, train_together
from tests.multiprocess.launching import launched
from tests.multiprocess.runs import QUICK_TO_COMPILE, outcome_of, training_config

CASES = [
    Case(name="four", model="untied", cut=(1, 1, 1, 1), num_stages=4, num_ranks=4, num_steps=3, transport="transfer"),
    Case(name="two", model="tied", cut=(2, 2), num_stages=2, num_ranks=2, num_steps=3, options={"deterministic": True}),
]
"""More processes come first; the second has a layer on both ends, whose gradients travel between them."""


OWN, JOINT = "experiments.train", "joint_train"


@pytest.mark.slow
def test_losses_and_parameters_are_those_of_a_joint_start(tmp_path: Path) -> None:
    for name in ("own", "joint"):
        (tmp_path / name).mkdir()
    own = train_together(CASES, tmp_path / "own")
    joint = train_together(CASES, tmp_path / "joint", "--together")
    for case in CASES:
        assert own[case.name][0] == joint[case.name][0]
        jax.tree.map(np.testing.assert_array_equal, own[case.name][1], joint[case.name][1])


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_of_the_other_kind(tmp_path: Path) -> None:
    config = training_config(tmp_path, steps=6, decay_steps=6)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _train(OWN, config, whole)
    for command, steps in ((OWN, "2"), (JOINT, "4"), (OWN, "6")):
        _train(command, config, parts, "--steps", steps)
    outcome_of(parts, 6).assert_same(outcome_of(whole, 6))


def _train(command: str, config: Path, run: Path, *options: str) -> None:
    arguments = ("--processes", 2, "--", command, "--config", config, "--run-dir", run, *options)
    with launched(*arguments, **QUICK_TO_COMPILE) as launcher:
        assert launcher.wait(200) == 0, launcher.text
    assert ("all processes start JAX together" in launcher.text) == (command == JOINT)
    assert ("each process has its own JAX" in launcher.text) == (command == OWN)
