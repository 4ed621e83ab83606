"""Connections for large arrays: several between two ranks, with two threads each.

Parts of a message travel over whichever connection is free, so several cores seal them. The threads spend their time in
the system or in the cipher, where the interpreter's lock is free, and work from and into the arrays' own memory. On the
wire, a part is a sealed header, the sealed head of its message if it is the first part, and the bytes, which are sealed
too unless the run leaves arrays in the clear.
"""

import logging
import os
import socket
import struct
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from rrfp_jax.cluster._array_parts import (
    CLEAR_PART_BYTES,
    MAX_HEAD_BYTES,
    SEALED_PART_BYTES,
    ArrayPart,
    BufferPool,
    MessageAssembly,
    cut_message,
)
from rrfp_jax.cluster._channel import PeerMessage, call_when_readable
from rrfp_jax.cluster._private_connections import PrivateLink, ProvenConnection
from rrfp_jax.cluster.wire import TAG_BYTES, MalformedMessage

_LOG = logging.getLogger(__name__)
_END_S = 2.0
_HEADER = struct.Struct("<QQQII")
"""Number and size of the message, offset and length of the part, and length of the head that follows."""
_SEALED_HEADER_BYTES = _HEADER.size + TAG_BYTES

_PartQueue = SimpleQueue[ArrayPart | None]
"""Parts that wait to be sent to a peer, over whichever of its connections is free; None ends one sending thread."""


