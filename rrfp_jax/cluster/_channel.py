"""Messages by topic over a link, with receipts: on the event loop, never blocking, in bounded memory.

Received messages are read on the loop itself, whenever the link's descriptor wakes it: measured against a reader thread
that hands over by ``call_soon_threadsafe``, a bare round trip takes 66 instead of 93 us, and 132 with ``zmq.asyncio``.
Receipts are running counts. They travel in the head of the next message the other way; alone after much data, and after
a moment otherwise, so that small messages share one.

Where a link lets other threads send, they may send here as well: queues and running counts are changed, and messages
put on the wire, under one lock.

A topic may have no handler yet. So the network can start first, and its listeners can be built later, in order, from
values: messages that have come meanwhile are handed over on subscription, in the order in which they came, before
anything newer.
"""

import logging
import struct
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rrfp_jax.cluster._array_link import ArrayLink
from rrfp_jax.cluster._direct_link import DirectLink
from rrfp_jax.cluster._zmq_link import ZmqLink
from rrfp_jax.cluster.wire import MAX_HEADER_BYTES, MalformedMessage, QuietLog, unpack_plain

_LOG = logging.getLogger(__name__)

MAX_TOPIC_BYTES = 255
_HEAD = struct.Struct("<QB")
"""Number of the receiver's messages that have come, and length of the topic (0: a receipt, nothing follows)."""
_MESSAGES_PER_TURN = 64
_RECEIPT_BYTES = 1 << 18
_RECEIPT_DELAY_S = 0.05
_WELCOME_S = 0.005
_LAST_MESSAGES_S = 3.0
"""Seconds that messages which a rank sent before its farewell may take to arrive."""
_OVERHEAD_BYTES = 500
"""Memory that a kept message takes beside its bytes, so that empty ones count too."""

Handler = Callable[[int, dict[str, Any], list[memoryview]], None]
"""Called on the event loop with the sender's rank, the header and the frames, which stay valid as long as they are
referenced. May raise :class:`MalformedMessage`: the message is then dropped and logged."""

