"""How a message travels on a direct connection: a record, sealed as a whole or but for its frames.

A record is two lengths in the clear, of what is sealed and of what follows as it is. Sealed are the number of frames,
the size of each, the head and, unless they follow, the frames one behind another.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from rrfp_jax.network.plain import MAX_HEADER_BYTES, MalformedMessage
from rrfp_jax.network.sealing import TAG_BYTES, Seal

MAX_FRAMES = 1000
"""Of a message, beside its head."""
MAX_FRAME_BYTES = 1 << 18
"""Of all frames of a message together, beside its head."""
CLEAR_BYTES = 1 << 14
"""What frames have together at least that are left as they are where arrays need not be encrypted: sealing less costs
little beside all else."""
_MAX_SEALED_BYTES = 2 * MAX_HEADER_BYTES + MAX_FRAME_BYTES
_LENGTHS, _COUNT = struct.Struct("<II"), struct.Struct("<H")
_CLEAR = 1 << 15
"""Added to the number of frames where those follow in the clear."""
_NO_FRAMES = _COUNT.pack(0)
_NOTHING = memoryview(b"")


def closed(seal: Seal, head: bytes, frames: Sequence[Any], *, encrypts: bool) -> tuple[list[Any], int]:
    """The record of a message, as buffers to be sent one behind another, and its length.

    Args:
        encrypts: whether frames are sealed whatever their size.
    """
    if not frames:
        return _record(seal.closed(_NO_FRAMES + head))
    sizes = [memoryview(frame).nbytes for frame in frames]
    num_clear = 0 if encrypts else sum(sizes)
    if num_clear < CLEAR_BYTES:
        return _record(seal.closed(b"".join((_named(sizes), head, *frames))))
    return _record(seal.closed(_named(sizes, _CLEAR) + head), frames, num_clear)


def _named(sizes: list[int], clear: int = 0) -> bytes:
    return struct.pack(f"<H{len(sizes)}I", len(sizes) | clear, *sizes)


def _record(sealed: bytes, frames: Sequence[Any] = (), num_clear: int = 0) -> tuple[list[Any], int]:
    begin = _LENGTHS.pack(len(sealed), num_clear) + sealed
    return [begin, *frames], len(begin) + num_clear


def opened(seal: Seal, data: memoryview, begin: int) -> tuple[list[memoryview], int] | None:
    """The head and frames of the record that begins there, and where it ends; None where that has not come yet.

    Raises:
        MalformedMessage: for what no peer sends.
    """
    begin += _LENGTHS.size
    if begin > len(data):
        return None
    num_sealed, num_clear = _LENGTHS.unpack_from(data, begin - _LENGTHS.size)
    if not TAG_BYTES <= num_sealed <= _MAX_SEALED_BYTES or num_clear > MAX_FRAME_BYTES:
        raise MalformedMessage(
            f"a record of {num_sealed} bytes sealed and {num_clear} in the clear: {TAG_BYTES} to {_MAX_SEALED_BYTES} "
            f"and up to {MAX_FRAME_BYTES} are read"
        )
    middle = begin + num_sealed
    end = middle + num_clear
    if end > len(data):
        return None
    body = memoryview(seal.opened(data[begin:middle]))
    return _frames(body, memoryview(bytes(data[middle:end])) if num_clear else _NOTHING), end


def _frames(body: memoryview, clear: memoryview) -> list[memoryview]:
    (said,) = _COUNT.unpack_from(body) if len(body) >= _COUNT.size else (_CLEAR - 1,)
    if not said and not clear:
        return [body[_COUNT.size :]]
    count, is_clear = said % _CLEAR, said >= _CLEAR
    begin = _COUNT.size + 4 * count
    if begin > len(body):
        raise MalformedMessage(f"a record of {len(body)} bytes, which names {count} frames")
    sizes = struct.unpack_from(f"<{count}I", body, _COUNT.size)
    place = clear if is_clear else body
    first = len(place) - sum(sizes)
    if is_clear != bool(clear) or (first if is_clear else first < begin):
        raise MalformedMessage(f"a record of {len(body)} and {len(clear)} bytes, whose frames take {sum(sizes)}")
    ends = accumulate(sizes, initial=first)
    return [body[begin : None if is_clear else first], *(place[start:end] for start, end in pairwise(ends))]
