"""The transport of a process: each part of a message takes the nearest way to each rank that needs it.

Between units of this process payloads are handed over (as views of NumPy's if devices share the host's memory, else
from device to device). Between processes parts go through the ranks' own network, or large ones through JAX's transfer
servers (:mod:`.transfer`). Plain data, such as reports and verdicts, always goes through the network, from the rank of
the sending unit that :func:`~rrfp_jax.runtime.transports.edges.sender_for` names.

An array takes this way: ``send_array`` cuts it on the compute thread, and sends the parts that can leave at once;
``send`` has the event loop send the others. At the receiver ``_receive_part`` unpacks a part, and the ``Inbox``
assembles and delivers the message.

The network works on every backend. If devices share the host's memory, a part is sent from the place where it lies.
Otherwise the copy to the host starts at once and a worker thread waits for it, so that the next task can be launched
meanwhile. The copy goes through pinned memory if that is faster, else directly. Which way is faster depends on the
platform and on JAX's version, so both are tried once for every device, before the first message.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from rrfp_jax.cluster import MalformedMessage, PeerNetwork
from rrfp_jax.cluster.peer_network import LARGE_ARRAY_BYTES
from rrfp_jax.cluster.wire import pack_plain, unpack_plain
from rrfp_jax.core import Message
from rrfp_jax.layout import Layout
from rrfp_jax.programs.stage_devices import shard_at
from rrfp_jax.runtime.failure import TransportFailed
from rrfp_jax.runtime.transports.edges import EdgeOf, EdgePlan, RoutingTable, num_bytes_of
from rrfp_jax.runtime.transports.messages import (
    KEY_BYTES,
    Deliver,
    DeviceCut,
    Failed,
    HeldBytes,
    Inbox,
    MessageKey,
    Workers,
    device_reshard,
    pack_key,
    pack_pieces,
    piece_on_host,
    shard_of,
    unpack_key,
    unpack_pieces,
)
from rrfp_jax.runtime.transports.transfer import Transfers, TransferServer
from rrfp_jax.schedules import Placement

_EAGER_BYTES = 1 << 16
"""Up to this size, sockets cost less than a transfer, even encrypted."""
_PART, _CONTROL = "part", "control"
"""The topics of parts of messages, and of plain data."""
_MAX_CONTROL_BYTES = 1 << 28
_CLOSE_TIMEOUT_S = 2.0
_PINNED = "pinned_host"
"""JAX's name for memory of the host that GPUs and TPUs write to by themselves."""
_TRIAL_BYTES = 4 << 20
_NUM_TRIALS = 5

BeginCopy = Callable[[Any], Any]
"""Begins to copy an array of one device; ``np.asarray`` of its result waits for the copy and returns it."""


def directly(shard: Any) -> Any:
    """Begins to copy into memory of the interpreter."""
    shard.copy_to_host_async()
    return shard


def through_pinned(shard: Any) -> Any:
    """Begins to copy into memory that the device writes to by itself."""
    return jax.device_put(shard, shard.sharding.with_memory_kind(_PINNED))


