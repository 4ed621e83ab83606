"""The interface of a data set to the training loop, the threads that make batches ahead, and the contents of a
batch."""

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.waiting import result_of

Batch = dict[str, Any]
"""One step's data by the names of leaves.

A leaf is a NumPy array ``[num_microbatches, ...]``, or, where microbatches differ, a list with one entry for each:
its array ``[...]``; ``None`` where the microbatch lacks the leaf; ``jax.ShapeDtypeStruct`` where this process does not
read it.
"""
Reads = Mapping[str, Container[int]]
"""Names of leaves -> the microbatches of which a process reads them. It reads nothing else."""
BucketSpecs = dict[str, Any]
"""The leaves of a microbatch as ``jax.ShapeDtypeStruct``, those that it lacks left out."""


class BrokenData(ValueError):
    """Raised for data that cannot be read when it is needed; the message names the data in a sentence with the
    remedy."""

    sample: int | None = None
    """The number, within its step, of the sample to blame; set if a step can do without that sample."""


class Dataset(Protocol):
    """Any object that can make the batch of a given step.

    There is no iterator state: the step number is the position, so to resume is to ask for the next step.
    """

    def batch(self, step: int, reads: Reads | None = None) -> Batch:
        """Returns the batch of ``step`` (0, 1, ...), the same at every call; safe to call from any thread.

        Leaves that ``reads`` leaves out (None: none) need not be loaded: their shape is enough. But ``segments`` and
        ``patch_segments``, where there are such, must be whole: the metrics of a step count by them.
        """
        ...

    @property
    def buckets(self) -> Sequence[BucketSpecs] | None:
        """Returns all shapes that a microbatch can have; None: that of the first batch."""
        ...


@contextmanager
def prefetched(
    dataset: Dataset, start_step: int = 0, *, reads: Reads | None = None, num_threads: int = 1
) -> Iterator[Iterator[Batch]]:
    """Yields an endless iterator over the batches of ``start_step``, ``start_step + 1``, ..., made ahead of their use.

    ::

        with prefetched(dataset, start_step=step) as batches:
            for batch in batches: ...

    Each thread makes one batch; as many are ahead as there are threads, so more of them are of use where one batch
    takes longer than a step, as with images that must be decoded. All have ended when the ``with`` block is left, each
    after the batch that it was at. An error of ``dataset.batch`` is raised in place of its batch.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}: give at least 1")
    with ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="data") as executor:
        steps = count(start_step)
        upcoming: deque[Future[Batch]] = deque()

        def ahead() -> Iterator[Batch]:
            while True:
                while len(upcoming) <= num_threads:
                    upcoming.append(executor.submit(dataset.batch, next(steps), reads))
                yield result_of(upcoming.popleft())

        yield ahead()


@dataclass(frozen=True, kw_only=True)
class BatchContents:
    """How much of a batch is data, and how much is padding."""

    microbatches_without_images: int
    images: int
    patches: int
    """Patches of images, padding left out."""
    tokens: int
    """Positions of text, image features among them, padding left out."""
    patch_padding: float
    """Share of padding among all patches, 0 to 1."""
    token_padding: float
    """Share of padding among all positions, 0 to 1."""
    token_lengths: NDArray[np.int64] = field(repr=False, compare=False)
    """The length of every sequence within which tokens look at each other, in no particular order."""
    patch_lengths: NDArray[np.int64] = field(repr=False, compare=False)
    """The patches of every image."""


def contents_of(batch: Mapping[str, Any]) -> BatchContents:
    """Count the contents of a batch, over all its microbatches, from ``segments`` and ``patch_segments``.

    Both are whole in every process, whatever it reads. A batch without ``segments`` is text without padding.
    """
    segments = [leaf for leaf in batch.get("segments", batch.get("tokens", ())) if leaf is not None]
    used = [np.count_nonzero(leaf) if "segments" in batch else leaf.size for leaf in segments]
    num_positions = sum(leaf.size for leaf in segments)
    of_patches = list(batch.get("patch_segments", [None] * len(segments)))
    images = [leaf for leaf in of_patches if leaf is not None]
    num_patches, patches = sum(leaf.size for leaf in images), sum(np.count_nonzero(leaf) for leaf in images)
    return BatchContents(
        microbatches_without_images=len(of_patches) - len(images),
        images=sum(int(leaf.max(axis=1).sum()) for leaf in images),
        patches=int(patches),
        tokens=int(sum(used)),
        patch_padding=1 - patches / num_patches if num_patches else 0.0,
        token_padding=1 - sum(used) / num_positions if num_positions else 0.0,
        token_lengths=_lengths(segments, is_packed="segments" in batch),
        patch_lengths=_lengths(images, is_packed=True),
    )


def _lengths(leaves: Iterable[NDArray[Any]], *, is_packed: bool) -> NDArray[np.int64]:
    """Returns the lengths of the sequences in rows ``[rows, length]``; in packed rows, of each segment but 0."""
    found = [np.zeros(0, np.int64)]
    for leaf in leaves:
        rows, length = leaf.shape
        if not is_packed:
            found.append(np.full(rows, length))
            continue
        num_ids = int(leaf.max(initial=0)) + 1
        places = np.asarray(leaf, np.int64) + num_ids * np.arange(rows)[:, None]
        counts = np.bincount(places.ravel(), minlength=rows * num_ids).reshape(rows, num_ids)[:, 1:]
        found.append(counts[counts > 0])
    return np.concatenate(found)
