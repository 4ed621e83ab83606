"""The newcomer's page, command by command as it stands: from a folder of text to a model that has learned."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation.blocks import ROOT, blocks
from tests.environment import of_child

COMMANDS = [line for one in blocks("console") if one.path == ROOT / "docs" / "README.md" for line in one.commands]


def test_the_page_goes_from_text_to_a_model_that_writes():
    assert [command.split()[1] for command in COMMANDS] == ["tokenize", "tokenize", "train", "evaluate", "sample"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_command_works_and_the_model_learns(tmp_path: Path):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    environment = of_child("JAX_DISABLE_MOST_OPTIMIZATIONS") | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for command in COMMANDS:
        done = subprocess.run(
            ["bash", "-eu", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"[-6000:]
    rows = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "evaluation" not in row]
    unseen = [row["loss"] for row in rows if "evaluation" in row]
    assert len(losses) == 150
    assert losses[0] > 6.5
    assert sum(losses[-10:]) / 10 < 5.3
    assert len(unseen) == 3
    assert unseen[-1] < unseen[0]
