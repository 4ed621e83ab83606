"""Handlers of messages by topic, and the messages of topics that have no handler yet.

So the network can start first, and its listeners can be built later, in order, from values: messages that have come
meanwhile are handed over on subscription, in the order in which they came, before anything newer.
"""

import logging
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from typing import Any

from rrfp_jax.cluster._zmq_sockets import QuietLog
from rrfp_jax.cluster.wire import MalformedMessage, unpack_plain

_LOG = logging.getLogger(__name__)
_OVERHEAD_BYTES = 500
"""Memory that a kept message takes beside its bytes, so that empty ones count too."""

Handler = Callable[[int, dict[str, Any], list[memoryview]], None]
"""Called on the event loop with the sender's rank, the header and the frames, which stay valid as long as they are
referenced. May raise :class:`MalformedMessage`: the message is then dropped and logged."""

PackedHandler = Callable[[int, bytes, list[memoryview]], None]
"""Called as a :data:`Handler` is, with the header as the bytes that came."""

_Message = tuple[int, bytes, list[memoryview]]


class Topics:
    """The handlers of a network, by topic.

    Args:
        limit_bytes: largest number of bytes that are kept for topics without a handler; later messages are dropped
            and logged.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._handlers: dict[bytes, PackedHandler] = {}
        self._kept: dict[bytes, deque[_Message]] = {}
        self._loop: AbstractEventLoop | None = None
        self._garbage = QuietLog(_LOG)
        self.kept_bytes = self.num_dropped = 0

    def start(self, loop: AbstractEventLoop) -> None:
        """Hands messages over on ``loop`` from now on."""
        self._loop = loop

    def subscribe(self, topic: bytes, handler: PackedHandler) -> None:
        """Gives a topic's messages to ``handler``, kept ones first; any thread may call it."""
        if topic in self._handlers:
            raise ValueError(f"the topic '{topic.decode()}' has a handler: choose another name, or unsubscribe")
        self._handlers[topic] = handler
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._hand_over, topic)

    def unsubscribe(self, topic: bytes) -> None:
        """Keeps a topic's messages from now on, for the next handler."""
        self._handlers.pop(topic, None)

    def deliver(self, rank: int, topic: bytes, header: bytes, frames: list[memoryview]) -> None:
        """Gives a message that has come to its handler, or keeps it; called on the event loop."""
        handler = self._handlers.get(topic)
        # While older messages of the topic are kept, a newer one waits behind them, handler or not.
        if handler is not None and topic not in self._kept:
            self._give(handler, rank, header, frames)
            return
        num_bytes = _size(header, frames)
        if self.kept_bytes + num_bytes > self._limit:
            why = f"nobody listens to the topic {topic[:40]!r}, and {self.kept_bytes} bytes are kept already"
            self._drop(rank, why)
            return
        self.kept_bytes += num_bytes
        self._kept.setdefault(topic, deque()).append((rank, header, frames))

    def _hand_over(self, topic: bytes) -> None:
        # The handler is looked up for each message: handlers may subscribe and unsubscribe meanwhile.
        kept = self._kept.get(topic, deque())
        while kept and (handler := self._handlers.get(topic)):
            rank, header, frames = kept.popleft()
            self.kept_bytes -= _size(header, frames)
            self._give(handler, rank, header, frames)
        if not kept:
            self._kept.pop(topic, None)

    def _give(self, handler: PackedHandler, rank: int, header: bytes, frames: list[memoryview]) -> None:
        try:
            handler(rank, header, frames)
        except MalformedMessage as error:
            self._drop(rank, error)
        except Exception as error:
            assert self._loop is not None
            what = f"the handler of a message from rank {rank} failed"
            self._loop.call_exception_handler({"message": what, "exception": error})

    def _drop(self, rank: int, why: object) -> None:
        self.num_dropped += 1
        self._garbage.warn("a message from rank %d was dropped: %s", rank, why)


def unpacked(handler: Handler) -> PackedHandler:
    """Returns a handler of packed headers that calls ``handler`` with the header as plain data."""

    def handle(rank: int, packed: bytes, frames: list[memoryview]) -> None:
        header = unpack_plain(packed)
        if not isinstance(header, dict):
            raise MalformedMessage("its header is no dict")
        handler(rank, header, frames)

    return handle


def _size(header: bytes, frames: list[memoryview]) -> int:
    return _OVERHEAD_BYTES + len(header) + sum(frame.nbytes for frame in frames)
