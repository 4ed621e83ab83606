"""Messages whose parts come from several ranks: collected on the event loop, assembled, and delivered once complete.

Pieces become arrays as the receiving program takes them, on worker threads where that takes long. On CPU a program
takes a whole array as NumPy's, without copying it where it starts at a multiple of 64 bytes, as large ones arrive; what
is sharded becomes a JAX array of this rank's shards. Elsewhere arrays are on their way to the devices when they are
delivered: a copy waits there for all that was launched before it, as the program that reads it does, and the stage
should choose its next task knowing what the host has. Whoever reads an array whose copy fails gets the error.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax.runtime.transports.edges import EdgePlan, Leaf, Slot, is_on_host, local_devices, num_bytes_of
from rrfp_jax.runtime.transports.interface import Deliver, HeldBytes
from rrfp_jax.runtime.transports.parts import Key, pasted
from rrfp_jax.runtime.transports.routes import Box, box_of, shape_of
from rrfp_jax.runtime.transports.workers import Workers

QUICK_BYTES = 1 << 18
"""Up to so many bytes are assembled on the event loop: less work than to wake a thread."""
_ALIGNMENT = 64
_STEPS_REMEMBERED = 4
"""Stages are at most a step or two apart, so parts of older steps do not come any more."""

Parts = Mapping[int, Sequence[Any]]
"""By sending rank, its pieces in the order of the plan."""


class Inbox:
    """Takes parts in any order; a part that comes again changes nothing."""

    def __init__(self, deliver: Deliver, workers: Workers, held: HeldBytes) -> None:
        self._deliver, self._workers, self._held = deliver, workers, held
        self._waiting: dict[Key, dict[int, Sequence[Any]]] = {}
        self._complete: dict[int, set[Key]] = {}

    def part(self, plan: EdgePlan, key: Key, sender: int, pieces: Sequence[Any]) -> None:
        """A part of a message has come from ``sender``."""
        num_parts = len(plan.incoming)
        if num_parts == 1:
            self._finish(plan, key, {sender: pieces})
            return
        if key in self._complete.get(key.step, ()):
            return
        parts = self._waiting.setdefault(key, {})
        if sender in parts:
            return
        parts[sender] = pieces
        self._held.add(received=num_bytes_of(plan.incoming[sender]))
        if len(parts) == num_parts:
            del self._waiting[key]
            self._remember(key)
            self._held.add(received=-plan.incoming_bytes)
            self._finish(plan, key, parts)

    def whole(self, plan: EdgePlan, key: Key, payload: Any) -> None:
        """A message has come that is assembled already."""
        self._deliver(plan.target_unit, key.step, key.message, payload)

    def _remember(self, key: Key) -> None:
        self._complete.setdefault(key.step, set()).add(key)
        for step in [step for step in self._complete if step <= key.step - _STEPS_REMEMBERED]:
            del self._complete[step]

    def _finish(self, plan: EdgePlan, key: Key, parts: dict[int, Sequence[Any]]) -> None:
        if is_quick(plan) or needs_nothing(plan, parts):
            self.whole(plan, key, assemble(plan, parts))
            return
        self._held.add(received=plan.incoming_bytes)
        self._workers.submit(lambda: assemble(plan, parts), lambda payload: self._assembled(plan, key, payload))

    def _assembled(self, plan: EdgePlan, key: Key, payload: Any) -> None:
        self._held.add(received=-plan.incoming_bytes)
        self.whole(plan, key, payload)


def is_quick(plan: EdgePlan) -> bool:
    """Whether a message of this edge may be assembled on the event loop."""
    return plan.incoming_bytes <= QUICK_BYTES and plan.on_host


def needs_nothing(plan: EdgePlan, parts: Parts) -> bool:
    """Whether the arrays are here as programs take them, so that nothing is copied whatever their size."""
    return plan.is_plain and all(
        isinstance(array, np.ndarray) and _is_aligned(array) for arrays in parts.values() for array in arrays
    )


def assemble(plan: EdgePlan, parts: Parts) -> Any:
    """The payload of a message whose parts are all here: a pytree of arrays, ready to be used."""
    if plan.is_plain:
        (arrays,) = parts.values()
        if plan.is_single:
            return _aligned(np.asarray(arrays[0]))
        return plan.treedef.unflatten([_aligned(np.asarray(array)) for array in arrays])
    pieces: list[list[tuple[Slot, Any]]] = [[] for _ in plan.leaves]
    for sender, arrays in parts.items():
        for slot, array in zip(plan.incoming[sender], arrays, strict=True):
            pieces[slot.leaf].append((slot, array))
    return plan.treedef.unflatten([_leaf(leaf, plan.rank, own) for leaf, own in zip(plan.leaves, pieces, strict=True)])


def _leaf(leaf: Leaf, rank: int, pieces: list[tuple[Slot, Any]]) -> Any:
    shards: dict[Box, list[tuple[Slot, Any]]] = {}
    for slot, array in pieces:
        shards.setdefault(slot.shard, []).append((slot, array))
    if leaf.is_whole_on_host:
        return _host_shard(leaf, leaf.shape, pieces)
    boxes = [box for box, owner in zip(leaf.target.boxes, leaf.target.ranks, strict=True) if owner == rank]
    values = {box: _shard(leaf, box, shards.get(box, ())) for box in boxes}
    return _global_array(leaf, values)


def _shard(leaf: Leaf, box: Box, pieces: Iterable[tuple[Slot, Any]]) -> Any:
    """One shard: the piece itself where it is all of it, else pasted together."""
    match list(pieces):
        case [(slot, array)] if slot.within is None and isinstance(array, jax.Array):
            return array
        case [(slot, _), *_] as several if _is_on_devices(leaf, several):
            device = local_devices(leaf.target_sharding, leaf.shape)[slot.device]
            return pasted(shape_of(box), leaf.dtype, several, device)
        case several:
            return _host_shard(leaf, shape_of(box), several)


def _is_on_devices(leaf: Leaf, pieces: Iterable[tuple[Slot, Any]]) -> bool:
    """Whether to paste in the host's memory would mean to wait for a device."""
    return not is_on_host(leaf.target_sharding) and any(isinstance(array, jax.Array) for _, array in pieces)


