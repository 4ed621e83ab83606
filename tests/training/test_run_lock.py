"""The lock of a run directory: its holder lives, is killed, is somewhere else, or there are many takers at once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rrfp_jax.training._run_lock import LOCK, LockHeld, RunLock

HOLD = """
import sys, time
from pathlib import Path
from rrfp_jax.training._run_lock import LockHeld, RunLock
lock = RunLock(Path(sys.argv[1]), touch_s=0.05, stale_s=1.0)
try:
    lock.take()
except LockHeld as error:
    print("refused", error, flush=True)
else:
    print("holds", flush=True)
    sys.stdin.read()
    lock.release()
"""


def holding(directory: Path) -> subprocess.Popen[str]:
    """A process that holds the lock, or has been refused, until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def rewritten(directory: Path, **changes: object) -> None:
    path = directory / LOCK
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def lock_of(directory: Path) -> RunLock:
    return RunLock(directory, touch_s=0.05, stale_s=1.0)


def refusal(directory: Path) -> str:
    with pytest.raises(LockHeld) as held:
        lock_of(directory).take()
    return str(held.value)


def test_a_directory_is_made_and_left_as_it_was(tmp_path: Path) -> None:
    lock = lock_of(tmp_path / "runs" / "mine")
    lock.take()
    assert [path.name for path in (tmp_path / "runs" / "mine").iterdir()] == [LOCK]
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    lock_of(tmp_path).release()  # was never taken


def test_a_living_holder_is_named_and_a_killed_one_holds_up_nobody(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        try:
            assert said(process) == "holds\n"
            assert f"{tmp_path} is in use: process {process.pid} on " in refusal(tmp_path)
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.1)
            assert f"process {process.pid}" in refusal(tmp_path)  # it stands still, but lives
        finally:
            process.kill()
        process.wait()
    started_s = time.monotonic()
    lock = lock_of(tmp_path)
    lock.take()
    assert time.monotonic() - started_s < 0.5
    lock.check()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    process = holding(tmp_path)
    assert said(process) == "holds\n"
    process.kill()
    stat = Path(f"/proc/{process.pid}/stat")
    until_s = time.monotonic() + 10
    while ") Z " not in stat.read_text():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    lock = lock_of(tmp_path)
    lock.take()
    lock.release()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def test_another_process_of_the_same_number_is_not_the_holder(tmp_path: Path) -> None:
    dead = lock_of(tmp_path)
    dead._keep = lambda: None  # type: ignore[method-assign]
    dead.take()
    record = json.loads((tmp_path / LOCK).read_text())
    boot, space, start = record["process"].split()
    rewritten(tmp_path, process=f"{boot} {space} {int(start) - 1}")
    lock = lock_of(tmp_path)
    lock.take()
    with pytest.raises(LockHeld, match="was taken over by process"):
        dead.check()
    dead.release()
    lock.check()
    lock.release()


@pytest.mark.parametrize(
    "elsewhere",
    [
        lambda boot, space, start: f"another-boot {space} {start}",
        lambda boot, space, start: f"{boot} pid:[1] {start}",
        lambda boot, space, start: None,
    ],
    ids=["host", "container", "unknown"],
)
def test_from_elsewhere_the_heartbeat_decides(tmp_path: Path, elsewhere: Callable[..., str | None]) -> None:
    holder = lock_of(tmp_path)
    holder.take()
    process = elsewhere(*json.loads((tmp_path / LOCK).read_text())["process"].split())
    rewritten(tmp_path, process=process, host="far.away", pid=12)
    started_s = time.monotonic()
    assert "process 12 on far.away holds it since" in refusal(tmp_path)
    holder._released.set()  # as if it were killed
    assert holder._keeper is not None
    holder._keeper.join()
    os.utime(tmp_path / LOCK)
    started_s = time.monotonic()
    lock = lock_of(tmp_path)
    lock.take()
    assert 0.8 < time.monotonic() - started_s < 5
    lock.release()
    # One that has been dead for long holds up nobody.
    (tmp_path / LOCK).write_text(json.dumps({"token": "ab", "host": "far.away", "pid": 12}))
    os.utime(tmp_path / LOCK, (time.time() - 100,) * 2)
    started_s = time.monotonic()
    lock = lock_of(tmp_path)
    lock.take()
    assert time.monotonic() - started_s < 0.5
    lock.release()


@pytest.mark.parametrize("text", [b"", b"\0" * 20, b'{"token": "../x"}', b'{"token": "a", "pid": "1"}', b"[" * 9999])
def test_a_damaged_lock_counts_by_its_age(tmp_path: Path, text: bytes) -> None:
    (tmp_path / LOCK).write_bytes(text)
    started_s = time.monotonic()
    lock = lock_of(tmp_path)
    lock.take()
    assert time.monotonic() - started_s > 0.8
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    lock.take()
    (tmp_path / LOCK).unlink()
    until_s = time.monotonic() + 5
    while not (tmp_path / LOCK).exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    lock.check()
    lock.release()


def test_a_taker_that_dies_while_it_takes_over_holds_up_nobody(tmp_path: Path) -> None:
    old_s = (time.time() - 100,) * 2
    for name, token in ((LOCK, "aa"), (f"{LOCK}.aa", "bb"), (f"{LOCK}.bb", "cc")):
        (tmp_path / name).write_text(json.dumps({"token": token, "host": "h", "pid": 1}))
        os.utime(tmp_path / name, old_s)
    lock = lock_of(tmp_path)
    lock.take()
    lock.check()
    lock.release()
    assert list(tmp_path.iterdir()) == []


MANY = """
import json, os, sys, time
from pathlib import Path
from rrfp_jax.training import _run_lock as run_lock

def no_link(*_):
    raise PermissionError(1, "Operation not permitted")

def take(directory, start_s, result, end):
    lock = run_lock.RunLock(directory, touch_s=0.05, stale_s=30.0)
    while time.time() < start_s:
        pass
    try:
        lock.take()
        lock.check()
    except run_lock.LockHeld:
        os.write(result, b"-")
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os.write(result, b"!")
    else:
        os.write(result, b"+")
    os.read(end, 1)  # until all have tried
    os._exit(0)

root, kind, links = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if links == "no links":
    run_lock.os.link = no_link
for attempt in range(5):
    directory = root / str(attempt)
    directory.mkdir()
    if kind == "dead":
        (directory / run_lock.LOCK).write_text(json.dumps({"token": "ab", "host": "h", "pid": 1}))
        os.utime(directory / run_lock.LOCK, (time.time() - 100,) * 2)
    results, result = os.pipe()
    end, ends = os.pipe()
    start_s = time.time() + 0.02
    pids = []
    for _ in range(5):
        pids.append(os.fork())
        if not pids[-1]:
            os.close(ends)
            take(directory, start_s, result, end)
    said = b""
    while len(said) < 5:
        said += os.read(results, 6)
    os.close(ends)
    for pid in pids:
        os.waitpid(pid, 0)
    assert sorted(said) == sorted(b"+----"), said
    assert not list(directory.glob("*.tmp")), list(directory.iterdir())
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("links", ["links", "no links"])
@pytest.mark.parametrize("kind", ["free", "dead"])
def test_of_many_takers_at_once_one_succeeds(tmp_path: Path, kind: str, links: str) -> None:
    """In processes that are forked at one moment, again and again."""
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path), kind, links],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
