"""Bound a ZeroMQ socket's connections whose other ends have proven nothing: the oldest makes room.

ZeroMQ accepts every connection, and drops one that has not proven itself after the handshake's deadline. Until then
each holds a descriptor, so that a stranger could use up all descriptors of the process, and leave none for files and
other connections. ZeroMQ tells the descriptor of a connection as it comes and as it goes, and the descriptor over which
a message came. To end a connection, this module shuts it down, which ZeroMQ takes for the other end's doing.
"""

import os
import socket
import threading
from contextlib import suppress

from rrfp_jax.network.descriptors import unproven_allowed

_Ends = tuple[str, int, int]
"""The other end's host and port, and the port here. They differ for every connection, while descriptors come again."""


class Unproven:
    """The connections that have come to some listening sockets of this process; used on any thread.

    Args:
        num_ranks: the number of ranks of the run: so many may have to prove themselves at once.
    """

    def __init__(self, num_ranks: int) -> None:
        self._most = unproven_allowed(num_ranks)
        self._lock = threading.Lock()
        self._present: dict[tuple[bytes, int], _Ends] = {}
        """The ends of present connections, by listener and descriptor: a listener may report that its connection has
        gone only after another listener has accepted one with the same descriptor."""
        self._since: dict[_Ends, int] = {}
        """The descriptors of connections that have proven nothing, the oldest first."""
        self._proven: set[_Ends] = set()
        """The ends that have proven themselves, perhaps before this object was told that they came."""
        # A second descriptor of a connection keeps others from getting its number meanwhile. It is reserved from the
        # start, since there may be no other left.
        self._idle = os.open(os.devnull, os.O_RDONLY)
        self._second = os.dup(self._idle)

    def came(self, descriptor: int, listener: bytes) -> str | None:
        """Add a connection that a listener has accepted; returns its host, or None if it is gone already."""
        with self._lock:
            ends = self._ends(descriptor)
            if ends is None or ends[2] != int(listener.rpartition(b":")[2]):  # closed, and another has its number
                return None
            self._present[listener, descriptor] = ends
            if ends not in self._proven:
                self._since[ends] = descriptor
                if len(self._since) > self._most:
                    oldest = next(iter(self._since))
                    self._ends(self._since.pop(oldest), to_shut=oldest)
            return ends[0]

    def went(self, descriptor: int, listener: bytes) -> None:
        """Remove a connection that the listener had accepted and that is closed."""
        with self._lock:
            ends = self._present.pop((listener, descriptor), None)
            if ends is not None:
                self._since.pop(ends, None)
                self._proven.discard(ends)

    def has_proven(self, descriptor: int) -> None:
        """Mark a connection over which a message has come, so that its other end has the run's key."""
        with self._lock:
            ends = self._ends(descriptor)
            if ends is not None:
                self._since.pop(ends, None)
                self._proven.add(ends)

    def _ends(self, descriptor: int, *, to_shut: _Ends | None = None) -> _Ends | None:
        """Returns the ends of a connection, which is shut down if they are ``to_shut``; None if there is no such
        connection."""
        with suppress(OSError):
            os.dup2(descriptor, self._second, inheritable=False)
            connection = socket.socket(fileno=self._second)
            try:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    return None
                host, number, *_ = connection.getpeername()
                ends = (host, number, connection.getsockname()[1])
                if ends == to_shut:
                    connection.shutdown(socket.SHUT_RDWR)
                return ends
            finally:
                connection.detach()
                os.dup2(self._idle, self._second, inheritable=False)
        return None

    def close(self) -> None:
        with self._lock:
            os.close(self._second)
            os.close(self._idle)
