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
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from rrfp_jax.cluster.loop_thread import runs_here
from rrfp_jax.cluster.wire import MAX_HEADER_BYTES, TAG_BYTES, MalformedMessage, PeerMessage, ProvenConnection, Seal

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
    (said,) = _COUNT.unpack_from(body) if len(body) >= _COUNT.size else (_CLEAR - 1,)
    if not said and not num_clear:
        return [body[_COUNT.size :]], end
    # The sizes are sealed, but a rank may be faulty: they are checked before they are used.
    count, is_clear = said % _CLEAR, said >= _CLEAR
    sizes_end = _COUNT.size + 4 * count
    if sizes_end > len(body):
        raise MalformedMessage(f"a record of {len(body)} bytes, which names {count} frames")
    sizes = struct.unpack_from(f"<{count}I", body, _COUNT.size)
    place = memoryview(bytes(data[middle:end])) if is_clear else body
    first = len(place) - sum(sizes)
    if is_clear != bool(num_clear) or (first if is_clear else first < sizes_end):
        raise MalformedMessage(f"a record of {len(body)} and {num_clear} bytes, whose frames take {sum(sizes)}")
    ends = accumulate(sizes, initial=first)
    head = body[sizes_end : None if is_clear else first]
    return [head, *(place[start:end] for start, end in pairwise(ends))], end


@dataclass(eq=False)
class _DirectConnection:
    """The connection to one rank. Messages that are sent before it stands wait."""

    proven: ProvenConnection | None = None
    early: list[tuple[bytes, Sequence[Any]]] = field(default_factory=list)
    unsent: bytearray = field(default_factory=bytearray)
    is_writing: bool = False
    """Whether the loop calls when the system takes more bytes."""
    partial: bytes = b""
    """Bytes that were read of a record whose end has not come yet."""


