"""Ranks are killed or stopped in the middle of a run, and the others go on in the same processes, nothing compiled."""

import itertools
import os
import pickle
import random
import re
import signal
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.runtime.process import Process
from tests.multiprocess.launching import eventually, launched
from tests.multiprocess.programs.survivor import make_pipeline, train
from tests.multiprocess.runs import QUICK_TO_COMPILE, outcome_of, training_config
from tests.multiprocess.striking import (
    NUM_SEEDS,
    PATIENCE_S,
    StruckTraining,
    Unharmed,
    assert_same,
    is_declared,
    named_as_lost,
    num_rows,
)

STEPS, MANY_STEPS = 12, 60


@pytest.fixture(scope="module")
def unharmed():
    return train_alone(STEPS)


def train_alone(num_steps: int) -> tuple:
    with make_pipeline(process=Process.alone(2)) as pipeline:
        return train(pipeline, num_steps)


def marks_of(folder: Path, rank: int, unharmed: tuple) -> list[float]:
    """Checks what a survivor has trained; returns the times at which its steps began, and that of the end."""
    losses, params, marks = pickle.loads((folder / f"rank{rank}").read_bytes())
    assert_same((losses, params), unharmed)
    times, programs = zip(*marks, strict=True)
    assert {*programs[1:]} == {programs[1]}, "nothing is compiled after the first step"
    return [*times]


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
    for rank in survivors:
        marks_of(tmp_path, rank, unharmed)


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * NUM_SEEDS)
def test_a_step_is_soon_done_without_a_lost_rank(tmp_path: Path) -> None:
    unharmed, delays_s = train_alone(MANY_STEPS), []
    for seed in range(NUM_SEEDS):
        chance, folder = random.Random(seed), tmp_path / str(seed)
        folder.mkdir()
        victim = chance.randrange(1, 4) if seed % 4 else 0
        with launched("--processes", 4, "--", "survivor", folder, MANY_STEPS, -1, 0, 0, **QUICK_TO_COMPILE) as launcher:
            assert eventually(lambda: sum("ready" in line for line in launcher.lines) == 4, PATIENCE_S)
            pids = launcher.ranks()
            time.sleep(chance.uniform(0.0, 1.0))
            struck_s = time.perf_counter()
            os.kill(pids[victim], signal.SIGKILL)
            assert eventually(lambda: is_declared(launcher, victim))  # noqa: B023
            survivors = {rank: pid for rank, pid in launcher.ranks().items() if rank != victim}
            assert launcher.wait(120) == 0, launcher.text
        assert named_as_lost(launcher) == [victim]
        assert survivors == {rank: pid for rank, pid in pids.items() if rank != victim}
        delays_s.append(delay_s(struck_s, [marks_of(folder, rank, unharmed) for rank in survivors]))
    print(f"delays of {NUM_SEEDS} steps in s, sorted:", *(f"{each:.3f}" for each in sorted(delays_s)))
    assert max(delays_s) <= 30.0, "nobody waits for a deadline"


def delay_s(struck_s: float, marks: list[list[float]]) -> float:
    """The seconds from a strike to the end of the step that was done again, less those of a step.

    That is the step under way on all survivors, or the next where the verdict of that one was known.
    """
    ends_s = [max(times) for times in list(zip(*marks, strict=True))[1:]]
    begun_s = [min(times) for times in list(zip(*marks, strict=True))[1:]]
    first = next(step for step, end_s in enumerate(begun_s) if end_s > struck_s)
    assert 0 < first < MANY_STEPS - 5, "the strike comes between steps"
    usual_s = statistics.median(end - begin for begin, end in itertools.pairwise(ends_s[:first]))
    return max(ends_s[first] - struck_s - usual_s, ends_s[first + 1] - struck_s - 2 * usual_s)