def faster(device: jax.Device, first: BeginCopy, second: BeginCopy) -> BeginCopy:
    """Returns the faster of two ways from an idle device; the first if the second fails or brings other bytes."""
    wanted = np.arange(_TRIAL_BYTES // 4, dtype=np.uint32)
    taken_s: dict[BeginCopy, list[float]] = {first: [], second: []}
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


class PackedPart(NamedTuple):
    """A part as bytes: its small pieces in one, each other piece by itself."""

    small: bytes
    frames: list[memoryview]
    num_bytes: int


class _StagedPayload(NamedTuple):
    """A payload on its way: the staged parts that are left to send, by receiver."""

    plan: EdgePlan
    bucket: int
    parts: list[tuple[int, Any]]


class PipelineTransport:
    """Carries the messages of one pipeline, for all units of this process, from now on until it is closed.

    Args:
        layout, placement: the rank that hosts each unit, and the unit of each chunk.
        rank: this process.
        network: connections to the others; None if there are none. Messages that they have sent ahead are delivered
            now.
        edge: returns the arrays of a message and how they lie at both ends, or None for plain data.
        deliver: called on the event loop with every message for a unit of this rank.
        failed: called on the event loop with an error after which messages are missing.
        num_buckets: number of shapes that the messages of an edge may have, one for each bucket of microbatches.
        server: carries arrays to and from ``transfer_ranks``; those of other ranks, or all without one, take sockets.
        eager_bytes: with a server, largest size of a part that goes through sockets nevertheless.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        placement: Placement,
        rank: int,
        network: PeerNetwork | None,
        edge: EdgeOf,
        deliver: Deliver,
        failed: Failed,
        num_buckets: int = 1,
        server: TransferServer | None = None,
        transfer_ranks: Iterable[int] = (),
        eager_bytes: int = _EAGER_BYTES,
    ) -> None:
        if network is None and layout.num_ranks > 1:
            raise ValueError(f"{layout.describe()} need a network: give the PeerNetwork of rank {rank}")
        self._rank, self._network = rank, network
        self._deliver, self._failed = deliver, failed
        self._moves: dict[EdgePlan, list[Callable[[Any], Any]]] = {}
        """The function that hands over each array of an edge within this process."""
        self._own_cuts: dict[EdgePlan, list[DeviceCut]] = {}
        """The pieces of arrays on devices that stay in this process, of edges between several."""
        self._copy_ways: dict[jax.Device, BeginCopy] = {}
        """The faster way to the host from each device that has memory of its own."""
        self._routes = RoutingTable(layout, placement, rank, edge, prepare=self._prepare, num_buckets=num_buckets)
        self.prepare = self._routes.prepare
        """Works out the routes of messages ahead of the first one. Raises ValueError for edges that cannot be."""
        self.held = HeldBytes()
        """Bytes on their way, and their peak."""
        num_workers = 1 if network is None else network.array_connections
        self._fetching = Workers("rrfp-fetch", num_workers, self._worker_failed)
        self._assembling = Workers("rrfp-assemble", num_workers, self._worker_failed)
        self._inbox = Inbox(deliver, self._assembling, self.held)
        self._is_closed = False
        self._transfers: Transfers | None = None
        if network is None:
            return
        # Messages of an epoch reach nobody who has come to another (:mod:`rrfp_jax.core.membership`).
        self._part, self._control = (network.in_epoch(topic).encode() for topic in (_PART, _CONTROL))
        if server is not None and (ranks := frozenset(transfer_ranks)):
            self._transfers = Transfers(
                network,
                server,
                routes=self._routes,
                inbox=self._inbox,
                held=self.held,
                ranks=ranks,
                eager_bytes=eager_bytes,
                deliver=deliver,
                failed=failed,
            )
            self._transfers.open()
        # Last, since messages may be waiting, which the loop hands over at once.
        network.subscribe_packed(self._part, self._receive_part)
        network.subscribe_packed(self._control, self._receive_control)

    def close(self) -> None:
        """Takes no more messages, which the network keeps for the next transport, and stops the threads. May be called
        again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._network is not None:
            self._network.unsubscribe(self._control)
            self._network.unsubscribe(self._part)
        if self._transfers is not None:
            self._transfers.close()
        self._fetching.close(_CLOSE_TIMEOUT_S)
        self._assembling.close(_CLOSE_TIMEOUT_S)

    def _prepare(self, plan: EdgePlan) -> None:
        """Prepares an edge before its first message: compiles programs, opens connections for large arrays, and learns
        how to copy from devices that have memory of their own; on any thread."""
        if plan.is_in_process:
            self._moves[plan] = [_move(plan, index) for index in range(len(plan.leaves))]
            return
        if not plan.is_source_on_host:
            self._own_cuts[plan] = [DeviceCut(plan, slot) for slot in plan.outgoing.get(self._rank, ())]
        if self._network is None:
            return
        parts = {**plan.outgoing, **plan.incoming}
        large = {rank for rank, slots in parts.items() if num_bytes_of(slots) >= LARGE_ARRAY_BYTES}
        by_transfer = frozenset[int]() if self._transfers is None else self._transfers.ranks
        self._network.open_array_connections(large - by_transfer - {self._rank})
        for slot in (slot for slots in plan.outgoing.values() for slot in slots if not plan.is_source_on_host):
            device = plan.leaves[slot.leaf].device(slot.device, is_source=True)
            if device not in self._copy_ways:
                has_pinned = any(memory.kind == _PINNED for memory in device.addressable_memories())
                self._copy_ways[device] = faster(device, directly, through_pinned) if has_pinned else directly
        if self._transfers is not None:
            self._transfers.prepare(plan)

    # -- on the compute thread ---------------------------------------------------------------------------------------

    def send_array(
        self,
        payload: Any,
        stage: int,  # noqa: ARG002 - the message says it too
        message: Message,
        bucket: int = 0,
        step: int | None = None,
    ) -> Any:
        """Begins to send a finished task's output; returns the form in which ``send`` takes it.

        ``bucket`` is that of the message's microbatch, which decides on the payload's shapes. For a message that stays
        in its unit this is the form in which the receiving task takes it. With ``step``, all parts that can leave
        without waiting for the event loop do; ``send`` is called all the same. Raises ValueError if the arrays are not
        those of the edge.
        """
        plan = self._routes.of(message, bucket).plan
        if plan is None:
            return payload
        leaves = plan.flatten(payload)
        if plan.is_in_process:
            # Nothing is packed: the receiving program gets the arrays themselves, where and how it takes them.
            handed = [move(leaf) for move, leaf in zip(self._moves[plan], leaves, strict=True)]
            return handed[0] if plan.is_single else plan.treedef.unflatten(handed)
        parts = []
        for receiver, slots in plan.outgoing.items():
            part: Any
            if receiver != self._rank:
                if self._transfers is not None and self._transfers.takes(plan, receiver):
                    part = self._transfers.offer(plan, receiver, leaves)
                else:
                    part = self._staged(plan, receiver, leaves)
                    # A part that leaves from this thread saves a turn of the event loop, which may be busy.
                    if step is not None and isinstance(part, PackedPart):
                        self._send_packed(receiver, MessageKey(step, message, bucket), part)
                        continue
            elif plan in self._own_cuts:
                part = [cut(leaves[cut.slot.leaf]) for cut in self._own_cuts[plan]]
            else:
                part = [piece_on_host(slot, leaves[slot.leaf]) for slot in slots]
            parts.append((receiver, part))
        return _StagedPayload(plan, bucket, parts)

    def _staged(self, plan: EdgePlan, receiver: int, leaves: Sequence[Any]) -> Any:
        """Returns a part as bytes; or a function that waits for the copies to the host and returns the bytes."""
        slots, num_bytes = plan.outgoing[receiver], plan.outgoing_bytes[receiver]
        if plan.is_source_on_host:
            return PackedPart(
                *pack_pieces(slots, [piece_on_host(slot, leaves[slot.leaf]) for slot in slots]), num_bytes
            )
        begun: dict[tuple[int, int], Any] = {}  # Several pieces may be cut from one shard, which is copied once.
        for slot in slots:
            if (slot.leaf, slot.device) not in begun:
                leaf = leaves[slot.leaf]
                shard = shard_at(leaf, 0) if slot.is_replicated else shard_of(slot, leaf)
                (device,) = shard.devices()
                begun[slot.leaf, slot.device] = self._copy_ways.get(device, directly)(shard)

        def fetch() -> PackedPart:
            shards = {which: np.asarray(copy) for which, copy in begun.items()}
            pieces = [shards[slot.leaf, slot.device][slot.within or ...] for slot in slots]
            return PackedPart(*pack_pieces(slots, pieces), num_bytes)

        return fetch

    # -- in the serial executor --------------------------------------------------------------------------------------

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        """Sends the result of ``send_array``, or plain data, to unit ``stage``. Called on any thread, one call at a
        time; never blocks."""
        if isinstance(payload, _StagedPayload):
            if payload.parts:
                assert self._network is not None
                self._network.on_loop(self._send_parts, step, message, payload)
            return
        route = self._routes.of(message)
        if route.plan is not None:  # Within the process send_array has made the payload that the receiver takes.
            self._deliver(stage, step, message, payload)
            return
        packed: bytes | None = None
        for receiver in route.receivers:
            if receiver == self._rank:
                self._deliver(route.target_unit, step, message, payload)
                continue
            assert self._network is not None
            # Packed once for all receivers, and not at all where the only one is this rank.
            if packed is None:
                packed = pack_plain(payload, _MAX_CONTROL_BYTES)
            self._network.send_arrays(receiver, self._control, pack_key(MessageKey(step, message)), [packed])

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _send_parts(self, step: int, message: Message, payload: _StagedPayload) -> None:
        plan, bucket, parts = payload
        key = MessageKey(step, message, bucket)
        for receiver, staged in parts:
            if receiver == self._rank:
                self._inbox.add_part(plan, key, receiver, staged)
            elif isinstance(staged, PackedPart):
                self._send_packed(receiver, key, staged)
            elif callable(staged):
                self._fetching.submit(staged, partial(self._send_packed, receiver, key))
            else:
                assert self._transfers is not None
                self._transfers.announce(receiver, key, staged)

    def _send_packed(self, receiver: int, key: MessageKey, part: PackedPart) -> None:
        # On any thread.
        assert self._network is not None
        small, frames, num_bytes = part
        self.held.add(sent=num_bytes)  # Before, for it may be confirmed at once.
        confirmed = partial(self.held.add, sent=-num_bytes)
        self._network.send_arrays(receiver, self._part, pack_key(key) + small, frames, confirmed)

    def _receive_part(self, sender: int, header: bytes, frames: list[memoryview]) -> None:
        key = unpack_key(header)
        plan = self._routes.plan_from(key.message, key.bucket, sender)
        self._inbox.add_part(plan, key, sender, unpack_pieces(plan.incoming[sender], header[KEY_BYTES:], frames))

    def _receive_control(self, sender: int, header: bytes, frames: list[memoryview]) -> None:
        step, message, _ = unpack_key(header)
        route = self._routes.expected(message)
        if route.plan is not None or len(frames) != 1:
            raise MalformedMessage(f"rank {sender} sends plain data as the message '{message}'")
        self._deliver(route.target_unit, step, message, unpack_plain(frames[0], _MAX_CONTROL_BYTES))

    def _worker_failed(self, error: Exception) -> None:
        failure = TransportFailed(f"rank {self._rank} could not put data where it belongs: {error!r}")
        failure.__cause__ = error
        self._failed(failure)


def _move(plan: EdgePlan, index: int) -> Callable[[Any], Any]:
    """Returns the function that turns an array of an edge within this process into that of the receiving program."""
    leaf = plan.leaves[index]
    if leaf.is_whole_on_host:
        return np.asarray
    if plan.stays:
        return lambda value: value
    # In most other cases JAX goes over the host's memory, which on CPU is faster than programs that cut and paste.
    on_host = plan.is_source_on_host and plan.is_target_on_host
    if on_host or leaf.source == leaf.target or len(leaf.source.boxes) == 1:
        return partial(jax.device_put, device=leaf.target_sharding)
    return device_reshard(plan, index)
