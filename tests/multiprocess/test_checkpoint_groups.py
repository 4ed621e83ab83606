"""Processes save what they own, alone or together, and restore it in another layout."""

from pathlib import Path

import pytest

from rrfp_jax.checkpoint import Checkpoints
from tests.multiprocess.checkpoint_process import check, layout_of, start_ranks


@pytest.mark.slow
def test_two_processes_save_apart_and_together_and_restore_each_others(
    tmp_path: Path, runs_at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKPOINTS", str(runs_at / "checkpoints"))
    commands = (
        "save apart 1  restore together 1  save together 2  save together 3  restore mixed 3  save mixed 4  "
        "restore apart 4  full together 5  restore together 5"
    )
    processes = start_ranks(tmp_path, commands.split())
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)

    owners, pieces = layout_of("apart", 0, 1)  # one process reads what two wrote
    checkpoints = Checkpoints(runs_at / "checkpoints", owners)
    for step in (3, 4, 5):
        for (layers, _), state in zip(pieces, checkpoints.restore(checkpoints.find(step), pieces), strict=True):
            check(layers, state, step)
    (part,) = checkpoints.find(3).parts
    assert {path.name for path in part.glob("ocdbt.process_*")} == {"ocdbt.process_0", "ocdbt.process_1"}
    assert len(checkpoints.find(4).parts) == 3
    checkpoints.close()
