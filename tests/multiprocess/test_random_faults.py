"""Fifty runs, in each of which a rank is killed or stopped at a random moment, while it starts, compiles or runs."""

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
CLOSED_S, SLACK_S = 2.0, 3.0
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
    """Every fourth one hits a training run, every second one kills; rank 0 is hit as often as the others together."""
    chance = random.Random(seed)
    commands = ["emulate", "emulate", "emulate", "train"]
    return [
        Strike(
            command=(command := commands[number // 2 % 4]),
            signal=(signal.SIGKILL, signal.SIGSTOP)[number % 2],
            rank=chance.choice([0, 0, 0, 1, 2, 3]),
            at_s=chance.uniform(0, LATEST_S[command]),
        )
        for number in range(num)
    ]


def start(strike: Strike, folder: Path) -> tuple[object, ...]:
    arguments: tuple[object, ...] = (*EMULATE, "--silence-deadline-s", SILENCE_S)
    if strike.command == "train":
        config = training_config(folder, num_stages=2, data=2, silence_deadline_s=SILENCE_S, steps=100_000)
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
        "running": rf"error: rank {strike.rank} \(stages? [\d, ]+\) was lost: ",
        "starting": rf"error: rank \d lost rank {strike.rank} \(.*before the run had begun",
        "connecting": rf"error: rank \d could not connect to rank {strike.rank}: ",
        "meeting": rf"error: the rendezvous failed: [^§]*rank {strike.rank}\b",
    }
    said = set()
    for other in set(range(NUM_RANKS)) - {strike.rank}:
        text = rank_text(launcher, other)
        assert "Traceback" not in text, launcher.text
        found = [phase for phase, pattern in sayings.items() if re.search(pattern, text)]
        assert found, launcher.text
        said.update(found)
    return "/".join(phase for phase in sayings if phase in said)


def codes(launcher: Launched) -> set[int]:
    """All exit codes in the launcher's summary."""
    return {int(code) for line in launcher.own_lines() for code in re.findall(r"code (\d+)", line)}


def strike_once(strike: Strike, folder: Path) -> str:
    """A row of the summary; fails unless all is as it should be."""
    is_kill = strike.signal == signal.SIGKILL
    with launched(*start(strike, folder), **QUICK_TO_COMPILE) as launcher:
        at_s, ended_s = hit(strike, launcher)
        code = launcher.wait()
        assert not launcher.living()
    phase = phase_of(launcher, strike)
    assert code in ((137,) if is_kill else (5, 6)), launcher.text
    assert codes(launcher) <= {5, 6, 137, 143}, launcher.text  # a stopped one is ended with SIGTERM or SIGKILL
    first = launcher.own_lines()[-3:]
    if is_kill:
        assert any(f"rank {strike.rank} (code 137, killed by SIGKILL)" in line for line in launcher.own_lines()), first
        deadline_s = CLOSED_S
    else:
        assert f"rank {strike.rank}: stood still (SIGSTOP): the launcher ended it" in launcher.text
        deadline_s = SILENCE_S if phase != "meeting" else max(SILENCE_S, START_S - at_s)
    assert ended_s < deadline_s + SLACK_S, launcher.text
    if strike.command == "train" and phase == "running":
        assert (folder / "run" / "failure.json").exists()
        assert len(list((folder / "run").glob("events-rank*.json.gz"))) == NUM_RANKS - 1
    return (
        f"{strike.command:8} {strike.signal.name} rank {strike.rank} at {at_s:5.2f} s ({phase:10}): "
        f"all others ended after {ended_s:5.2f} s, allowed {deadline_s:5.2f} s; code {code}"
    )


@pytest.mark.slow
def test_fifty_runs_end_cleanly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures = []
    for number, strike in enumerate(strikes(NUM_RUNS, seed=0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            row = strike_once(strike, folder)
        except AssertionError as error:
            failures.append(f"run {number}, {strike}: {error}")
            row = f"{strike}: FAILED"
        with capsys.disabled():
            print(f"\n{number:3} {row}", end="", flush=True)
    assert not failures, "\n\n".join(failures)
