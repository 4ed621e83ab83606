"""``make setup`` speaks while it installs; the installer is a stand-in."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
[ "$1" = -c ] && { echo py311; exit; }
echo "Collecting numpy"; echo "  Downloading numpy.whl"; echo "note: unimportant"; echo "Collecting jax"
echo "$@" >>"$ASKED"
exit "$CODE"
"""


def make_setup(folder: Path, code: int) -> subprocess.CompletedProcess[str]:
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment = kept | {"CODE": str(code), "ASKED": str(folder / "asked")}
    command = ["make", f"VENV={folder}", "setup"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_it_says_how_long_it_takes_and_that_something_moves(tmp_path: Path) -> None:
    done = make_setup(tmp_path, 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"installing the pinned dependencies into {tmp_path} (about a minute)\n...\n"
    assert "install -c requirements/constraints-py311.txt -e ." in (tmp_path / "asked").read_text()
    assert make_setup(tmp_path, 0).stdout.startswith("make: Nothing to be done"), "it is installed already"


@pytest.mark.parametrize("code", [1, 2])
def test_what_pip_says_is_shown_where_it_fails(tmp_path: Path, code: int) -> None:
    done = make_setup(tmp_path, code)
    assert done.returncode != 0
    assert "note: unimportant" in done.stderr
    assert "error: pip could not install '.'; its output is above" in done.stderr
    assert not (tmp_path / ".installed").exists()
