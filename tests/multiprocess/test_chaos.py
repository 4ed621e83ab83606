"""Ranks are killed or stopped one after the other at chosen moments, and the run comes to the same end.

The moments are those of saves, evaluations, recoveries and changes of the first rank, as they show outside; and random
delays within a few steps, some of which hit a reduction, a verdict or an update. ``RRFP_CHAOS_SEEDS`` tells how many
runs each test strikes.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.multiprocess.launching import Launched, eventually
from tests.multiprocess.runs import committed, is_saving
from tests.multiprocess.striking import (
    NUM_SEEDS,
    PATIENCE_S,
    SILENCE_S,
    StruckTraining,
    Unharmed,
    is_declared,
    num_rows,
    rows_of,
)

TRAINING = StruckTraining(replicas=4, steps=50, save_every=5, evaluate_every=7, num_microbatches=8)
FIRST_ROW, LAST_ROW = 3, 42
"""Rows between which ranks are struck."""
_NOTICED_S = 2.0
"""Seconds after which a rank that was only paused has been declared lost, or never will be."""


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Unharmed:
    return TRAINING.unharmed(tmp_path_factory.mktemp("unharmed"))


@dataclass
class Chaos:
    """Strikes the ranks of one run, as drawn from a seed, until no stage can spare any more."""

    run: Path
    launcher: Launched
    chance: random.Random
    pids: dict[int, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    at_the_end: list[int] = field(default_factory=list)
    """Ranks that were struck after the last step, some perhaps when all had come to the end of the run."""
    events: list[str] = field(default_factory=list)
    """The strikes in words, for the report of a run that fails."""

    def strike_all(self) -> None:
        assert self._comes(lambda: num_rows(self.run) >= FIRST_ROW), self.launcher.text
        self.pids = self.launcher.ranks()
        assert len(self.pids) == TRAINING.num_ranks
        most = self.chance.choice([3, 5, 6, 6])
        while (spare := self._spare()) and len(self.lost) < most and num_rows(self.run) < LAST_ROW:
            is_recovering = bool(self.lost) and not is_declared(self.launcher, self.lost[-1])
            moment = self.chance.choice([name for name in MOMENTS if is_recovering or name != "a recovery"])
            if not self._comes(MOMENTS[moment](self)):
                return  # The run has ended.
            self.lost += self._strike(moment, spare)
            assert self.launcher.ranks().items() <= self.pids.items(), "nobody was started again"
        last_save = a_last_save(self)
        if (spare := self._spare()) and self._comes(last_save):
            self.at_the_end = self._strike("the last save", spare)

    def _strike(self, moment: str, spare: list[int]) -> list[int]:
        """Returns the ranks that are lost by it."""
        living = min(self.pids.keys() - set(self.lost))
        victims = [living if living in spare and self.chance.random() < 0.3 else self.chance.choice(spare)]
        others = [rank for rank in spare if TRAINING.stage_of(rank) != TRAINING.stage_of(victims[0])]
        if others and self.chance.random() < 0.25:
            victims.append(self.chance.choice(others))
        way = self.chance.choice(["killed", "killed", "killed", "stopped", "woken", "paused"])
        delay_s = self.chance.choice([0.0, self.chance.uniform(0.0, 0.05), self.chance.uniform(0.0, 0.3)])
        time.sleep(delay_s)
        self.events.append(f"row {num_rows(self.run)}: {victims} {way} {delay_s:.3f} s into {moment}")
        self._send(victims, signal.SIGKILL if way == "killed" else signal.SIGSTOP)
        if way == "paused":
            # Up to the time at which the others miss it, or lost after all if they just have.
            time.sleep(self.chance.choice([self.chance.uniform(0.1, SILENCE_S / 2), SILENCE_S * 0.87]))
            self._send(victims, signal.SIGCONT)
            time.sleep(_NOTICED_S)
            return [rank for rank in victims if is_declared(self.launcher, rank)]
        if way == "woken":
            # The others go on without it by now; it may do something yet before it hears of that.
            self._comes(lambda: all(is_declared(self.launcher, rank) for rank in victims))
            time.sleep(self.chance.uniform(0.0, 0.3))
            self._send(victims, signal.SIGCONT)
        return victims

    def _send(self, ranks: list[int], number: signal.Signals) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def _spare(self) -> list[int]:
        """The ranks without which each stage has a replica left."""
        living = self.pids.keys() - set(self.lost)
        stages = [TRAINING.stage_of(rank) for rank in living]
        return sorted(rank for rank in living if stages.count(TRAINING.stage_of(rank)) > 1)

    def _comes(self, condition: Callable[[], bool]) -> bool:
        """Whether a moment comes before the run has ended; it fails where neither does."""
        ended = self.launcher.process.poll
        assert eventually(lambda: ended() is not None or condition(), PATIENCE_S), (self.events, self.launcher.text)
        return ended() is None


def a_step(chaos: Chaos) -> Callable[[], bool]:
    row = num_rows(chaos.run) + chaos.chance.randrange(1, 9)
    return lambda: num_rows(chaos.run) >= row


def a_commit(chaos: Chaos) -> Callable[[], bool]:
    before = committed(chaos.run)
    return lambda: committed(chaos.run) != before


def an_evaluation(chaos: Chaos) -> Callable[[], bool]:
    def is_evaluated() -> bool:
        last = rows_of(chaos.run)[-1]
        return "evaluation" not in last and (last["step"] + 1) % TRAINING.evaluate_every == 0

    return is_evaluated


def a_last_save(chaos: Chaos) -> Callable[[], bool]:
    num_rows_of_run = TRAINING.steps + TRAINING.steps // TRAINING.evaluate_every + 2
    return lambda: num_rows(chaos.run) == num_rows_of_run and is_saving(chaos.run)


MOMENTS: dict[str, Callable[[Chaos], Callable[[], bool]]] = {
    "a step": a_step,
    "a save": lambda chaos: lambda: is_saving(chaos.run),
    "a commit": a_commit,
    "an evaluation": an_evaluation,
    "a recovery": lambda chaos: lambda: is_declared(chaos.launcher, chaos.lost[-1]),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_chaos(seed: int, unharmed: Unharmed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with TRAINING.launched(tmp_path, run) as launcher:
        chaos = Chaos(run, launcher, random.Random(seed))
        chaos.strike_all()
        code = launcher.wait(200)
    print(f"seed {seed}:", *chaos.events, sep="\n  ")
    at_the_end = [rank for rank in chaos.at_the_end if is_declared(launcher, rank)]
    assert not code or at_the_end != chaos.at_the_end, launcher.text
    TRAINING.check(run, launcher, chaos.lost, unharmed, at_the_end=at_the_end)
