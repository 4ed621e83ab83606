"""A part of a message: the pieces that one rank sends to another, cut out of its shards, as bytes, and back.

Small pieces travel in the message's header, all in one; each larger one is a frame of its own, which shares memory with
the array it was cut from.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rrfp_jax.arbitration import Message, MessageKind
from rrfp_jax.network import MalformedMessage
from rrfp_jax.runtime.transports.boxes import box_of
from rrfp_jax.runtime.transports.edges import EdgePlan, Slot
from rrfp_jax.tasks import NO_MICROBATCH

_KINDS = tuple(MessageKind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_KEY = struct.Struct("<QBIIi")
KEY_BYTES = _KEY.size


class Key(NamedTuple):
    """A message of a step."""

    step: int
    message: Message


def pack_key(key: Key) -> bytes:
    """A message's identity for a header, ``KEY_BYTES`` long."""
    step, (kind, source, target, microbatch) = key
    return _KEY.pack(step, _NUMBERS[kind], source, target, microbatch)


def unpack_key(data: bytes) -> Key:
    """The identity that a header begins with. Raises MalformedMessage for anything else."""
    if len(data) >= KEY_BYTES:
        step, kind, source, target, microbatch = _KEY.unpack_from(data)
        if kind < len(_KINDS) and microbatch >= NO_MICROBATCH:
            return Key(step, Message(_KINDS[kind], source, target, microbatch))
    raise MalformedMessage(f"{data[:KEY_BYTES]!r} is not the identity of a message")


class Shards:
    """Finds the pieces of an edge's outputs on this rank; checks once per sharding that they lie as planned."""

    def __init__(self, plan: EdgePlan) -> None:
        self._plan = plan
        self._known: list[Any] = [None] * len(plan.leaves)

    def flatten(self, payload: Any) -> list[Any]:
        """The arrays of a payload (NumPy's hold all of it). Raises ValueError where they are not what the edge says."""
        if self._plan.is_single and hasattr(payload, "dtype"):
            leaves = [payload]
        else:
            structure: Any
            leaves, structure = jax.tree.flatten(payload)
            if structure != self._plan.treedef:
                raise ValueError(
                    f"a payload has the structure {structure}, its edge {self._plan.treedef}: send what it says"
                )
        for i, leaf in enumerate(leaves):
            if type(leaf) is np.ndarray or leaf.sharding is not self._known[i]:
                self._check(i, leaf)
        return leaves

    def _check(self, index: int, array: Any) -> None:
        leaf = self._plan.leaves[index]
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ValueError(
                f"array {index} of a payload is {array.dtype}{array.shape}, its edge says {leaf.dtype}{leaf.shape}: "
                "give the edge the shapes and dtypes of the program's outputs"
            )
        if isinstance(array, np.ndarray):
            return
        own = [b for b, rank in zip(leaf.source.boxes, leaf.source.ranks, strict=True) if rank == self._plan.rank]
        held = [box_of(i or (), leaf.shape) for i in _own_indices(array.sharding, leaf.shape)]
        # an array that each device holds wholly may lie on some of them only: one is enough to send it
        if held != own and not (array.is_fully_replicated and set(held) == set(own)):
            raise ValueError(
                f"array {index} of a payload lies as {array.sharding}, its edge says {leaf.source_sharding}: "
                "give the edge the sharding of the program's outputs"
            )
        self._known[index] = array.sharding


def _own_indices(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Iterable[Any]:
    """What this process's devices hold of an array."""
    return sharding.addressable_devices_indices_map(shape).values()


def shard_of(slot: Slot, leaf: jax.Array) -> jax.Array:
    """The shard that a piece is cut from, as an array of one device."""
    return leaf if len(leaf.sharding.device_set) == 1 else leaf.addressable_data(slot.device)


def on_host(slot: Slot, leaf: Any) -> np.ndarray:
    """A piece in the host's memory: a view, where the device shares it and the array is ready."""
    if isinstance(leaf, np.ndarray):  # asking whether something is a jax.Array takes longer
        return leaf if slot.in_array is None else leaf[slot.in_array]
    shard = np.asarray(leaf if slot.is_replicated else leaf.addressable_data(slot.device))
    return shard if slot.within is None else shard[slot.within]


def start_copy(slot: Slot, leaf: jax.Array) -> None:
    """Begin to bring to the host's memory what :func:`on_host` will ask for."""
    (leaf if slot.is_replicated else leaf.addressable_data(slot.device)).copy_to_host_async()


def pack(slots: Sequence[Slot], leaves: Sequence[Any]) -> tuple[bytes, list[memoryview]]:
    """The pieces of some arrays: the small ones in one, the others as they are (copied, if not contiguous)."""
    small, frames = [], []
    for slot in slots:
        piece = on_host(slot, leaves[slot.leaf])
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
