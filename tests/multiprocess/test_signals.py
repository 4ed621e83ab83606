"""Signals at moments spread over a run: the state is saved or the reason told, with the right code, in time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.environment import of_child
from tests.multiprocess.launching import MARK, Launched, eventually
from tests.multiprocess.runs import QUICK_TO_COMPILE, committed, is_saving, training_config

STOPPING = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (*STOPPING, signal.SIGINT, signal.SIGPIPE)
EVALUATED_AFTER, SAVED_EVERY = 8, 4
STEPS = {1: 40, 4: 16}
"""By number of processes."""
ENDS_WITHIN_S = 10.0
"""On a machine that has nothing else to do."""


class Run(Launched):
    """A training run, alone or launched, that is watched by its lines, its files and what it has loaded."""

    def __init__(self, folder: Path, num_processes: int) -> None:
        self.folder, self.num_processes = folder / "run", num_processes
        config = training_config(
            folder, num_stages=4, steps=STEPS[num_processes], checkpoint_every=SAVED_EVERY, held_out=0.3
        )
        evaluation = ("--evaluation.every", EVALUATED_AFTER, "--evaluation.batches", 40 if num_processes == 1 else 10)
        command = ("train", "--config", config, "--run-dir", self.folder, *evaluation)
        launcher = () if num_processes == 1 else ("launch", "--processes", num_processes, "--prefix", "always", "--")
        super().__init__(*launcher, *command, module="rrfp_jax.commands.main", **QUICK_TO_COMPILE)

    def has_loaded(self, library: str) -> bool:
        """Whether all processes that train have this in memory."""
        pids = [self.process.pid] if self.num_processes == 1 else [*self.ranks().values()]
        try:
            return len(pids) == self.num_processes and all(
                library in Path(f"/proc/{pid}/maps").read_text() for pid in pids
            )
        except OSError:
            return False

    def hears(self) -> bool:
        """Whether the first process has its handlers, or all ranks are there."""
        if self.num_processes > 1:
            return len(self.ranks()) == self.num_processes
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    def says(self, words: str) -> bool:
        return any(words in line for line in self.lines)

    def step_is_told(self, step: int) -> bool:
        return self.says(f"step {step:5d} ")


MOMENTS: dict[str, Callable[[Run], bool]] = {
    "importing Python": Run.hears,
    "reading the configuration": lambda run: run.has_loaded("pydantic_core"),
    "rendezvous": lambda run: run.has_loaded("jaxlib"),
    "compiling": lambda run: (run.folder / "run.lock").exists(),
    "first step": lambda run: run.says("the resolved configuration is in"),
    "mid run": lambda run: run.step_is_told(2),
    "evaluating": lambda run: run.step_is_told(EVALUATED_AFTER - 1),
    "saving": lambda run: is_saving(run.folder),
    "ending": lambda run: run.step_is_told(STEPS[run.num_processes] - 1),
    "at exit": lambda run: run.says("the run is in"),
}


@contextmanager
def running(folder: Path, num_processes: int) -> Iterator[Run]:
    run = Run(folder, num_processes)
    try:
        yield run
    finally:
        run.close()


def check(number: int, moment: str, num_processes: int, folder: Path) -> tuple[str, float]:
    """One cell of the matrix; returns how the run ended, and after how many seconds."""
    with running(folder, num_processes) as run:
        reached = MOMENTS[moment]
        assert eventually(lambda: reached(run) or run.process.poll() is not None, 120), run.text
        sent_s = time.monotonic()
        run.signal(number)
        code = run.wait(120)
        took_s = time.monotonic() - sent_s
        assert not run.living(), run.text
    saved, num_steps = committed(run.folder), STEPS[num_processes]
    told = f"code {code} after {took_s:.1f} s, saved {saved[-1:]}"
    assert "Traceback" not in run.text, run.text
    if number == signal.SIGPIPE:  # changes nothing
        assert (code, saved[-1:]) == (0, [num_steps]), run.text
        return told, 0.0
    if code == 0:
        assert moment in ("ending", "at exit") or num_steps in saved, run.text
        assert saved[-1:] == [num_steps], run.text
    elif number == signal.SIGINT:
        assert code == 130, run.text
        assert run.says("interrupted"), run.text
        assert not (run.folder / "run.lock").exists()
    else:
        assert code == 7, run.text
        assert run.says("told to stop"), run.text
        if run.step_is_told(2):
            assert run.says(f"told to stop: saved after step {saved[-1] - 1}"), run.text
        assert not (run.folder / "run.lock").exists()
    return told, took_s


ALL = [(number, moment, processes) for processes in (1, 4) for moment in MOMENTS for number in SIGNALS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment", "num_processes"),
    ALL,
    ids=[f"{signal.Signals(number).name} {moment} {processes}" for number, moment, processes in ALL],
)
def test_a_signal_ends_a_run_in_good_order(number: int, moment: str, num_processes: int, tmp_path: Path) -> None:
    told, took_s = check(number, moment, num_processes, tmp_path)
    assert took_s < ENDS_WITHIN_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), told


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_storm_of_signals_changes_nothing_after_the_first(num_processes: int, tmp_path: Path) -> None:
    with running(tmp_path, num_processes) as run:
        assert eventually(lambda: run.step_is_told(2), 120), run.text
        while run.process.poll() is None:
            for number in STOPPING:
                run.signal(number)
            time.sleep(0.04)
        assert run.wait() == 7, run.text
    assert run.says(f"told to stop: saved after step {committed(run.folder)[-1] - 1}")
    assert "Traceback" not in run.text


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("target", ["closed", "gone", "full"])
def test_output_that_cannot_be_written_costs_the_output_only(target: str, tmp_path: Path) -> None:
    config = training_config(tmp_path, num_stages=2, steps=12)
    command = [sys.executable, "-m", "rrfp_jax.commands.main", "train", "--config", str(config)]
    environment = of_child("JAX_PLATFORMS") | QUICK_TO_COMPILE | {"PYTHONUNBUFFERED": "", MARK: "output"}
    how = {"closed": ">&-", "gone": "| head -n 1 >&2", "full": ">/dev/full"}[target]
    script = f'{{ "$@"; echo "code $?" >&2; }} {how}'
    ended = subprocess.run(
        ["bash", "-c", script, "bash", *command, "--run-dir", str(tmp_path / "run")],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert "code 0" in ended.stderr.splitlines(), ended.stderr
    assert committed(tmp_path / "run")[-1:] == [12]
    assert not (tmp_path / "run" / "run.lock").exists()
    assert ("standard output cannot be written (" in ended.stderr) == (target != "closed"), ended.stderr
