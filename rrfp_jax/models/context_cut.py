"""How the positions of a decoder's sequences are dealt out over the mesh axis ``context``.

Every device holds equally many positions. Under a causal mask a device with late positions has more to look at than one
with early ones. So a sequence is cut into twice as many pieces as there are devices, and device ``i`` of ``n`` holds
the pieces ``i`` and ``2 n - 1 - i``, an early one and a late one: all have ``2 n + 1`` pairs of pieces to compute,
where pieces in their natural order would make the last device compute ``4 n`` pairs' worth (the zig-zag of Llama 3's
and of other ring attentions). With a sliding window most tokens look at equally many others anyway, and only near
neighbours need each other's keys; there positions keep their order as soon as that is less work.

Pure data and NumPy: nothing here knows devices.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

GATHER, RING, AUTO = "gather", "ring", "auto"
CONTEXT_ATTENTIONS = (AUTO, GATHER, RING)
"""How keys and values reach the queries of other devices; see :mod:`rrfp_jax.models.context_attention`."""


@dataclass(frozen=True, kw_only=True)
class ContextCut:
    """Over how many devices sequences are cut, and how attention looks across the cuts."""

    devices: int
    """Size of the mesh axis ``context`` of all stages with decoder layers."""
    attention: str = AUTO
    """One of :data:`CONTEXT_ATTENTIONS`."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"a context is cut over {self.devices} devices: give at least 1")
        if self.attention not in CONTEXT_ATTENTIONS:
            raise ValueError(f"context_attention is {self.attention!r}: give one of {', '.join(CONTEXT_ATTENTIONS)}")


@dataclass(frozen=True)
class SequenceOrder:
    """Which positions lie where, for a decoder with this sliding window."""

    devices: int
    window: int | None

    def num_hops(self, length: int) -> int:
        """From how many of the devices before it one needs keys, where positions keep their order."""
        reach = length - 1 if self.window is None else self.window - 1
        return min(self.devices - 1, -(-reach // (length // self.devices)))

    def is_balanced(self, length: int) -> bool:
        """Whether pieces are dealt out as above; otherwise positions keep their order."""
        if self.devices == 1 or length % (2 * self.devices):
            return False
        return 4 * (self.num_hops(length) + 1) > 2 * self.devices + 1

    def __call__(self, length: int) -> np.ndarray:
        """The natural position of what stands at each place, int32 ``[length]``."""
        return _balanced(length, self.devices) if self.is_balanced(length) else np.arange(length, dtype=np.int32)


@lru_cache(maxsize=64)
def _balanced(length: int, devices: int) -> np.ndarray:
    pieces = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    order = np.concatenate([np.concatenate([pieces[i], pieces[2 * devices - 1 - i]]) for i in range(devices)])
    order.flags.writeable = False
    return order
