"""Pieces on devices: cut out of a shard where it lies, and described for the receiver's device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from rrfp_jax.runtime.transports.boxes import shape_of
from rrfp_jax.runtime.transports.edges import EdgePlan, Slot, local_devices
from rrfp_jax.runtime.transports.parts import on_host, shard_of


class Cut:
    """Takes a piece out of this rank's shard of an array, as an array of one device."""

    def __init__(self, plan: EdgePlan, slot: Slot) -> None:
        leaf = plan.leaves[slot.leaf]
        self.slot = slot
        self._device = local_devices(leaf.source_sharding, leaf.shape)[slot.device]
        self._program = None if slot.within is None else self._compile(slot.within, leaf.dtype)

    def _compile(self, within: tuple[slice, ...], dtype: np.dtype) -> Callable[[Any], Any]:
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        shard = jax.ShapeDtypeStruct(shape_of(self.slot.shard), dtype, sharding=sharding)
        starts, stops = [s.start for s in within], [s.stop for s in within]
        return jax.jit(partial(jax.lax.slice, start_indices=starts, limit_indices=stops)).lower(shard).compile()

    def __call__(self, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return jax.device_put(on_host(self.slot, leaf), self._device)
        shard = shard_of(self.slot, leaf)
        return shard if self._program is None else self._program(shard)


def pull_spec(plan: EdgePlan, slot: Slot) -> jax.ShapeDtypeStruct:
    """What to pull, and to which of this rank's devices."""
    leaf = plan.leaves[slot.leaf]
    device = local_devices(leaf.target_sharding, leaf.shape)[slot.device]
    return jax.ShapeDtypeStruct(slot.shape, slot.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
