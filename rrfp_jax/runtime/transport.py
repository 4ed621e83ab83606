"""How messages travel between stages: an interface, and the transport between stages of one process.

Messages are order-free: each is routed by its identity (step, kind, chunks, microbatch), so a transport may deliver in
any order, and early.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from rrfp_jax.arbitration import Message

Deliver = Callable[[int, int, Message, Any], None]
"""Called on the event loop with the receiving stage, the step, the message and its payload."""


class Transport(Protocol):
    """Carries payloads to other stages; ``send`` is called on the event loop and must not block."""

    def ship(self, payload: Any, stage: int) -> Any:
        """Bring a finished task's output into the form that ``send`` takes; called on the compute thread."""

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        """Deliver to ``stage``."""


class InProcessTransport:
    """Between stages of one process: NumPy views where devices share the host's memory, else ``device_put``.

    A view of a ready CPU array costs nothing, and a compiled program takes it as an argument; ``device_put`` between
    CPU devices would cost several times the launch of a small program.
    """

    def __init__(self, deliver: Deliver, shardings: dict[int, jax.sharding.Sharding]) -> None:
        self._deliver = deliver
        self._shardings = shardings
        self._host = {s for s, sharding in shardings.items() if _is_on_host(sharding)}

    def ship(self, payload: Any, stage: int) -> Any:
        if stage in self._host:
            return np.asarray(payload) if isinstance(payload, jax.Array) else jax.tree.map(np.asarray, payload)
        return jax.device_put(payload, self._shardings[stage])

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        self._deliver(stage, step, message, payload)


def _is_on_host(sharding: jax.sharding.Sharding) -> bool:
    devices: set[Any] = sharding.device_set
    return all(device.platform == "cpu" for device in devices)
