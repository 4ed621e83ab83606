"""A pair of sockets per rank: one listens, the other is connected to every peer, so a connection carries one way.

:class:`SecureLink` encrypts everything and proves the sender of each message in the handshake. :class:`ClearLink`
proves the sender by a code over each message's head, and leaves the frames as they are.
"""

import hmac
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import zmq

from rrfp_jax.runtime.network.keys import RunKey
from rrfp_jax.runtime.network.plain import MalformedMessage
from rrfp_jax.runtime.network.sockets import Context, Socket, bind, connect_as, new_socket, rank_role, serve_as

COPY_BELOW_BYTES = 1 << 16
"""Smaller frames are copied into ZeroMQ's own memory, which costs less than to be told when they have been sent."""

# What Python adds to it are options of kinds of sockets that are not used here.
_send_frame = zmq.backend.Socket.send
# As plain integers: combining the enumeration's members costs more than a send.
_NO_WAIT = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Link(Protocol):
    """Carries messages, each a head and frames, in order per peer. Used on one thread."""

    address: str

    def sockets(self) -> tuple[Socket, Socket]:
        """The listening and the connected socket."""

    def connect(self, rank: int, address: str) -> None: ...

    def disconnect(self, rank: int) -> None:
        """Send nothing more to a rank; what waits for it is discarded."""

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        """Never blocks. What cannot be sent since the connection is gone is discarded: its loss is reported anyway."""

    def receive(self) -> tuple[int, list[memoryview]] | None:
        """The sender, the head and the frames of the next message, if one has arrived.

        Raises:
            MalformedMessage: where the sender is not proven.
        """

    def close(self, linger_s: float) -> None: ...


class SecureLink:
    """CURVE on every connection; the gate has told ZeroMQ whose key it is, and ZeroMQ tells us with each message."""

    def __init__(self, context: Context, rank: int, key: RunKey, interface: str, max_frame_bytes: int) -> None:
        self._key, self._role = key, rank_role(rank)
        self._inbound = new_socket(context, zmq.DEALER)
        self._inbound.maxmsgsize = max_frame_bytes
        serve_as(self._inbound, key.pair(self._role))
        self.address = bind(self._inbound, interface)
        self._outbound = _connecting(context)
        self._ranks: dict[str, int] = {}
        self._peers: dict[int, tuple[bytes, str]] = {}

    def sockets(self) -> tuple[Socket, Socket]:
        return self._inbound, self._outbound

    def connect(self, rank: int, address: str) -> None:
        role = rank_role(rank)
        identity = role.encode()
        self._ranks[role], self._peers[rank] = rank, (identity, address)
        connect_as(self._outbound, self._key.pair(self._role), self._key.pair(role).public)
        self._outbound.setsockopt(zmq.CONNECT_ROUTING_ID, identity)
        self._outbound.connect(address)

    def disconnect(self, rank: int) -> None:
        _disconnect(self._outbound, self._peers.pop(rank, None))

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        if peer := self._peers.get(rank):
            _send(self._outbound, peer[0], head, frames)

    def receive(self) -> tuple[int, list[memoryview]] | None:
        try:
            frame = self._inbound.recv(_NO_WAIT, copy=False)
        except zmq.Again:
            return None
        rank, frames = self._ranks.get(_user(frame)), [frame.buffer]
        while frame.more:
            frame = self._inbound.recv(_NO_WAIT, copy=False)
            frames.append(frame.buffer)
        if rank is None:
            raise MalformedMessage("its sender is no other rank of this run")
        return rank, frames

    def close(self, linger_s: float) -> None:
        self._outbound.close(linger=round(linger_s * 1000))
        self._inbound.close(linger=0)


_SEAL = struct.Struct("<16sIQ")
"""The code, the sender's rank and the number of the message."""


