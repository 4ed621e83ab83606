"""Large arrays are written in chunks, many arrays in several transactions."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest
import tensorstore as ts

from rrfp_jax.checkpoint import _part_writer, _reader
from rrfp_jax.checkpoint._part_writer import chunk_shape
from tests.checkpoint.states import LAYERS, bits, opened, pieces_of, restored, save, trained


def test_chunks_tile_the_piece_and_are_small_enough() -> None:
    assert chunk_shape((4096, 4096), 4, 16 << 20) == [2048, 2048]
    assert chunk_shape((6, 10), 4, 40) == [3, 1]
    assert chunk_shape((7,), 4, 8) == [1]
    assert chunk_shape((), 4, 8) == []


def test_chunks_and_batches_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_part_writer, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(_part_writer, "_BATCH_BYTES", 200)
    monkeypatch.setattr(_reader, "_BATCH_BYTES", 200)
    pieces = pieces_of([LAYERS], optax.adam(1e-3))
    checkpoints = opened(tmp_path, pieces)
    assert save(checkpoints, 1, pieces) is None
    assert bits(restored(checkpoints, pieces)) == bits(trained(pieces, 1))
    (part,) = checkpoints.find(1).parts
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{part}/", "path": "head.params.table"}}
    array = ts.open(spec).result()
    assert array.shape == (16, 6)
    assert np.prod(array.chunk_layout.read_chunk.shape) * 4 <= 64
    checkpoints.close()


NO_LOCKS = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>
int flock(int fd, int operation) { errno = ENOSYS; return -1; }
int link(const char *from, const char *to) { errno = EPERM; return -1; }
static int answer(int fd, int command, void *argument) {
    if (command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW) {
        errno = ENOSYS;
        return -1;
    }
    return syscall(SYS_fcntl, fd, command, argument);
}
int fcntl(int fd, int command, ...) {
    va_list list; va_start(list, command); void *argument = va_arg(list, void *); va_end(list);
    return answer(fd, command, argument);
}
int fcntl64(int fd, int command, ...) {
    va_list list; va_start(list, command); void *argument = va_arg(list, void *); va_end(list);
    return answer(fd, command, argument);
}
"""
"""What a file system without locks and without links answers."""
SAVES = """
import sys
from pathlib import Path
import optax
from tests.checkpoint.states import LAYERS, bits, opened, pieces_of, restored, save, trained
from rrfp_jax.data._pieces import try_lock
from rrfp_jax.training._run_lock import RunLock

folder, pieces = Path(sys.argv[1]), pieces_of([LAYERS], optax.adam(1e-3))
lock = RunLock(folder / "run")
lock.take()
checkpoints = opened(folder, pieces)
assert save(checkpoints, 1, pieces) is None
assert bits(restored(checkpoints, pieces)) == bits(trained(pieces, 1))
checkpoints.close()
lock.release()
with open(folder / "lock", "w") as file:
    try_lock(file, "name another folder")
"""


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler on Linux")
def test_a_file_system_without_locks_takes_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "no_locks.c").write_text(NO_LOCKS)
    library = tmp_path / "no_locks.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "no_locks.c"], check=True)
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", SAVES, tmp_path],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr.splitlines()[-1] == (
        f"ValueError: the file system of {tmp_path / 'lock'} has no file locks (Function not implemented), which keep "
        "two processes from writing there at once: name another folder"
    )
