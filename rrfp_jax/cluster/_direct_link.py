"""Small messages over one connection per rank, which the event loop itself reads and writes: a channel's link.

ZeroMQ sends and receives on a thread of its own at either end. Each is woken, and takes the interpreter's core, and a
message that a stage waits for pays for that each time. Here a message goes from the loop to the system and back to a
loop. Bytes that do not fit into the system's buffers wait, so nothing ever blocks.

The thread of a stage may send as well, so that its message need not wait for the loop's turn. It seals and hands to the
system under a lock, which is never held for longer; the loop does everything else.

A message travels as a record: two lengths in the clear, of the sealed bytes and of the clear bytes that follow. Sealed
are the number of frames, the size of each, the head and, unless they follow in the clear, the frames themselves.
"""

import logging
import struct
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

from rrfp_jax.cluster._channel import PeerMessage
from rrfp_jax.cluster._private_connections import PrivateLink, ProvenConnection
from rrfp_jax.cluster.loop_thread import runs_here
from rrfp_jax.cluster.wire import MAX_HEADER_BYTES, TAG_BYTES, MalformedMessage, Seal

_LOG = logging.getLogger(__name__)
_READ_BYTES = 1 << 19
MAX_FRAMES = 1000
"""Largest number of frames in a message, beside its head."""
MAX_FRAME_BYTES = 1 << 18
"""Largest number of bytes in all frames of a message, beside its head."""
CLEAR_BYTES = 1 << 14
"""Frames of at least this many bytes together stay in the clear if arrays need not be encrypted. To seal fewer bytes
costs little beside all else."""
_MAX_SEALED_BYTES = 2 * MAX_HEADER_BYTES + MAX_FRAME_BYTES
_LENGTHS, _COUNT = struct.Struct("<II"), struct.Struct("<H")
_CLEAR = 1 << 15
"""Flag added to the number of frames where those follow in the clear."""
_NO_FRAMES = _COUNT.pack(0)
_NOTHING = memoryview(b"")


def seal_record(seal: Seal, head: bytes, frames: Sequence[Any], *, encrypts: bool) -> tuple[list[Any], int]:
    """Returns the record of a message as buffers to be sent one behind another, and its number of bytes.

    Args:
        encrypts: whether frames are sealed whatever their size.
    """
    if not frames:  # most messages: the fewest steps
        sealed = seal.closed(_NO_FRAMES + head)
        begin = _LENGTHS.pack(len(sealed), 0) + sealed
        return [begin], len(begin)
    sizes = [memoryview(frame).nbytes for frame in frames]
    num_clear = 0 if encrypts else sum(sizes)
    if num_clear < CLEAR_BYTES:
        sealed = seal.closed(b"".join((struct.pack(f"<H{len(sizes)}I", len(sizes), *sizes), head, *frames)))
        begin = _LENGTHS.pack(len(sealed), 0) + sealed
        return [begin], len(begin)
    sealed = seal.closed(struct.pack(f"<H{len(sizes)}I", len(sizes) | _CLEAR, *sizes) + head)
    begin = _LENGTHS.pack(len(sealed), num_clear) + sealed
    return [begin, *frames], len(begin) + num_clear


