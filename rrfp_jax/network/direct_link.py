"""Small messages over a connection per rank, which the event loop itself reads and writes: a link for a channel.

ZeroMQ sends and receives on a thread of its own, at either end; each is woken, and takes the interpreter's core. A
message that a stage waits for pays for that each time. Here it goes from the loop to the system and back to a loop.
What does not fit into the system's buffers waits, so nothing ever blocks. Everything is sealed.

A thread of a stage may send, too, so that what others wait for does not wait for the loop's turn. It seals and hands to
the system under a lock, which is never held for longer than that takes; the loop does all else.

A record is its length in the clear, and sealed: the number of frames, the head among them, the size of each but the
last, and the frames one behind another.
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

from rrfp_jax.network.lane import Proven
from rrfp_jax.network.link import Message
from rrfp_jax.network.loop_thread import runs_here
from rrfp_jax.network.plain import MAX_HEADER_BYTES, MalformedMessage
from rrfp_jax.network.sealing import TAG_BYTES

_LOG = logging.getLogger(__name__)
MAX_FRAMES = 1000
"""Of a message, beside its head."""
MAX_FRAME_BYTES = 1 << 18
"""Of all frames of a message together, beside its head."""
_MAX_RECORD_BYTES = 2 * MAX_HEADER_BYTES + MAX_FRAME_BYTES
_LENGTH, _COUNT = struct.Struct("<I"), struct.Struct("<H")
_READ_BYTES = 1 << 19


class _Line:
    """The connection to one rank. Before it stands, what is sent waits."""

    def __init__(self) -> None:
        self.proven: Proven | None = None
        self.unsent = bytearray()
        self._early: list[list[Any]] = []
        self._partial = b""

    def open(self, proven: Proven) -> None:
        proven.connection.setblocking(False)
        self.proven = proven
        for frames in self._early:
            self.send(frames)
        self._early.clear()

    def send(self, frames: list[Any]) -> None:
        """Raises OSError where the connection has ended."""
        if self.proven is None:
            self._early.append(frames)
            return
        sizes = [memoryview(frame).nbytes for frame in frames[:-1]]
        body = b"".join((_COUNT.pack(len(frames)), struct.pack(f"<{len(sizes)}I", *sizes), *frames))
        sealed = self.proven.outgoing.closed(body)
        record = _LENGTH.pack(len(sealed)) + sealed
        self.unsent += record[0 if self.unsent else self._send(record) :]

    def flush(self) -> None:
        """Send what waits, as far as the system takes it. Raises OSError."""
        del self.unsent[: self._send(self.unsent)]

    def _send(self, data: Any) -> int:
        assert self.proven is not None
        try:
            return self.proven.connection.send(data)
        except BlockingIOError:
            return 0

    def read(self, scratch: memoryview) -> list[list[memoryview]]:
        """The messages that are complete now. Raises OSError, or MalformedMessage for what no peer sends."""
        assert self.proven is not None
        try:
            num_bytes = self.proven.connection.recv_into(scratch)
        except BlockingIOError:
            return []
        if not num_bytes:
            raise ConnectionError("closed its connection")
        came = scratch[:num_bytes]
        data = memoryview(self._partial + bytes(came)) if self._partial else came
        messages, begin = [], 0
        while (end := _end_of_record(data, begin)) <= len(data):
            opened = self.proven.incoming.opened(data[begin + _LENGTH.size : end])
            messages.append(_frames(memoryview(opened)))
            begin = end
        self._partial = bytes(data[begin:])
        return messages

    def close(self) -> None:
        if self.proven is not None:
            self.proven.connection.close()


class DirectLink:
    """Carries messages, each a head and frames, in order per rank. Used on the event loop, but for :meth:`send`.

    Args:
        broken: called where the connection to a rank has ended, other than by :meth:`disconnect`.
    """

    def __init__(self, loop: AbstractEventLoop, *, broken: Callable[[int, str], None]) -> None:
        self._loop, self._broken = loop, broken
        self._lines: dict[int, _Line] = {}
        self._lock = threading.Lock()
        """Held by whoever sends."""
        self._writing: set[int] = set()
        self._ended: list[_Line] = []
        self._arrived: deque[Message] = deque()
        self._scratch = memoryview(bytearray(_READ_BYTES))
        self._wake: Callable[[], None] = lambda: None

    is_complete = True
    """Nobody has to be welcomed."""

    def listen(self, loop: AbstractEventLoop, read: Callable[[], None]) -> None:  # noqa: ARG002 - it has it
        """Have ``read`` called where messages have arrived."""
        self._wake = read

    def welcome(self) -> list[int]:
        """Nobody greets here."""
        return []

    def connect(self, rank: int, address: str) -> None:  # noqa: ARG002 - :meth:`open` brings the connection
        """Messages to a rank may be sent from now on; they travel when it is connected."""
        self._lines[rank] = _Line()

    def open(self, rank: int, connections: Sequence[Proven]) -> None:
        """Begin to exchange messages with a rank over this connection."""
        (proven,) = connections
        line = self._lines.get(rank)
        if line is None:  # it was lost meanwhile
            proven.connection.close()
            return
        try:
            with self._lock:
                line.open(proven)
        except OSError as error:
            self._lose(rank, line, error)
        else:
            self._loop.add_reader(proven.connection.fileno(), self._read, rank, line)
            self._flush_later(rank, line)

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        """From any thread; never blocks. What cannot be sent since the rank is gone is discarded: its loss is reported
        anyway."""
        line = self._lines.get(rank)
        if line is None:
            return
        try:
            with self._lock:
                line.send([head, *frames])
        except OSError as error:
            self._on_loop(self._lose, rank, line, error)
            return
        if line.unsent:
            self._on_loop(self._flush_later, rank, line)

    def _on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        if runs_here(self._loop):
            call(*arguments)
        else:
            with suppress(RuntimeError):  # the loop was closed: nobody is left to be told
                self._loop.call_soon_threadsafe(call, *arguments)

    def _flush_later(self, rank: int, line: _Line) -> None:
        if line.unsent and line.proven and self._lines.get(rank) is line and rank not in self._writing:
            self._writing.add(rank)
            self._loop.add_writer(line.proven.connection.fileno(), self._flush, rank, line)

    def _flush(self, rank: int, line: _Line) -> None:
        try:
            with self._lock:
                line.flush()
        except OSError as error:
            self._lose(rank, line, error)
        else:
            if not line.unsent:
                self._stop_writing(rank, line)

    def _stop_writing(self, rank: int, line: _Line) -> None:
        if rank in self._writing:
            assert line.proven is not None
            self._writing.discard(rank)
            self._loop.remove_writer(line.proven.connection.fileno())

    def receive(self) -> Message | None:
        """The next message, if one has arrived."""
        return self._arrived.popleft() if self._arrived else None

    def _read(self, rank: int, line: _Line) -> None:
        """There is something to read."""
        try:
            self._arrived.extend((rank, frames) for frames in line.read(self._scratch))
        except MalformedMessage as error:
            _LOG.warning("the direct connection to rank %d is closed for what came there: %s", rank, error)
            self._lose(rank, line, error)
        except OSError as error:
            self._lose(rank, line, error)
        self._wake()

    def _lose(self, rank: int, line: _Line, why: Exception) -> None:
        if self._end(rank, line):
            self._broken(rank, str(why) or repr(why))

    def _end(self, rank: int, line: _Line) -> bool:
        """Neither read nor write any more; who is still there learns of it by the end of the connection. False: it has
        ended before."""
        if self._lines.get(rank) is not line:
            return False
        del self._lines[rank]
        self._ended.append(line)
        if line.proven is not None and not self._loop.is_closed():
            self._stop_writing(rank, line)
            self._loop.remove_reader(line.proven.connection.fileno())
        return True

    def disconnect(self, rank: int) -> None:
        """Send nothing more to a rank, and expect nothing."""
        if line := self._lines.get(rank):
            self._end(rank, line)
            with self._lock:
                line.close()

    def close(self, linger_s: float) -> None:  # noqa: ARG002 - connections stand until :meth:`join`
        """Send nothing that is new."""
        for rank, line in [*self._lines.items()]:
            self._end(rank, line)
            if line.unsent:
                with suppress(OSError), self._lock:
                    line.flush()

    def join(self) -> None:
        """After :meth:`close`, on any thread: end all connections."""
        for line in self._ended:
            with self._lock:
                line.close()


def _end_of_record(data: memoryview, begin: int) -> int:
    """Where the record ends that begins there, or beyond the data, if that is not known yet."""
    if len(data) - begin < _LENGTH.size:
        return len(data) + 1
    (size,) = _LENGTH.unpack_from(data, begin)
    if not TAG_BYTES <= size <= _MAX_RECORD_BYTES:
        raise MalformedMessage(f"a record of {size} bytes, {TAG_BYTES} to {_MAX_RECORD_BYTES} are read")
    return begin + _LENGTH.size + int(size)


def _frames(body: memoryview) -> list[memoryview]:
    (count,) = _COUNT.unpack_from(body) if len(body) >= _COUNT.size else (0,)
    begin = _COUNT.size + 4 * (count - 1)
    if not count or begin > len(body):
        raise MalformedMessage(f"a record of {len(body)} bytes, which names {count} frames")
    if count == 1:
        return [body[begin:]]
    *ends, last = accumulate(struct.unpack_from(f"<{count - 1}I", body, _COUNT.size), initial=begin)
    if last > len(body):
        raise MalformedMessage(f"a record of {len(body)} bytes, whose frames take {last}")
    return [body[start:end] for start, end in pairwise([*ends, last, len(body)])]
