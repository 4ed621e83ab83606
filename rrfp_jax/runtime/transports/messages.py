"""A message's parts: cut out of its arrays, collected as they come, and put together to the payload.

A part is all that one rank sends of a message to another. Its small pieces travel in the message's header, all in one;
each larger piece is a frame of its own, which shares memory with the array it was cut from.

Parts are collected on the event loop, and pieces become arrays as the receiving program takes them, on worker threads
if that takes long. On CPU a program takes a whole array as NumPy's, without copying it if it starts at a multiple of 64
bytes, as large ones arrive; a sharded one becomes a JAX array of this rank's shards. On other devices arrays are still
on their way when they are delivered: a copy waits there for all that was launched before it, as the program that reads
it does, and the stage should choose its next task knowing which inputs the host has. A task that reads an array whose
copy fails gets the error.

Pieces of arrays on devices are cut out of a shard where it lies, and pasted into the shard that a program takes. These
programs are compiled ahead of the first message, and run on one device each.
"""

import asyncio
import struct
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.cluster import MalformedMessage
from rrfp_jax.core import BESIDE, Message, MessageKind
from rrfp_jax.programs.stage_devices import shard_at
from rrfp_jax.runtime.transports.edges import Box, EdgeLeaf, EdgePlan, Slot, box_of, is_on_host, num_bytes_of, shape_of
from rrfp_jax.schedules import NO_MICROBATCH

Deliver = Callable[[int, int, Message, Any], None]
"""Called with the receiving unit, the step, the message and its payload: on the event loop, or within ``send``."""
Failed = Callable[[Exception], None]
"""Called on the event loop with an error after which the transport is useless: the run cannot go on."""

