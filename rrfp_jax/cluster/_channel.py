"""Messages by topic over a link, with receipts: on the event loop, never blocking, in bounded memory.

Received messages are read on the loop itself, whenever the link's descriptor wakes it: measured against a reader thread
that hands over by ``call_soon_threadsafe``, a bare round trip takes 66 instead of 93 us, and 132 with ``zmq.asyncio``.
Receipts are running counts. They travel in the head of the next message the other way; alone after much data, and after
a moment otherwise, so that small messages share one.

Where a link lets other threads send, they may send here as well: queues and running counts are changed, and messages
put on the wire, under one lock.
"""

import logging
import struct
import threading
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rrfp_jax.cluster._zmq_sockets import QuietLog
from rrfp_jax.cluster.wire import MAX_HEADER_BYTES, MalformedMessage

_LOG = logging.getLogger(__name__)

DeliverMessage = Callable[[int, bytes, bytes, list[memoryview]], None]
"""Called on the event loop with the sender's rank, the topic, the header and the frames, which stay valid as long as
they are referenced."""
PeerMessage = tuple[int, list[memoryview]]
"""Rank of the sender, and the head followed by the frames."""

MAX_TOPIC_BYTES = 255
_HEAD = struct.Struct("<QB")
"""Number of the receiver's messages that have come, and length of the topic (0: a receipt, nothing follows)."""
_MESSAGES_PER_TURN = 64
_RECEIPT_BYTES = 1 << 18
_RECEIPT_DELAY_S = 0.05
_WELCOME_S = 0.005
_LAST_MESSAGES_S = 3.0
"""Seconds that messages which a rank sent before its farewell may take to arrive."""


class MessageLink(ABC):
    """Carries messages, each a head and frames, in order per rank: ZeroMQ's link, the one for arrays, the direct one.

    Methods are called on the event loop unless a link says otherwise.
    """

    @property
    def is_complete(self) -> bool:
        """Whether every peer has been welcomed; private connections are proven before they are opened."""
        return True

    def welcome(self) -> list[int]:
        """Returns the ranks that have connected since the last call, and sends the messages that waited for them."""
        return []

    @abstractmethod
    def listen(self, loop: AbstractEventLoop, read: Callable[[], None]) -> None:
        """Has ``read`` called on the loop when messages may have arrived, until :meth:`close`."""

    @abstractmethod
    def connect(self, rank: int, address: str) -> None:
        """Accepts messages to a rank from now on; they travel once it is connected."""

    @abstractmethod
    def send(self, rank: int, head: bytes, frames: Sequence[Any] = ()) -> None:
        """Sends a message; never blocks. A message to a rank that is gone is dropped: its loss is reported anyway."""

    @abstractmethod
    def receive(self) -> PeerMessage | None:
        """Returns the next message that has arrived, or None."""

    @abstractmethod
    def disconnect(self, rank: int) -> None:
        """Ends the exchange with a rank in both directions."""

    @abstractmethod
    def close(self, linger_s: float) -> None:
        """Sends nothing new, and frees everything that can be freed at once."""


def call_when_readable(loop: AbstractEventLoop, descriptor: int, read: Callable[[], None]) -> Callable[[], None]:
    """Has the loop call ``read`` while a descriptor is readable. Returns a function that ends this."""
    loop.add_reader(descriptor, read)

    def stop() -> None:
        if not loop.is_closed():
            loop.remove_reader(descriptor)

    return stop


class OutgoingMessage(NamedTuple):
    """A message on its way; ``frames`` keep its buffers alive."""

    topic: bytes
    header: bytes
    frames: Sequence[Any]
    num_bytes: int
    on_confirmed: Callable[[], None] | None


