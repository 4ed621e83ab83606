"""Memory for arrays that arrive: aligned, and used again once nobody refers to what lay there.

Fresh memory has to be handed over by the system page by page, which costs as much time as to copy into it.
"""

import weakref
from collections import deque
from threading import Lock

import numpy as np

ALIGNMENT = 64
"""At multiples of so many bytes, programs on CPU take an array without copying it."""


class BufferPool:
    """Gives memory out, on any thread.

    Args:
        limit_bytes: how much is kept that nobody uses.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = Lock()
        self._free: deque[np.ndarray] = deque()
        """What came back first is to the left."""
        self._returned: deque[np.ndarray] = deque()
        """Not looked at yet: it may come while any other code of this process runs."""
        self.free_bytes = 0

    def take(self, num_bytes: int) -> memoryview:
        """Memory with anything in it, which comes back when neither the view nor any part of it is referenced."""
        with self._lock:
            while self._returned:
                self._keep(self._returned.popleft())
            memory = self._found(num_bytes)
        start = -memory.__array_interface__["data"][0] % ALIGNMENT
        # Its own object, of which all views are: NumPy's views of an array refer to what that array is a view of.
        lease = np.frombuffer(memory, np.uint8, num_bytes, start)
        weakref.finalize(lease, self._returned.append, memory).atexit = False
        return lease.data

    def _found(self, num_bytes: int) -> np.ndarray:
        size = num_bytes + ALIGNMENT
        for i in range(len(self._free) - 1, -1, -1):  # what was used last is the likeliest to be in a cache
            if self._free[i].nbytes == size:
                memory = self._free[i]
                del self._free[i]
                self.free_bytes -= size
                return memory
        return np.empty(size, np.uint8)

    def _keep(self, memory: np.ndarray) -> None:
        self._free.append(memory)
        self.free_bytes += memory.nbytes
        while self.free_bytes > self._limit_bytes:
            self.free_bytes -= self._free.popleft().nbytes
