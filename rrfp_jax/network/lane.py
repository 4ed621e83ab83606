"""One connection for arrays between two ranks: a thread that sends parts of messages, and one that receives them.

Both spend their time in the system or in the cipher, where the interpreter's lock is free, and work from and into the
arrays' own memory. A part is a sealed header, perhaps the sealed head of its message, and the bytes: sealed too, or as
they are.
"""

import logging
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

from rrfp_jax.network.assembly import PART_BYTES, Assembly, Part, check_head_size
from rrfp_jax.network.plain import MalformedMessage
from rrfp_jax.network.sealing import TAG_BYTES, Seal

_LOG = logging.getLogger(__name__)
_HEADER = struct.Struct("<QQQII")
"""The message's number and size, where the part belongs, its length and that of the head."""
_SEALED_BYTES = _HEADER.size + TAG_BYTES

Parts = SimpleQueue[Part | None]
"""What waits to be sent to a peer, over whichever of its connections is free; None ends one."""


class Proven(NamedTuple):
    """A connection to a rank that has proven itself: a blocking socket, and how to seal and open."""

    connection: socket.socket
    outgoing: Seal
    incoming: Seal


class Lane:
    """Carries parts both ways, as soon as it is made, until one side ends.

    Args:
        encrypts: whether the bytes of arrays are sealed too; both sides must say the same.
        broken: called on either thread, perhaps twice, where the connection ends other than by :meth:`end`.
    """

    def __init__(
        self,
        name: str,
        proven: Proven,
        parts: Parts,
        assembly: Assembly,
        *,
        encrypts: bool,
        broken: Callable[[str], None],
    ) -> None:
        self._name = name
        self._connection, self._outgoing, self._incoming = proven
        self._parts, self._assembly, self._encrypts = parts, assembly, encrypts
        self._broken = broken
        self._is_ended = False
        self._scratch = {side: memoryview(bytearray(PART_BYTES + TAG_BYTES if encrypts else 0)) for side in "oi"}
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"rrfp-{side}-{name}", daemon=True)
            for side, work in (("send", self._send_all), ("receive", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Send and receive nothing more; returns at once. The queue needs a None for the sending thread to notice."""
        self._is_ended = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> None:
        """Wait for the threads and free the connection; after :meth:`end`."""
        for thread in self._threads:
            thread.join(timeout_s)
        self._connection.close()

    def _guarded(self, work: Callable[[], None]) -> None:
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

    # -- sending -----------------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (part := self._parts.get()) is not None:
            self._send(part)
            del part  # its buffers may be released, and the next may come late

    def _send(self, part: Part) -> None:
        number, total, offset, length, buffers, head = part
        header = self._outgoing.closed(_HEADER.pack(number, total, offset, length, len(head)))
        said: list[Any] = [header + self._outgoing.closed(head) if head else header]
        if self._encrypts and length:
            whole = buffers[0] if len(buffers) == 1 else b"".join(buffers)
            sealed = self._scratch["o"][: length + TAG_BYTES]
            self._outgoing.close_into(whole, sealed)
            said.append(sealed)
        else:
            said += buffers
        num_sent = self._connection.sendmsg(said)
        num_left = sum(len(each) for each in said) - num_sent
        while num_left:  # a signal came, or the system took less
            said = _without(said, num_sent)
            num_sent = self._connection.sendmsg(said)
            num_left -= num_sent

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        sealed, header = memoryview(bytearray(_SEALED_BYTES)), bytearray(_HEADER.size)
        while self._fill(sealed, may_end=True):
            self._incoming.open_into(sealed, header)
            number, total, offset, length, head_size = _HEADER.unpack(header)
            head = self._head(head_size) if head_size else None
            self._receive(self._assembly.place(number, total, offset, length))
            self._assembly.filled(number, length, head)
        if not self._is_ended:
            self._broken("closed its connection")

    def _head(self, size: int) -> bytes:
        check_head_size(size)
        sealed = bytearray(size + TAG_BYTES)
        self._fill(memoryview(sealed))
        return self._incoming.opened(sealed)

    def _receive(self, place: memoryview) -> None:
        if not self._encrypts or not place.nbytes:
            self._fill(place)
            return
        if place.nbytes > PART_BYTES:
            raise MalformedMessage(f"a part of {place.nbytes} bytes, at most {PART_BYTES} are read")
        sealed = self._scratch["i"][: place.nbytes + TAG_BYTES]
        self._fill(sealed)
        self._incoming.open_into(sealed, place)

    def _fill(self, view: memoryview, *, may_end: bool = False) -> bool:
        """Whether all of it came; the connection may end only before it."""
        done, size = 0, view.nbytes
        while done < size:
            num_bytes = self._connection.recv_into(view[done:], size - done, socket.MSG_WAITALL)
            if not num_bytes:
                if may_end and not done:
                    return False
                raise ConnectionError("closed its connection")
            done += num_bytes
        return True


def _without(buffers: list[Any], num_bytes: int) -> list[Any]:
    """What is left of buffers of which so many bytes have been sent."""
    left = []
    for each in buffers:
        if num_bytes < len(each):
            left.append(memoryview(each)[num_bytes:])
            num_bytes = 0
        else:
            num_bytes -= len(each)
    return left
