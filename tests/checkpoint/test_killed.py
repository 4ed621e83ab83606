"""A process killed at any moment: emulated at every single change of the file system, and for real elsewhere.

``tests/multiprocess/test_checkpoint_kill.py`` kills processes.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax
import pytest

from rrfp_jax.checkpoint._part_writer import PartWriter
from tests.checkpoint.states import bits, newest_step, opened, pieces_of, restored, save, trained

PIECES = pieces_of([["layers.0"], ["head"]], optax.sgd(1e-3))
CHANGES = ("open", "mkdir", "link", "replace", "fsync", "unlink", "rmdir", "remove")


class Killed(BaseException):
    pass


class Life:
    """Counts changes of the file system, and ends at one of them: from there on nothing is changed any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: float) -> None:
        self.num_changes, self.last = 0, last
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if change.__name__ == "open" and not (args[1] & (os.O_WRONLY | os.O_RDWR)):
                return change(*args, **kwargs)
            if self.num_changes >= self.last:
                raise Killed
            self.num_changes += 1
            return change(*args, **kwargs)

        return counted


@pytest.fixture
def quick_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax's files come out of a cupboard: what it writes while it is killed lies outside of committed steps."""
    write, finish = PartWriter.write, PartWriter.finish

    def cupboard_of(folder: Path) -> Path:
        return tmp_path / f"cupboard-{folder.parent.name}"

    def written(self: PartWriter, folder: Path, arrays: Any) -> None:
        pass

    def finished(self: PartWriter, folder: Path, arrays: Any) -> dict[str, str]:
        cupboard = cupboard_of(folder)
        if cupboard.exists() and folder.parent.name == "step_00000003":
            shutil.copytree(cupboard / "data", folder)
            sums: dict[str, str] = json.loads((cupboard / "sums").read_text())
        else:
            write(self, folder, arrays)
            sums = finish(self, folder, arrays)
            shutil.copytree(folder, cupboard / "data", dirs_exist_ok=True)
            (cupboard / "sums").write_text(json.dumps(sums))
        return sums

    monkeypatch.setattr(PartWriter, "write", written)
    monkeypatch.setattr(PartWriter, "finish", finished)


def test_no_change_of_the_file_system_is_a_bad_one_to_be_killed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_parts: None
) -> None:
    origin = tmp_path / "origin"
    checkpoints = opened(origin, PIECES, keep=2)
    for step in (3, 1, 2):  # what comes after step 1 is removed, but is in the cupboard
        assert save(checkpoints, step, PIECES) is None
    checkpoints.close()
    outcomes = []
    for last in range(1000):
        directory = tmp_path / f"killed-{last}"
        shutil.copytree(origin, directory)
        checkpoints = opened(directory, PIECES, keep=2)
        with monkeypatch.context() as patch:
            life = Life(patch, last)
            try:
                assert save(checkpoints, 3, PIECES) is None
            except Killed:
                outcome = "killed"
            else:
                outcome = "done"
        resumed = opened(directory, PIECES, keep=2)
        for path in directory.glob("*/commit.json"):
            resumed.find(int(path.parent.name.removeprefix("step_")))  # what looks committed is whole
        step = newest_step(resumed)
        assert step in (2, 3)
        assert bits(restored(resumed, PIECES)) == bits(trained(PIECES, step))
        # Leftovers are gone, and the next save ends as if nothing had happened.
        assert save(resumed, 4, PIECES) is None
        assert sorted(entry.name for entry in directory.iterdir()) == [f"step_0000000{step}", "step_00000004"]
        resumed.close()
        shutil.rmtree(directory)
        outcomes.append(step)
        if outcome == "done":
            assert life.num_changes <= last
            break
    assert len(outcomes) > 15
    assert outcomes == sorted(outcomes)  # once committed, always committed
    assert set(outcomes) == {2, 3}
