"""A data set of one's own, of which some elements cannot be read; tests name it in configurations."""

import errno
import os
from collections.abc import Sequence

import numpy as np


class Elements:
    """Elements of eight tokens."""

    def __init__(self, broken: Sequence[int] = (), stale: Sequence[int] = (), weight: float = 1.0) -> None:
        self._broken, self._stale, self._weight = set(broken), set(stale), weight

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        if number in self._stale:
            self._stale.remove(number)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        if number in self._broken:
            raise ValueError("it is torn")
        ids = (np.arange(8) * 3 + number) % 90
        return {"tokens": ids, "targets": ids + 1, "weights": np.full(8, self._weight)}


class Stream:
    """The same elements one after the other, from iterators with a state; tells which it draws."""

    def __init__(self, num: int = 30) -> None:
        self._elements, self._num, self._next = Elements(), num, 0

    def __iter__(self) -> "Stream":
        return Stream(self._num)

    def __next__(self) -> dict[str, np.ndarray]:
        if self._next == self._num:
            raise StopIteration
        self._next += 1
        print(f"drew {self._next - 1}", flush=True)
        return self._elements[self._next - 1]

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        self._next = state
