"""A stage's values on their way: what has arrived, what was handed from chunk to chunk here, what waits to be sent.

Values are keyed by step and message, so they may come in any order and early. An edge between two chunks of the same
stage uses the same key and never leaves the stage.
"""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rrfp_jax.core import Message, MessageKind
from rrfp_jax.schedules import Placement

Ship = Callable[[Any, int, Message, int, int | None], Any]
"""Brings a value, of a message of a bucket, into the form in which it reaches a stage. With a step also sends it, where
that can be done at once; see ``Transport.ship``."""

_Held = tuple[Any, int]
"""A value and its bytes."""
_COUNTED = (MessageKind.ACTIVATION, MessageKind.GRADIENT)


class Mailbox:
    """The inbox and outbox of one stage. Dictionary operations are atomic, so both its threads may use it."""

    def __init__(self, placement: Placement, stage: int, ship: Ship) -> None:
        self._placement, self._stage, self._ship = placement, stage, ship
        self._inbox: dict[int, dict[Message, _Held]] = {}
        self._outbox: dict[tuple[int, Message], Any] = {}
        self._ahead: set[tuple[int, Message]] = set()
        """What was fetched and has not been delivered."""
        self._incoming = threading.Lock()
        self._last_finished = -1
        # bytes that came and went; each counter has one thread that writes it, or a lock, so none is ever lost
        self._accepted_bytes = self._posted_bytes = self._taken_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the values that have arrived and have not been taken."""
        return self._accepted_bytes + self._posted_bytes - self._taken_bytes

    def begin(self, step: int) -> None:
        self._inbox.setdefault(step, {})

    def accept(self, step: int, message: Message, payload: Any) -> None:
        """A value from another stage; the step need not have begun here. What comes again or too late is dropped."""
        if step <= self._last_finished:
            return
        with self._incoming:
            if (step, message) in self._ahead:
                self._ahead.discard((step, message))
            else:
                self._keep(step, message, payload)

    def fetch(self, step: int, message: Message, ahead: Callable[[], Any]) -> bool:
        """Take a value before it is delivered, if ``ahead`` has it; tells whether it is here."""
        with self._incoming:
            if message in self._inbox[step]:
                return True
            payload = ahead()
            if payload is None:
                return False
            self._ahead.add((step, message))
            self._keep(step, message, payload)
            return True

    def _keep(self, step: int, message: Message, payload: Any) -> None:
        inbox = self._inbox.setdefault(step, {})
        if message not in inbox:
            num_bytes = _num_bytes(message, payload)
            inbox[message] = (payload, num_bytes)
            self._accepted_bytes += num_bytes

    def post(self, step: int, message: Message, value: Any, bucket: int = 0) -> None:
        """A chunk of this stage has produced ``value`` for the chunk that ``message`` names."""
        receiver = self._placement.stage_of_chunk[message.target]
        shipped = self._ship(value, receiver, message, bucket, step)
        if receiver == self._stage:
            num_bytes = _num_bytes(message, shipped)
            self._inbox[step][message] = (shipped, num_bytes)
            self._posted_bytes += num_bytes
        else:
            self._outbox[step, message] = shipped

    def read(self, step: int, message: Message) -> Any:
        """A value that has arrived; it stays until the step ends or :meth:`take` removes it."""
        return self._inbox[step][message][0]

    def take(self, step: int, message: Message) -> Any:
        value, num_bytes = self._inbox[step].pop(message)
        self._taken_bytes += num_bytes
        return value

    def ahead(self, step: int, message: Message) -> Any:
        """A value that waits to be sent, or None; it goes on waiting."""
        return self._outbox.get((step, message))

    def payload(self, step: int, message: Message) -> Any:
        """Hand over a value that waits to be sent."""
        return self._outbox.pop((step, message))

    def finish(self, step: int) -> None:
        """Forget what is left of a step."""
        self._last_finished = step
        self._ahead = {key for key in self._ahead if key[0] != step}
        left = self._inbox.pop(step, {})
        self._accepted_bytes -= sum(num_bytes for _, num_bytes in left.values())


def _num_bytes(message: Message, value: Any) -> int:
    """Bytes of an activation or a gradient; what ends a step is read where it lies and not counted."""
    if message.kind not in _COUNTED:
        return 0
    if isinstance(value, np.ndarray):
        return value.nbytes
    return sum(leaf.nbytes for leaf in jax.tree.leaves(value))
