"""ZeroMQ's link: a pair of sockets per rank, of which one listens and sends, and the other connects and receives.

So a process that reaches a port can say nothing there but a short greeting: the socket that listens reads no more, and
no stranger can make a rank allocate memory. Large messages come only over connections that this rank has made itself,
to addresses of its run. A receiver greets when it connects; from then on the sender knows the connection by its proven
rank. Everything is encrypted, and both ends are proven in the handshake (CURVE).
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from rrfp_jax.cluster._admission import UnprovenConnections
from rrfp_jax.cluster._channel import MessageLink, PeerMessage, call_when_readable
from rrfp_jax.cluster._zmq_sockets import (
    ZmqContext,
    bind_socket,
    connect_as,
    connect_socket,
    new_socket,
    rank_of,
    rank_role,
    serve_as,
)
from rrfp_jax.cluster.keys import RunKey

_COPY_BELOW_BYTES = 1 << 16
"""Smaller frames are copied into ZeroMQ's own memory, which costs less than to be told when they have been sent."""
_GREETING_BYTES = 1 << 10
"""Largest message that a listening socket reads; messages of a handshake are no longer either."""
_GREETINGS = 4
"""Largest number of messages of one connection that may wait to be read."""
_HELLO = b"hello"
"""Greeting of a rank that has connected to another."""
_RECONNECT_MS = 20
"""A port that refuses a connection that has just closed shows that its process has ended; so this is tried soon."""

# The method that Python adds handles options of kinds of sockets that are not used here.
_send_frame = zmq.backend.Socket.send
# As plain integers: combining the enumeration's members costs more than a send.
_NO_WAIT = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class ZmqLink(MessageLink):
    """Carries messages over ZeroMQ. Used on one thread, which may be another than the event loop's.

    Args:
        rank: this rank.
        interface: the interface to listen on.
        unproven: told of the connections over which others have greeted.
    """

    def __init__(
        self, context: ZmqContext, rank: int, key: RunKey, interface: str, unproven: UnprovenConnections
    ) -> None:
        self.rank, self.key, self._unproven = rank, key, unproven
        self.inbound, self.outbound = new_socket(context, zmq.ROUTER), new_socket(context, zmq.ROUTER)
        self.inbound.router_mandatory = self.outbound.router_mandatory = 1
        self.inbound.reconnect_ivl = _RECONNECT_MS
        # A stranger can make this process hold no more than a few short messages.
        self.outbound.maxmsgsize, self.outbound.rcvhwm = _GREETING_BYTES, _GREETINGS
        serve_as(self.outbound, key.pair(rank_role(rank)))
        self.address = bind_socket(self.outbound, interface)
        self._senders: dict[bytes, int] = {}
        self._places: dict[int, str] = {}
        self._receivers: dict[int, bytes] = {}
        self._early: dict[int, list[tuple[bytes, Sequence[Any]]]] = {}
        """Messages to ranks that have not connected yet."""
        self._stop_reading: Callable[[], None] = lambda: None

    def listen(self, loop: AbstractEventLoop, read: Callable[[], None]) -> None:
        descriptor = self.inbound.fd  # tells of changes only
        assert isinstance(descriptor, int)
        self._stop_reading = call_when_readable(loop, descriptor, read)

    def connect(self, rank: int, address: str) -> None:
        name = rank_role(rank).encode()
        self._senders[name], self._places[rank] = rank, address
        if rank not in self._receivers:
            self._early[rank] = []
        # Both options hold for the next connection of the socket: the keys, and the name under which it is known here.
        connect_as(self.inbound, self.key.pair(rank_role(self.rank)), self.key.pair(rank_role(rank)).public)
        self.inbound.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        connect_socket(self.inbound, address)
        self.greet(rank)

    def greet(self, rank: int) -> None:
        """Greets a rank; again where the connection was made anew."""
        with suppress(zmq.ZMQError):
            self.inbound.send_multipart([rank_role(rank).encode(), _HELLO], zmq.NOBLOCK)

    def welcome(self) -> list[int]:
        came: list[int] = []
        while True:
            try:
                name, frame = self.outbound.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return came
            except ValueError:  # a stranger's message of several frames
                continue
            # The handshake has proven the role; the gate has told ZeroMQ, and ZeroMQ tells us.
            role = frame.get("User-Id")
            rank = rank_of(role) if isinstance(role, str) else None
            if rank is not None:
                self._unproven.has_proven(frame.get(zmq.SRCFD))
                self._receivers[rank] = name.bytes
                for head, frames in self._early.pop(rank, ()):
                    self.send(rank, head, frames)
                came.append(rank)

    @property
    def is_complete(self) -> bool:
        return not self._early

    def disconnect(self, rank: int) -> None:
        self._receivers.pop(rank, None)
        self._early.pop(rank, None)
        self.ignore(rank)

    def ignore(self, rank: int) -> None:
        """Stops receiving from a rank, but goes on sending to it."""
        if place := self._places.pop(rank, None):
            with suppress(zmq.ZMQError):
                self.inbound.disconnect(place)

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        name = self._receivers.get(rank)
        if name is None:
            if rank in self._early:
                self._early[rank].append((head, frames))
            return
        # Where the connection is gone, the first frame raises (ROUTER_MANDATORY).
        try:
            _send_frame(self.outbound, name, _MORE)
            _send_frame(self.outbound, head, _MORE if frames else _NO_WAIT)
            num_left = len(frames)
            for frame in frames:
                num_left -= 1
                small = memoryview(frame).nbytes < _COPY_BELOW_BYTES
                _send_frame(self.outbound, frame, _MORE if num_left else _NO_WAIT, copy=small)
        except zmq.ZMQError:
            return

    def receive(self) -> PeerMessage | None:
        try:
            name = self.inbound.recv(_NO_WAIT)
        except zmq.Again:
            return None
        frames = []
        while True:
            frame = self.inbound.recv(_NO_WAIT, copy=False)
            frames.append(frame.buffer)
            if not frame.more:
                break
        return self._senders[name], frames

    def close(self, linger_s: float) -> None:
        self._stop_reading()
        self.outbound.close(linger=round(linger_s * 1000))
        self.inbound.close(linger=0)
