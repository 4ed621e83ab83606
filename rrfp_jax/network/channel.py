"""Messages by topic over a link, with receipts: on the event loop, never blocking, in bounded memory.

Received messages are read on the loop itself, whenever ZeroMQ's descriptor wakes it: measured against a reader thread
that hands over by ``call_soon_threadsafe``, a bare round trip takes 66 instead of 93 us, and 132 with ``zmq.asyncio``.
Receipts are running counts. They travel in the head of whatever goes the other way; else at once after much data, and
after a moment otherwise, so that small messages share one.

Over a link on which other threads may send, they may send here as well: queues and running counts are changed, and
messages put on the wire, under one lock.
"""

import logging
import struct
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rrfp_jax.network.link import Message
from rrfp_jax.network.plain import MAX_HEADER_BYTES, MalformedMessage
from rrfp_jax.network.send_queue import Outgoing, SendQueue
from rrfp_jax.network.sockets import QuietLog

_LOG = logging.getLogger(__name__)

Deliver = Callable[[int, bytes, bytes, list[memoryview]], None]
"""Called on the event loop with the sender's rank, the topic, the header as it came and the frames, which stay valid as
long as they are referenced."""

MAX_TOPIC_BYTES = 255
_HEAD = struct.Struct("<QB")
"""How many of the receiver's messages have come, and the length of the topic (0: a receipt, nothing follows)."""
_MESSAGES_PER_TURN = 64
_RECEIPT_BYTES = 1 << 18
_RECEIPT_DELAY_S = 0.05
_WELCOME_S = 0.005
_LAST_WORDS_S = 3.0
"""How long what a rank has sent before its farewell may take to arrive."""


class Carrier(Protocol):
    """What a channel needs of a link."""

    @property
    def is_complete(self) -> bool:
        """Whether nobody is to be welcomed any more."""

    def listen(self, loop: AbstractEventLoop, read: Callable[[], None]) -> None:
        """Have ``read`` called on the loop where messages may have arrived, until :meth:`close`."""

    def connect(self, rank: int, address: str) -> None:
        """Begin to exchange messages with a rank that listens there."""

    def welcome(self) -> list[int]:
        """Learn who has connected."""

    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        """Send a message; never blocks. Messages to a rank arrive in order."""

    def receive(self) -> Message | None:
        """The next message, if one has arrived."""

    def disconnect(self, rank: int) -> None:
        """Send nothing more to a rank, and expect nothing."""

    def close(self, linger_s: float) -> None:
        """Free what can be freed at once."""


@dataclass
class _Peer:
    queue: SendQueue
    num_received: int = 0
    num_receipted: int = 0
    unreceipted_bytes: int = 0
    has_left: bool = False