PackedHandler = Callable[[int, bytes, list[memoryview]], None]
"""Called as a :data:`Handler` is, with the header as the bytes that came."""
_AnyHandler = tuple[Callable[..., None], bool]
"""A handler, and whether it takes the header as the bytes that came."""


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
        return bool(self._sent) and (bool(self._waiting) or self.unconfirmed_bytes + num_bytes > self._limit)

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
        while waiting := self._waiting:
            if self._sent and self.unconfirmed_bytes + waiting[0].num_bytes > self._limit:
                break
            message = waiting.popleft()
            self._sent.append(message)
            self.waiting_bytes -= message.num_bytes
            self.unconfirmed_bytes += message.num_bytes
            released.append(message)
        return confirmed, released


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
        link: carries messages in order per rank; closed here.
        topics: gets every message.
        high_water_bytes: largest number of unconfirmed bytes per peer before further messages wait.
    """

    def __init__(
        self, link: ZmqLink | ArrayLink | DirectLink, loop: AbstractEventLoop, topics: "Topics", high_water_bytes: int
    ) -> None:
        self._link, self._loop, self._topics = link, loop, topics
        self._high_water = high_water_bytes
        self.peers: dict[int, _Peer] = {}
        """The ranks to which messages may be sent, and the messages under way to each."""
        self.gone: set[int] = set()
        """Ranks that are lost or have left."""
        self._lock = threading.Lock()
        """Held by the thread that sends."""
        self._receipts_due = self._is_closed = self._is_welcoming = False
        self._garbage = QuietLog(_LOG)
        self.num_sent = self.num_received = self.num_dropped = 0

    def open(self) -> None:
        if self._is_closed:
            return
        if isinstance(self._link, DirectLink):
            self._link.on_arrival = self._read
        else:
            self._loop.add_reader(self._link.descriptor, self._read)
        self._read()

    def close(self, linger_s: float) -> None:
        """Stops receiving; messages under way are sent for up to ``linger_s``."""
        self._is_closed = True
        if not isinstance(self._link, DirectLink) and not self._loop.is_closed():
            self._loop.remove_reader(self._link.descriptor)
        self._link.close(linger_s)

    def held_bytes(self) -> tuple[int, int]:
        """Returns the bytes that are sent and unconfirmed, and those that wait behind the high-water mark."""
        queues = [peer.queue for peer in self.peers.values()]
        return sum(q.unconfirmed_bytes for q in queues), sum(q.waiting_bytes for q in queues)

    def add(self, rank: int, address: str = "") -> None:
        """Begins to exchange messages with a rank that listens there."""
        if not self._is_closed and rank not in self.peers and rank not in self.gone:
            self._link.connect(rank, address)
            self.peers[rank] = _Peer(SendQueue(self._high_water))  # last: from now on other threads may send there
            self._welcome()
            self._loop.call_soon(self._read)  # ZeroMQ wakes only a reader that has found nothing before

    def _welcome(self, *, by_timer: bool = False) -> None:
        """Looks for peers that have connected, again and again until all have: nothing wakes the loop for that."""
        self._is_welcoming &= not by_timer
        if isinstance(self._link, ZmqLink) and not self._is_closed:
            self._link.welcome()
            if self._link.early and not self._is_welcoming:
                self._is_welcoming = True
                self._loop.call_later(_WELCOME_S, lambda: self._welcome(by_timer=True))

    def drop(self, rank: int, *, has_left: bool) -> None:
        """Forgets a rank that is gone. Messages that it sent before a farewell may still arrive, and are delivered."""
        self.gone.add(rank)
        peer = self.peers.get(rank)
        if peer is None:
            return
        if has_left:
            # Nothing more is sent, and confirmations are of no use; only messages that are on their way still count.
            with self._lock:
                peer.has_left, peer.queue = True, SendQueue(self._high_water)
            self._loop.call_later(_LAST_MESSAGES_S, self._link.disconnect, rank)
        else:
            del self.peers[rank]
            self._link.disconnect(rank)

    def take_up(self, rank: int, number: int) -> None:
        """Lets go of a process of a rank that is gone; :meth:`add` then adds the one of this number."""
        self.drop(rank, has_left=False)
        self.gone.discard(rank)
        if isinstance(self._link, ZmqLink):
            self._link.take_up(rank, number)

    # -- sending: on any thread where the link allows it -------------------------------------------------------------

    def send(
        self,
        rank: int,
        topic: bytes,
        header: bytes,
        frames: Sequence[Any],
        on_confirmed: Callable[[], None] | None,
        *,
        may_drop: bool = False,
    ) -> None:
        """Sends a message, see :meth:`PeerNetwork.send_arrays`."""
        # Counted before the lock is taken: the other sender need not wait for that.
        num_bytes = len(header)
        for frame in frames:
            num_bytes += memoryview(frame).nbytes
        with self._lock:
            peer = self.peers.get(rank)
            if self._is_closed or peer is None or peer.has_left or (may_drop and peer.queue.would_wait(num_bytes)):
                self.num_dropped += 1
                return
            for message in peer.queue.offer(OutgoingMessage(topic, header, frames, num_bytes, on_confirmed)):
                self._put(rank, peer, message)

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
                if not self._receipts_due and any(peer.unreceipted_bytes for peer in self.peers.values()):
                    self._receipts_due = True
                    self._loop.call_later(_RECEIPT_DELAY_S, self._receipt_all)
                return
            rank, frames = received
            peer = self.peers.get(rank)
            if peer is None:
                self.num_dropped += 1
                continue
            try:
                self._receive(rank, peer, frames)
            except MalformedMessage as error:
                self.num_dropped += 1
                self._garbage.warn("a message from rank %d was dropped: %s", rank, error)
            if peer.unreceipted_bytes >= _RECEIPT_BYTES and not self._is_closed:
                self._receipt(rank, peer)
        self._loop.call_soon(self._read)

    def _receive(self, rank: int, peer: _Peer, frames: list[memoryview]) -> None:
        size = frames[0].nbytes if frames else 0
        if not _HEAD.size <= size <= MAX_HEADER_BYTES + _HEAD.size + MAX_TOPIC_BYTES:
            raise MalformedMessage(f"its head has {size} bytes, where {_HEAD.size} to {MAX_HEADER_BYTES} are read")
        head = bytes(frames[0])
        count, num_topic_bytes = _HEAD.unpack_from(head)
        if not peer.has_left:
            with self._lock:
                confirmed, released = peer.queue.confirm(count)
                for message in released:
                    self._put(rank, peer, message)
            for message in confirmed:  # without the lock: a callback may send
                if message.on_confirmed is not None:
                    message.on_confirmed()
        if num_topic_bytes:
            self.num_received += 1
            peer.num_received += 1
            for frame in frames:
                peer.unreceipted_bytes += frame.nbytes
            end = _HEAD.size + num_topic_bytes
            self._topics.deliver(rank, head[_HEAD.size : end], head[end:], frames[1:])

    def _receipt(self, rank: int, peer: _Peer) -> None:
        with self._lock:
            peer.num_receipted, peer.unreceipted_bytes = peer.num_received, 0
            if not peer.has_left:
                self._link.send(rank, _HEAD.pack(peer.num_received, 0))

    def _receipt_all(self) -> None:
        self._receipts_due = False
        for rank, peer in self.peers.items():
            if not self._is_closed and peer.num_receipted < peer.num_received:
                self._receipt(rank, peer)


class Topics:
    """The handlers of a network, by topic, and the messages of topics without one.

    Args:
        limit_bytes: largest number of bytes that are kept for topics without a handler; later messages are dropped
            and logged.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self.handlers: dict[bytes, _AnyHandler] = {}
        self._kept: dict[bytes, deque[tuple[int, bytes, list[memoryview], int]]] = {}
        self.loop: AbstractEventLoop | None = None
        """The loop on which messages are handed over, once there is one."""
        self._garbage = QuietLog(_LOG)
        self.kept_bytes = self.num_dropped = 0
        self.epoch = 0
        """Number of the present epoch. A topic of one epoch ends in ``@`` and the epoch's number."""

    def begin_epoch(self, epoch: int) -> None:
        """Drops messages of topics of earlier epochs, now and later; called on the event loop."""
        self.epoch = epoch
        for topic in [topic for topic in self._kept if self._is_of_the_past(topic)]:
            self.kept_bytes -= sum(num_bytes for *_, num_bytes in self._kept.pop(topic))

    def _is_of_the_past(self, topic: bytes) -> bool:
        _, mark, number = topic.rpartition(b"@")
        return bool(mark) and number.isdigit() and int(number) < self.epoch

    def subscribe(self, topic: bytes, handler: Callable[..., None], *, is_packed: bool) -> None:
        """Gives a topic's messages to ``handler``, kept ones first; any thread may call it."""
        if topic in self.handlers:
            raise ValueError(f"the topic '{topic.decode()}' has a handler: choose another name, or unsubscribe")
        self.handlers[topic] = handler, is_packed
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._hand_over, topic)

    def deliver(self, rank: int, topic: bytes, header: bytes, frames: list[memoryview]) -> None:
        """Gives a message that has come to its handler, or keeps it; called on the event loop."""
        handler = self.handlers.get(topic)
        # While older messages of the topic are kept, a newer one waits behind them, handler or not.
        if handler is not None and topic not in self._kept:
            self._give(handler, rank, header, frames)
            return
        if self._is_of_the_past(topic):
            return
        num_bytes = _OVERHEAD_BYTES + len(header) + sum(frame.nbytes for frame in frames)
        if self.kept_bytes + num_bytes > self._limit:
            self.num_dropped += 1
            why = f"nobody listens to the topic {topic[:40]!r}, and {self.kept_bytes} bytes are kept already"
            self._garbage.warn("a message from rank %d was dropped: %s", rank, why)
            return
        self.kept_bytes += num_bytes
        self._kept.setdefault(topic, deque()).append((rank, header, frames, num_bytes))

    def _hand_over(self, topic: bytes) -> None:
        # The handler is looked up for each message: handlers may subscribe and unsubscribe meanwhile.
        kept = self._kept.get(topic, deque())
        while kept and (handler := self.handlers.get(topic)):
            rank, header, frames, num_bytes = kept.popleft()
            self.kept_bytes -= num_bytes
            self._give(handler, rank, header, frames)
        if not kept:
            self._kept.pop(topic, None)

    def _give(self, handler: _AnyHandler, rank: int, packed: bytes, frames: list[memoryview]) -> None:
        call, is_packed = handler
        try:
            header = packed if is_packed else unpack_plain(packed)
            if not is_packed and not isinstance(header, dict):
                raise MalformedMessage("its header is no dict")
            call(rank, header, frames)
        except MalformedMessage as error:
            self.num_dropped += 1
            self._garbage.warn("a message from rank %d was dropped: %s", rank, error)
        except Exception as error:
            assert self.loop is not None
            told = f"the handler of a message from rank {rank} failed"
            self.loop.call_exception_handler({"message": told, "exception": error})
