"""Run the project's commands as a user does, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_command(module: str, *arguments: object, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """``python -m experiments.<module>`` from the repository's root, without the tests' own JAX flags."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
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