class ArrayConnection:
    """One connection to a rank. Carries parts both ways from its construction until one side ends it.

    Args:
        encrypts: whether the bytes of arrays are sealed too; both sides must agree.
        broken: called on either thread, perhaps twice, where the connection ends other than by :meth:`end`.
    """

    def __init__(
        self,
        name: str,
        proven: ProvenConnection,
        parts: _PartQueue,
        assembly: MessageAssembly,
        *,
        encrypts: bool,
        broken: Callable[[str], None],
    ) -> None:
        self._name = name
        self._socket, self._outgoing, self._incoming = proven
        self._parts, self._assembly, self._encrypts = parts, assembly, encrypts
        self._broken = broken
        self._is_ended = False
        num_scratch = SEALED_PART_BYTES + TAG_BYTES if encrypts else 0
        self._sealing, self._opening = (memoryview(bytearray(num_scratch)) for _ in range(2))
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"rrfp-{side}-{name}", daemon=True)
            for side, work in (("send", self._send_all), ("receive", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stops both directions; returns at once. The queue needs a None for the sending thread to notice."""
        self._is_ended = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> None:
        """Waits for the threads and closes the socket; call it after :meth:`end`."""
        for thread in self._threads:
            thread.join(timeout_s)
        self._socket.close()

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
        num_sent = self._socket.sendmsg(said)
        num_left = sum(len(each) for each in said) - num_sent
        while num_left:  # a signal came, or the system took less
            while num_sent >= len(said[0]):
                num_sent -= len(said.pop(0))
            said[0] = memoryview(said[0])[num_sent:]
            num_sent = self._socket.sendmsg(said)
            num_left -= num_sent

    def _receive_all(self) -> None:
        sealed, header = memoryview(bytearray(_SEALED_HEADER_BYTES)), bytearray(_HEADER.size)
        while self._fill(sealed, may_end=True):
            self._incoming.open_into(sealed, header)
            number, total, offset, length, head_size = _HEADER.unpack(header)
            head = None
            if head_size:
                if head_size > MAX_HEAD_BYTES:
                    raise MalformedMessage(f"a head of {head_size} bytes, at most {MAX_HEAD_BYTES} are read")
                sealed_head = bytearray(head_size + TAG_BYTES)
                self._fill(memoryview(sealed_head))
                head = self._incoming.opened(sealed_head)
            place = self._assembly.place(number, total, offset, length)
            if not self._encrypts or not length:
                # Straight into the memory of the message: the system's copy is the only one.
                self._fill(place)
            elif length > SEALED_PART_BYTES:
                raise MalformedMessage(f"a part of {length} bytes, at most {SEALED_PART_BYTES} are read")
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
            num_bytes = self._socket.recv_into(view[done:], size - done, socket.MSG_WAITALL)
            if not num_bytes:
                if may_end and not done:
                    return False
                raise ConnectionError("closed its connection")
            done += num_bytes
        return True


class _PeerConnections:
    """All array connections to one rank, and the messages under way to and from it."""

    def __init__(self, assembly: MessageAssembly) -> None:
        self.assembly = assembly
        self.parts: _PartQueue = SimpleQueue()
        self.connections: list[ArrayConnection] = []
        self.num_sent = 0

    def finish(self) -> None:
        """Lets the sending threads end once everything has been sent."""
        for _ in self.connections:
            self.parts.put(None)


class ArrayLink(PrivateLink):
    """Carries messages over array connections.

    Args:
        encrypts: whether frames are sealed; heads always are.
        keep_bytes: number of unused bytes that are kept for arrays that arrive next.
        broken: called on the threads of connections, perhaps several times, where one to a rank has ended.
    """

    def __init__(self, *, encrypts: bool, keep_bytes: int, broken: Callable[[int, str], None]) -> None:
        self._encrypts, self._broken = encrypts, broken
        self._part_bytes = SEALED_PART_BYTES if encrypts else CLEAR_PART_BYTES
        self._pool = BufferPool(keep_bytes)
        self._peers: dict[int, _PeerConnections] = {}
        self._ended: list[_PeerConnections] = []
        self._arrived: deque[PeerMessage] = deque()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop_reading: Callable[[], None] = lambda: None

    def listen(self, loop: AbstractEventLoop, read: Callable[[], None]) -> None:
        self._stop_reading = call_when_readable(loop, self._descriptor, read)

    def connect(self, rank: int, address: str) -> None:  # noqa: ARG002
        self._peers[rank] = _PeerConnections(MessageAssembly(self._pool, partial(self._complete, rank)))

    def open(self, rank: int, connections: Sequence[ProvenConnection]) -> None:
        peer = self._peers.get(rank)
        if peer is None:  # the rank was lost meanwhile
            for proven in connections:
                proven.socket.close()
            return
        for number, proven in enumerate(connections):
            connection = ArrayConnection(
                f"{rank}-{number}",
                proven,
                peer.parts,
                peer.assembly,
                encrypts=self._encrypts,
                broken=partial(self._broken, rank),
            )
            peer.connections.append(connection)

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        peer = self._peers.get(rank)
        if peer is None:
            return
        for part in cut_message(peer.num_sent, head, frames, self._part_bytes):
            peer.parts.put(part)
        peer.num_sent += 1

    def receive(self) -> PeerMessage | None:
        if not self._arrived:
            with suppress(BlockingIOError):
                os.eventfd_read(self._descriptor)
        # A message that came since the descriptor was read has made it readable again.
        return self._arrived.popleft() if self._arrived else None

    def disconnect(self, rank: int) -> None:
        if peer := self._peers.pop(rank, None):
            for connection in peer.connections:
                connection.end()
            peer.finish()
            self._ended.append(peer)

    def close(self, linger_s: float) -> None:  # noqa: ARG002 - :meth:`join` waits
        self._stop_reading()
        for peer in self._peers.values():
            peer.finish()

    def join(self) -> None:
        connections = [each for peer in (*self._peers.values(), *self._ended) for each in peer.connections]
        for connection in connections:
            connection.end()
        for connection in connections:
            connection.join(_END_S)
        os.close(self._descriptor)

    def _complete(self, rank: int, frames: list[memoryview]) -> None:
        # Called on the thread of a connection.
        self._arrived.append((rank, frames))
        os.eventfd_write(self._descriptor, 1)