def open_record(seal: Seal, data: memoryview, begin: int) -> tuple[list[memoryview], int] | None:
    """Returns head and frames of the record at ``begin``, and where it ends; None if its end has not come yet.

    Raises:
        MalformedMessage: for a record that no peer sends.
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
    return _record_frames(body, memoryview(bytes(data[middle:end])) if num_clear else _NOTHING), end


def _record_frames(body: memoryview, clear: memoryview) -> list[memoryview]:
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


class _DirectConnection:
    """The connection to one rank. Messages that are sent before it stands wait."""

    def __init__(self, *, encrypts: bool) -> None:
        self.proven: ProvenConnection | None = None
        self.unsent = bytearray()
        self._encrypts = encrypts
        self._early: list[tuple[bytes, Sequence[Any]]] = []
        self._partial = b""

    def open(self, proven: ProvenConnection) -> None:
        proven.socket.setblocking(False)
        self.proven = proven
        for head, frames in self._early:
            self.send(head, frames)
        self._early.clear()

    def send(self, head: bytes, frames: Sequence[Any]) -> None:
        """Sends a message, or queues it. Raises OSError where the connection has ended."""
        if self.proven is None:
            self._early.append((head, frames))
            return
        # Sealed even where it has to wait: records must be sealed in the order in which they travel.
        record, num_bytes = seal_record(self.proven.outgoing, head, frames, encrypts=self._encrypts)
        num_sent = 0 if self.unsent else self._send(record)
        if num_sent < num_bytes:
            self.unsent += b"".join(record)[num_sent:]

    def flush(self) -> None:
        """Sends waiting bytes as far as the system takes them. Raises OSError."""
        del self.unsent[: self._send([self.unsent])]

    def _send(self, buffers: list[Any]) -> int:
        assert self.proven is not None
        try:
            return self.proven.socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    def read(self, scratch: memoryview) -> list[list[memoryview]]:
        """Returns the messages that are complete now. Raises OSError, or MalformedMessage for bytes no peer sends."""
        assert self.proven is not None
        try:
            num_bytes = self.proven.socket.recv_into(scratch)
        except BlockingIOError:
            return []
        if not num_bytes:
            raise ConnectionError("closed its connection")
        came = scratch[:num_bytes]
        # Most reads hold whole records, which are opened where they lie; only the rest of a read is copied.
        data = memoryview(self._partial + bytes(came)) if self._partial else came
        messages, begin = [], 0
        while begin < len(data) and (record := open_record(self.proven.incoming, data, begin)):
            frames, begin = record
            messages.append(frames)
        self._partial = bytes(data[begin:])
        return messages

    def close(self) -> None:
        if self.proven is not None:
            self.proven.socket.close()


class DirectLink(PrivateLink):
    """Carries small messages over one connection to each rank. Any thread may call :meth:`send`.

    Args:
        encrypts: whether larger frames are sealed too; both sides must agree.
        broken: called where the connection to a rank has ended, other than by :meth:`disconnect`.
    """

    def __init__(self, loop: AbstractEventLoop, *, encrypts: bool, broken: Callable[[int, str], None]) -> None:
        self._loop, self._encrypts, self._broken = loop, encrypts, broken
        self._connections: dict[int, _DirectConnection] = {}
        self._lock = threading.Lock()
        """Held by the thread that sends, so that records are sealed and sent in one order."""
        self._writing: set[int] = set()
        self._ended: list[_DirectConnection] = []
        self._arrived: deque[PeerMessage] = deque()
        self._scratch = memoryview(bytearray(_READ_BYTES))
        self._wake: Callable[[], None] = lambda: None

    def listen(self, loop: AbstractEventLoop, read: Callable[[], None]) -> None:  # noqa: ARG002 - it has it
        self._wake = read

    def connect(self, rank: int, address: str) -> None:  # noqa: ARG002
        self._connections[rank] = _DirectConnection(encrypts=self._encrypts)

    def open(self, rank: int, connections: Sequence[ProvenConnection]) -> None:
        (proven,) = connections
        connection = self._connections.get(rank)
        if connection is None:  # the rank was lost meanwhile
            proven.socket.close()
            return
        try:
            with self._lock:
                connection.open(proven)
        except OSError as error:
            self._lose(rank, connection, error)
        else:
            self._loop.add_reader(proven.socket.fileno(), self._read, rank, connection)
            self._flush_later(rank, connection)

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        connection = self._connections.get(rank)
        if connection is None:
            return
        try:
            with self._lock:
                connection.send(head, frames)
        except OSError as error:
            # The loop's readers and writers belong to the loop, so it also takes the connection down.
            self._on_loop(self._lose, rank, connection, error)
            return
        if connection.unsent:
            self._on_loop(self._flush_later, rank, connection)

    def _on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        if runs_here(self._loop):
            call(*arguments)
        else:
            with suppress(RuntimeError):  # the loop was closed: nobody is left to be told
                self._loop.call_soon_threadsafe(call, *arguments)

    def _flush_later(self, rank: int, connection: _DirectConnection) -> None:
        is_current = connection.proven is not None and self._connections.get(rank) is connection
        if connection.unsent and is_current and rank not in self._writing:
            assert connection.proven is not None
            self._writing.add(rank)
            self._loop.add_writer(connection.proven.socket.fileno(), self._flush, rank, connection)

    def _flush(self, rank: int, connection: _DirectConnection) -> None:
        try:
            with self._lock:
                connection.flush()
        except OSError as error:
            self._lose(rank, connection, error)
        else:
            if not connection.unsent:
                self._stop_writing(rank, connection)

    def _stop_writing(self, rank: int, connection: _DirectConnection) -> None:
        if rank in self._writing:
            assert connection.proven is not None
            self._writing.discard(rank)
            self._loop.remove_writer(connection.proven.socket.fileno())

    def receive(self) -> PeerMessage | None:
        return self._arrived.popleft() if self._arrived else None

    def _read(self, rank: int, connection: _DirectConnection) -> None:
        try:
            self._arrived.extend((rank, frames) for frames in connection.read(self._scratch))
        except MalformedMessage as error:
            _LOG.warning("the direct connection to rank %d is closed for what came there: %s", rank, error)
            self._lose(rank, connection, error)
        except OSError as error:
            self._lose(rank, connection, error)
        self._wake()

    def _lose(self, rank: int, connection: _DirectConnection, why: Exception) -> None:
        if self._end(rank, connection):
            self._broken(rank, str(why) or repr(why))

    def _end(self, rank: int, connection: _DirectConnection) -> bool:
        """Stops reading and writing; the other side learns of it by the end of the connection.

        Returns False if the connection has ended before.
        """
        if self._connections.get(rank) is not connection:
            return False
        del self._connections[rank]
        self._ended.append(connection)
        if connection.proven is not None and not self._loop.is_closed():
            self._stop_writing(rank, connection)
            self._loop.remove_reader(connection.proven.socket.fileno())
        return True

    def disconnect(self, rank: int) -> None:
        if connection := self._connections.get(rank):
            self._end(rank, connection)
            with self._lock:
                connection.close()

    def close(self, linger_s: float) -> None:  # noqa: ARG002 - connections stand until :meth:`join`
        for rank, connection in [*self._connections.items()]:
            self._end(rank, connection)
            if connection.unsent:
                with suppress(OSError), self._lock:
                    connection.flush()

    def join(self) -> None:
        for connection in self._ended:
            with self._lock:
                connection.close()
