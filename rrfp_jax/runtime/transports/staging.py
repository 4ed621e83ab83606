"""How what a device holds comes to the host's memory: through pinned memory where that is faster, else directly.

JAX names the memories of a device (``pinned_host`` on GPUs and TPUs). Which way is faster depends on the platform and
on JAX's version, so it is tried once for every device, before the first message.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import numpy as np

_PINNED = "pinned_host"
_TRIAL_BYTES = 4 << 20
_NUM_TRIALS = 5

Begin = Callable[[Any], Any]
"""Begins to copy an array of one device; what it returns becomes a view or copy by ``np.asarray``, which waits."""


class Staging:
    """The way of each device that arrays are sent from."""

    def __init__(self) -> None:
        self._ways: dict[jax.Device, Begin] = {}

    def learn(self, device: jax.Device) -> None:
        """Find the way of a device, which is idle."""
        if device not in self._ways:
            self._ways[device] = faster(device, directly, through_pinned) if _has_pinned(device) else directly

    def begin(self, shard: Any) -> Any:
        """Begin to copy an array of one device."""
        (device,) = shard.devices()
        return self._ways.get(device, directly)(shard)


def directly(shard: Any) -> Any:
    """Into memory of the interpreter's."""
    shard.copy_to_host_async()
    return shard


def through_pinned(shard: Any) -> Any:
    """Into memory that the device writes to by itself."""
    return jax.device_put(shard, shard.sharding.with_memory_kind(_PINNED))


def faster(device: jax.Device, first: Begin, second: Begin) -> Begin:
    """The faster of two ways; the first where the second fails or brings other bytes."""
    wanted = np.arange(_TRIAL_BYTES // 4, dtype=np.uint32)
    taken_s: dict[Begin, list[float]] = {first: [], second: []}
    for trial in range(_NUM_TRIALS):
        for way in (first, second):
            shard = jax.device_put(wanted, device).block_until_ready()  # a new one: copies are kept with an array
            started_s = time.perf_counter()
            try:
                came = np.asarray(way(shard))
            except Exception:  # of any type, as platforms refuse a memory
                return first
            elapsed_s = time.perf_counter() - started_s
            if not np.array_equal(came, wanted):
                return first
            if trial:  # the first makes what later ones use
                taken_s[way].append(elapsed_s)
    return min((first, second), key=lambda way: median(taken_s[way]))


def _has_pinned(device: jax.Device) -> bool:
    return any(memory.kind == _PINNED for memory in device.addressable_memories())
