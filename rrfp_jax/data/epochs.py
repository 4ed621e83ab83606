"""The order of a data set that is gone through again and again, each time in another order, by the step's number alone.

Items are counted over the whole run: item ``n`` of the run is item ``order(n // num)[n % num]`` of the data set, and
step ``s`` takes ``batch_size`` of them from ``s * batch_size`` on. A step may therefore span two epochs, and nothing is
left out.

An order is never written down: ``order(epoch)[place]`` is computed from the place, in the same memory for ten items and
for ten billion. The place's bits are cut into two halves, and by turns each half is changed by a keyed function of the
other (a Feistel network). That permutes the numbers of so many bits, whatever the function; the keys come from (seed,
epoch). With as few bits as hold ``num``, more than half of these numbers are below it; what is not is put through again
until it is (cycle walking: Black and Rogaway 2002), which permutes the numbers below ``num``.
"""

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_LEAST_BITS = 5
"""With fewer, some orders of a handful of items would come more often than others."""
_BYTES_PER_KEY = 8
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Odd numbers that mix well (Steele, Lea and Flood 2014)."""


def items_of(step: int, *, batch_size: int, num: int, seed: int) -> NDArray[np.int64]:
    """Which of ``num`` items step ``step`` takes, ``[batch_size]``. Raises ValueError for a negative step."""
    check_step(step)
    return items_at(np.arange(step * batch_size, (step + 1) * batch_size), num=num, seed=seed)


def comes_again(step: int, batch_size: int, num: int) -> NDArray[np.bool_]:
    """Returns which of a step's items, ``[batch_size]``, have come before in the run, as all have after the first
    ``num``."""
    return np.arange(step * batch_size, (step + 1) * batch_size) >= num


def check_step(step: int) -> None:
    """Raises ValueError where it is negative."""
    if step < 0:
        raise ValueError(f"step is {step}: give 0 or more")


def items_at(numbers: NDArray[np.int64], *, num: int, seed: int, source: int = 0) -> NDArray[np.int64]:
    """Which of ``num`` items come as these of the run, counted from 0, ``[len(numbers)]``.

    ``source`` tells data sets apart that are gone through beside each other, so that equally long ones differ.
    """
    epochs, places = np.divmod(numbers, num)
    different, which = np.unique(epochs, return_inverse=True)
    keys = np.array([_keys(seed, source, epoch) for epoch in different.tolist()])[which].T
    return _permuted(places.astype(np.uint64), keys, num).astype(np.int64)


def _permuted(items: NDArray[np.uint64], keys: NDArray[np.uint64], num: int) -> NDArray[np.uint64]:
    """``items`` ``[n]``, changed in place, with the ``keys`` ``[rounds, n]`` of each."""
    num_bits = max(_LEAST_BITS, (num - 1).bit_length())
    outside = np.arange(len(items))
    while len(outside):
        items[outside] = _passed_once(items[outside], keys[:, outside], num_bits)
        outside = outside[items[outside] >= num]
    return items


def _passed_once(items: NDArray[np.uint64], keys: NDArray[np.uint64], num_bits: int) -> NDArray[np.uint64]:
    """A permutation of the numbers of so many bits, for each set of keys."""
    low = num_bits // 2
    halves = [items & np.uint64((1 << low) - 1), items >> np.uint64(low)]
    unused = [np.uint64(64 - low), np.uint64(64 - (num_bits - low))]
    for number, key in enumerate(keys):
        one, other = number % 2, 1 - number % 2
        mixed = (halves[other] ^ key) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _SECOND
        halves[one] = halves[one] ^ (mixed >> unused[one])
    return (halves[1] << np.uint64(low)) | halves[0]


@lru_cache(maxsize=1024)
def _keys(seed: int, source: int, epoch: int) -> NDArray[np.uint64]:
    # A digest is the same for ever, so a run that resumes with another NumPy sees the same order.
    text = f"{seed} {source} {epoch}".encode()
    digest = hashlib.blake2b(text, digest_size=_ROUNDS * _BYTES_PER_KEY).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)
