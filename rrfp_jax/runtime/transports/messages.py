"""A message's parts: as bytes on their way, collected as they come, and assembled into the payload.

A part is all that one rank sends of a message to another. Its small pieces travel in the message's header, all in one;
each larger piece is a frame of its own, which shares memory with the array it was cut from.

Parts are collected on the event loop, and pieces become arrays as the receiving program takes them, on worker threads
if that takes long. On CPU a program takes a whole array as NumPy's, without copying it if it starts at a multiple of 64
bytes, as large ones arrive; a sharded one becomes a JAX array of this rank's shards. On other devices arrays are still
on their way when they are delivered: a copy waits there for all that was launched before it, as the program that reads
it does, and the stage should choose its next task knowing which inputs the host has. A task that reads an array whose
copy fails gets the error.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rrfp_jax.cluster import MalformedMessage
from rrfp_jax.core import Message, MessageKind
from rrfp_jax.programs.stage_devices import shard_at
from rrfp_jax.runtime.transports.device_pieces import pasted
from rrfp_jax.runtime.transports.edges import Box, EdgeLeaf, EdgePlan, Slot, box_of, is_on_host, num_bytes_of, shape_of
from rrfp_jax.runtime.transports.interface import Deliver, HeldBytes, Workers
from rrfp_jax.schedules import NO_MICROBATCH

QUICK_BYTES = 1 << 18
"""Up to this size a message is assembled on the event loop: less work than to wake a thread."""
_ALIGNMENT = 64
_STEPS_REMEMBERED = 4
"""Stages are at most a step or two apart, so parts of older steps do not come any more."""
_KINDS = tuple(MessageKind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_KEY = struct.Struct("<QBIIiH")
KEY_BYTES = _KEY.size

Parts = Mapping[int, Sequence[Any]]
"""By sending rank, its pieces in the order of the plan."""


class MessageKey(NamedTuple):
    """The identity of a message in a run."""

    step: int
    message: Message
    bucket: int = 0
    """The bucket of its microbatch: the message may come before the receiver knows the step's batch."""


def pack_key(key: MessageKey) -> bytes:
    """Returns a message's identity for a header, ``KEY_BYTES`` long."""
    step, (kind, source, target, microbatch), bucket = key
    return _KEY.pack(step, _NUMBERS[kind], source, target, microbatch, bucket)


def unpack_key(data: bytes) -> MessageKey:
    """Returns the identity that a header begins with. Raises MalformedMessage for anything else."""
    if len(data) >= KEY_BYTES:
        step, kind, source, target, microbatch, bucket = _KEY.unpack_from(data)
        if kind < len(_KINDS) and microbatch >= NO_MICROBATCH:
            return MessageKey(step, Message(_KINDS[kind], source, target, microbatch), bucket)
    raise MalformedMessage(f"{data[:KEY_BYTES]!r} is not the identity of a message")


def piece_on_host(slot: Slot, leaf: Any) -> np.ndarray:
    """Returns a piece in the host's memory: a view, if the device shares it and the array is ready."""
    if isinstance(leaf, np.ndarray):  # asking whether something is a jax.Array takes longer
        return leaf if slot.in_array is None else leaf[slot.in_array]
    shard = np.asarray(leaf if slot.is_replicated else shard_at(leaf, slot.device))
    return shard if slot.within is None else shard[slot.within]


