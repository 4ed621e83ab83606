"""Small messages over a connection per rank, which the event loop itself reads and writes: a link for a channel.

ZeroMQ sends and receives on a thread of its own, at either end; each is woken, and takes the interpreter's core. A
message that a stage waits for pays for that each time. Here it goes from the loop to the system and back to a loop.
What does not fit into the system's buffers waits, so nothing ever blocks. All is sealed, but for larger frames where
arrays need not be.

A thread of a stage may send, too, so that what others wait for does not wait for the loop's turn. It seals and hands to
the system under a lock, which is never held for longer than that takes; the loop does all else.
"""

import logging
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rrfp_jax.network.direct_record import closed, opened
from rrfp_jax.network.lane import Proven
from rrfp_jax.network.link import Message
from rrfp_jax.network.loop_thread import runs_here
from rrfp_jax.network.plain import MalformedMessage

_LOG = logging.getLogger(__name__)
_READ_BYTES = 1 << 19


class _Line:
    """The connection to one rank. Before it stands, what is sent waits."""

    def __init__(self, *, encrypts: bool) -> None:
        self.proven: Proven | None = None
        self.unsent = bytearray()
        self._encrypts = encrypts
        self._early: list[tuple[bytes, Sequence[Any]]] = []
        self._partial = b""

    def open(self, proven: Proven) -> None:
        proven.connection.setblocking(False)
        self.proven = proven
        for head, frames in self._early:
            self.send(head, frames)
        self._early.clear()

    def send(self, head: bytes, frames: Sequence[Any]) -> None:
        """Raises OSError where the connection has ended."""
        if self.proven is None:
            self._early.append((head, frames))
            return
        record, num_bytes = closed(self.proven.outgoing, head, frames, encrypts=self._encrypts)
        num_sent = 0 if self.unsent else self._send(record)
        if num_sent < num_bytes:
            self.unsent += b"".join(record)[num_sent:]

    def flush(self) -> None:
        """Send what waits, as far as the system takes it. Raises OSError."""
        del self.unsent[: self._send([self.unsent])]

    def _send(self, buffers: list[Any]) -> int:
        assert self.proven is not None
        try:
            return self.proven.connection.sendmsg(buffers)
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
        while begin < len(data) and (record := opened(self.proven.incoming, data, begin)):
            frames, begin = record
            messages.append(frames)
        self._partial = bytes(data[begin:])
        return messages

    def close(self) -> None:
        if self.proven is not None:
            self.proven.connection.close()


class DirectLink:
    """Carries messages, each a head and frames, in order per rank. Used on the event loop, but for :meth:`send`.

    Args:
        encrypts: whether larger frames are sealed too; both sides must say the same.
        broken: called where the connection to a rank has ended, other than by :meth:`disconnect`.
    """

    def __init__(self, loop: AbstractEventLoop, *, encrypts: bool, broken: Callable[[int, str], None]) -> None:
        self._loop, self._encrypts, self._broken = loop, encrypts, broken
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
        self._lines[rank] = _Line(encrypts=self._encrypts)

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
                line.send(head, frames)
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
