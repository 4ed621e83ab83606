"""The reader that works one step ahead."""

import threading
from itertools import islice

import numpy as np
import pytest

from rrfp_jax.data import prefetched


class Counting:
    """A data set whose batch says its step; fails at one step if asked to."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.steps = []
        self.reads = []

    buckets = None

    def batch(self, step, reads=None):
        self.steps.append(step)
        self.reads.append(reads)
        if step == self.fails_at:
            raise ValueError(f"no batch {step}")
        return {"step": np.array(step)}


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def test_batches_come_in_order_from_any_step():
    with prefetched(Counting(), start_step=5) as batches:
        assert [int(batch["step"]) for batch in islice(batches, 4)] == [5, 6, 7, 8]


def test_it_reads_one_step_ahead_and_leaves_no_thread():
    data = Counting()
    with prefetched(data) as batches:
        next(batches)
        assert data_threads()
    assert data.steps == [0, 1]
    assert not data_threads()


def test_an_error_comes_where_its_batch_would_have():
    with prefetched(Counting(fails_at=2)) as batches:
        assert len(list(islice(batches, 2))) == 2
        with pytest.raises(ValueError, match="no batch 2"):
            next(batches)
    assert not data_threads()


def test_it_passes_on_what_is_read():
    data, reads = Counting(), {"step": range(2)}
    with prefetched(data, reads=reads) as batches:
        next(batches)
    assert data.reads == [reads, reads]


def test_several_threads_make_batches_at_the_same_time_and_keep_their_order():
    both = threading.Barrier(2, timeout=60)

    class Paired(Counting):
        def batch(self, step, reads=None):
            if step < 4:
                both.wait()  # breaks where one thread is to make both
            return super().batch(step, reads)

    with prefetched(Paired(), num_threads=2) as batches:
        assert [int(batch["step"]) for batch in islice(batches, 6)] == list(range(6))
    assert not data_threads()
    with pytest.raises(ValueError, match="num_threads is 0"), prefetched(Counting(), num_threads=0):
        pass
