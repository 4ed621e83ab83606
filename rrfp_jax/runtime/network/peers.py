"""A mesh among the ranks of a run: small messages and arrays, authenticated, with bounded memory.

Each rank listens on one socket and connects another to every peer, so a connection carries messages one way. Received
messages are read on the event loop itself, whenever ZeroMQ's descriptor wakes it: measured against a reader thread
that hands over by ``call_soon_threadsafe``, a round trip takes 66 instead of 93 us, and 132 with ``zmq.asyncio``.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq

from rrfp_jax.runtime.network.gate import Gate
from rrfp_jax.runtime.network.keys import RunKey
from rrfp_jax.runtime.network.liveness import Liveness, Watchers
from rrfp_jax.runtime.network.plain import MAX_HEADER_BYTES, MalformedMessage, pack, unpack
from rrfp_jax.runtime.network.sockets import (
    LOOPBACK,
    QuietLog,
    bind,
    connect_as,
    new_socket,
    rank_role,
    serve_as,
)
from rrfp_jax.runtime.network.window import Outgoing, SendWindow

_LOG = logging.getLogger(__name__)

Handler = Callable[[int, dict[str, Any], list[memoryview]], None]
"""Called on the event loop with the sender's rank, the header and the frames, which stay valid as long as they are
referenced. May raise :class:`MalformedMessage`: the message is then dropped and logged."""

_CONFIRM = ""
_MESSAGES_PER_WAKE = 64
_COPY_BELOW_BYTES = 1 << 16
_CONFIRM_BYTES = 1 << 16
_CONFIRM_DELAY_S = 0.05
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class PeerAddress:
    """Where a rank listens (``tcp://...``), to be told to all others by the rendezvous."""

    messages: str
    heartbeats: str

    def as_dict(self) -> dict[str, str]:
        """The address as plain data; ``PeerAddress(**data)`` is the way back."""
        return {"messages": self.messages, "heartbeats": self.heartbeats}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a :class:`PeerNetwork` has sent and still holds."""

    num_sent: int
    num_received: int
    num_dropped: int
    """Malformed messages, and messages to ranks that are gone."""
    unconfirmed_bytes: int
    """Sent, but not confirmed yet."""
    waiting_bytes: int
    """Behind the high-water mark."""
    peak_bytes: int
    """The most that was held for any one peer, unconfirmed and waiting together."""


@dataclass
class _Peer:
    identity: bytes
    window: SendWindow
    num_received: int = 0
    num_confirmed: int = 0
    unconfirmed_bytes: int = 0
    """Received from the peer, and not yet confirmed to it."""


class PeerNetwork:
    """This rank's place in the mesh. Listens from the start, so that its address can be given to the rendezvous.

    Args:
        rank, num_ranks: this process among all.
        key: the run's key; every peer proves its own, derived from it, before anything it says is read.
        interface: address or name of the network interface to listen on.
        silence_deadline_s: how long a peer may be silent before it counts as lost.
        high_water_bytes: how much may be unconfirmed per peer before further messages wait here.
        max_frame_bytes: a peer that sends a larger frame is disconnected.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        key: RunKey,
        interface: str = LOOPBACK,
        silence_deadline_s: float = 60.0,
        high_water_bytes: int = 256 << 20,
        max_frame_bytes: int = 16 << 30,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} of {num_ranks}: ranks count from 0 to {num_ranks - 1}")
        if silence_deadline_s <= 0 or high_water_bytes <= 0 or max_frame_bytes < MAX_HEADER_BYTES:
            raise ValueError(
                f"silence_deadline_s {silence_deadline_s} and high_water_bytes {high_water_bytes} must be positive, "
                f"max_frame_bytes {max_frame_bytes} at least {MAX_HEADER_BYTES}"
            )
        self.rank, self.num_ranks = rank, num_ranks
        self._key, self._high_water = key, high_water_bytes
        self._context = zmq.Context()
        roles = {key.pair(rank_role(r)).public: rank_role(r) for r in range(num_ranks) if r != rank}
        gate = Gate(self._context, roles)
        self._inbound = new_socket(self._context, zmq.ROUTER)
        self._outbound = new_socket(self._context, zmq.ROUTER)
        try:
            self._inbound.maxmsgsize = max_frame_bytes
            serve_as(self._inbound, key.pair(rank_role(rank)))
            messages = bind(self._inbound, interface)
            self._liveness = Liveness(
                self._context,
                gate,
                (self._inbound, self._outbound),
                rank=rank,
                key=key,
                interface=interface,
                deadline_s=silence_deadline_s,
                watchers=Watchers(connected=self._tell_connected, lost=self._tell_lost, left=self._tell_left),
            )
        except ValueError:
            self._context.destroy(linger=0)
            raise
        self.address = PeerAddress(messages=messages, heartbeats=self._liveness.address)
        self._outbound.routing_id = rank_role(rank).encode()
        self._outbound.router_mandatory = 1
        self._peers: dict[int, _Peer] = {}
        self._senders: dict[bytes, int] = {}
        self._handlers: dict[str, Handler] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_lost: Callable[[int, str], None] | None = None
        self._on_left: Callable[[int], None] | None = None
        self._decided = threading.Event()
        self._first_loss: str | None = None
        self._confirming = False
        self._closed = False
        self._garbage = QuietLog(_LOG)
        self._num_sent = self._num_received = self._num_dropped = self._peak_bytes = 0

    # -- called from any thread --------------------------------------------------------------------------------------

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        addresses: Mapping[int, PeerAddress],
        *,
        lost: Callable[[int, str], None],
        left: Callable[[int], None] | None = None,
    ) -> None:
        """Connect to all peers and begin to deliver messages on ``loop``; subscribe before.

        Args:
            addresses: every rank's address (this rank's own is skipped), as the rendezvous collected them.
            lost: called on the loop, once per rank, with a rank that died and how that was noticed.
            left: called on the loop with a rank that closed its network in good order.
        """
        wanted = set(range(self.num_ranks)) - {self.rank}
        if missing := wanted - set(addresses):
            raise ValueError(f"no address for rank {min(missing)}: give those of all {self.num_ranks} ranks")
        if self._loop is not None:
            raise ValueError("the network was started before: make a new one")
        self._loop, self._on_lost, self._on_left = loop, lost, left
        pair = self._key.pair(rank_role(self.rank))
        for rank in sorted(wanted):
            identity = rank_role(rank).encode()
            self._senders[identity] = rank
            self._peers[rank] = _Peer(identity, SendWindow(self._high_water))
            connect_as(self._outbound, pair, self._key.pair(rank_role(rank)).public)
            self._outbound.setsockopt(zmq.CONNECT_ROUTING_ID, identity)
            self._outbound.connect(addresses[rank].messages)
        followed = {rank: (addresses[rank].messages, addresses[rank].heartbeats) for rank in sorted(wanted)}
        self._liveness.follow(loop, followed)
        loop.call_soon_threadsafe(self._listen)

    def wait_connected(self, timeout_s: float) -> None:
        """Wait, on another thread than the loop's, until every connection stands.

        Raises:
            ConnectionError: where a peer is lost before, or the time is over.
        """
        if not self._decided.wait(timeout_s):
            raise ConnectionError(f"rank {self.rank} is not connected to all {self.num_ranks} ranks after {timeout_s} s")
        if self._first_loss is not None:
            raise ConnectionError(self._first_loss)

    def send_threadsafe(
        self,
        rank: int,
        topic: str,
        header: Mapping[str, Any],
        frames: Sequence[Any] = (),
        on_confirmed: Callable[[], None] | None = None,
    ) -> None:
        """:meth:`send` from a thread other than the loop's."""
        assert self._loop is not None, "started"
        self._loop.call_soon_threadsafe(lambda: self.send(rank, topic, header, frames, on_confirmed))

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is under way for up to ``linger_s``, say farewell, and free sockets, threads and ports.

        May be called from any thread, also on the loop; more than once too.
        """
        if self._closed:
            return
        loop = self._loop
        if loop is None or not loop.is_running() or _runs_here(loop):
            self._shut(linger_s)
        else:
            done = threading.Event()
            loop.call_soon_threadsafe(lambda: (self._shut(linger_s), done.set()))
            if not done.wait(_CLOSE_TIMEOUT_S):
                _LOG.warning("the event loop is busy: the network of rank %d is closed with the process", self.rank)
                return
        self._liveness.stop(_CLOSE_TIMEOUT_S)
        self._context.term()

    # -- on the event loop -------------------------------------------------------------------------------------------

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Give the messages of a topic to ``handler``; one per topic."""
        if not topic or topic in self._handlers:
            raise ValueError(f"the topic '{topic}' is {'taken' if topic else 'reserved'}: choose another name")
        self._handlers[topic] = handler

    def send(
        self,
        rank: int,
        topic: str,
        header: Mapping[str, Any],
        frames: Sequence[Any] = (),
        on_confirmed: Callable[[], None] | None = None,
    ) -> None:
        """Send a message; returns at once. Messages to one rank arrive in order.

        Args:
            header: a dict of plain data.
            frames: contiguous buffers, which must not change until the message is confirmed.
            on_confirmed: called on the loop once the peer has received the message.
        """
        if rank not in range(self.num_ranks) or rank == self.rank:
            raise ValueError(f"rank {self.rank} of {self.num_ranks} cannot send to rank {rank}: name another rank")
        peer, packed = self._peers.get(rank), pack(header)
        if peer is None:
            self._num_dropped += 1
            return
        num_bytes = len(packed) + sum(memoryview(frame).nbytes for frame in frames)
        window = peer.window
        for message in window.offer(Outgoing(topic, packed, frames, num_bytes, on_confirmed)):
            self._put(peer, message)
        self._peak_bytes = max(self._peak_bytes, window.unconfirmed_bytes + window.waiting_bytes)

    def traffic(self) -> Traffic:
        """What was sent and what is held now."""
        windows = [peer.window for peer in self._peers.values()]
        return Traffic(
            num_sent=self._num_sent,
            num_received=self._num_received,
            num_dropped=self._num_dropped,
            unconfirmed_bytes=sum(window.unconfirmed_bytes for window in windows),
            waiting_bytes=sum(window.waiting_bytes for window in windows),
            peak_bytes=self._peak_bytes,
        )

    def _put(self, peer: _Peer, message: Outgoing) -> None:
        socket, num_frames = self._outbound, len(message.frames)
        self._num_sent += 1
        peer.num_confirmed, peer.unconfirmed_bytes = peer.num_received, 0
        head = pack([message.topic, peer.num_received, message.header])
        with suppress(zmq.ZMQError):  # no route: the connection is gone, and its loss on its way to us
            socket.send(peer.identity, zmq.SNDMORE | zmq.NOBLOCK)
            socket.send(head, zmq.NOBLOCK | (zmq.SNDMORE if num_frames else 0))
            for i, frame in enumerate(message.frames, start=1):
                more = zmq.SNDMORE if i < num_frames else 0
                small = memoryview(frame).nbytes < _COPY_BELOW_BYTES
                socket.send(frame, zmq.NOBLOCK | more, copy=small)

    def _listen(self) -> None:
        if self._closed:
            return
        assert self._loop is not None, "started"
        self._loop.add_reader(self._inbound.fd, self._read)
        self._read()

    def _read(self) -> None:
        """Deliver what has arrived. The descriptor reports changes only, so a turn ends at an empty socket or with
        another turn already under way."""
        for _ in range(_MESSAGES_PER_WAKE):
            if self._closed:
                return
            try:
                identity = self._inbound.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._confirm_later()
                return
            frames: list[memoryview] = []
            while self._inbound.rcvmore:
                frames.append(self._inbound.recv(zmq.NOBLOCK, copy=False).buffer)
            self._receive(identity, frames)
        assert self._loop is not None, "started"
        self._loop.call_soon(self._read)

    def _receive(self, identity: bytes, frames: list[memoryview]) -> None:
        rank = self._senders.get(identity)
        peer = None if rank is None else self._peers.get(rank)
        if rank is None or peer is None:
            self._num_dropped += 1
            return
        try:
            topic, num_confirmed, packed = _head(frames)
            self._confirmed(peer, num_confirmed)
            if topic == _CONFIRM:
                return
            self._num_received += 1
            peer.num_received += 1
            peer.unconfirmed_bytes += sum(frame.nbytes for frame in frames)
            if (handler := self._handlers.get(topic)) is None:
                raise MalformedMessage(f"nobody listens to the topic '{topic:.40}'")
            header = unpack(packed)
            if not isinstance(header, dict):
                raise MalformedMessage("a header that is no dict")
            handler(rank, header, frames[1:])
        except MalformedMessage as error:
            self._num_dropped += 1
            self._garbage.warn("a message from rank %d was dropped: %s", rank, error)
        except Exception as error:
            assert self._loop is not None, "started"
            self._loop.call_exception_handler(
                {"message": f"the handler of a message from rank {rank} failed", "exception": error}
            )
        if peer.unconfirmed_bytes >= _CONFIRM_BYTES:
            self._confirm(peer)

    def _confirmed(self, peer: _Peer, count: int) -> None:
        confirmed, released = peer.window.confirm(count)
        for message in released:
            self._put(peer, message)
        for message in confirmed:
            if message.on_confirmed is not None:
                message.on_confirmed()

    def _confirm(self, peer: _Peer) -> None:
        peer.num_confirmed, peer.unconfirmed_bytes = peer.num_received, 0
        with suppress(zmq.ZMQError):
            self._outbound.send(peer.identity, zmq.SNDMORE | zmq.NOBLOCK)
            self._outbound.send(pack([_CONFIRM, peer.num_received, b""]), zmq.NOBLOCK)

    def _confirm_later(self) -> None:
        """Small messages are confirmed together, or by the next message the other way."""
        if not self._confirming and any(peer.unconfirmed_bytes for peer in self._peers.values()):
            assert self._loop is not None, "started"
            self._confirming = True
            self._loop.call_later(_CONFIRM_DELAY_S, self._confirm_all)

    def _confirm_all(self) -> None:
        self._confirming = False
        if not self._closed:
            for peer in self._peers.values():
                if peer.num_confirmed < peer.num_received:
                    self._confirm(peer)

    def _lose(self, rank: int, reason: str) -> None:
        if self._closed or self._peers.pop(rank, None) is None:
            return
        _LOG.warning("rank %d lost rank %d: %s", self.rank, rank, reason)
        if self._on_lost is not None:
            self._on_lost(rank, reason)

    def _leave(self, rank: int) -> None:
        if not self._closed and self._on_left is not None:
            self._on_left(rank)

    def _shut(self, linger_s: float) -> None:
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._inbound.fd)
        self._outbound.close(linger=round(linger_s * 1000))
        self._inbound.close(linger=0)
        self._peers.clear()

    # -- on the liveness thread --------------------------------------------------------------------------------------

    def _tell_connected(self) -> None:
        self._decided.set()

    def _tell_lost(self, rank: int, reason: str) -> None:
        if not self._decided.is_set():
            self._first_loss = f"rank {self.rank} could not connect to rank {rank}: {reason}"
            self._decided.set()
        self._on_loop(lambda: self._lose(rank, reason))

    def _tell_left(self, rank: int) -> None:
        self._on_loop(lambda: self._leave(rank))

    def _on_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None, "started"
        with suppress(RuntimeError):  # the loop was closed: nobody is left to be told
            self._loop.call_soon_threadsafe(call)


def _head(frames: list[memoryview]) -> tuple[str, int, bytes]:
    if not frames:
        raise MalformedMessage("a message without a header")
    if frames[0].nbytes > MAX_HEADER_BYTES:
        raise MalformedMessage(f"a header of {frames[0].nbytes} bytes, at most {MAX_HEADER_BYTES} are read")
    match unpack(bytes(frames[0])):
        case [str() as topic, int() as num_confirmed, bytes() as packed]:
            return topic, num_confirmed, packed
    raise MalformedMessage("a message whose first frame is not topic, confirmation and header")


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
