"""How many connections whose other end has proven nothing a listening socket of ZeroMQ may have: the oldest makes room.

ZeroMQ accepts whoever connects, and drops who has not proven itself after the handshake's deadline. Until then each
holds a descriptor, so that a stranger could use up all that the process may have, and with them files and other
connections. ZeroMQ tells the descriptor of a connection as it comes and as it goes, and which one a message came over;
to end a connection it is shut down from here, which ZeroMQ takes for the other end's doing.
"""

import os
import socket
import threading
from contextlib import suppress

from rrfp_jax.network.descriptors import unproven_allowed

_Peer = tuple[str, int]
"""The address of the other end: another one for every connection, where descriptors come again."""


class Unproven:
    """The connections that have come to some listening sockets of this process; used on any thread.

    Args:
        num_ranks: of the run: so many may have to prove themselves at once.
    """

    def __init__(self, num_ranks: int) -> None:
        self._most = unproven_allowed(num_ranks)
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self._since: dict[_Peer, int] = {}
        """The descriptors of those that have proven nothing, the oldest first."""
        self._early: set[_Peer] = set()
        """Who has proven itself before this was told that it came."""
        # A second descriptor of a connection keeps others from getting its number meanwhile. It is one that is held
        # for that, since there may be no other left.
        self._idle = os.open(os.devnull, os.O_RDONLY)
        self._second = os.dup(self._idle)

    def came(self, descriptor: int, listener: bytes) -> str | None:
        """A listener has accepted a connection; returns its host, or None where it is gone already."""
        port = int(listener.rpartition(b":")[2])
        with self._lock:
            peer = self._peer(descriptor, port=port)
            if peer is None:
                return None
            self._peers[descriptor] = peer
            if peer in self._early:
                self._early.discard(peer)
            else:
                self._since[peer] = descriptor
                if len(self._since) > self._most:
                    oldest = next(iter(self._since))
                    self._peer(self._since.pop(oldest), to_end=oldest)
            return peer[0]

    def went(self, descriptor: int) -> None:
        """ZeroMQ has closed a connection."""
        with self._lock:
            peer = self._peers.pop(descriptor, None)
            if peer is not None:
                self._since.pop(peer, None)

    def has_proven(self, descriptor: int) -> None:
        """A message has come over a connection, so its other end has the run's key."""
        with self._lock:
            known = self._peers.get(descriptor)
            if known is not None and known not in self._since:
                return
            peer = self._peer(descriptor)
            if peer is not None and self._since.pop(peer, None) is None:
                self._early.add(peer)

    def _peer(self, descriptor: int, *, port: int | None = None, to_end: _Peer | None = None) -> _Peer | None:
        """The other end of a connection, which is shut down where it is ``to_end``; None for a descriptor that was
        closed, or is of something else by now: what has come in at another ``port``, or no connection at all."""
        with suppress(OSError):
            os.dup2(descriptor, self._second, inheritable=False)
            connection = socket.socket(fileno=self._second)
            try:
                is_other = connection.family not in (socket.AF_INET, socket.AF_INET6)
                if is_other or (port is not None and connection.getsockname()[1] != port):
                    return None
                host, number, *_ = connection.getpeername()
                if to_end == (host, number):
                    connection.shutdown(socket.SHUT_RDWR)
                return host, number
            finally:
                connection.detach()
                os.dup2(self._idle, self._second, inheritable=False)
        return None

    def close(self) -> None:
        with self._lock:
            os.close(self._second)
            os.close(self._idle)
