"""What a copy from one device to another takes in this process, where no processes send each other anything."""

import time
from collections.abc import Iterable
from statistics import median

import jax
import numpy as np

from rrfp_jax.costs import LinkCosts
from rrfp_jax.costs.fitting import fit_links

_REPEATS = 20


def device_links(sizes: Iterable[int]) -> LinkCosts:
    """Of arrays of these bytes, between the first two devices; links that take no time where there is one device."""
    devices = jax.local_devices()
    if len(devices) < 2:
        return LinkCosts()
    return fit_links((num_bytes, _copy_ms(num_bytes, *devices[:2])) for num_bytes in sorted({1, *sizes}))


def _copy_ms(num_bytes: int, source: jax.Device, target: jax.Device) -> float:
    array = jax.block_until_ready(jax.device_put(np.zeros(num_bytes, np.uint8), source))
    times_ms = []
    for _ in range(_REPEATS):
        begun_s = time.perf_counter()
        jax.block_until_ready(jax.device_put(array, target))
        times_ms.append((time.perf_counter() - begun_s) * 1e3)
    return median(times_ms)
