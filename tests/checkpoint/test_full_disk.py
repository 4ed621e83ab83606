"""A disk that is full ends the save, not the committed steps; the next save tries again."""

import errno
import logging
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optax
import pytest

from rrfp_jax.checkpoint import _checkpoints as module
from tests.checkpoint.states import bits, newest_step, opened, pieces_of, restored, save, trained

PIECES = pieces_of([["layers.0"], ["head"]], optax.adam(1e-3))


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [100, 1000])
def test_writes_that_the_system_refuses_end_the_save_only(
    tmp_path: Path, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = opened(tmp_path, PIECES)
    assert save(checkpoints, 1, PIECES) is None
    caplog.clear()
    with no_file_larger_than(num_bytes), caplog.at_level(logging.WARNING, "rrfp_jax"):
        failure = save(checkpoints, 2, PIECES)
    assert failure is not None
    assert "File too large" in failure
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"step 2 was not saved: {failure}"  # and none of Orbax's own
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000001"]
    assert bits(restored(checkpoints, PIECES)) == bits(trained(PIECES, 1))
    assert save(checkpoints, 3, PIECES) is None
    assert newest_step(checkpoints) == 3
    checkpoints.close()


def test_a_disk_that_is_full_at_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = opened(tmp_path, PIECES)
    assert save(checkpoints, 1, PIECES) is None

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module.Commit, "write", full)
        assert save(checkpoints, 2, PIECES) == "rank 0: No space left on device"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000001"]
    assert save(checkpoints, 2, PIECES) is None
    assert newest_step(checkpoints) == 2
    checkpoints.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs rights that this user has not")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_small_disk_fills_up(small_disk: Path) -> None:
    checkpoints = opened(small_disk / "run", PIECES, keep=1)
    assert save(checkpoints, 1, PIECES) is None
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for step in (2, 3):
        failure = save(checkpoints, step, PIECES)
        assert failure is not None
        assert "No space left" in failure
        assert bits(restored(checkpoints, PIECES)) == bits(trained(PIECES, 1))
    filler.unlink()
    assert save(checkpoints, 4, PIECES) is None
    assert bits(restored(checkpoints, PIECES)) == bits(trained(PIECES, 4))
    checkpoints.close()
