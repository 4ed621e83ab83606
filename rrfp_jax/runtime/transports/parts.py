"""A part of a message: the pieces that one rank sends to another, cut out of its shards, as bytes and back again.

Or as arrays of one device each, where devices fetch them from each other.

Small pieces travel in the message's header, all in one; each larger one is a frame of its own, which shares memory with
the array it was cut from.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.cluster import MalformedMessage
from rrfp_jax.core import Message, MessageKind
from rrfp_jax.programs.stage_devices import shard_at
from rrfp_jax.runtime.transports.edges import EdgePlan, Slot, local_devices
from rrfp_jax.runtime.transports.routes import Box, shape_of
from rrfp_jax.schedules import NO_MICROBATCH

_KINDS = tuple(MessageKind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_KEY = struct.Struct("<QBIIiH")
KEY_BYTES = _KEY.size


class Key(NamedTuple):
    """A message of a step."""

    step: int
    message: Message
    bucket: int = 0
    """Of its microbatch: the message may come before the receiver knows the step's batch."""


def pack_key(key: Key) -> bytes:
    """A message's identity for a header, ``KEY_BYTES`` long."""
    step, (kind, source, target, microbatch), bucket = key
    return _KEY.pack(step, _NUMBERS[kind], source, target, microbatch, bucket)


def unpack_key(data: bytes) -> Key:
    """The identity that a header begins with. Raises MalformedMessage for anything else."""
    if len(data) >= KEY_BYTES:
        step, kind, source, target, microbatch, bucket = _KEY.unpack_from(data)
        if kind < len(_KINDS) and microbatch >= NO_MICROBATCH:
            return Key(step, Message(_KINDS[kind], source, target, microbatch), bucket)
    raise MalformedMessage(f"{data[:KEY_BYTES]!r} is not the identity of a message")


def shard_of(slot: Slot, leaf: jax.Array) -> jax.Array:
    """The shard that a piece is cut from, as an array of one device."""
    return leaf if len(leaf.sharding.device_set) == 1 else shard_at(leaf, slot.device)


def on_host(slot: Slot, leaf: Any) -> np.ndarray:
    """A piece in the host's memory: a view, where the device shares it and the array is ready."""
    if isinstance(leaf, np.ndarray):  # asking whether something is a jax.Array takes longer
        return leaf if slot.in_array is None else leaf[slot.in_array]
    shard = np.asarray(leaf if slot.is_replicated else shard_at(leaf, slot.device))
    return shard if slot.within is None else shard[slot.within]


