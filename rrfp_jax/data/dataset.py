"""What the training loop asks of a data set, and the thread that makes the next batch while the current step runs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

from numpy.typing import NDArray

from rrfp_jax.waiting import result_of

Batch = dict[str, NDArray[Any]]
"""One step's data: leaf name -> NumPy array ``[num_microbatches, microbatch_size, ...]``."""


class Dataset(Protocol):
    """Any object that can make the batch of a given step.

    There is no iterator state: the step number is the position, so to resume is to ask for the next step.
    """

    def batch(self, step: int) -> Batch:
        """The batch of ``step`` (0, 1, ...), the same at every call; safe to call from any thread."""
        ...


@contextmanager
def prefetched(dataset: Dataset, start_step: int = 0) -> Iterator[Iterator[Batch]]:
    """An endless iterator over the batches of ``start_step``, ``start_step + 1``, ..., made one step ahead.

    ::

        with prefetched(dataset, start_step=step) as batches:
            for batch in batches: ...

    One background thread makes them; it has ended when the ``with`` block is left, after at most one more batch.
    What ``dataset.batch`` raises is raised where its batch would have come.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="data") as executor:
        yield _one_ahead(dataset, start_step, executor)


def _one_ahead(dataset: Dataset, start_step: int, executor: ThreadPoolExecutor) -> Iterator[Batch]:
    upcoming = executor.submit(dataset.batch, start_step)
    for step in count(start_step + 1):
        current, upcoming = upcoming, executor.submit(dataset.batch, step)
        yield result_of(current)
