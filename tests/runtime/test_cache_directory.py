"""Entries of the cache come back whole or not at all, whoever writes at the same time."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rrfp_jax.runtime.compile_cache import CompileCache

WRITER = """
import sys
from pathlib import Path
from rrfp_jax.runtime.compile_cache import CompileCache

cache, own = CompileCache(Path(sys.argv[1]), 20_000), int(sys.argv[2])
for turn in range(200):
    number = (turn * 7 + own) % 40
    cache.put(f"key {number}", bytes([number]) * 1000)
    for other in range(0, 40, 9):
        value = cache.get(f"key {other}")
        assert value in (None, bytes([other]) * 1000), other
assert cache.problem is None, cache.problem
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "when needed"


def test_keeps_what_it_is_given_for_its_owner_alone(path: Path) -> None:
    cache = CompileCache(path, 10**6)
    assert cache.get("a") is None
    cache.put("a", b"one")
    cache.put("b", b"")
    assert CompileCache(path, 10**6).get("a") == b"one"
    assert cache.get("b") == b""
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_damaged_entry_is_a_miss_and_goes(path: Path) -> None:
    cache = CompileCache(path, 10**6)
    cache.put("a", b"x" * 1000)
    (entry,) = path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert cache.get("a") is None
    assert not list(path.iterdir())
    cache.put("a", b"whole")
    assert cache.get("a") == b"whole"


def test_what_was_used_last_stays(path: Path) -> None:
    cache = CompileCache(path, 10_000)
    for number in range(9):
        cache.put(str(number), b"x" * 1000)
    for age, entry in enumerate(sorted(path.iterdir(), reverse=True)):
        os.utime(entry, (0, time.time() - 1000 - age))  # "8" is the youngest
    assert cache.get("0") is not None  # and "0" counts as used now
    cache.put("9", b"x" * 1000)
    cache.put("10", b"x" * 1000)
    kept = [number for number in range(11) if cache.get(str(number)) is not None]
    assert sum(entry.stat().st_size for entry in path.iterdir()) <= 10_000
    assert {0, 8, 9, 10} <= set(kept)
    assert 1 not in kept


def test_an_entry_above_the_bound_is_not_kept(path: Path) -> None:
    cache = CompileCache(path, 100)
    cache.put("a", b"x" * 101)
    assert cache.get("a") is None
    assert cache.problem is None


def test_what_a_killed_writer_left_goes_after_a_while(path: Path) -> None:
    path.mkdir(parents=True)
    old, new = path / "old.tmp", path / "new.tmp"
    old.write_bytes(b"")
    new.write_bytes(b"")
    os.utime(old, (0, time.time() - 7200))
    CompileCache(path, 10**6).put("a", b"one")
    assert not old.exists()
    assert new.exists()


def test_a_directory_that_cannot_be_made_is_a_problem_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CompileCache(tmp_path / "file" / "below", 10**6)
    cache.put("a", b"one")
    assert isinstance(cache.problem, OSError)
    assert cache.get("a") is None


def test_several_processes_write_and_read_at_once(path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number)]) for number in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert not list(path.glob("*.tmp"))
    assert sum(entry.stat().st_size for entry in path.iterdir()) <= 3 * 20_000