@pytest.mark.slow
def test_a_deterministic_run_keeps_its_bits_through_a_loss(tmp_path: Path) -> None:
    trained = []
    for victim in (-1, 0, 3):
        (folder := tmp_path / str(victim)).mkdir()
        program = ("survivor", folder, STEPS, victim, 4, 0.01, "deterministic")
        with launched("--processes", 4, "--", *program, NPROC="1") as launcher:
            assert launcher.wait(120) == 0, launcher.text
        trained.append({rank: pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in (1, 2)})
    unharmed, *struck = trained
    for rank, (losses, params, _) in unharmed.items():
        for survivors in struck:
            own_losses, own_params, _ = survivors[rank]
            assert own_losses == losses
            jax.tree.map(np.testing.assert_array_equal, own_params, params)


@pytest.mark.slow
@pytest.mark.parametrize("second", [0, 2])
def test_shares_of_the_optimizer_state_outlive_one_loss_after_the_other(second: int, tmp_path: Path) -> None:
    """Ranks 1 and 2 hold share 1 of 4 together, so the second loss takes what the first has left."""
    with make_pipeline(1, process=Process.alone(1)) as pipeline:
        alone = train(pipeline, STEPS)
    with launched("--processes", 4, "--", "survivor", tmp_path, STEPS, 1, 4, 0.01, second, 7) as launcher:
        assert launcher.wait(200) == 0, launcher.text
    for rank in {0, 2, 3} - {second}:
        marks_of(tmp_path, rank, alone)


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
    assert re.search(
        rf"stage {slow % 2}, replica {slow // 2} takes 1\.\d+ times as long as its stage's replicas", launcher.text
    )
    losses, _ = unharmed
    for rank in range(4):
        own_losses, slow_units = zip(*pickle.loads((tmp_path / f"rank{rank}").read_bytes()), strict=True)
        np.testing.assert_allclose(own_losses, losses, rtol=1e-6)
        # After five steps that agree, and two on their way.
        assert [set(each) for each in slow_units[9:]] == [{slow}] * (STEPS - 9)  # the unit of its number
        assert not any(slow_units[:8])


# -- training ----------------------------------------------------------------------------------------------------------

TRAINING = StruckTraining(replicas=2, steps=60, save_every=7, evaluate_every=9)


@dataclass(frozen=True)
class Strike:
    """What happens to one rank."""

    rank: int
    signal: signal.Signals
    after_row: int
    """The number of rows after which it comes."""
    delay_s: float


