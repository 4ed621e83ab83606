"""Fifty runs, in each of which a rank is killed or stopped at a random moment, while it starts, compiles or runs."""

import json
import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.multiprocess.launching import Launched, eventually, launched
from tests.multiprocess.reports import rank_text, survivors_end
from tests.multiprocess.runs import QUICK_TO_COMPILE, training_config

NUM_RUNS, NUM_RANKS = 50, 4
SILENCE_S, START_S = 5.0, 12.0
CLOSED_S, LAUNCHING_S, SLACK_S = 2.0, 1.0, 2.0
LATEST_S = {"emulate": 6.0, "train": 16.0}
EMULATE = ("--num-stages", 2, "--data", 2, "--num-microbatches", 8, "--durations-ms", "2,2,2", "--steps", 100_000)


@dataclass(frozen=True, kw_only=True)
class Strike:
    """What happens to one run."""

    command: str
    signal: signal.Signals
    rank: int
    at_s: float
    """After the launcher's start; later where the rank does not exist yet."""


def strikes(num: int, seed: int) -> list[Strike]:
    """Every third pair hits training runs, every second one kills; rank 0 is hit as often as the others together."""
    chance = random.Random(seed)
    commands = ["emulate", "train", "emulate"]
    return [
        Strike(
            command=(command := commands[number // 2 % 3]),
            signal=(signal.SIGKILL, signal.SIGSTOP)[number % 2],
            rank=chance.choice([0, 0, 0, 1, 2, 3]),
            at_s=chance.uniform(0, LATEST_S[command]),
        )
        for number in range(num)
    ]


def start(strike: Strike, folder: Path) -> tuple[object, ...]:
    arguments: tuple[object, ...] = (*EMULATE, "--silence-deadline-s", SILENCE_S)
    if strike.command == "train":
        config = training_config(folder, num_stages=2, replicas=2, silence_deadline_s=SILENCE_S, steps=100_000)
        arguments = ("--config", config, "--run-dir", folder / "run")
    launcher = ("--processes", NUM_RANKS, "--start-deadline-s", START_S, "--grace-s", START_S)
    return (*launcher, "--", f"experiments.{strike.command}", *arguments)


def hit(strike: Strike, launcher: Launched) -> tuple[float, float]:
    """Carry it out: when it came, and the seconds until all other ranks had ended."""
    started_s = time.monotonic()
    assert eventually(lambda: len(launcher.ranks()) == NUM_RANKS)
    time.sleep(max(0.0, started_s + strike.at_s - time.monotonic()))
    pids = launcher.ranks()
    hit_s = time.monotonic()
    os.kill(pids.pop(strike.rank), strike.signal)
    return hit_s - started_s, survivors_end(pids.values(), hit_s)


def phase_of(launcher: Launched, strike: Strike) -> str:
    """How far the run had come, by the words with which all others name the rank."""
    sayings = {
        "running": rf"error: rank {strike.rank} \(stage \d, replica \d\) was lost: ",
        "starting": rf"error: rank \d lost rank {strike.rank} \(.*before the run had begun",
        "connecting": rf"error: rank \d could not connect to rank {strike.rank}: ",
        "meeting": rf"error: [^§]*the rendezvous failed: [^§]*rank {strike.rank}\b",
    }
    said = set()
    for other in set(range(NUM_RANKS)) - {strike.rank}:
        text = rank_text(launcher, other)
        assert "Traceback" not in text, launcher.text
        found = [phase for phase, pattern in sayings.items() if re.search(pattern, text)]
        if not found and "had not come to the others: the launcher ended it" in launcher.text:
            found = ["meeting"]  # it had no time to say anything
        assert found, launcher.text
        said.update(found)
    return "/".join(phase for phase in sayings if phase in said)


def codes(launcher: Launched) -> set[int]:
    """All exit codes in the launcher's summary."""
    return {int(code) for line in launcher.own_lines() for code in re.findall(r"code (\d+)", line)}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended."""

    strike: Strike
    at_s: float
    phase: str
    ended_s: float
    """From the strike until all other ranks had ended."""
    deadline_s: float

    def __str__(self) -> str:
        strike = self.strike
        return (
            f"{strike.command:7} {strike.signal.name} of rank {strike.rank} at {self.at_s:5.2f} s ({self.phase:10}): "
            f"all others had ended after {self.ended_s:5.2f} s, allowed {self.deadline_s:5.2f} s"
        )


def strike_once(strike: Strike, folder: Path) -> Ended:
    """One run; fails unless all is as it should be."""
    is_kill = strike.signal == signal.SIGKILL
    with launched(*start(strike, folder), **QUICK_TO_COMPILE) as launcher:
        at_s, ended_s = hit(strike, launcher)
        code = launcher.wait()
        assert not launcher.living()
    phase, own = phase_of(launcher, strike), "\n".join(launcher.own_lines())
    assert codes(launcher) <= {5, 6, 137, 143}, launcher.text  # a stopped one is ended with SIGTERM or SIGKILL
    if is_kill:
        assert code == 137, launcher.text
        assert f"rank {strike.rank} (code 137, killed by SIGKILL)" in own
    else:
        assert code in (5, 6), launcher.text
        assert f"rank {strike.rank}: stood still (SIGSTOP): the launcher ended it" in own
    if strike.command == "train" and phase == "running":
        assert json.loads((folder / "run" / "failure.json").read_text())["lost_ranks"] == [strike.rank]
        others = set(range(NUM_RANKS)) - {strike.rank}
        assert all((folder / "run" / f"events-rank{other}.json.gz").exists() for other in others)
    deadline_s = CLOSED_S if is_kill else SILENCE_S
    if phase == "meeting" and not is_kill:  # there are no connections yet
        deadline_s = max(deadline_s, START_S + LAUNCHING_S - at_s)
    assert ended_s < deadline_s + SLACK_S, launcher.text
    return Ended(strike=strike, at_s=at_s, phase=phase, ended_s=ended_s, deadline_s=deadline_s)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_runs_end_cleanly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs: list[Ended] = []
    failures = []
    for number, strike in enumerate(strikes(NUM_RUNS, seed=0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            runs.append(strike_once(strike, folder))
            row = str(runs[-1])
        except AssertionError as error:
            failures.append(f"run {number}, {strike}: {error}")
            row = f"{strike}: FAILED"
        with capsys.disabled():
            print(f"\n{number:3} {row}", end="", flush=True)
    with capsys.disabled():
        for number in (signal.SIGKILL, signal.SIGSTOP):
            worst = max(
                (run for run in runs if run.strike.signal == number), key=lambda run: run.ended_s - run.deadline_s
            )
            print(f"\nlatest {worst}", end="", flush=True)
    assert not failures, "\n\n".join(failures)