class SendQueue:
    """The messages to one peer: bounded in bytes, in order, none dropped.

    The buffers of a message stay owned here until the peer has confirmed its receipt, by a running count. While more
    than ``high_water_bytes`` are unconfirmed, further messages wait; a larger message goes alone.
    """

    def __init__(self, high_water_bytes: int) -> None:
        self._limit = high_water_bytes
        self._waiting: deque[OutgoingMessage] = deque()
        self._sent: deque[OutgoingMessage] = deque()
        self._num_confirmed = 0
        self.unconfirmed_bytes = 0
        self.waiting_bytes = 0

    def would_wait(self, num_bytes: int) -> bool:
        """Returns whether a message of this size, offered now, would have to wait."""
        return bool(self._sent) and (bool(self._waiting) or not self._has_space(num_bytes))

    def offer(self, message: OutgoingMessage) -> list[OutgoingMessage]:
        """Adds a message behind all others. Returns the messages to put on the wire now, in order."""
        if not self.would_wait(message.num_bytes):
            self._sent.append(message)
            self.unconfirmed_bytes += message.num_bytes
            return [message]
        self._waiting.append(message)
        self.waiting_bytes += message.num_bytes
        return []

    def confirm(self, count: int) -> tuple[list[OutgoingMessage], list[OutgoingMessage]]:
        """Notes that the peer has received ``count`` messages so far.

        Returns:
            The messages that are confirmed by this, and those to put on the wire now, in order.

        Raises:
            MalformedMessage: where the peer confirms less than before, or more than was sent.
        """
        num_new = count - self._num_confirmed
        if not 0 <= num_new <= len(self._sent):
            raise MalformedMessage(
                f"{count} messages are confirmed, where {self._num_confirmed} were and {len(self._sent)} more are out"
            )
        self._num_confirmed = count
        confirmed, released = [], []
        for _ in range(num_new):
            message = self._sent.popleft()
            self.unconfirmed_bytes -= message.num_bytes
            confirmed.append(message)
        while self._waiting and self._has_space(self._waiting[0].num_bytes):
            message = self._waiting.popleft()
            self._sent.append(message)
            self.waiting_bytes -= message.num_bytes
            self.unconfirmed_bytes += message.num_bytes
            released.append(message)
        return confirmed, released

    def _has_space(self, num_bytes: int) -> bool:
        return not self._sent or self.unconfirmed_bytes + num_bytes <= self._limit


@dataclass
class _Peer:
    queue: SendQueue
    num_received: int = 0
    num_receipted: int = 0
    unreceipted_bytes: int = 0
    has_left: bool = False