def _host_shard(leaf: Leaf, shape: tuple[int, ...], pieces: Sequence[tuple[Slot, Any]]) -> np.ndarray:
    if len(pieces) == 1 and pieces[0][0].within is None:
        array = np.asarray(pieces[0][1])
        return _aligned(array) if is_on_host(leaf.target_sharding) else array
    whole = _empty(shape, leaf.dtype)
    for slot, array in pieces:
        whole[slot.within or ...] = np.asarray(array)
    return whole


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if num_bytes <= QUICK_BYTES:
        return np.empty(shape, dtype)
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -_address(memory) % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _aligned(array: np.ndarray) -> np.ndarray:
    """The array, moved where a program would have to copy it. Small ones are copied by programs anyway."""
    if _is_aligned(array):
        return array
    moved = _empty(array.shape, array.dtype)
    moved[...] = array
    return moved


def _is_aligned(array: np.ndarray) -> bool:
    return (array.nbytes <= QUICK_BYTES and array.flags.aligned) or _address(array) % _ALIGNMENT == 0


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _global_array(leaf: Leaf, shards: Mapping[Box, Any]) -> jax.Array:
    """An array of the target's sharding from this rank's shards; JAX keeps those in the host's memory until they are
    copied."""
    if all(isinstance(shard, np.ndarray) for shard in shards.values()):
        made = jax.make_array_from_callback(
            leaf.shape, leaf.target_sharding, lambda index: shards[box_of(index or (), leaf.shape)]
        )
    else:
        places = leaf.target_sharding.addressable_devices_indices_map(leaf.shape)
        made = jax.make_array_from_single_device_arrays(
            leaf.shape,
            leaf.target_sharding,
            [jax.device_put(shards[box_of(index or (), leaf.shape)], device) for device, index in places.items()],
        )
    if is_on_host(leaf.target_sharding):
        # A copy in the host's memory waits for no program, so it is better made here than by the task that reads it,
        # in place of which another task may be ready.
        made.block_until_ready()
    return made
