"""Run the project's commands as a user does, in a process of their own."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.environment import of_child

ROOT = Path(__file__).parents[2]
_HEAVY = [
    "rrfp_jax.commands.training.assembly",
    "optax",
    "orbax.checkpoint",
    "rrfp_jax.observe.picture",
    "rrfp_jax.testing",
]
"""What takes a command longest to import."""


def run_command(module: str, *arguments: object, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """``python -m experiments.<module>`` from the repository's root, without the tests' own devices.

    The process is forked from one that has imported libraries and done nothing else, which spares each command seconds.
    """
    return _run_forked(_run, [f"experiments.{module}", *map(str, arguments)], ROOT, of_child(), timeout_s)


def run_code(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, forked alike, that works in ``folder``."""
    return _run_forked(_run_code, [code], folder, of_child() | environment, 240)


def _run_forked(
    target: Callable[[list[str]], None], command: list[str], folder: Path, environment: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as temporary:
        streams = [Path(temporary, name) for name in ("stdout", "stderr")]
        process = _with_libraries().Process(target=_start, args=(target, command, folder, environment, streams))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout_s)
        return subprocess.CompletedProcess(command, process.exitcode, *(stream.read_text() for stream in streams))


def run_afresh(
    module: str, *arguments: object, timeout_s: float = 240, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in a process that imports for itself."""
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", *map(str, arguments)],
        cwd=ROOT,
        env=of_child() | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def sentence(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that a command that refuses its input leaves on stderr."""
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@cache
def _with_libraries() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_HEAVY)
    return context


def _start(
    target: Callable[[list[str]], None],
    command: list[str],
    folder: Path,
    environment: dict[str, str],
    streams: list[Path],
) -> None:
    for descriptor, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    target(command)


def _run_code(command: list[str]) -> None:
    exec(compile(command[0], "<example>", "exec"), {"__name__": "__main__"})


def _run(command: list[str]) -> None:
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
