"""What the training loop asks of a data set, and the threads that make batches ahead of it."""

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

from rrfp_jax.waiting import result_of

Batch = dict[str, Any]
"""One step's data by the names of leaves.

A leaf is a NumPy array ``[num_microbatches, ...]``, or, where microbatches differ, a list with one entry for each:
its array ``[...]``; ``None`` where the microbatch lacks the leaf; ``jax.ShapeDtypeStruct`` where this process does not
read it.
"""
Reads = Mapping[str, Container[int]]
"""Names of leaves -> the microbatches of which a process reads them. It reads nothing else."""
Bucket = dict[str, Any]
"""The leaves of a microbatch as ``jax.ShapeDtypeStruct``, those that it lacks left out."""


class BrokenData(ValueError):
    """What the data set holds cannot be read, which shows only when it is needed: the message names it, in a sentence
    with the remedy."""

    sample: int | None = None
    """The number, within its step, of the sample to blame; set if a step can do without that sample."""


class Dataset(Protocol):
    """Any object that can make the batch of a given step.

    There is no iterator state: the step number is the position, so to resume is to ask for the next step.
    """

    def batch(self, step: int, reads: Reads | None = None) -> Batch:
        """The batch of ``step`` (0, 1, ...), the same at every call; safe to call from any thread.

        What ``reads`` leaves out (None: nothing) need not be loaded: its shape is enough. But ``segments`` and
        ``patch_segments``, where there are such, must be whole: the metrics of a step count by them.
        """
        ...

    @property
    def buckets(self) -> Sequence[Bucket] | None:
        """All shapes that a microbatch can have; None: that of the first batch."""
        ...


@contextmanager
def prefetched(
    dataset: Dataset, start_step: int = 0, *, reads: Reads | None = None, num_threads: int = 1
) -> Iterator[Iterator[Batch]]:
    """An endless iterator over the batches of ``start_step``, ``start_step + 1``, ..., made ahead of their use.

    ::

        with prefetched(dataset, start_step=step) as batches:
            for batch in batches: ...

    Each thread makes one batch; as many are ahead as there are threads, so more of them are of use where one batch
    takes longer than a step, as with images that must be decoded. All have ended when the ``with`` block is left, each
    after the batch that it was at. What ``dataset.batch`` raises is raised where its batch would have come.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}: give at least 1")
    with ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="data") as executor:
        yield _ahead(dataset, start_step, reads, executor, num_threads)


def _ahead(
    dataset: Dataset, start_step: int, reads: Reads | None, executor: ThreadPoolExecutor, num_ahead: int
) -> Iterator[Batch]:
    steps = count(start_step)
    upcoming: deque[Future[Batch]] = deque()
    while True:
        while len(upcoming) <= num_ahead:
            upcoming.append(executor.submit(dataset.batch, next(steps), reads))
        yield result_of(upcoming.popleft())
