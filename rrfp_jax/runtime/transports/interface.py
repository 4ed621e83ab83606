"""What the runtime asks of a transport, and what its remote half has to do."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rrfp_jax.core import Message
from rrfp_jax.runtime.transports.edges import EdgePlan
from rrfp_jax.runtime.transports.parts import Key

Deliver = Callable[[int, int, Message, Any], None]
"""Called with the receiving unit, the step, the message and its payload: on the event loop, or within ``send``."""

Failed = Callable[[Exception], None]
"""Called on the event loop with what makes the transport useless: the run cannot go on."""


class TransportFailed(RuntimeError):
    """Data could not be fetched or put on a device; says which, and from whom."""


class Transport(Protocol):
    """Carries payloads between units, in any order; each message is known by step and identity."""

    def ship(self, payload: Any, stage: int, message: Message, bucket: int = 0, step: int | None = None) -> Any:
        """Bring a finished task's output into the form in which ``send`` takes it; called on the compute thread.

        ``bucket`` is that of the message's microbatch, which decides on the payload's shapes. For a message that stays
        in its unit this is the form in which the receiving task takes it. With ``step``, what can leave without waiting
        for the event loop does; ``send`` is called all the same.
        """

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        """Send what ``ship`` returned, or plain data, to unit ``stage``; on any thread, one call at a time; never
        blocks."""

    def close(self) -> None:
        """Stop what was started; what comes or goes from now on is lost, or left to who comes next."""


class HeldBytes:
    """Counts the bytes that a transport holds; on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = 0
        """Sent or offered, and not confirmed by the receiver."""
        self.received = 0
        """Arrived, and not delivered: not all parts are here, or they are being assembled."""
        self.peak = 0
        """The most of both together."""

    def add(self, *, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self.sent += sent
            self.received += received
            self.peak = max(self.peak, self.sent + self.received)


class Remote(Protocol):
    """Carries the parts of messages to other processes; to be derived from, since not all have to do everything."""

    def prepare(self, plan: EdgePlan) -> None:  # noqa: ARG002 - there may be nothing to compile
        """Compile what the parts of this edge need; called before the first of them, on any thread."""
        return

    def offer(self, plan: EdgePlan, receiver: int, leaves: Sequence[Any]) -> Any:
        """Get a part ready to be sent, from the arrays of a payload; called on the compute thread."""

    def send_at_once(self, receiver: int, key: Key, offered: Any) -> Any:  # noqa: ARG002 - not all have such a way
        """Send what ``offer`` returned, if that can be done now; returns what ``send`` gets in its place, None where
        nothing is left to do.

        Called on the compute thread, or on the one that waits for its tasks.
        """
        return offered

    def send(self, receiver: int, key: Key, offered: Any) -> None:
        """Send what ``offer`` returned; called on the event loop."""

    def open(self) -> None:
        """Take messages from now on, also those that came before."""

    def close(self) -> None:
        """Stop what was started."""
        return
