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
EMULATE = ["emulate", "--num-stages", "2", "--num-microbatches", "2", "--durations-ms", "1,1,1"]


@pytest.mark.parametrize(
    ("library", "command"),
    [("rich", ["config"]), ("numpy", ["train"]), ("jax", ["train", "--config", "cpu/debug"]), ("jax", EMULATE)],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_while_libraries_are_loaded(library: str, command: list[str], tmp_path: Path) -> None:
    (tmp_path / f"{library}.py").write_text(INTERRUPTS_ITSELF)
    ended = ended_of(["-m", "rrfp_jax.commands.main", *command], tmp_path)
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
