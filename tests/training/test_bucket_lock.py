"""The lock of a run in an object store, here fsspec's in memory; ``tests/multiprocess`` has takers on a server."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrfp_jax.storage import STORE_FAILED, BucketPath, located
from rrfp_jax.training._run_lock import LOCK, BucketLock, LockHeld, RunLock, lock_of


@pytest.fixture
def bucket() -> Iterator[Path]:
    path = located("memory://locks/run")
    yield path
    path.remove_tree()  # type: ignore[attr-defined]


def quick_lock(directory: Path) -> BucketLock:
    return BucketLock(directory, touch_s=0.05, stale_s=1.0)


def numbers(directory: Path) -> list[str]:
    return [path.name for path in (directory / LOCK).iterdir()]


def rewritten(directory: Path, number: str, **changes: object) -> None:
    path = directory / LOCK / number
    path.write_bytes(json.dumps(json.loads(path.read_bytes()) | changes).encode())


def end(lock: RunLock) -> None:
    """As if its process were killed."""
    lock._released.set()
    assert lock._keeper is not None
    lock._keeper.join()


def refusal(directory: Path) -> str:
    with pytest.raises(LockHeld) as held:
        quick_lock(directory).take()
    return str(held.value)


def test_a_second_run_is_refused_and_the_next_takes_another_number(bucket: Path, tmp_path: Path) -> None:
    assert type(lock_of(tmp_path)) is RunLock
    first = lock_of(bucket)
    first.take()
    assert first.is_held
    assert f"{bucket} is in use: process " in refusal(bucket)
    first.check()
    first.release()
    first.release()
    second = quick_lock(bucket)
    second.take()
    assert numbers(bucket) == ["00000002"]
    with pytest.raises(LockHeld, match="was taken over"):
        first.check()
    time.sleep(0.12)
    second.check()
    second.release()


def test_a_dead_holder_of_this_host_holds_up_nobody(bucket: Path) -> None:
    dead = quick_lock(bucket)
    dead.take()
    end(dead)
    boot, space, start = json.loads((bucket / LOCK / "00000001").read_bytes())["process"].split()
    rewritten(bucket, "00000001", process=f"{boot} {space} {int(start) - 1}")
    started_s = time.monotonic()
    lock = quick_lock(bucket)
    lock.take()
    assert time.monotonic() - started_s < 0.5
    with pytest.raises(LockHeld, match="seemed to be dead"):
        dead.check()
    lock.check()
    lock.release()


def test_from_elsewhere_the_heartbeat_decides(bucket: Path) -> None:
    holder = quick_lock(bucket)
    holder._own = type(holder._own)(**{**vars(holder._own), "host": "far.away", "pid": 12, "process": None})
    holder.take()
    assert "process 12 on far.away holds it since" in refusal(bucket)
    end(holder)
    started_s = time.monotonic()
    lock = quick_lock(bucket)
    lock.take()
    assert 0.5 < time.monotonic() - started_s < 5
    assert not holder._touch()  # should it wake up
    lock.release()


def test_a_slow_taker_with_an_old_look_finds_the_higher_number(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, newest = quick_lock(bucket), BucketLock._newest
    for _ in range(2):
        lock = quick_lock(bucket)
        lock.take()
        lock.release()
    holder = quick_lock(bucket)
    holder.take()
    looks: list[Any] = [None]  # before there was any
    monkeypatch.setattr(BucketLock, "_newest", lambda self: looks.pop() if looks else newest(self))
    with pytest.raises(LockHeld):
        slow.take()
    assert not looks
    assert numbers(bucket) == ["00000003"]
    holder.check()
    holder.release()


def test_a_lock_that_somebody_removes_is_made_again(bucket: Path) -> None:
    lock = quick_lock(bucket)
    lock.take()
    (bucket / LOCK / "00000001").unlink()
    until_s = time.monotonic() + 5
    while not (bucket / LOCK).exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    lock.check()
    lock.release()


def test_an_answer_that_is_lost_is_no_other_holder(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, is_lost = BucketPath._call, [True, True]

    def once_lost(path: BucketPath, method: str, *args: Any, **options: Any) -> Any:
        result = call(path, method, *args, **options)
        if is_lost and path.parent.name == LOCK and method in ("pipe_file", "cat_file"):
            is_lost.pop()
            raise OSError(5, f"{STORE_FAILED} (no answer)")
        return result

    monkeypatch.setattr(BucketPath, "_call", once_lost)
    lock = quick_lock(bucket)
    with pytest.raises(OSError, match="no answer"):
        lock.take()  # neither was it told that the lock is made, nor could it look
    lock.take()
    assert numbers(bucket) == ["00000001"]
    lock.check()
    lock.release()
