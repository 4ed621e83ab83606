"""Ctrl-C ends a command whenever it comes: while libraries are loaded, and where Python loses it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands.running import ROOT
from tests.environment import of_child

INTERRUPTS_ITSELF = """
import contextlib, os, signal, time
with contextlib.suppress(BaseException):  # as libraries of C++ may
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
raise ImportError("has gone on")
"""
LOSES_ONE = """
import os, signal, time
from rrfp_jax.commands.common.errors import run_command

class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

def main():
    Dying()
    time.sleep(20)
    return 0

run_command(main)
"""
HEARS = """
import os, signal, sys, time
from rrfp_jax.commands.common.errors import hear_no_more, stop_requests

signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
heard = []
requests = stop_requests()
requests.action = heard.append
child = os.fork()
if not child:
    time.sleep(20)
    os._exit(0)
time.sleep(0.3)
os.kill(child, signal.SIGUSR1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR1
os.kill(os.getpid(), signal.SIGHUP)
time.sleep(0.2)
assert not heard, heard
for _ in range(1000):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR2)
time.sleep(0.3)
assert heard == [signal.SIGTERM], heard
hear_no_more()
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGXCPU)
print("well")
"""
RRFP = ["rrfp_jax.commands.main"]
EMULATE = ["experiments.emulate", "--num-stages", "2", "--num-microbatches", "2", "--durations-ms", "1,1,1"]


@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("rich", [*RRFP, "config"]),
        ("numpy", [*RRFP, "train"]),
        ("jax", [*RRFP, "train", "--config", "cpu/debug"]),
        ("jax", EMULATE),
    ],
    ids=lambda value: value if isinstance(value, str) else ":".join(value[:2]),
)
def test_while_libraries_are_loaded(library: str, command: list[str], tmp_path: Path) -> None:
    (tmp_path / f"{library}.py").write_text(INTERRUPTS_ITSELF)
    ended = ended_of(["-m", *command], tmp_path)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_where_python_loses_it(tmp_path: Path) -> None:
    started_s = time.monotonic()
    ended = ended_of(["-c", LOSES_ONE], tmp_path)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")
    assert time.monotonic() - started_s < 15


def ended_of(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=of_child() | {"PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_first_request_to_stop_counts_and_a_forked_process_ends_by_its_own() -> None:
    ended = ended_of(["-c", HEARS], ROOT)
    assert (ended.returncode, ended.stdout) == (0, "well\n"), ended.stderr
