"""Checkpoints in an object store: killed and cut off at every single request; the store itself is fsspec's in memory.

``tests/multiprocess/test_object_store.py`` has a server, and kills processes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optax
import pytest

from rrfp_jax.checkpoint import NotDone, Unusable, last_committed
from rrfp_jax.checkpoint import newest_step as newest_stored
from rrfp_jax.storage import STORE_FAILED, BucketPath, located
from tests.checkpoint.states import bits, newest_step, opened, pieces_of, restored, save, trained

PIECES = pieces_of([["layers.0"], ["head"]], optax.sgd(1e-3))
CHANGES = ("pipe_file", "put_file", "rm", "rm_file")


class Killed(BaseException):
    pass


class Requests:
    """Counts the requests that change something, and lets the one after ``last`` fail; after a kill all others too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int, fail: Callable[[Callable[[], Any]], Any]) -> None:
        self.num, call = 0, BucketPath._call

        def counted(path: BucketPath, method: str, *args: Any, **options: Any) -> Any:
            if method in CHANGES:
                self.num += 1
                if self.num == last + 1 or (self.num > last and fail is killed):
                    return fail(lambda: call(path, method, *args, **options))
            return call(path, method, *args, **options)

        monkeypatch.setattr(BucketPath, "_call", counted)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in a store, which is empty again afterwards."""
    monkeypatch.chdir(tmp_path)
    path = located("memory://bucket/run/checkpoints")
    yield path
    located("memory://bucket").remove_tree()  # type: ignore[attr-defined]


def test_steps_are_saved_kept_and_restored_as_on_a_disk(bucket: Path) -> None:
    checkpoints = opened(bucket, PIECES, keep=2)
    for step in (1, 2, 3):
        assert save(checkpoints, step, PIECES) is None
    assert [path.name for path in bucket.iterdir()] == ["step_00000002", "step_00000003"]
    assert bits(restored(checkpoints, PIECES)) == bits(trained(PIECES, 3))
    checkpoints.close()
    assert last_committed(Path(str(bucket))) == 3  # the name of a bucket stays one wherever it was a path
    assert not list(Path().glob("runs/**/*.bin"))


def test_what_lies_beside_or_is_damaged_is_named(bucket: Path) -> None:
    checkpoints = opened(bucket, PIECES, keep=3)
    for step in (1, 2):
        assert save(checkpoints, step, PIECES) is None
    files = list(bucket.glob("step_00000002/data-*/*/d/*"))
    files[0].write_bytes(b"x" * files[0].stat().st_size)
    with pytest.raises(Unusable, match="is damaged"):
        newest_stored(bucket)
    assert newest_step(checkpoints) == 1
    checkpoints.close()


def check_every_request(
    bucket: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[Callable[[], Any]], Any]
) -> list[int | None]:
    """Saves again and again with another request failing; the steps that were the newest afterwards."""
    outcomes: list[int | None] = []
    for last in range(100):
        checkpoints = opened(bucket, PIECES, keep=1)
        assert save(checkpoints, 2, PIECES) is None
        with monkeypatch.context() as patch:
            requests, failure = Requests(patch, last, fail), None
            try:
                failure = save(checkpoints, 3, PIECES)
            except Killed:
                failure = "killed"
        resumed = opened(bucket, PIECES, keep=2)
        for path in bucket.glob("*/commit.json"):
            resumed.find(int(path.parent.name.removeprefix("step_")))  # what looks committed is whole
        step = newest_step(resumed)
        assert step in (2, 3)
        assert step == 3 or failure is not None
        assert bits(restored(resumed, PIECES)) == bits(trained(PIECES, step))
        assert save(resumed, 4, PIECES) is None
        assert [entry.name for entry in bucket.iterdir()] == [f"step_0000000{step}", "step_00000004"]
        assert len(list(bucket.glob("*/data-*"))) == 2
        resumed.close()
        bucket.remove_tree()  # type: ignore[attr-defined]
        outcomes.append(step)
        if requests.num <= last:
            break
    return outcomes


def killed(request: Callable[[], Any]) -> Any:
    raise Killed


def lost(request: Callable[[], Any]) -> Any:
    raise OSError(5, f"{STORE_FAILED} (no answer)")


def answer_lost(request: Callable[[], Any]) -> Any:
    request()
    raise OSError(5, f"{STORE_FAILED} (no answer)")


@pytest.mark.parametrize("fail", [killed, lost, answer_lost])
def test_no_request_is_a_bad_one_to_fail(
    bucket: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[Callable[[], Any]], Any]
) -> None:
    outcomes = check_every_request(bucket, monkeypatch, fail)
    assert len(outcomes) > 8
    assert outcomes == sorted(outcomes)  # type: ignore[type-var]
    assert set(outcomes) == {2, 3}


def test_a_store_that_does_not_answer_is_no_empty_one(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = opened(bucket, PIECES)
    assert save(checkpoints, 1, PIECES) is None
    call = BucketPath._call

    def cut_off(path: BucketPath, method: str, *args: Any, **options: Any) -> Any:
        if method == "cat_file":
            lost(lambda: None)
        return call(path, method, *args, **options)

    monkeypatch.setattr(BucketPath, "_call", cut_off)
    with pytest.raises(NotDone, match=STORE_FAILED):
        checkpoints.newest()
    with pytest.raises(Unusable, match=STORE_FAILED):
        last_committed(bucket)
    monkeypatch.undo()
    assert newest_step(checkpoints) == 1
    checkpoints.close()