def pack(slots: Sequence[Slot], pieces: Iterable[np.ndarray]) -> tuple[bytes, list[memoryview]]:
    """Pieces in the host's memory: the small ones in one, the others as they are (copied, if not contiguous)."""
    small, frames = [], []
    for slot, piece in zip(slots, pieces, strict=True):
        if slot.is_inline:
            small.append(piece.tobytes())
        else:
            # Viewed as bytes, since the buffer protocol has no formats for ml_dtypes' types.
            frames.append(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return b"".join(small), frames


def unpack(slots: Sequence[Slot], small: bytes, frames: Sequence[memoryview]) -> list[np.ndarray]:
    """The pieces again; they share memory with what is given.

    Raises:
        MalformedMessage: where the bytes are not those of the slots.
    """
    offset, num_frames, pieces = 0, 0, []
    for slot in slots:
        num_bytes = slot.num_bytes
        if slot.is_inline:
            buffer: Any = small[offset : offset + num_bytes]
            offset += num_bytes
        else:
            buffer = frames[num_frames] if num_frames < len(frames) else b""
            num_frames += 1
        if len(buffer) != num_bytes:
            raise MalformedMessage(f"a piece has {len(buffer)} bytes, {num_bytes} are expected")
        pieces.append(np.frombuffer(buffer, slot.dtype).reshape(slot.shape))
    if offset != len(small) or num_frames != len(frames):
        raise MalformedMessage(f"{len(small)} bytes and {len(frames)} frames are more than {len(slots)} pieces have")
    return pieces


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


def pasted(
    shape: tuple[int, ...], dtype: np.dtype, pieces: Sequence[tuple[Slot, Any]], device: jax.Device
) -> jax.Array:
    """A shard of this shape on a device, of the pieces that it consists of, wherever they are.

    Nothing is waited for: arrays of other devices come directly, those in the host's memory while they are kept alive.
    """
    ordered = sorted(pieces, key=lambda each: _start(each[0]))
    arrays = jax.device_put([array for _, array in ordered], device)
    if len(ordered) == 1 and ordered[0][0].within is None:
        return arrays[0]
    return paste_program(shape, dtype, [slot for slot, _ in ordered], device)(arrays)


def paste_program(
    shape: tuple[int, ...], dtype: np.dtype, slots: Iterable[Slot], device: jax.Device
) -> Callable[[list[Any]], Any]:
    """Makes a shard on a device of the arrays of these slots, in the order of their places; compiled once."""
    ordered = sorted(slots, key=_start)
    return _pasting(shape, dtype, tuple(map(_start, ordered)), tuple(slot.shape for slot in ordered), device)


def prepare_pasting(plan: EdgePlan) -> None:
    """Compile what makes this rank's shards of pieces that several ranks send."""
    shards: dict[tuple[int, Box], list[Slot]] = {}
    for slot in (slot for slots in plan.incoming.values() for slot in slots):
        shards.setdefault((slot.leaf, slot.shard), []).append(slot)
    for (index, shard), slots in shards.items():
        if [slot.within for slot in slots] != [None]:
            leaf = plan.leaves[index]
            device = local_devices(leaf.target_sharding, leaf.shape)[slots[0].device]
            paste_program(shape_of(shard), leaf.dtype, slots, device)


def _start(slot: Slot) -> tuple[int, ...]:
    return tuple(part.start for part in slot.within or ())


@lru_cache(maxsize=256)
def _pasting(
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


class Reshard:
    """Brings one array from a unit to another of this process that holds it differently, from device to device.

    JAX's ``device_put`` does so where every device wants exactly what some device has. Elsewhere it waits for the
    array, takes all of it to the host and back, on the thread that launches. So this cuts on the devices that have it
    and pastes on those that want it, by programs that are compiled ahead.
    """

    def __init__(self, plan: EdgePlan, index: int) -> None:
        leaf, rank = plan.leaves[index], plan.rank
        self._leaf = leaf
        ways = zip(plan.outgoing.get(rank, ()), plan.incoming.get(rank, ()), strict=True)  # both in the route's order
        self._cuts: dict[Box, list[tuple[Slot, Cut]]] = {}
        for source, target in ways:
            if source.leaf == index:
                self._cuts.setdefault(target.shard, []).append((target, Cut(plan, source)))
        devices = local_devices(leaf.target_sharding, leaf.shape)
        self._boxes = list(zip(leaf.target.boxes, devices, strict=True))
        for box, device in self._boxes:
            slots = [slot for slot, _ in self._cuts.get(box, ())]
            if [slot.within for slot in slots] != [None]:
                paste_program(shape_of(box), leaf.dtype, slots, device)

    def __call__(self, array: Any) -> jax.Array:
        leaf = self._leaf
        pieces = {box: [(slot, cut(array)) for slot, cut in cuts] for box, cuts in self._cuts.items()}
        shards = [pasted(shape_of(box), leaf.dtype, pieces.get(box, ()), device) for box, device in self._boxes]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.target_sharding, shards)


def pull_spec(plan: EdgePlan, slot: Slot) -> jax.ShapeDtypeStruct:
    """What to pull, and to which of this rank's devices."""
    leaf = plan.leaves[slot.leaf]
    device = local_devices(leaf.target_sharding, leaf.shape)[slot.device]
    return jax.ShapeDtypeStruct(slot.shape, slot.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
