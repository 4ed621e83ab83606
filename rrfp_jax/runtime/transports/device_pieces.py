"""Pieces of arrays on devices: cut out of a shard where it lies, and pasted into the shard that a program takes.

All programs here are compiled ahead of the first message and run on one device each.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.programs.stage_devices import shard_at
from rrfp_jax.runtime.transports.edges import Box, EdgePlan, Slot, shape_of


def shard_of(slot: Slot, leaf: jax.Array) -> jax.Array:
    """Returns the shard that a piece is cut from, as an array of one device."""
    return leaf if len(leaf.sharding.device_set) == 1 else shard_at(leaf, slot.device)


class DeviceCut:
    """Takes a piece out of this rank's shard of an array, as an array of one device."""

    def __init__(self, plan: EdgePlan, slot: Slot) -> None:
        leaf = plan.leaves[slot.leaf]
        self.slot, self._program = slot, None
        self._device = leaf.device(slot.device, is_source=True)
        if slot.within is not None:
            sharding = jax.sharding.SingleDeviceSharding(self._device)
            shard = jax.ShapeDtypeStruct(shape_of(slot.shard), leaf.dtype, sharding=sharding)
            starts, stops = [s.start for s in slot.within], [s.stop for s in slot.within]
            cut = jax.jit(partial(jax.lax.slice, start_indices=starts, limit_indices=stops))
            self._program = cut.lower(shard).compile()

    def __call__(self, leaf: Any) -> Any:
        slot = self.slot
        if isinstance(leaf, np.ndarray):
            return jax.device_put(leaf if slot.in_array is None else leaf[slot.in_array], self._device)
        shard = shard_of(slot, leaf)
        return shard if self._program is None else self._program(shard)


def pasted(
    shape: tuple[int, ...], dtype: np.dtype, pieces: Sequence[tuple[Slot, Any]], device: jax.Device
) -> jax.Array:
    """Returns a shard of this shape on a device, made of the pieces that it consists of, wherever they are.

    Waits for nothing: arrays of other devices come directly, those in the host's memory while they are kept alive.
    """
    ordered = sorted(pieces, key=lambda each: _start(each[0]))
    arrays = jax.device_put([array for _, array in ordered], device)
    if len(ordered) == 1 and ordered[0][0].within is None:
        return arrays[0]
    return _paste_program(shape, dtype, [slot for slot, _ in ordered], device)(arrays)


def prepare_pasting(plan: EdgePlan) -> None:
    """Compiles the programs that make this rank's shards of pieces that several ranks send."""
    shards: dict[tuple[int, Box], list[Slot]] = {}
    for slot in (slot for slots in plan.incoming.values() for slot in slots):
        shards.setdefault((slot.leaf, slot.shard), []).append(slot)
    for (index, shard), slots in shards.items():
        if [slot.within for slot in slots] != [None]:
            leaf = plan.leaves[index]
            _paste_program(shape_of(shard), leaf.dtype, slots, leaf.device(slots[0].device, is_source=False))


def _start(slot: Slot) -> tuple[int, ...]:
    return tuple(part.start for part in slot.within or ())


def _paste_program(
    shape: tuple[int, ...], dtype: np.dtype, slots: Iterable[Slot], device: jax.Device
) -> Callable[[list[Any]], Any]:
    """Returns the program that makes a shard of the arrays of these slots, in the order of their places."""
    ordered = sorted(slots, key=_start)
    return _compiled_pasting(shape, dtype, tuple(map(_start, ordered)), tuple(slot.shape for slot in ordered), device)


@lru_cache(maxsize=256)
def _compiled_pasting(
    shape: tuple[int, ...],
    dtype: np.dtype,
    starts: tuple[tuple[int, ...], ...],
    shapes: tuple[tuple[int, ...], ...],
    device: jax.Device,
) -> Callable[[list[Any]], Any]:
    sharding = jax.sharding.SingleDeviceSharding(device)

    def paste(arrays: list[jax.Array]) -> jax.Array:
        whole = jnp.zeros(shape, dtype)
        for start, array in zip(starts, arrays, strict=True):
            whole = jax.lax.dynamic_update_slice(whole, array, start)
        return whole

    specs = [jax.ShapeDtypeStruct(each, dtype, sharding=sharding) for each in shapes]
    return jax.jit(paste, out_shardings=sharding).lower(specs).compile()


class DeviceReshard:
    """Brings one array from a unit to another of this process that holds it differently, from device to device.

    ``jax.device_put`` does so if every device wants exactly the data of some other device. Otherwise it waits for the
    array and takes all of it to the host and back, on the thread that launches. So this class cuts on the devices that
    have the array and pastes on those that want it.
    """

    def __init__(self, plan: EdgePlan, index: int) -> None:
        leaf, rank = plan.leaves[index], plan.rank
        self._leaf = leaf
        pairs = zip(plan.outgoing.get(rank, ()), plan.incoming.get(rank, ()), strict=True)  # both in the route's order
        self._cuts: dict[Box, list[tuple[Slot, DeviceCut]]] = {}
        for source, target in pairs:
            if source.leaf == index:
                self._cuts.setdefault(target.shard, []).append((target, DeviceCut(plan, source)))
        devices = leaf.target_sharding.addressable_devices_indices_map(leaf.shape)
        self._boxes = list(zip(leaf.target.boxes, devices, strict=True))
        for box, device in self._boxes:
            slots = [slot for slot, _ in self._cuts.get(box, ())]
            if [slot.within for slot in slots] != [None]:
                _paste_program(shape_of(box), leaf.dtype, slots, device)

    def __call__(self, array: Any) -> jax.Array:
        leaf = self._leaf
        pieces = {box: [(slot, cut(array)) for slot, cut in cuts] for box, cuts in self._cuts.items()}
        shards = [pasted(shape_of(box), leaf.dtype, pieces.get(box, ()), device) for box, device in self._boxes]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.target_sharding, shards)
