"""Batches that are read with patience, and taken or refused by all processes alike."""

import errno
import os
import threading
from collections.abc import Callable, Container
from typing import Any

import pytest

from rrfp_jax.data import BrokenData
from rrfp_jax.training import batches as module
from rrfp_jax.training.batches import AgreedBatches


class Samples:
    """Four samples in each batch, some of which cannot be read by this process."""

    def __init__(self, bad: dict[int, set[int]] | None = None, error: Exception | None = None, times: int = 0) -> None:
        self._bad, self._error, self._left = bad or {}, error, times
        self.num_tries = 0

    def batch(self, step: int, _: Any, left_out: Container[int] = ()) -> dict[str, Any]:
        self.num_tries += 1
        if self._left:
            self._left -= 1
            assert self._error is not None
            raise BrokenData("a file cannot be read") from self._error
        for sample in self._bad.get(step, ()):
            if sample not in left_out:
                error = BrokenData(f"sample {sample} is broken")
                error.sample = sample
                raise error
        return {"counts": [int(sample not in left_out) for sample in range(4)]}


class Together:
    """Gathers as ranks of a run do, each on a thread of its own."""

    def __init__(self, num_ranks: int) -> None:
        self._told: dict[int, Any] = {}
        self._barrier = threading.Barrier(num_ranks)

    def gather(self, rank: int) -> Callable[[str, Any], dict[int, Any]]:
        def gather(_: str, data: Any) -> dict[int, Any]:
            self._told[rank] = data
            self._barrier.wait(10)
            told = dict(self._told)
            self._barrier.wait(10)
            return told

        return gather

    def all_do(self, read: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self._barrier.parties

        def run(rank: int) -> None:
            try:
                results[rank] = read(rank)
            except BrokenData as error:
                results[rank] = str(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results


def alone(_: str, data: Any) -> dict[int, Any]:
    return {0: data}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("error", "times", "num_tries"),
    [
        (OSError(errno.ESTALE, os.strerror(errno.ESTALE)), 2, 3),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), 3, 4),
        (OSError(errno.EIO, "input/output error"), 9, 4),
        (OSError("image file is truncated"), 9, 1),  # as Pillow says it: no error of the system
        (ValueError("not a number"), 9, 1),
    ],
)
def test_what_the_system_refuses_is_tried_again_a_few_times(error: Exception, times: int, num_tries: int) -> None:
    samples = Samples(error=error, times=times)
    batches = AgreedBatches(samples, alone)
    if times > 3 or num_tries == 1:
        with pytest.raises(BrokenData, match="a file cannot be read"):
            batches.batch(0, None)
    else:
        assert batches.batch(0, None) == {"counts": [1, 1, 1, 1]}
    assert samples.num_tries == num_tries


def test_samples_that_one_process_cannot_read_are_left_out_by_all() -> None:
    together = Together(3)
    bad = [{0: {1}}, {}, {0: {3}, 1: {0}}]
    ranks = [AgreedBatches(Samples(bad[rank]), together.gather(rank), max_bad=3) for rank in range(3)]
    assert together.all_do(lambda rank: ranks[rank].batch(0, None)) == [{"counts": [1, 0, 1, 0]}] * 3
    assert together.all_do(lambda rank: ranks[rank].batch(1, None)) == [{"counts": [0, 1, 1, 1]}] * 3
    assert together.all_do(lambda rank: ranks[rank].batch(2, None)) == [{"counts": [1, 1, 1, 1]}] * 3
    assert [rank.num_bad for rank in ranks] == [3, 3, 3]


@pytest.mark.parametrize(
    ("max_bad", "words"),
    [(0, "rank 2: sample 1 is broken"), (1, "2 samples could not be read, more than max_bad_samp")],
)
def test_all_processes_end_alike_where_one_cannot_go_on(max_bad: int, words: str) -> None:
    together = Together(3)
    bad = [{}, {}, {0: {3, 1}}]
    ranks = [AgreedBatches(Samples(bad[rank]), together.gather(rank), max_bad=max_bad) for rank in range(3)]
    for told in together.all_do(lambda rank: ranks[rank].batch(0, None)):
        assert words in told


def test_those_read_ahead_end_where_one_cannot_be_read() -> None:
    batches = AgreedBatches(Samples({3: {0}}), alone)
    with batches.ahead(1, {}, num_threads=2) as ahead:
        assert [next(ahead), next(ahead)] == [{"counts": [1, 1, 1, 1]}] * 2
        with pytest.raises(BrokenData, match="sample 0 is broken"):
            next(ahead)


def test_a_defect_of_a_data_set_is_named_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    class Defective:
        def batch(self, *_: Any) -> None:
            raise KeyError("tokens")

    with pytest.raises(BrokenData, match="KeyError: 'tokens'"):
        AgreedBatches(Defective(), alone).batch(4, None)
    assert "the batch of step 4 cannot be made" in caplog.text
