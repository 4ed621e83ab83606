"""How a message is cut into parts that may travel over several connections, and put together again.

A message's frames lie one behind another, each at a multiple of 64 bytes, and that is what is cut: so all of a message
arrives in one piece of memory, where programs can take the frames as they are.
"""

import struct
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

from rrfp_jax.network.buffers import ALIGNMENT, BufferPool
from rrfp_jax.network.plain import MAX_HEADER_BYTES, MalformedMessage

PART_BYTES = 1 << 19
"""Of a part that is sealed: small enough that one is opened while the next one comes."""
CLEAR_PART_BYTES = 1 << 21
"""Of a part that is not: the fewer there are, the less the threads hold each other up."""
_MAX_BUFFERS = 500
"""Of a part: what the system takes in one call, with some to spare."""
_MAX_HEAD_BYTES = 4 * MAX_HEADER_BYTES
_PADDING = memoryview(bytes(ALIGNMENT))
_COUNT = struct.Struct("<I")


class Part(NamedTuple):
    """A part of a message on its way out."""

    number: int
    """Of the message."""
    total: int
    """What all frames of the message take in memory."""
    offset: int
    length: int
    buffers: list[memoryview]
    head: bytes
    """Comes with the message's first part."""


def cut(number: int, head: bytes, frames: Sequence[Any], part_bytes: int = PART_BYTES) -> list[Part]:
    """The parts of a message, each of at most ``part_bytes``, which are more than the alignment."""
    views = [memoryview(frame).cast("B") for frame in frames]
    sizes = [view.nbytes for view in views]
    starts, total = _places(sizes)
    parts: list[Part] = []
    offset, buffers, length = 0, list[memoryview](), 0
    whole_head = _COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + head

    def close() -> None:
        nonlocal offset, buffers, length
        parts.append(Part(number, total, offset, length, buffers, b"" if parts else whole_head))
        offset, buffers, length = offset + length, [], 0

    for start, view in zip(starts, views, strict=True):
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
    if length or not parts:
        close()
    return parts


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each frame begins, and where the last one ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end + -end % ALIGNMENT)
        end = starts[-1] + size
    return starts, end


class _Arriving:
    def __init__(self, total: int, memory: memoryview) -> None:
        self.total, self.memory, self.num_missing = total, memory, total
        self.head: bytes | None = None


class Assembly:
    """The messages of one peer, of which parts arrive over several connections. May be used on any thread.

    Args:
        arrived: called with complete messages, in the order in which they were sent: the head and the frames.
    """

    def __init__(self, pool: BufferPool, arrived: Callable[[list[memoryview]], None]) -> None:
        self._pool, self._arrived = pool, arrived
        self._lock = Lock()
        self._arriving: dict[int, _Arriving] = {}
        self._next = 0

    def place(self, number: int, total: int, offset: int, length: int) -> memoryview:
        """Where a part belongs. Raises MalformedMessage where it does not fit what came before."""
        with self._lock:
            message = self._arriving.get(number)
            if message is None:
                if number < self._next:
                    raise MalformedMessage(f"a part of the message {number}, which is complete")
                memory = self._pool.take(total) if total else memoryview(bytearray())
                message = self._arriving[number] = _Arriving(total, memory)
            if message.total != total or offset + length > total:
                raise MalformedMessage(f"a part of {length} bytes at {offset}, of a message of {message.total}")
            return message.memory[offset : offset + length]

    def filled(self, number: int, length: int, head: bytes | None) -> None:
        """A part has come. Raises MalformedMessage for too many bytes."""
        with self._lock:
            message = self._arriving[number]
            message.num_missing -= length
            if head is not None:
                message.head = head
            if message.num_missing < 0:
                raise MalformedMessage("parts of a message overlap")
            while (first := self._arriving.get(self._next)) and not first.num_missing and first.head is not None:
                del self._arriving[self._next]
                self._next += 1
                self._arrived(_frames(first.head, first.memory))


def check_head_size(size: int) -> None:
    """Raises MalformedMessage for one that no peer sends."""
    if size > _MAX_HEAD_BYTES:
        raise MalformedMessage(f"a head of {size} bytes, at most {_MAX_HEAD_BYTES} are read")


def _frames(head: bytes, memory: memoryview) -> list[memoryview]:
    """The head as it was given, and the frames."""
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