def strikes(seed: int) -> list[Strike]:
    """One strike, or two on ranks of different stages; ranks 0 and 2 have stage 0."""
    chance = random.Random(seed)
    ranks = [chance.choice([0, 0, 2]), chance.choice([1, 3])]
    chance.shuffle(ranks)
    first = chance.randrange(2, TRAINING.steps // 2)
    return [
        Strike(
            rank=rank,
            signal=chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]),
            after_row=first if seed % 4 == 0 else first + number * chance.randrange(TRAINING.steps // 3),
            delay_s=chance.uniform(0.0, 0.3),
        )
        for number, rank in enumerate(ranks[: 1 + seed % 2])
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Unharmed:
    return TRAINING.unharmed(tmp_path_factory.mktemp("unharmed"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_training_goes_on_whoever_is_lost(seed: int, trained: Unharmed, tmp_path: Path) -> None:
    run, plan = tmp_path / "run", strikes(seed)
    with TRAINING.launched(tmp_path, run) as launcher:
        pids: dict[int, int] = {}
        for strike in plan:
            assert eventually(lambda: num_rows(run) >= strike.after_row, 120), launcher.text  # noqa: B023
            pids = pids or launcher.ranks()
            time.sleep(strike.delay_s)
            os.kill(pids[strike.rank], strike.signal)
        assert launcher.wait(180) == 0, launcher.text
    TRAINING.check(run, launcher, [strike.rank for strike in plan], trained)


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
            assert eventually(lambda: num_rows(tmp_path / "run") >= 5, 120), launcher.text
            os.kill(launcher.ranks()[victim], signal.SIGKILL)
        assert launcher.wait(200) == 0, launcher.text
    outcome_of(tmp_path / "run", 16).assert_close(outcome_of(tmp_path / "whole", 16))


# -- coming back -------------------------------------------------------------------------------------------------------

LONG = StruckTraining(replicas=2, steps=500, save_every=150, evaluate_every=75, verify_every=3, learning_rate=1e-3)
"""A run that lasts for as long as a new process needs to prepare, and often has just verified when that takes part; too
slow to make much of a rounding error."""


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Unharmed:
    return LONG.unharmed(tmp_path_factory.mktemp("long"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "lost"),
    [
        # Who is killed, once the launcher has said what (a pattern), and how much later.
        ([(3, "", 0.0)], []),
        ([(0, "", 0.0)], []),
        ([(2, "", 0.0), (2, "rank 2 is started again .1 ", 2.0)], []),
        ([(1, "", 0.0), (2, "rank 1 is back", 0.01)], [2]),
        ([(1, "", 0.0), (1, "rank 1 is back", 0.02)], []),
        ([(2, "", 0.0), (0, "rank 2 is back", 1.0)], [0]),
    ],
    ids=["3", "0", "newcomer prepares", "other stage meanwhile", "newcomer meanwhile", "other replica later"],
)
def test_a_lost_rank_comes_back(plan: list, lost: list[int], long_run: Unharmed, tmp_path: Path) -> None:
    strike_and_await(LONG, plan, lost, long_run, tmp_path)


SHARING = replace(LONG, num_stages=1, num_microbatches=6, batch_size=12, shares=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("training", "plan", "lost"),
    [
        (
            replace(LONG, shares=True),
            [(1, "", 0.0), (3, "rank 1 is back", 1.0)],
            [3],
        ),
        (
            replace(SHARING, replicas=3, is_deterministic=True),
            [(1, "", 0.0), (2, "rank 1 is back", 0.5), (0, "rank 2 declared lost", 0.5)],
            [0, 2],
        ),
        (
            replace(SHARING, replicas=4, num_microbatches=4, batch_size=8),
            [
                (1, "", 0.0),
                (3, "rank 1 is started again .1 ", 2.0),
                (2, "3 (is|are) back", 0.5),
                (0, "rank 2 declared lost", 0.5),
            ],
            [0, 2],
        ),
    ],
    ids=["data 2", "data 3, deterministic", "data 4, one is back before the other"],
)
def test_a_rank_that_is_back_holds_its_shares_again(
    training: StruckTraining, plan: list, lost: list[int], tmp_path: Path
) -> None:
    """Ranks are lost afterwards that held a share with it."""
    (tmp_path / "unharmed").mkdir()
    strike_and_await(training, plan, lost, training.unharmed(tmp_path / "unharmed"), tmp_path)


def strike_and_await(training: StruckTraining, plan: list, lost: list[int], unharmed: Unharmed, folder: Path) -> None:
    """Strikes a run whose ranks come back, but for those that are lost in the end."""
    run = folder / "run"
    variables = {"JAX_LOG_COMPILES": "1"}
    with training.launched(folder, run, max_restarts=len(plan) - len(lost), **variables) as launcher:
        assert eventually(lambda: num_rows(run) >= 10, 120), launcher.text
        for rank, said, delay_s in plan:
            assert eventually(lambda: re.search(said, launcher.text) is not None, 120), launcher.text  # noqa: B023
            # A spare process that takes a place is named once its imports are done.
            assert eventually(lambda: rank in launcher.ranks(), 120), launcher.text  # noqa: B023
            pids = launcher.ranks()
            time.sleep(delay_s)
            os.kill(pids[rank], signal.SIGKILL)
        assert launcher.wait(300) == 0, launcher.text
    assert re.search(f"ranks? .*{plan[0][0]}.* (is|are) back", launcher.text)
    backs = [number for number, line in enumerate(launcher.stderr) if re.search(" (is|are) back", line)]
    compiled = [number for number, line in enumerate(launcher.stderr) if "jax: Compiling" in line]
    assert 0 < max(compiled) < backs[-1], "the others would wait for it"
    training.check(run, launcher, lost, unharmed)