_QUICK_BYTES = 1 << 18
"""Up to this size a message is assembled on the event loop: less work than to wake a thread."""
_ALIGNMENT = 64
_STEPS_REMEMBERED = 4
"""Stages are at most a step or two apart, so parts of older steps do not come any more."""
_KINDS = tuple(MessageKind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_KEY = struct.Struct("<QBIIiH")
KEY_BYTES = _KEY.size


class HeldBytes:
    """Counts the bytes that a transport holds; usable on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = 0
        """Bytes sent or offered, and not confirmed by the receiver."""
        self.received = 0
        """Bytes arrived, and not delivered: not all parts are here, or they are being assembled."""
        self.peak = 0
        """The largest sum of both."""

    def add(self, *, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self.sent += sent
            self.received += received
            self.peak = max(self.peak, self.sent + self.received)


class Workers:
    """A few threads for work that would hold up the event loop: large copies, and waiting for devices.

    They start when first needed, take work in the order given, and report back to the event loop. ``failed`` is called
    there with the error of a piece of work.
    """

    def __init__(self, name: str, num_threads: int, failed: Failed) -> None:
        self._name, self._num_threads, self._failed = name, num_threads, failed
        self._queue: SimpleQueue[tuple[AbstractEventLoop, Callable[[], Any], Callable[[Any], None]] | None] = (
            SimpleQueue()
        )
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Runs ``work`` on a thread, then ``done`` with its result on the loop. Called on the event loop."""
        if not self._threads:
            for i in range(self._num_threads):
                self._threads.append(threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True))
                self._threads[-1].start()
        self._queue.put((asyncio.get_running_loop(), work, done))

    def close(self, timeout_s: float) -> None:
        """Ends the threads after all queued work; one that waits for a device that never answers is left behind."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            loop, work, report = job
            try:
                result = work()
            except Exception as error:
                result, report = error, self._failed
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits for it any more
                loop.call_soon_threadsafe(report, result)
            del job, work, report, result  # they hold buffers, and the next job may come late


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
        num_parts = len(plan.incoming)
        # Most messages have one part, of which nothing need be remembered: the mailbox drops a second delivery.
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
            is_beside = key.step >= BESIDE
            for step in [*self._complete]:
                if step <= key.step - _STEPS_REMEMBERED and (step >= BESIDE) == is_beside:
                    del self._complete[step]
            self._held.add(received=-plan.incoming_bytes)
            self._finish(plan, key, parts)

    def _finish(self, plan: EdgePlan, key: MessageKey, parts: Mapping[int, Sequence[Any]]) -> None:
        step, message, _ = key
        is_quick = plan.incoming_bytes <= _QUICK_BYTES and plan.is_target_on_host
        # Arrays that are here as programs take them need no copy, whatever their size.
        if is_quick or (
            plan.is_plain
            and all(isinstance(each, np.ndarray) and _is_aligned(each) for part in parts.values() for each in part)
        ):
            self._deliver(plan.target_unit, step, message, assemble_message(plan, parts))
            return

        def assembled(payload: Any) -> None:
            self._held.add(received=-plan.incoming_bytes)
            self._deliver(plan.target_unit, step, message, payload)

        self._held.add(received=plan.incoming_bytes)
        self._workers.submit(lambda: assemble_message(plan, parts), assembled)


def assemble_message(plan: EdgePlan, parts: Mapping[int, Sequence[Any]]) -> Any:
    """Returns the payload of a message whose parts are all here: a pytree of arrays, ready to be used.

    ``parts`` has by sending rank its pieces, in the order of the plan.
    """
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
        return _pasted(shape_of(box), leaf.dtype, pieces, device)
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
    if num_bytes <= _QUICK_BYTES:
        return np.empty(shape, dtype)
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _aligned(array: np.ndarray) -> np.ndarray:
    """Returns the array, moved if a program would have to copy it. Small ones are copied by programs anyway."""
    if _is_aligned(array):
        return array
    moved = _empty(array.shape, array.dtype)
    moved[...] = array
    return moved


def _is_aligned(array: np.ndarray) -> bool:
    is_small = array.nbytes <= _QUICK_BYTES and array.flags.aligned
    return is_small or not array.__array_interface__["data"][0] % _ALIGNMENT


# -- pieces on devices ------------------------------------------------------------------------------------------------


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


def _pasted(
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
    # Slots are no key: their slices have no hash.
    starts = tuple(sorted((_start(slot), slot.shape) for slot in slots))
    return _compiled_pasting(shape, dtype, starts, device)


@lru_cache(maxsize=256)
def _compiled_pasting(
    shape: tuple[int, ...],
    dtype: np.dtype,
    pieces: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
    device: jax.Device,
) -> Callable[[list[Any]], Any]:
    sharding = jax.sharding.SingleDeviceSharding(device)

    def paste(arrays: list[jax.Array]) -> jax.Array:
        whole = jnp.zeros(shape, dtype)
        for (start, _), array in zip(pieces, arrays, strict=True):
            whole = jax.lax.dynamic_update_slice(whole, array, start)
        return whole

    specs = [jax.ShapeDtypeStruct(each, dtype, sharding=sharding) for _, each in pieces]
    return jax.jit(paste, out_shardings=sharding).lower(specs).compile()


def device_reshard(plan: EdgePlan, index: int) -> Callable[[Any], jax.Array]:
    """Returns a function that brings one array from a unit to another of this process that holds it differently, from
    device to device.

    ``jax.device_put`` does so if every device wants exactly the data of some other device. Otherwise it waits for the
    array and takes all of it to the host and back, on the thread that launches. So this function cuts on the devices
    that have the array and pastes on those that want it.
    """
    leaf, rank = plan.leaves[index], plan.rank
    cuts: dict[Box, list[tuple[Slot, DeviceCut]]] = {}
    # Both sides list their slots in the route's order.
    for source, target in zip(plan.outgoing.get(rank, ()), plan.incoming.get(rank, ()), strict=True):
        if source.leaf == index:
            cuts.setdefault(target.shard, []).append((target, DeviceCut(plan, source)))
    devices = leaf.target_sharding.addressable_devices_indices_map(leaf.shape)
    boxes = list(zip(leaf.target.boxes, devices, strict=True))
    for box, device in boxes:
        slots = [slot for slot, _ in cuts.get(box, ())]
        if [slot.within for slot in slots] != [None]:
            _paste_program(shape_of(box), leaf.dtype, slots, device)

    def reshard(array: Any) -> jax.Array:
        pieces = {box: [(slot, cut(array)) for slot, cut in own] for box, own in cuts.items()}
        shards = [_pasted(shape_of(box), leaf.dtype, pieces.get(box, ()), device) for box, device in boxes]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.target_sharding, shards)

    return reshard
