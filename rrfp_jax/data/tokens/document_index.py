"""Where documents end: a binary search in a file that is never read whole.

Some thousand entries, evenly apart, are read at first use and kept; they bound the search to one block of neighbours,
which one read brings.
"""

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.tokens.header import END_BYTES

_NUM_KEPT = 4096
_BLOCK = 4096
"""Entries that one read brings; a longer stretch is halved first."""
_LITTLE_ENDIAN = np.dtype("<u8")

Read = Callable[[int, int], bytes]
"""The bytes of the file from one offset to another."""


class DocumentIndex:
    """The ends of ``num_documents`` documents, ascending, int64; safe to use from any thread."""

    def __init__(self, read: Read, num_documents: int) -> None:
        self._read, self.num_documents = read, num_documents
        self._stride = max(1, -(-num_documents // _NUM_KEPT))
        self._kept: NDArray[np.int64] | None = None
        self._lock = threading.Lock()

    def ends(self, first: int, stop: int) -> NDArray[np.int64]:
        """The ends of documents ``first`` to ``stop - 1``."""
        data = self._read(first * END_BYTES, stop * END_BYTES)
        return np.frombuffer(data, _LITTLE_ENDIAN).astype(np.int64)

    def at(self, position: int) -> int:
        """The number of the document that holds the token at ``position``, that is, of ends not behind it."""
        kept = self._kept_ends()
        low = int(np.searchsorted(kept, position, side="right")) * self._stride
        # Entry low - 1 is kept and at most ``position``; entry low + stride - 1, if any, is larger.
        high = min(low + self._stride, self.num_documents)
        while high - low > _BLOCK:
            middle = (low + high) // 2
            if self.ends(middle, middle + 1)[0] <= position:
                low = middle + 1
            else:
                high = middle
        return low + int(np.searchsorted(self.ends(low, high), position, side="right"))

    def _kept_ends(self) -> NDArray[np.int64]:
        """The last end of every full stretch of ``stride``."""
        with self._lock:
            if self._kept is None:
                stride = self._stride
                if stride == 1:
                    self._kept = self.ends(0, self.num_documents)
                else:
                    numbers = range(stride - 1, self.num_documents, stride)
                    self._kept = np.array([self.ends(n, n + 1)[0] for n in numbers], np.int64)
            return self._kept
