"""Connections for large arrays: several between two ranks, with two threads each.

The frames of a message lie one behind another, each at a multiple of 64 bytes, and this layout is cut into parts. Parts
travel over whichever connection is free, so several cores seal them, and a message arrives in one piece of memory,
where programs can take the frames as they are. The threads spend their time in the system or in the cipher, where the
interpreter's lock is free, and work from and into the arrays' own memory. On the wire, a part is a sealed header, the
sealed head of its message if it is the first part, and the bytes, which are sealed too unless the run leaves arrays in
the clear.
"""

import logging
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from rrfp_jax.cluster.wire import MAX_HEADER_BYTES, TAG_BYTES, MalformedMessage, PeerMessage, ProvenConnection

_LOG = logging.getLogger(__name__)
ALIGNMENT = 64
"""Programs on CPU take an array without a copy if its address is a multiple of this many bytes."""
_SEALED_PART_BYTES = 1 << 19
"""Largest part that is sealed: small enough that one is opened while the next one comes."""
_CLEAR_PART_BYTES = 1 << 21
"""Largest part that is not sealed: fewer parts make the threads of the connections hold each other up less."""
_MAX_BUFFERS = 500
"""Largest number of buffers in a part: a little less than the system takes in one call."""
_MAX_HEAD_BYTES = 4 * MAX_HEADER_BYTES
"""Largest head that is read: the header of a message, and the sizes of its frames."""
_PADDING = memoryview(bytes(ALIGNMENT))
_COUNT = struct.Struct("<I")
_HEADER = struct.Struct("<QQQII")
"""Number and size of the message, offset and length of the part, and length of the head that follows."""
_END_S = 2.0


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
    number: int, head: bytes, frames: Sequence[Any], part_bytes: int = _SEALED_PART_BYTES
) -> list[ArrayPart]:
    """Returns the parts of a message, each of at most ``part_bytes`` bytes, which must exceed the alignment."""
    views = [memoryview(frame).cast("B") for frame in frames]
    sizes = [view.nbytes for view in views]
    starts, total = _offsets(sizes)
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


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offset of each frame, and the offset at which the last frame ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end + -end % ALIGNMENT)
        end = starts[-1] + size
    return starts, end


@dataclass
class _ArrivingMessage:
    total: int
    memory: memoryview
    num_missing: int
    head: bytes | None = None


class MessageAssembly:
    """Puts the messages of one peer together from parts that arrive over several connections. Any thread may call it.

    Args:
        arrived: called with each complete message, head first, in the order in which the peer sent them.
    """

    def __init__(self, pool: "BufferPool", arrived: Callable[[list[memoryview]], None]) -> None:
        self._pool, self._arrived = pool, arrived
        self._lock = threading.Lock()
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
                message = self._arriving[number] = _ArrivingMessage(total, memory, num_missing=total)
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
    # The head is sealed, but a rank may be faulty: its numbers are checked before they are used.
    (count,) = _COUNT.unpack_from(head) if len(head) >= _COUNT.size else (-1,)
    begin = _COUNT.size + 8 * count
    if count < 0 or len(head) < begin:
        raise MalformedMessage(f"a head of {len(head)} bytes, which names {count} frames")
    sizes = struct.unpack_from(f"<{count}Q", head, _COUNT.size)
    starts, total = _offsets(sizes)
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
        self._lock = threading.Lock()
        self._free: deque[np.ndarray] = deque()
        """Unused memory; the piece that came back first is to the left."""
        self._returned: deque[np.ndarray] = deque()
        """Memory that came back since the last call. Finalizers fill it, at any moment and under any lock."""
        self.free_bytes = 0

    def take(self, num_bytes: int) -> memoryview:
        """Returns memory with arbitrary content. It comes back when no view of any part of it is left."""
        size, memory = num_bytes + ALIGNMENT, None
        with self._lock:
            while self._returned:
                back = self._returned.popleft()
                self._free.append(back)
                self.free_bytes += back.nbytes
                while self.free_bytes > self._limit_bytes:
                    self.free_bytes -= self._free.popleft().nbytes
            for i in range(len(self._free) - 1, -1, -1):  # memory that was used last is the likeliest to be in a cache
                if self._free[i].nbytes == size:
                    memory = self._free[i]
                    del self._free[i]
                    self.free_bytes -= size
                    break
        if memory is None:
            memory = np.empty(size, np.uint8)
        start = -memory.__array_interface__["data"][0] % ALIGNMENT
        # All views refer to this array, which owns nothing: NumPy's views of an array refer to the array's own base.
        lease = np.frombuffer(memory, np.uint8, num_bytes, start)
        weakref.finalize(lease, self._returned.append, memory).atexit = False
        return lease.data