def pack_pieces(slots: Sequence[Slot], pieces: Iterable[np.ndarray]) -> tuple[bytes, list[memoryview]]:
    """Returns the small pieces in one, and the others as they are (copied, if not contiguous)."""
    small, frames = [], []
    for slot, piece in zip(slots, pieces, strict=True):
        if slot.is_inline:
            small.append(piece.tobytes())
        else:
            # viewed as bytes, since the buffer protocol has no formats for ml_dtypes' types
            frames.append(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return b"".join(small), frames


def unpack_pieces(slots: Sequence[Slot], small: bytes, frames: Sequence[memoryview]) -> list[np.ndarray]:
    """Returns the pieces again; they share memory with the arguments.

    Raises:
        MalformedMessage: if the bytes are not those of the slots.
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


class Inbox:
    """Takes parts in any order and delivers each message once all are here; a part that comes again changes nothing."""

    def __init__(self, deliver: Deliver, workers: Workers, held: HeldBytes) -> None:
        self._deliver, self._workers, self._held = deliver, workers, held
        self._waiting: dict[MessageKey, dict[int, Sequence[Any]]] = {}
        self._complete: dict[int, set[MessageKey]] = {}

    def add_part(self, plan: EdgePlan, key: MessageKey, sender: int, pieces: Sequence[Any]) -> None:
        """Adds the part of a message that has come from ``sender``."""
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
            self._complete.setdefault(key.step, set()).add(key)
            for step in [step for step in self._complete if step <= key.step - _STEPS_REMEMBERED]:
                del self._complete[step]
            self._held.add(received=-plan.incoming_bytes)
            self._finish(plan, key, parts)

    def deliver(self, plan: EdgePlan, key: MessageKey, payload: Any) -> None:
        """Delivers a message that is assembled already."""
        self._deliver(plan.target_unit, key.step, key.message, payload)

    def _finish(self, plan: EdgePlan, key: MessageKey, parts: Parts) -> None:
        is_quick = plan.incoming_bytes <= QUICK_BYTES and plan.is_target_on_host
        if is_quick or _needs_no_copy(plan, parts):
            self.deliver(plan, key, assemble_message(plan, parts))
            return

        def assembled(payload: Any) -> None:
            self._held.add(received=-plan.incoming_bytes)
            self.deliver(plan, key, payload)

        self._held.add(received=plan.incoming_bytes)
        self._workers.submit(lambda: assemble_message(plan, parts), assembled)


def _needs_no_copy(plan: EdgePlan, parts: Parts) -> bool:
    """Returns whether the arrays are here as programs take them, whatever their size."""
    return plan.is_plain and all(
        isinstance(array, np.ndarray) and _is_aligned(array) for arrays in parts.values() for array in arrays
    )


def assemble_message(plan: EdgePlan, parts: Parts) -> Any:
    """Returns the payload of a message whose parts are all here: a pytree of arrays, ready to be used."""
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


def _leaf(leaf: EdgeLeaf, rank: int, pieces: list[tuple[Slot, Any]]) -> Any:
    """Returns one array of a payload, made of its pieces."""
    if leaf.is_whole_on_host:
        return _host_shard(leaf, leaf.shape, pieces)
    by_shard: dict[Box, list[tuple[Slot, Any]]] = {}
    for slot, array in pieces:
        by_shard.setdefault(slot.shard, []).append((slot, array))
    boxes = [box for box, owner in zip(leaf.target.boxes, leaf.target.ranks, strict=True) if owner == rank]
    shards = {box: _shard(leaf, box, by_shard.get(box, [])) for box in boxes}
    if all(isinstance(shard, np.ndarray) for shard in shards.values()):
        # JAX keeps the shards in the host's memory until they are copied
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


def _shard(leaf: EdgeLeaf, box: Box, pieces: list[tuple[Slot, Any]]) -> Any:
    """Returns one shard: the piece itself if it is all of it, else the pieces pasted together."""
    if len(pieces) == 1 and pieces[0][0].within is None and isinstance(pieces[0][1], jax.Array):
        return pieces[0][1]
    # to paste pieces of a device in the host's memory would mean to wait for that device
    if any(isinstance(array, jax.Array) for _, array in pieces) and not is_on_host(leaf.target_sharding):
        device = leaf.device(pieces[0][0].device, is_source=False)
        return pasted(shape_of(box), leaf.dtype, pieces, device)
    return _host_shard(leaf, shape_of(box), pieces)


def _host_shard(leaf: EdgeLeaf, shape: tuple[int, ...], pieces: Sequence[tuple[Slot, Any]]) -> np.ndarray:
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
    """Returns the array, moved if a program would have to copy it. Small ones are copied by programs anyway."""
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
