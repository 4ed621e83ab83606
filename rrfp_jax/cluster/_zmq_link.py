"""ZeroMQ's link: a pair of sockets per rank, of which one listens and sends, and the other connects and receives.

So a process that reaches a port can say nothing there but a short greeting: the socket that listens reads no more, and
no stranger can make a rank allocate memory. Large messages come only over connections that this rank has made itself,
to addresses of its run. A receiver greets when it connects; from then on the sender knows the connection by its proven
rank. Everything is encrypted, and both ends are proven in the handshake (CURVE).

A rank may have one process after another, which have the same keys. They are numbered from 0, and a greeting tells the
number, so that connections of a process that is gone are not taken for those of its successor, nor the other way round.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from rrfp_jax.cluster._zmq_sockets import (
    UnprovenConnections,
    ZmqContext,
    bind_socket,
    connect_socket,
    new_socket,
    rank_role,
)
from rrfp_jax.cluster.keys import RunKey
from rrfp_jax.cluster.wire import PeerMessage

_COPY_BELOW_BYTES = 1 << 16
"""Smaller frames are copied into ZeroMQ's own memory, which costs less than to be told when they have been sent."""
_GREETING_BYTES = 1 << 10
"""Largest message that a listening socket reads; messages of a handshake are no longer either."""
_GREETINGS = 4
"""Largest number of messages of one connection that may wait to be read."""
_HELLO = b"hello %d"
"""Greeting of a rank that has connected to another, with the number of its process."""
_RECONNECT_MS = 20
"""A port that refuses a connection that has just closed shows that its process has ended; so this is tried soon."""

# The method that Python adds handles options of kinds of sockets that are not used here.
_send_frame = zmq.backend.Socket.send
# As plain integers: combining the enumeration's members costs more than a send.
_NO_WAIT = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class ZmqLink:
    """Carries messages over ZeroMQ. Used on one thread, which may be another than the event loop's.

    Args:
        rank: this rank.
        interface: the interface to listen on.
        unproven: told of the connections over which others have greeted.
        number: the number of this process of the rank.
    """

    def __init__(
        self,
        context: ZmqContext,
        rank: int,
        key: RunKey,
        interface: str,
        unproven: UnprovenConnections,
        *,
        number: int = 0,
    ) -> None:
        self.rank, self.key, self._unproven = rank, key, unproven
        self.inbound, self.outbound = new_socket(context, zmq.ROUTER), new_socket(context, zmq.ROUTER)
        self.inbound.router_mandatory = self.outbound.router_mandatory = 1
        self.inbound.reconnect_ivl = _RECONNECT_MS
        # A stranger can make this process hold no more than a few short messages.
        self.outbound.maxmsgsize, self.outbound.rcvhwm = _GREETING_BYTES, _GREETINGS
        self.address = bind_socket(self.outbound, key.pair(rank_role(rank)), interface)
        self.descriptor = int(self.inbound.fd)
        """Readable when something has changed, which may be that a message has come."""
        self.early: dict[int, list[tuple[bytes, Sequence[Any]]]] = {}
        """Messages to ranks that have not connected yet."""
        self._senders: dict[bytes, int] = {}
        self._places: dict[int, str] = {}
        self._receivers: dict[int, bytes] = {}
        self._own_number = number
        self.numbers: dict[int, int] = {}
        """Numbers of the processes to exchange messages with, by rank, where they are not 0."""
        self._ahead: dict[tuple[int, int], bytes] = {}
        """Connections of processes of which this one has not been told, by rank and number."""

    def connect(self, rank: int, address: str) -> None:
        """Accepts messages to a rank from now on; they travel once it has connected as well."""
        name = self._name(rank)
        self._senders[name], self._places[rank] = rank, address
        if rank not in self._receivers:
            self.early[rank] = []
        # The option holds for the next connection of the socket: it is the name under which it is known here.
        self.inbound.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        keys = self.key.pair(rank_role(self.rank)), self.key.pair(rank_role(rank)).public
        connect_socket(self.inbound, address, *keys)
        self.greet(rank)

    def greet(self, rank: int) -> None:
        """Greets a rank; again where the connection was made anew."""
        with suppress(zmq.ZMQError):
            self.inbound.send_multipart([self._name(rank), _HELLO % self._own_number], zmq.NOBLOCK)

    def _name(self, rank: int) -> bytes:
        return f"{rank_role(rank)}, process {self.numbers.get(rank, 0)}".encode()

    def take_up(self, rank: int, number: int) -> None:
        """Lets go of a process of a rank that is gone; the next :meth:`connect` is to the one of this number."""
        self.disconnect(rank)
        self._senders.pop(self._name(rank), None)
        self.numbers[rank] = number
        if (name := self._ahead.pop((rank, number), None)) is not None:
            self._receivers[rank] = name

    def welcome(self) -> list[int]:
        """Returns the ranks that have connected since the last call, and sends the messages that waited for them."""
        came: list[int] = []
        while True:
            try:
                name, frame = self.outbound.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return came
            except ValueError:  # a stranger's message of several frames
                continue
            # The handshake has proven the role; the gate, which admits ranks alone, has told ZeroMQ, and that tells us.
            role = frame.get("User-Id")
            if not isinstance(role, str):
                continue
            rank = int(role.removeprefix("rank "))
            self._unproven.has_proven(frame.get(zmq.SRCFD))
            said = frame.bytes.rpartition(b" ")[2]
            number, known = int(said) if said.isdigit() else 0, self.numbers.get(rank, 0)
            if number != known:
                if number > known:
                    self._ahead[rank, number] = name.bytes
                continue
            self._receivers[rank] = name.bytes
            for head, frames in self.early.pop(rank, ()):
                self.send(rank, head, frames)
            came.append(rank)

    def disconnect(self, rank: int) -> None:
        """Ends the exchange with a rank in both directions."""
        self._receivers.pop(rank, None)
        self.early.pop(rank, None)
        self.ignore(rank)

    def ignore(self, rank: int) -> None:
        """Stops receiving from a rank, but goes on sending to it."""
        if place := self._places.pop(rank, None):
            with suppress(zmq.ZMQError):
                self.inbound.disconnect(place)

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        """Sends a message; never blocks. A message to a rank that is gone is dropped: its loss is reported anyway."""
        name = self._receivers.get(rank)
        if name is None:
            if rank in self.early:
                self.early[rank].append((head, frames))
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
        """Returns the next message that has arrived, or None."""
        while True:
            try:
                name = self.inbound.recv(_NO_WAIT)
            except zmq.Again:
                return None
            frames, has_more = [], True
            while has_more:
                frame = self.inbound.recv(_NO_WAIT, copy=False)
                frames.append(frame.buffer)
                has_more = frame.more
            if (rank := self._senders.get(name)) is not None:  # else of a process that is gone
                return rank, frames

    def close(self, linger_s: float) -> None:
        """Closes both sockets; ZeroMQ sends messages under way for up to ``linger_s``."""
        self.outbound.close(linger=round(linger_s * 1000))
        self.inbound.close(linger=0)