class Channel:
    """Sends to and receives from the peers of a link.

    Args:
        link: connected by the owner; closed here.
        deliver: called with every message.
    """

    def __init__(
        self,
        link: Carrier,
        loop: AbstractEventLoop,
        deliver: Deliver,
        high_water_bytes: int,
    ) -> None:
        self._link, self._loop, self._deliver = link, loop, deliver
        self._high_water = high_water_bytes
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        """Held by whoever sends."""
        self._receipts_due = False
        self._is_closed = self._is_welcoming = False
        self._garbage = QuietLog(_LOG)
        self.num_sent = self.num_received = self.num_dropped = self.peak_bytes = 0

    def open(self) -> None:
        """Begin to receive."""
        if not self._is_closed:
            self._link.listen(self._loop, self._read)
            self._read()

    def _welcome(self) -> None:
        """Learn who has connected, until all have: only greetings come to the socket that sends."""
        if not self._is_closed:
            self._link.welcome()
            if not self._link.is_complete and not self._is_welcoming:
                self._is_welcoming = True
                self._loop.call_later(_WELCOME_S, self._welcome_again)

    def _welcome_again(self) -> None:
        self._is_welcoming = False
        self._welcome()

    def close(self, linger_s: float) -> None:
        """Stop to receive; what is under way is sent for up to ``linger_s``."""
        self._is_closed = True
        self._link.close(linger_s)

    def held_bytes(self) -> tuple[int, int]:
        """(sent and unconfirmed, waiting for room)."""
        queues = [peer.queue for peer in self._peers.values()]
        return sum(q.unconfirmed_bytes for q in queues), sum(q.waiting_bytes for q in queues)

    def add(self, rank: int, address: str) -> None:
        """Exchange messages with a rank that listens there."""
        if not self._is_closed and rank not in self._peers:
            self._peers[rank] = _Peer(SendQueue(self._high_water))
            self._link.connect(rank, address)
            self._welcome()
            self._loop.call_soon(self._read)  # ZeroMQ wakes only who has found nothing to read before

    def drop(self, rank: int, *, has_left: bool) -> None:
        """The rank is gone. What it sent before a farewell may still be on the way, and is delivered."""
        peer = self._peers.get(rank)
        if peer is None:
            return
        if has_left:
            with self._lock:
                peer.has_left, peer.queue = True, SendQueue(self._high_water)
            self._loop.call_later(_LAST_WORDS_S, self._disconnect, rank)
        else:
            del self._peers[rank]
            self._disconnect(rank)

    def _disconnect(self, rank: int) -> None:
        if not self._is_closed:
            self._link.disconnect(rank)

    def send(
        self, rank: int, topic: bytes, header: bytes, frames: Sequence[Any], on_confirmed: Callable[[], None] | None
    ) -> None:
        """See :meth:`PeerNetwork.send`; from any thread where the link allows it."""
        num_bytes = len(header)
        for frame in frames:
            num_bytes += memoryview(frame).nbytes
        with self._lock:
            peer = self._peers.get(rank)
            if self._is_closed or peer is None or peer.has_left:
                self.num_dropped += 1
                return
            queue = peer.queue
            for message in queue.offer(Outgoing(topic, header, frames, num_bytes, on_confirmed)):
                self._put(rank, peer, message)
            self.peak_bytes = max(self.peak_bytes, queue.unconfirmed_bytes + queue.waiting_bytes)

    def send_if_room(self, rank: int, topic: bytes, header: bytes) -> None:
        """See :meth:`PeerNetwork.send_if_room`."""
        peer = self._peers.get(rank)
        if peer is None or peer.queue.would_wait(len(header)):
            self.num_dropped += 1
        else:
            self.send(rank, topic, header, (), None)

    def _put(self, rank: int, peer: _Peer, message: Outgoing) -> None:
        self.num_sent += 1
        peer.num_receipted, peer.unreceipted_bytes = peer.num_received, 0
        head = _HEAD.pack(peer.num_received, len(message.topic)) + message.topic + message.header
        self._link.send(rank, head, message.frames)

    def _read(self) -> None:
        """Deliver what has arrived. A link may tell of changes only, so this ends either with nothing left or with
        another turn under way."""
        for _ in range(_MESSAGES_PER_TURN):
            if self._is_closed:
                return
            received = self._link.receive()
            if received is None:
                self._receipt_soon()
                return
            self._receive(*received)
        self._loop.call_soon(self._read)

    def _receive(self, rank: int, frames: list[memoryview]) -> None:
        peer = self._peers.get(rank)
        if peer is None:
            self.num_dropped += 1
            return
        try:
            count, topic, header = _parse(frames)
            if not peer.has_left:
                self._confirmed(rank, peer, count)
            if not topic:
                return
            self.num_received += 1
            peer.num_received += 1
            for frame in frames:
                peer.unreceipted_bytes += frame.nbytes
            self._deliver(rank, topic, header, frames[1:])
        except MalformedMessage as error:
            self._drop_message("a message from rank %d was dropped: %s", rank, error)
        if peer.unreceipted_bytes >= _RECEIPT_BYTES and not self._is_closed:
            self._receipt(rank, peer)

    def _drop_message(self, text: str, *values: Any) -> None:
        self.num_dropped += 1
        self._garbage.warn(text, *values)

    def _confirmed(self, rank: int, peer: _Peer, count: int) -> None:
        with self._lock:
            confirmed, released = peer.queue.confirm(count)
            for message in released:
                self._put(rank, peer, message)
        for message in confirmed:
            if message.on_confirmed is not None:
                message.on_confirmed()

    def _receipt(self, rank: int, peer: _Peer) -> None:
        with self._lock:
            peer.num_receipted, peer.unreceipted_bytes = peer.num_received, 0
            if not peer.has_left:
                self._link.send(rank, _HEAD.pack(peer.num_received, 0))

    def _receipt_soon(self) -> None:
        if not self._receipts_due and any(peer.unreceipted_bytes for peer in self._peers.values()):
            self._receipts_due = True
            self._loop.call_later(_RECEIPT_DELAY_S, self._receipt_all)

    def _receipt_all(self) -> None:
        self._receipts_due = False
        if self._is_closed:
            return
        for rank, peer in self._peers.items():
            if peer.num_receipted < peer.num_received:
                self._receipt(rank, peer)


def _parse(frames: list[memoryview]) -> tuple[int, bytes, bytes]:
    """The sender's receipt, the topic and the header."""
    size = frames[0].nbytes if frames else 0
    if not _HEAD.size <= size <= MAX_HEADER_BYTES + _HEAD.size + MAX_TOPIC_BYTES:
        raise MalformedMessage(f"its head has {size} bytes, where {_HEAD.size} to {MAX_HEADER_BYTES} are read")
    data = bytes(frames[0])
    count, topic_size = _HEAD.unpack_from(data)
    end = _HEAD.size + topic_size
    return count, data[_HEAD.size : end], data[end:]