class Channel:
    """Sends messages to the peers of a link, and delivers theirs.

    Args:
        link: closed here.
        deliver: called with every message.
        high_water_bytes: largest number of unconfirmed bytes per peer before further messages wait.
    """

    def __init__(
        self, link: MessageLink, loop: AbstractEventLoop, deliver: DeliverMessage, high_water_bytes: int
    ) -> None:
        self._link, self._loop, self._deliver = link, loop, deliver
        self._high_water = high_water_bytes
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        """Held by the thread that sends."""
        self._receipts_due = False
        self._is_closed = self._is_welcoming = False
        self._garbage = QuietLog(_LOG)
        self.num_sent = self.num_received = self.num_dropped = self.peak_bytes = 0

    def open(self) -> None:
        """Begins to receive."""
        if not self._is_closed:
            self._link.listen(self._loop, self._read)
            self._read()

    def close(self, linger_s: float) -> None:
        """Stops receiving; messages under way are sent for up to ``linger_s``."""
        self._is_closed = True
        self._link.close(linger_s)

    def held_bytes(self) -> tuple[int, int]:
        """Returns the bytes that are sent and unconfirmed, and those that wait behind the high-water mark."""
        queues = [peer.queue for peer in self._peers.values()]
        return sum(q.unconfirmed_bytes for q in queues), sum(q.waiting_bytes for q in queues)

    def add(self, rank: int, address: str) -> None:
        """Begins to exchange messages with a rank that listens there."""
        if not self._is_closed and rank not in self._peers:
            self._peers[rank] = _Peer(SendQueue(self._high_water))
            self._link.connect(rank, address)
            self._welcome()
            self._loop.call_soon(self._read)  # ZeroMQ wakes only a reader that has found nothing before

    def _welcome(self) -> None:
        """Looks for peers that have connected, again and again until all have: nothing wakes the loop for that."""
        if not self._is_closed:
            self._link.welcome()
            if not self._link.is_complete and not self._is_welcoming:
                self._is_welcoming = True
                self._loop.call_later(_WELCOME_S, self._welcome_again)

    def _welcome_again(self) -> None:
        self._is_welcoming = False
        self._welcome()

    def drop(self, rank: int, *, has_left: bool) -> None:
        """Forgets a rank that is gone. Messages that it sent before a farewell may still arrive, and are delivered."""
        peer = self._peers.get(rank)
        if peer is None:
            return
        if has_left:
            # Nothing more is sent, and confirmations are of no use; only messages that are on their way still count.
            with self._lock:
                peer.has_left, peer.queue = True, SendQueue(self._high_water)
            self._loop.call_later(_LAST_MESSAGES_S, self._disconnect, rank)
        else:
            del self._peers[rank]
            self._disconnect(rank)

    def _disconnect(self, rank: int) -> None:
        if not self._is_closed:
            self._link.disconnect(rank)

    # -- sending: on any thread where the link allows it -------------------------------------------------------------

    def send(
        self, rank: int, topic: bytes, header: bytes, frames: Sequence[Any], on_confirmed: Callable[[], None] | None
    ) -> None:
        """Sends a message, see :meth:`PeerNetwork.send`."""
        # Counted before the lock is taken: the other sender need not wait for that.
        num_bytes = len(header)
        for frame in frames:
            num_bytes += memoryview(frame).nbytes
        with self._lock:
            peer = self._peers.get(rank)
            if self._is_closed or peer is None or peer.has_left:
                self.num_dropped += 1
                return
            queue = peer.queue
            for message in queue.offer(OutgoingMessage(topic, header, frames, num_bytes, on_confirmed)):
                self._put(rank, peer, message)
            self.peak_bytes = max(self.peak_bytes, queue.unconfirmed_bytes + queue.waiting_bytes)

    def send_if_room(self, rank: int, topic: bytes, header: bytes) -> None:
        """Sends a message, or drops it if it would have to wait."""
        peer = self._peers.get(rank)
        if peer is None or peer.queue.would_wait(len(header)):
            self.num_dropped += 1
        else:
            self.send(rank, topic, header, (), None)

    def _put(self, rank: int, peer: _Peer, message: OutgoingMessage) -> None:
        # Every message brings a receipt for all that has come, so none of its own is due.
        self.num_sent += 1
        peer.num_receipted, peer.unreceipted_bytes = peer.num_received, 0
        head = _HEAD.pack(peer.num_received, len(message.topic)) + message.topic + message.header
        self._link.send(rank, head, message.frames)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Delivers messages that have arrived.

        A link may report changes only, so this ends either with nothing left to read or with another turn scheduled.
        """
        for _ in range(_MESSAGES_PER_TURN):
            if self._is_closed:
                return
            received = self._link.receive()
            if received is None:
                if not self._receipts_due and any(peer.unreceipted_bytes for peer in self._peers.values()):
                    self._receipts_due = True
                    self._loop.call_later(_RECEIPT_DELAY_S, self._receipt_all)
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
            self.num_dropped += 1
            self._garbage.warn("a message from rank %d was dropped: %s", rank, error)
        if peer.unreceipted_bytes >= _RECEIPT_BYTES and not self._is_closed:
            self._receipt(rank, peer)

    def _confirmed(self, rank: int, peer: _Peer, count: int) -> None:
        with self._lock:
            confirmed, released = peer.queue.confirm(count)
            for message in released:
                self._put(rank, peer, message)
        for message in confirmed:  # without the lock: a callback may send
            if message.on_confirmed is not None:
                message.on_confirmed()

    def _receipt(self, rank: int, peer: _Peer) -> None:
        with self._lock:
            peer.num_receipted, peer.unreceipted_bytes = peer.num_received, 0
            if not peer.has_left:
                self._link.send(rank, _HEAD.pack(peer.num_received, 0))

    def _receipt_all(self) -> None:
        self._receipts_due = False
        if self._is_closed:
            return
        for rank, peer in self._peers.items():
            if peer.num_receipted < peer.num_received:
                self._receipt(rank, peer)


def _parse(frames: list[memoryview]) -> tuple[int, bytes, bytes]:
    """Returns the sender's receipt, the topic and the header."""
    size = frames[0].nbytes if frames else 0
    if not _HEAD.size <= size <= MAX_HEADER_BYTES + _HEAD.size + MAX_TOPIC_BYTES:
        raise MalformedMessage(f"its head has {size} bytes, where {_HEAD.size} to {MAX_HEADER_BYTES} are read")
    data = bytes(frames[0])
    count, topic_size = _HEAD.unpack_from(data)
    end = _HEAD.size + topic_size
    return count, data[_HEAD.size : end], data[end:]
