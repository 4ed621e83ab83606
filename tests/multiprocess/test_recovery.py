"""Ranks are killed or stopped in the middle of a run, and the others go on in the same processes, nothing compiled."""

import json
import os
import pickle
import random
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.runtime.process import Process
from tests.multiprocess.launching import eventually, launched
from tests.multiprocess.programs.survivor import make_pipeline, train
from tests.multiprocess.runs import QUICK_TO_COMPILE, Outcome, committed, outcome_of, training_config

STEPS = 12


@pytest.fixture(scope="module")
def unharmed():
    with make_pipeline(process=Process.alone(2)) as pipeline:
        return train(pipeline, STEPS)


@pytest.mark.parametrize(
    ("victim", "step", "delay_s"),
    [
        (0, 4, 0.0),
        *(pytest.param(*strike, marks=pytest.mark.slow) for strike in [(1, 5, 0.01), (2, 6, 0.02), (3, 3, 0.005)]),
    ],
)
def test_survivors_go_on_with_what_a_lost_rank_had_to_do(
    victim: int, step: int, delay_s: float, unharmed: tuple, tmp_path: Path
) -> None:
    survivors = [rank for rank in range(4) if rank != victim]
    with launched("--processes", 4, "--", "survivor", tmp_path, STEPS, victim, step, delay_s) as launcher:
        assert launcher.wait(120) == 0, launcher.text
    assert f"rank {victim} declared lost: rank {victim} ended with code 137" in launcher.text
    assert f"rank {victim} was lost, and the others went on" in launcher.text
    losses, params = unharmed
    for rank in survivors:
        own_losses, own_params, (before, after) = pickle.loads((tmp_path / f"rank{rank}").read_bytes())
        assert after == before, "nothing is compiled after the first step"
        np.testing.assert_allclose(own_losses, losses, rtol=1e-6)
        for chunk, held in own_params.items():
            jax.tree.map(
                lambda own, all_: np.testing.assert_allclose(own, all_, rtol=1e-5, atol=1e-5), held, params[chunk]
            )


@pytest.mark.parametrize("second", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_shares_of_the_optimizer_state_outlive_one_loss_after_the_other(second: int, tmp_path: Path) -> None:
    """Ranks 1 and 2 hold share 1 of 4 together, so the second loss takes what the first has left."""
    with make_pipeline(1, process=Process.alone(1)) as pipeline:
        losses, params = train(pipeline, STEPS)
    with launched("--processes", 4, "--", "survivor", tmp_path, STEPS, 1, 4, 0.01, second, 7) as launcher:
        assert launcher.wait(200) == 0, launcher.text
    for rank in {0, 2, 3} - {second}:
        own_losses, own_params, (before, after) = pickle.loads((tmp_path / f"rank{rank}").read_bytes())
        assert after == before, "nothing is compiled after the first step"
        np.testing.assert_allclose(own_losses, losses, rtol=1e-6)
        jax.tree.map(
            lambda own, all_: np.testing.assert_allclose(own, all_, rtol=1e-5, atol=1e-5), own_params[0], params[0]
        )


@pytest.mark.slow
def test_two_holders_of_a_share_that_are_lost_together_end_the_run(tmp_path: Path) -> None:
    with launched("--processes", 4, "--", "survivor", tmp_path, STEPS, 1, 4, 0.01, 2, 4) as launcher:
        assert launcher.wait(200) != 0, launcher.text
    assert re.search("share 1 of the optimizer state of stage 0 went with the two replicas that held it", launcher.text)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 3])
def test_a_slow_unit_gets_fewer_microbatches(slow: int, unharmed: tuple, tmp_path: Path) -> None:
    with launched("--processes", 4, "--", "slowed", tmp_path, STEPS, slow) as launcher:
        assert launcher.wait(200) == 0, launcher.text
    unit = {0: 0, 3: 3}[slow]
    assert re.search(
        rf"stage {slow // 2}, replica {slow % 2} takes 1\.\d+ times as long as its stage's replicas", launcher.text
    )
    losses, _ = unharmed
    for rank in range(4):
        own_losses, slow_units = zip(*pickle.loads((tmp_path / f"rank{rank}").read_bytes()), strict=True)
        np.testing.assert_allclose(own_losses, losses, rtol=1e-6)
        # After five steps that agree, and two on their way.
        assert [set(each) for each in slow_units[9:]] == [{unit}] * (STEPS - 9)
        assert not any(slow_units[:8])


# -- training ----------------------------------------------------------------------------------------------------------