class ClearLink:
    """Plain TCP for arrays. The head carries a code that only a holder of the run key can compute, over the sender, the
    receiver's address, a running number, the sizes of the frames and the head itself: nothing can be forged or
    replayed, but who controls the wire can read frames, and alter them."""

    def __init__(self, context: Context, rank: int, key: RunKey, interface: str, max_frame_bytes: int) -> None:
        self._rank, self._mac_key = rank, key.mac_key("arrays")
        self._inbound = new_socket(context, zmq.DEALER)
        self._inbound.maxmsgsize = max_frame_bytes
        self.address = bind(self._inbound, interface)
        self._outbound = _connecting(context)
        self._peers: dict[int, tuple[bytes, str]] = {}
        self._num_sent: dict[int, int] = {}
        self._last_seen: dict[int, int] = {}

    def sockets(self) -> tuple[Socket, Socket]:
        return self._inbound, self._outbound

    def connect(self, rank: int, address: str) -> None:
        self._peers[rank] = rank_role(rank).encode(), address
        self._last_seen[rank] = self._num_sent[rank] = 0
        self._outbound.setsockopt(zmq.CONNECT_ROUTING_ID, self._peers[rank][0])
        self._outbound.connect(address)

    def disconnect(self, rank: int) -> None:
        _disconnect(self._outbound, self._peers.pop(rank, None))

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        if peer := self._peers.get(rank):
            self._num_sent[rank] += 1
            sizes = [memoryview(frame).nbytes for frame in frames]
            code = self._code(self._rank, peer[1], self._num_sent[rank], sizes, head)
            _send(self._outbound, peer[0], _SEAL.pack(code, self._rank, self._num_sent[rank]) + head, frames)

    def receive(self) -> tuple[int, list[memoryview]] | None:
        frames = []
        try:
            while True:
                frame = self._inbound.recv(_NO_WAIT, copy=False)
                frames.append(frame.buffer)
                if not frame.more:
                    break
        except zmq.Again:
            return None
        if frames[0].nbytes < _SEAL.size:
            raise MalformedMessage("it is shorter than a seal")
        code, rank, number = _SEAL.unpack_from(frames[0])
        head = frames[0][_SEAL.size :]
        right = self._code(rank, self.address, number, [frame.nbytes for frame in frames[1:]], bytes(head))
        if not hmac.compare_digest(code, right) or number <= self._last_seen.get(rank, number):
            raise MalformedMessage("its seal is not of this run")
        self._last_seen[rank] = number
        return rank, [head, *frames[1:]]

    def _code(self, sender: int, address: str, number: int, sizes: list[int], head: bytes) -> bytes:
        subject = f"{sender} {address} {number} {sizes} ".encode() + head
        return hmac.digest(self._mac_key, subject, "sha256")[:16]

    def close(self, linger_s: float) -> None:
        self._outbound.close(linger=round(linger_s * 1000))
        self._inbound.close(linger=0)


def _user(frame: zmq.Frame) -> str:
    """Whose key the connection of a frame has proven."""
    user = frame.get("User-Id")
    return user if isinstance(user, str) else ""


def _connecting(context: Context) -> Socket:
    """A socket that chooses the connection of each message by the identity that we gave its peer."""
    socket = new_socket(context, zmq.ROUTER)
    socket.router_mandatory = 1
    return socket


def _send(socket: Socket, identity: bytes, head: bytes, frames: Sequence[Any]) -> None:
    try:
        _send_frame(socket, identity, _MORE)
        _send_frame(socket, head, _MORE if frames else _NO_WAIT)
        num_left = len(frames)
        for frame in frames:
            num_left -= 1
            small = memoryview(frame).nbytes < COPY_BELOW_BYTES
            _send_frame(socket, frame, _MORE if num_left else _NO_WAIT, copy=small)
    except zmq.ZMQError:
        return


def _disconnect(socket: Socket, peer: tuple[bytes, str] | None) -> None:
    if peer is None:
        return
    try:
        socket.disconnect(peer[1])
    except zmq.ZMQError:
        return
