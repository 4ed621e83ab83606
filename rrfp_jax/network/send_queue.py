"""What was sent to a peer and what waits to be sent: bounded in bytes, in order, nothing dropped.

A message's buffers stay owned here until the peer has confirmed its receipt. While more than ``high_water_bytes`` are
unconfirmed, further messages wait; one larger than the mark goes alone. The peer confirms by a running count.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rrfp_jax.network.plain import MalformedMessage


class Outgoing(NamedTuple):
    """A message on its way; ``frames`` keep its buffers alive."""

    topic: bytes
    header: bytes
    frames: Sequence[Any]
    num_bytes: int
    on_confirmed: Callable[[], None] | None


class SendQueue:
    """The messages to one peer. Methods return what is to be put on the wire, in order."""

    def __init__(self, high_water_bytes: int) -> None:
        self._limit = high_water_bytes
        self._waiting: deque[Outgoing] = deque()
        self._sent: deque[Outgoing] = deque()
        self._num_confirmed = 0
        self.unconfirmed_bytes = 0
        self.waiting_bytes = 0

    def would_wait(self, num_bytes: int) -> bool:
        """Whether a message of this size, offered now, would have to wait."""
        return bool(self._sent) and (bool(self._waiting) or not self._has_room(num_bytes))

    def offer(self, message: Outgoing) -> list[Outgoing]:
        """Add a message behind all others."""
        if not self.would_wait(message.num_bytes):
            self._sent.append(message)
            self.unconfirmed_bytes += message.num_bytes
            return [message]
        self._waiting.append(message)
        self.waiting_bytes += message.num_bytes
        return []

    def confirm(self, count: int) -> tuple[list[Outgoing], list[Outgoing]]:
        """The peer has received ``count`` messages so far: (those newly confirmed, those to send now).

        Raises:
            MalformedMessage: where the peer confirms less than before, or more than was sent.
        """
        num_new = count - self._num_confirmed
        if not 0 <= num_new <= len(self._sent):
            raise MalformedMessage(
                f"{count} messages are confirmed, where {self._num_confirmed} were and {len(self._sent)} more are out"
            )
        self._num_confirmed = count
        confirmed = []
        for _ in range(num_new):
            message = self._sent.popleft()
            self.unconfirmed_bytes -= message.num_bytes
            confirmed.append(message)
        return confirmed, self._release() if self._waiting else []

    def _release(self) -> list[Outgoing]:
        released = []
        while self._waiting and self._has_room(self._waiting[0].num_bytes):
            message = self._waiting.popleft()
            self._sent.append(message)
            self.waiting_bytes -= message.num_bytes
            self.unconfirmed_bytes += message.num_bytes
            released.append(message)
        return released

    def _has_room(self, num_bytes: int) -> bool:
        return not self._sent or self.unconfirmed_bytes + num_bytes <= self._limit