TRAINED, SILENCE_S = 60, 5.0
RANKS = ("--processes", 4, "--", "experiments.train")
EVALUATED = ("--evaluation.every", 9, "--evaluation.at-start", "true")


@dataclass(frozen=True)
class Strike:
    """What happens to one rank."""

    rank: int
    signal: signal.Signals
    after_row: int
    """The number of rows after which it comes."""
    delay_s: float


def strikes(seed: int) -> list[Strike]:
    """One strike, or two on ranks of different stages; ranks 0 and 1 have stage 0."""
    chance = random.Random(seed)
    ranks = [chance.choice([0, 0, 1]), chance.choice([2, 3])]
    chance.shuffle(ranks)
    first = chance.randrange(2, TRAINED // 2)
    return [
        Strike(
            rank=rank,
            signal=chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]),
            after_row=first if seed % 4 == 0 else first + number * chance.randrange(TRAINED // 3),
            delay_s=chance.uniform(0.0, 0.3),
        )
        for number, rank in enumerate(ranks[: 1 + seed % 2])
    ]


def config_of(folder: Path) -> Path:
    changes: dict[str, Any] = {"num_stages": 2, "replicas": 2, "reduce": "messages", "steps": TRAINED}
    changes |= {"checkpoint_every": 7, "held_out": 0.3}
    return training_config(folder, **changes, silence_deadline_s=SILENCE_S)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[tuple[int, float]]]:
    folder = tmp_path_factory.mktemp("unharmed")
    command = (*RANKS, "--config", config_of(folder), "--run-dir", folder / "run", *EVALUATED)
    with launched(*command, **QUICK_TO_COMPILE) as launcher:
        assert launcher.wait(300) == 0, launcher.text
    return outcome_of(folder / "run", TRAINED), evaluations_of(folder / "run")


def evaluations_of(run: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "evaluation" in row]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_training_goes_on_whoever_is_lost(seed: int, trained: tuple, tmp_path: Path) -> None:
    run, plan = tmp_path / "run", strikes(seed)

    def num_rows() -> int:
        with suppress(OSError):
            return (run / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    command = (*RANKS, "--config", config_of(tmp_path), "--run-dir", run, *EVALUATED)
    with launched(*command, **QUICK_TO_COMPILE) as launcher:
        pids: dict[int, int] = {}
        for strike in plan:
            assert eventually(lambda: num_rows() >= strike.after_row, 120), launcher.text  # noqa: B023
            pids = pids or launcher.ranks()
            time.sleep(strike.delay_s)
            os.kill(pids[strike.rank], strike.signal)
        assert launcher.wait(180) == 0, launcher.text
    lost = sorted(strike.rank for strike in plan)
    for rank in lost:
        assert f"rank {rank} was lost, and the others went on" in launcher.text
    outcome, evaluations = trained
    outcome_of(run, TRAINED).assert_close(outcome)
    np.testing.assert_allclose(evaluations_of(run), evaluations, rtol=1e-6)
    assert committed(run)[-1] == TRAINED
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    unit_of = {0: 0, 1: 2, 2: 1, 3: 3}
    assert [row for row in rows if "evaluation" not in row][-1]["lost_units"] == sorted(unit_of[rank] for rank in lost)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [None, 1])
def test_shares_of_the_optimizer_state_are_saved_by_those_who_live(victim: int | None, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_stages": 1, "replicas": 3, "reduce": "messages", "shard": True, "steps": 16}
    changes |= {"batch_size": 12, "num_microbatches": 6, "checkpoint_every": 4}
    (tmp_path / "alone").mkdir()
    alone = training_config(tmp_path / "alone", **{**changes, "replicas": 1, "reduce": "auto", "shard": False})
    with launched(
        "--processes", 1, "--", "experiments.train", "--config", alone, "--run-dir", tmp_path / "whole"
    ) as one:
        assert one.wait(200) == 0, one.text
    command = ("--processes", 3, "--", "experiments.train", "--config", training_config(tmp_path, **changes))
    with launched(*command, "--run-dir", tmp_path / "run", **QUICK_TO_COMPILE) as launcher:
        if victim is not None:
            rows = tmp_path / "run" / "metrics.jsonl"
            assert eventually(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 5, 120), launcher.text
            os.kill(launcher.ranks()[victim], signal.SIGKILL)
        assert launcher.wait(200) == 0, launcher.text
    outcome_of(tmp_path / "run", 16).assert_close(outcome_of(tmp_path / "whole", 16))