class DirectLink:
    """Carries small messages over one connection to each rank. Used as :class:`ZmqLink` is, on the event loop.

    Any thread may call :meth:`send`. :meth:`open` brings the connection to a rank.

    Args:
        encrypts: whether larger frames are sealed too; both sides must agree.
    """

    def __init__(self, loop: AbstractEventLoop, *, encrypts: bool) -> None:
        self._loop, self._encrypts = loop, encrypts
        self.connections: dict[int, _DirectConnection] = {}
        self._lock = threading.Lock()
        """Held by the thread that sends, so that records are sealed and sent in one order."""
        self._ended: list[_DirectConnection] = []
        self._arrived: deque[PeerMessage] = deque()
        self._scratch = memoryview(bytearray(_READ_BYTES))
        self.broken: Callable[[int, str], None] = lambda rank, why: None
        """Called where the connection to a rank has ended, other than by :meth:`disconnect`."""
        self.on_arrival: Callable[[], None] = lambda: None
        """Called on the loop when messages may have arrived."""

    def connect(self, rank: int, address: str) -> None:  # noqa: ARG002 - :meth:`open` brings the connection
        self.connections[rank] = _DirectConnection()

    def open(self, rank: int, connections: Sequence[ProvenConnection]) -> None:
        (proven,) = connections
        connection = self.connections.get(rank)
        if connection is None:  # the rank was lost meanwhile
            proven.socket.close()
            return
        proven.socket.setblocking(False)
        try:
            with self._lock:
                connection.proven = proven
                for head, frames in connection.early:
                    self._send(connection, proven, head, frames)
                connection.early.clear()
        except OSError as error:
            self._end(rank, connection, error)
        else:
            self._loop.add_reader(proven.socket.fileno(), self._read, rank, connection, proven)
            self._write(rank, connection)

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        connection = self.connections.get(rank)
        if connection is None:
            return
        try:
            with self._lock:
                if connection.proven is None:
                    connection.early.append((head, frames))
                    return
                self._send(connection, connection.proven, head, frames)
            if not connection.unsent:
                return
            follows = partial(self._write, rank, connection)
        except OSError as error:
            follows = partial(self._end, rank, connection, error)
        # The loop's readers and writers belong to the loop, so it goes on from here.
        if runs_here(self._loop):
            follows()
        else:
            with suppress(RuntimeError):  # the loop was closed: nobody is left to be told
                self._loop.call_soon_threadsafe(follows)

    def _send(
        self, connection: _DirectConnection, proven: ProvenConnection, head: bytes, frames: Sequence[Any]
    ) -> None:
        # Sealed even where it has to wait: records must be sealed in the order in which they travel.
        record, num_bytes = seal_record(proven.outgoing, head, frames, encrypts=self._encrypts)
        try:
            num_sent = 0 if connection.unsent else proven.socket.sendmsg(record)
        except BlockingIOError:
            num_sent = 0
        if num_sent < num_bytes:
            connection.unsent += b"".join(record)[num_sent:]

    def _write(self, rank: int, connection: _DirectConnection) -> None:
        """Sends waiting bytes as far as the system takes them, and again once it takes more."""
        if connection.proven is None or self.connections.get(rank) is not connection:
            return
        socket = connection.proven.socket
        try:
            with self._lock, suppress(BlockingIOError):
                del connection.unsent[: socket.send(connection.unsent)]
        except OSError as error:
            self._end(rank, connection, error)
            return
        if connection.unsent and not connection.is_writing:
            self._loop.add_writer(socket.fileno(), self._write, rank, connection)
        elif connection.is_writing and not connection.unsent:
            self._loop.remove_writer(socket.fileno())
        connection.is_writing = bool(connection.unsent)

    def receive(self) -> PeerMessage | None:
        return self._arrived.popleft() if self._arrived else None

    def _read(self, rank: int, connection: _DirectConnection, proven: ProvenConnection) -> None:
        try:
            num_bytes = proven.socket.recv_into(self._scratch)
            if not num_bytes:
                raise ConnectionError("closed its connection")
            came, begin = self._scratch[:num_bytes], 0
            # Most reads hold whole records, which are opened where they lie; only the rest of a read is copied.
            data = memoryview(connection.partial + bytes(came)) if connection.partial else came
            while begin < len(data) and (record := open_record(proven.incoming, data, begin)):
                frames, begin = record
                self._arrived.append((rank, frames))
            connection.partial = bytes(data[begin:])
        except BlockingIOError:
            return
        except MalformedMessage as error:
            _LOG.warning("the direct connection to rank %d is closed for what came there: %s", rank, error)
            self._end(rank, connection, error)
        except OSError as error:
            self._end(rank, connection, error)
        self.on_arrival()

    def _end(self, rank: int, connection: _DirectConnection, why: Exception | None = None) -> None:
        """Stops reading and writing, for an error if there is one; the other side learns of it by the end of the
        connection."""
        if self.connections.get(rank) is not connection:
            return
        del self.connections[rank]
        self._ended.append(connection)
        if connection.proven is not None and not self._loop.is_closed():
            self._loop.remove_reader(connection.proven.socket.fileno())
            if connection.is_writing:
                self._loop.remove_writer(connection.proven.socket.fileno())
        if why is not None:
            self.broken(rank, str(why) or repr(why))

    def disconnect(self, rank: int) -> None:
        if connection := self.connections.get(rank):
            self._end(rank, connection)
            if connection.proven is not None:
                with self._lock:
                    connection.proven.socket.close()

    def close(self, linger_s: float) -> None:  # noqa: ARG002 - connections stand until :meth:`join`
        """Sends nothing new, and waiting bytes as far as the system takes them at once."""
        for rank, connection in [*self.connections.items()]:
            self._end(rank, connection)
            if connection.unsent and connection.proven is not None:
                with suppress(OSError), self._lock:
                    connection.proven.socket.send(connection.unsent)

    def join(self) -> None:
        """Ends all connections; called after :meth:`close`, on any thread."""
        for connection in self._ended:
            if connection.proven is not None:
                with self._lock:
                    connection.proven.socket.close()
