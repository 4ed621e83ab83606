"""Arrays of a message: cut into parts for several connections, and put together again in memory that is used again.

The frames of a message lie one behind another, each at a multiple of 64 bytes, and this layout is cut into parts. So a
message arrives in one piece of memory, where programs can take the frames as they are.
"""

import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from rrfp_jax.cluster.wire import MAX_HEADER_BYTES, MalformedMessage

ALIGNMENT = 64
"""Programs on CPU take an array without a copy if its address is a multiple of this many bytes."""
SEALED_PART_BYTES = 1 << 19
"""Largest part that is sealed: small enough that one is opened while the next one comes."""
CLEAR_PART_BYTES = 1 << 21
"""Largest part that is not sealed: fewer parts make the threads of the connections hold each other up less."""
_MAX_BUFFERS = 500
"""Largest number of buffers in a part: a little less than the system takes in one call."""
MAX_HEAD_BYTES = 4 * MAX_HEADER_BYTES
"""Largest head that is read: the header of a message, and the sizes of its frames."""
_PADDING = memoryview(bytes(ALIGNMENT))
_COUNT = struct.Struct("<I")


class ArrayPart(NamedTuple):
    """One part of a message on its way out."""

    number: int
    """Number of the message, counted from 0 for each peer."""
    total: int
    """Bytes that all frames of the message take in memory."""
    offset: int
    length: int
    buffers: list[memoryview]
    head: bytes
    """Sizes of the frames and the head of the message; empty in all parts but the first."""


def cut_message(
    number: int, head: bytes, frames: Sequence[Any], part_bytes: int = SEALED_PART_BYTES
) -> list[ArrayPart]:
    """Returns the parts of a message, each of at most ``part_bytes`` bytes, which must exceed the alignment."""
    views = [memoryview(frame).cast("B") for frame in frames]
    sizes = [view.nbytes for view in views]
    starts, total = _places(sizes)
    parts: list[ArrayPart] = []
    offset, buffers, length = 0, list[memoryview](), 0
    whole_head = _COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + head

    def close() -> None:
        nonlocal offset, buffers, length
        parts.append(ArrayPart(number, total, offset, length, buffers, b"" if parts else whole_head))
        offset, buffers, length = offset + length, [], 0

    for start, view in zip(starts, views, strict=True):
        # The gap before an aligned frame is sent as well, so that a part is one piece of the receiver's memory.
        gap = start - offset - length
        if length + gap > part_bytes:
            close()
        if gap:
            buffers.append(_PADDING[:gap])
            length += gap
        done = 0
        while done < view.nbytes:
            taken = min(view.nbytes - done, part_bytes - length)
            if taken <= 0 or len(buffers) >= _MAX_BUFFERS:
                close()
                continue
            buffers.append(view[done : done + taken])
            done, length = done + taken, length + taken
    if length or not parts:  # a message without bytes still has one part, which brings its head
        close()
    return parts


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offset of each frame, and the offset at which the last frame ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end + -end % ALIGNMENT)
        end = starts[-1] + size
    return starts, end


class _ArrivingMessage:
    def __init__(self, total: int, memory: memoryview) -> None:
        self.total, self.memory, self.num_missing = total, memory, total
        self.head: bytes | None = None


class MessageAssembly:
    """Puts the messages of one peer together from parts that arrive over several connections. Any thread may call it.

    Args:
        arrived: called with each complete message, head first, in the order in which the peer sent them.
    """

    def __init__(self, pool: "BufferPool", arrived: Callable[[list[memoryview]], None]) -> None:
        self._pool, self._arrived = pool, arrived
        self._lock = Lock()
        self._arriving: dict[int, _ArrivingMessage] = {}
        self._next = 0

    def place(self, number: int, total: int, offset: int, length: int) -> memoryview:
        """Returns the memory that a part belongs into.

        Raises:
            MalformedMessage: where the part does not fit the parts that came before.
        """
        with self._lock:
            message = self._arriving.get(number)
            if message is None:
                # The first part to come, not the first part of the message: connections overtake each other.
                if number < self._next:
                    raise MalformedMessage(f"a part of the message {number}, which is complete")
                memory = self._pool.take(total) if total else memoryview(bytearray())
                message = self._arriving[number] = _ArrivingMessage(total, memory)
            if message.total != total or offset + length > total:
                raise MalformedMessage(f"a part of {length} bytes at {offset}, of a message of {message.total}")
            return message.memory[offset : offset + length]

    def filled(self, number: int, length: int, head: bytes | None) -> None:
        """Counts a part whose bytes have arrived. Raises MalformedMessage for too many bytes."""
        with self._lock:
            message = self._arriving[number]
            message.num_missing -= length
            if head is not None:
                message.head = head
            if message.num_missing < 0:
                raise MalformedMessage("parts of a message overlap")
            # A later message may be complete first: it waits here, so that messages are delivered in order.
            while (first := self._arriving.get(self._next)) and not first.num_missing and first.head is not None:
                del self._arriving[self._next]
                self._next += 1
                self._arrived(_frames(first.head, first.memory))


def _frames(head: bytes, memory: memoryview) -> list[memoryview]:
    """Returns the head that the sender gave, and the frames."""
    # The head is sealed, but a rank may be faulty: its numbers are checked before they are used.
    (count,) = _COUNT.unpack_from(head) if len(head) >= _COUNT.size else (-1,)
    begin = _COUNT.size + 8 * count
    if count < 0 or len(head) < begin:
        raise MalformedMessage(f"a head of {len(head)} bytes, which names {count} frames")
    sizes = struct.unpack_from(f"<{count}Q", head, _COUNT.size)
    starts, total = _places(sizes)
    if total != memory.nbytes:
        raise MalformedMessage(f"{total} bytes of frames are announced, {memory.nbytes} have come")
    frames = [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return [memoryview(head)[begin:], *frames]


class BufferPool:
    """Gives out aligned memory for arrays that arrive, and keeps it when nobody refers to it any more. Thread-safe.

    The system hands over fresh memory page by page, which costs as much time as to copy into it.

    Args:
        limit_bytes: largest number of unused bytes that are kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = Lock()
        self._free: deque[np.ndarray] = deque()
        """Unused memory; the piece that came back first is to the left."""
        self._returned: deque[np.ndarray] = deque()
        """Memory that came back since the last call. Finalizers fill it, at any moment and under any lock."""
        self.free_bytes = 0

    def take(self, num_bytes: int) -> memoryview:
        """Returns memory with arbitrary content. It comes back when no view of any part of it is left."""
        size = num_bytes + ALIGNMENT
        with self._lock:
            while self._returned:
                back = self._returned.popleft()
                self._free.append(back)
                self.free_bytes += back.nbytes
                while self.free_bytes > self._limit_bytes:
                    self.free_bytes -= self._free.popleft().nbytes
            memory = self._find(size)
        start = -memory.__array_interface__["data"][0] % ALIGNMENT
        # All views refer to this array, which owns nothing: NumPy's views of an array refer to the array's own base.
        lease = np.frombuffer(memory, np.uint8, num_bytes, start)
        weakref.finalize(lease, self._returned.append, memory).atexit = False
        return lease.data

    def _find(self, size: int) -> np.ndarray:
        for i in range(len(self._free) - 1, -1, -1):  # memory that was used last is the likeliest to be in a cache
            if self._free[i].nbytes == size:
                memory = self._free[i]
                del self._free[i]
                self.free_bytes -= size
                return memory
        return np.empty(size, np.uint8)