class ArrayConnection:
    """One connection to a rank. Carries parts both ways from its construction until one side ends it.

    Args:
        parts: parts that wait to be sent to the rank, over whichever connection is free; None ends a sending thread.
        encrypts: whether the bytes of arrays are sealed too; both sides must agree.
        broken: called on either thread, perhaps twice, where the connection ends other than by :meth:`end`.
    """

    def __init__(
        self,
        name: str,
        proven: ProvenConnection,
        parts: SimpleQueue[ArrayPart | None],
        assembly: MessageAssembly,
        *,
        encrypts: bool,
        broken: Callable[[str], None],
    ) -> None:
        self._name, self._broken, self._is_ended = name, broken, False
        self.socket, self._outgoing, self._incoming = proven
        self._parts, self._assembly, self._encrypts = parts, assembly, encrypts
        num_scratch = _SEALED_PART_BYTES + TAG_BYTES if encrypts else 0
        self._sealing, self._opening = (memoryview(bytearray(num_scratch)) for _ in range(2))
        self.threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"rrfp-{side}-{name}", daemon=True)
            for side, work in (("send", self._send_all), ("receive", self._receive_all))
        ]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        """Stops both directions; returns at once. The queue needs a None for the sending thread to notice."""
        self._is_ended = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _guarded(self, work: Callable[[], None]) -> None:
        # One thread's fault ends both: the other would wait for a peer that hears nothing any more.
        try:
            work()
        except MalformedMessage as error:
            _LOG.warning("the connection %s for arrays is closed for what came there: %s", self._name, error)
            self._broken(str(error))
            self.end()
        except Exception as error:
            if not self._is_ended:
                self._broken(str(error) or repr(error))
                self.end()

    def _send_all(self) -> None:
        # All connections to a rank share one queue: each takes the next part when it is free.
        while (part := self._parts.get()) is not None:
            self._send(part)
            del part  # else the buffers of the last part would be held until the next one comes

    def _send(self, part: ArrayPart) -> None:
        number, total, offset, length, buffers, head = part
        header = self._outgoing.closed(_HEADER.pack(number, total, offset, length, len(head)))
        said: list[Any] = [header + self._outgoing.closed(head) if head else header]
        if self._encrypts and length:
            # The cipher takes one buffer; a part of several small frames is copied together, a large one is not.
            whole = buffers[0] if len(buffers) == 1 else b"".join(buffers)
            sealed = self._sealing[: length + TAG_BYTES]
            self._outgoing.close_into(whole, sealed)
            said.append(sealed)
        else:
            said += buffers
        num_sent = self.socket.sendmsg(said)
        num_left = sum(len(each) for each in said) - num_sent
        while num_left:  # a signal came, or the system took less
            while num_sent >= len(said[0]):
                num_sent -= len(said.pop(0))
            said[0] = memoryview(said[0])[num_sent:]
            num_sent = self.socket.sendmsg(said)
            num_left -= num_sent

    def _receive_all(self) -> None:
        sealed, header = memoryview(bytearray(_HEADER.size + TAG_BYTES)), bytearray(_HEADER.size)
        while self._fill(sealed, may_end=True):
            self._incoming.open_into(sealed, header)
            number, total, offset, length, head_size = _HEADER.unpack(header)
            head = None
            if head_size:
                if head_size > _MAX_HEAD_BYTES:
                    raise MalformedMessage(f"a head of {head_size} bytes, at most {_MAX_HEAD_BYTES} are read")
                sealed_head = bytearray(head_size + TAG_BYTES)
                self._fill(memoryview(sealed_head))
                head = self._incoming.opened(sealed_head)
            place = self._assembly.place(number, total, offset, length)
            if not self._encrypts or not length:
                # Straight into the memory of the message: the system's copy is the only one.
                self._fill(place)
            elif length > _SEALED_PART_BYTES:
                raise MalformedMessage(f"a part of {length} bytes, at most {_SEALED_PART_BYTES} are read")
            else:
                sealed_part = self._opening[: length + TAG_BYTES]
                self._fill(sealed_part)
                self._incoming.open_into(sealed_part, place)
            self._assembly.filled(number, length, head)
        if not self._is_ended:
            self._broken("closed its connection")

    def _fill(self, view: memoryview, *, may_end: bool = False) -> bool:
        """Reads until ``view`` is full. Returns False where the connection ends before the first byte and may do so."""
        done, size = 0, view.nbytes
        while done < size:
            num_bytes = self.socket.recv_into(view[done:], size - done, socket.MSG_WAITALL)
            if not num_bytes:
                if may_end and not done:
                    return False
                raise ConnectionError("closed its connection")
            done += num_bytes
        return True


