"""Who is given the messages of a topic, and what is kept for topics that nobody has subscribed to yet.

So the network can start first, and what listens to it can be built later, in order, from values: what has come
meanwhile is handed over on subscription, in the order in which it came, before anything newer.
"""

import logging
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from typing import Any

from rrfp_jax.network.plain import MalformedMessage, unpack
from rrfp_jax.network.sockets import QuietLog

_LOG = logging.getLogger(__name__)
_OVERHEAD_BYTES = 500
"""What a kept message takes beside its bytes, so that empty ones count too."""

Handler = Callable[[int, dict[str, Any], list[memoryview]], None]
"""Called on the event loop with the sender's rank, the header and the frames, which stay valid as long as they are
referenced. May raise :class:`MalformedMessage`: the message is then dropped and logged."""

PackedHandler = Callable[[int, bytes, list[memoryview]], None]
"""The same, with the header as it came."""

_Message = tuple[int, bytes, list[memoryview]]


class Topics:
    """The handlers of a network, by topic.

    Args:
        limit_bytes: what is kept in all for topics without a handler; what comes beyond is dropped and logged.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._handlers: dict[bytes, PackedHandler] = {}
        self._kept: dict[bytes, deque[_Message]] = {}
        self._loop: AbstractEventLoop | None = None
        self._garbage = QuietLog(_LOG)
        self.kept_bytes = self.num_dropped = 0

    def start(self, loop: AbstractEventLoop) -> None:
        """Hand messages over on ``loop`` from now on."""
        self._loop = loop

    def subscribe(self, topic: bytes, handler: PackedHandler) -> None:
        """Give a topic's messages to ``handler``, those that are kept first; from any thread."""
        if topic in self._handlers:
            raise ValueError(f"the topic '{topic.decode()}' has a handler: choose another name, or unsubscribe")
        self._handlers[topic] = handler
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._hand_over, topic)

    def unsubscribe(self, topic: bytes) -> None:
        """Keep a topic's messages from now on, for the next who subscribes."""
        self._handlers.pop(topic, None)

    def deliver(self, rank: int, topic: bytes, header: bytes, frames: list[memoryview]) -> None:
        """A message has come; on the event loop."""
        handler = self._handlers.get(topic)
        if handler is None or topic in self._kept:
            self._keep(topic, (rank, header, frames))
        else:
            self._give(handler, rank, header, frames)

    def _keep(self, topic: bytes, message: _Message) -> None:
        num_bytes = _size(message)
        if self.kept_bytes + num_bytes > self._limit:
            why = f"nobody listens to the topic {topic[:40]!r}, and {self.kept_bytes} bytes are kept already"
            self._drop(message[0], why)
            return
        self.kept_bytes += num_bytes
        self._kept.setdefault(topic, deque()).append(message)

    def _hand_over(self, topic: bytes) -> None:
        """Handlers may subscribe and unsubscribe meanwhile."""
        kept = self._kept.get(topic, deque())
        while kept and (handler := self._handlers.get(topic)):
            message = kept.popleft()
            self.kept_bytes -= _size(message)
            self._give(handler, *message)
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
    """Have a handler called with the header as plain data."""

    def handle(rank: int, packed: bytes, frames: list[memoryview]) -> None:
        header = unpack(packed)
        if not isinstance(header, dict):
            raise MalformedMessage("its header is no dict")
        handler(rank, header, frames)

    return handle


def _size(message: _Message) -> int:
    _, header, frames = message
    return _OVERHEAD_BYTES + len(header) + sum(frame.nbytes for frame in frames)
