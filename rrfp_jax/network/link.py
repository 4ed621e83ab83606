"""A pair of sockets per rank: one listens and sends, the other is connected to every peer and receives.

So whoever reaches a port can say nothing there but a short greeting: what listens reads no more, and no stranger can
make a rank allocate memory. What may be large comes only over connections that this rank has made itself, to addresses
of its run. A receiver greets when it connects; from then on the sender knows the connection by its proven rank.

Everything is encrypted, and both ends are proven in the handshake (CURVE).
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from rrfp_jax.network.keys import RunKey
from rrfp_jax.network.sockets import Context, bind, connect, connect_as, descriptor, new_socket, rank_role, serve_as
from rrfp_jax.network.unproven import Unproven

_COPY_BELOW_BYTES = 1 << 16
"""Smaller frames are copied into ZeroMQ's own memory, which costs less than to be told when they have been sent."""

_GREETING_BYTES = 1 << 10
"""The most that a listening socket reads in one: what a handshake says is no longer either."""
_GREETINGS = 4
"""How many of a connection may wait to be read."""

_HELLO = b"hello"
"""What a rank says where it connects to another."""

_RECONNECT_MS = 20
"""Where a port refuses a connection that has just closed, its process has ended; so that is tried soon."""

# What Python adds to it are options of kinds of sockets that are not used here.
_send_frame = zmq.backend.Socket.send
# As plain integers: combining the enumeration's members costs more than a send.
_NO_WAIT = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

Message = tuple[int, list[memoryview]]
"""The sender, and the head and the frames."""


class Link:
    """Carries messages, each a head and frames, in order per peer. Used on one thread.

    Args:
        rank: the number of this rank.
        interface: the interface to listen on.
        unproven: is told of the connections over which others have greeted.
    """

    def __init__(self, context: Context, rank: int, key: RunKey, interface: str, unproven: Unproven) -> None:
        self.rank, self.key, self._unproven = rank, key, unproven
        self.inbound, self.outbound = new_socket(context, zmq.ROUTER), new_socket(context, zmq.ROUTER)
        self.inbound.router_mandatory = self.outbound.router_mandatory = 1
        self.inbound.reconnect_ivl = _RECONNECT_MS
        self.outbound.maxmsgsize, self.outbound.rcvhwm = _GREETING_BYTES, _GREETINGS
        serve_as(self.outbound, key.pair(rank_role(rank)))
        self.address = bind(self.outbound, interface)
        self._senders: dict[bytes, int] = {}
        self._places: dict[int, str] = {}
        self._receivers: dict[int, bytes] = {}
        self._early: dict[int, list[tuple[bytes, Sequence[Any]]]] = {}
        self._hush: Callable[[], None] | None = None

    def listen(self, loop: AbstractEventLoop, read: Callable[[], None]) -> None:
        """Have ``read`` called on the loop where messages may have arrived; it is told of changes only."""
        self._hush = listen(loop, descriptor(self.inbound), read)

    def connect(self, rank: int, address: str) -> None:
        """Begin to receive from a rank that listens there, and to send to it once it has connected likewise."""
        name = rank_role(rank).encode()
        self._senders[name], self._places[rank] = rank, address
        if rank not in self._receivers:
            self._early[rank] = []
        connect_as(self.inbound, self.key.pair(rank_role(self.rank)), self.key.pair(rank_role(rank)).public)
        self.inbound.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        connect(self.inbound, address)
        self.greet(rank)

    def greet(self, rank: int) -> None:
        """Say who connects; again where the connection was made anew."""
        with suppress(zmq.ZMQError):
            self.inbound.send_multipart([rank_role(rank).encode(), _HELLO], zmq.NOBLOCK)

    def welcome(self) -> list[int]:
        """Learn who has connected since the last call, and send what waited for them."""
        came: list[int] = []
        while True:
            try:
                name, frame = self.outbound.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return came
            except ValueError:  # not one frame
                continue
            rank = _greeter(frame)
            if rank is not None:
                self._unproven.has_proven(frame.get(zmq.SRCFD))
                self._receivers[rank] = name.bytes
                for head, frames in self._early.pop(rank, ()):
                    self.send(rank, head, frames)
                came.append(rank)

    @property
    def is_complete(self) -> bool:
        """Whether everybody that this rank has connected to has connected too."""
        return not self._early

    def disconnect(self, rank: int) -> None:
        """Send nothing more to a rank, and expect nothing; what waits for its greeting is discarded."""
        self._receivers.pop(rank, None)
        self._early.pop(rank, None)
        self.ignore(rank)

    def ignore(self, rank: int) -> None:
        """Expect nothing more of a rank, but go on sending to it."""
        if place := self._places.pop(rank, None):
            with suppress(zmq.ZMQError):
                self.inbound.disconnect(place)

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        """Never blocks. What cannot be sent since the connection is gone is discarded: its loss is reported anyway."""
        name = self._receivers.get(rank)
        if name is None:
            if rank in self._early:
                self._early[rank].append((head, frames))
            return
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

    def receive(self) -> Message | None:
        """The next message, if one has arrived."""
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
        """Free the sockets; what is under way is sent for up to ``linger_s``."""
        if self._hush is not None:
            self._hush()
        self.outbound.close(linger=round(linger_s * 1000))
        self.inbound.close(linger=0)


def listen(loop: AbstractEventLoop, number: int, read: Callable[[], None]) -> Callable[[], None]:
    """Have the loop call ``read`` while a descriptor is readable; returns what ends that."""
    loop.add_reader(number, read)

    def hush() -> None:
        if not loop.is_closed():
            loop.remove_reader(number)

    return hush


def rank_of(role: str) -> int | None:
    """The rank of a role, the way back from :func:`rank_role`."""
    number = role.removeprefix("rank ")
    return int(number) if number.isdecimal() and rank_role(int(number)) == role else None


def _greeter(frame: zmq.Frame) -> int | None:
    """Whose key the handshake has proven; the gate has told ZeroMQ, and ZeroMQ tells us. None: nothing is proven."""
    user = frame.get("User-Id")
    return rank_of(user) if isinstance(user, str) else None