@dataclass
class _ArrayPeer:
    assembly: MessageAssembly
    parts: SimpleQueue[ArrayPart | None] = field(default_factory=SimpleQueue)
    connections: list[ArrayConnection] = field(default_factory=list)
    num_sent: int = 0


class ArrayLink:
    """Carries messages over array connections. Used as :class:`ZmqLink` is, on the event loop, except for :meth:`join`.

    :meth:`open` brings the connections to a rank.

    Args:
        encrypts: whether frames are sealed; heads always are.
        keep_bytes: number of unused bytes that are kept for arrays that arrive next.
    """

    def __init__(self, *, encrypts: bool, keep_bytes: int) -> None:
        self._encrypts = encrypts
        self._part_bytes = _SEALED_PART_BYTES if encrypts else _CLEAR_PART_BYTES
        self._pool = BufferPool(keep_bytes)
        self.peers: dict[int, _ArrayPeer] = {}
        self._ended: list[_ArrayPeer] = []
        self._arrived: deque[PeerMessage] = deque()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when messages have arrived."""
        self.broken: Callable[[int, str], None] = lambda rank, why: None
        """Called on the threads of connections, perhaps several times, where one to a rank has ended."""

    def connect(self, rank: int, address: str) -> None:  # noqa: ARG002 - :meth:`open` brings the connections
        self.peers[rank] = _ArrayPeer(MessageAssembly(self._pool, partial(self._complete, rank)))

    def open(self, rank: int, connections: Sequence[ProvenConnection]) -> None:
        peer = self.peers.get(rank)
        if peer is None:  # the rank was lost meanwhile
            for proven in connections:
                proven.socket.close()
            return
        common: dict[str, Any] = {"encrypts": self._encrypts, "broken": partial(self.broken, rank)}
        for number, proven in enumerate(connections):
            name = f"{rank}-{number}"
            peer.connections.append(ArrayConnection(name, proven, peer.parts, peer.assembly, **common))

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        if peer := self.peers.get(rank):
            for part in cut_message(peer.num_sent, head, frames, self._part_bytes):
                peer.parts.put(part)
            peer.num_sent += 1

    def receive(self) -> PeerMessage | None:
        if not self._arrived:
            with suppress(BlockingIOError):
                os.eventfd_read(self.descriptor)
        # A message that came since the descriptor was read has made it readable again.
        return self._arrived.popleft() if self._arrived else None

    def disconnect(self, rank: int) -> None:
        if peer := self.peers.pop(rank, None):
            for connection in peer.connections:
                connection.end()
                peer.parts.put(None)
            self._ended.append(peer)

    def close(self, linger_s: float) -> None:  # noqa: ARG002 - :meth:`join` waits
        """Lets the sending threads end once everything has been sent."""
        for peer in self.peers.values():
            for _ in peer.connections:
                peer.parts.put(None)

    def join(self) -> None:
        """Ends all connections; called after :meth:`close`, on any thread."""
        connections = [each for peer in (*self.peers.values(), *self._ended) for each in peer.connections]
        for connection in connections:
            connection.end()
        for connection in connections:
            for thread in connection.threads:
                thread.join(_END_S)
            connection.socket.close()
        os.close(self.descriptor)

    def _complete(self, rank: int, frames: list[memoryview]) -> None:
        # Called on the thread of a connection.
        self._arrived.append((rank, frames))
        os.eventfd_write(self.descriptor, 1)
