"""Parts over the ranks' own network: to the host's memory, through a socket, and from there to the device.

Works on every backend. If devices share the host's memory, a part is sent from the place where it lies. Otherwise the
copy to the host starts at once and a worker thread waits for it, so that the next task can be launched meanwhile.

The copy goes through pinned memory if that is faster, else directly. JAX names the memories of a device
(``pinned_host`` on GPUs and TPUs). Which way is faster depends on the platform and on JAX's version, so both are tried
once for every device, before the first message.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from rrfp_jax.cluster import PeerNetwork
from rrfp_jax.cluster.peer_network import LARGE_ARRAY_BYTES
from rrfp_jax.programs.stage_devices import shard_at
from rrfp_jax.runtime.transports.device_pieces import shard_of
from rrfp_jax.runtime.transports.edges import EdgePlan, num_bytes_of
from rrfp_jax.runtime.transports.interface import HeldBytes, Workers
from rrfp_jax.runtime.transports.messages import (
    KEY_BYTES,
    Inbox,
    MessageKey,
    pack_key,
    pack_pieces,
    piece_on_host,
    unpack_key,
    unpack_pieces,
)
from rrfp_jax.runtime.transports.routing import RoutingTable

PART = b"part"
"""The topic of parts of messages."""
_PINNED = "pinned_host"
_TRIAL_BYTES = 4 << 20
_NUM_TRIALS = 5

BeginCopy = Callable[[Any], Any]
"""Begins to copy an array of one device; ``np.asarray`` of its result waits for the copy and returns it."""


class PackedPart(NamedTuple):
    """A part as bytes: its small pieces in one, each other piece by itself."""

    small: bytes
    frames: list[memoryview]
    num_bytes: int


class Staging:
    """Copies arrays of devices to the host's memory in the way that is the faster one for each device."""

    def __init__(self) -> None:
        self._ways: dict[jax.Device, BeginCopy] = {}

    def learn(self, device: jax.Device) -> None:
        """Finds the faster way from a device, which must be idle."""
        if device not in self._ways:
            has_pinned = any(memory.kind == _PINNED for memory in device.addressable_memories())
            self._ways[device] = faster(device, directly, through_pinned) if has_pinned else directly

    def begin(self, shard: Any) -> Any:
        """Begins to copy an array of one device; ``np.asarray`` of the result waits for the copy."""
        (device,) = shard.devices()
        return self._ways.get(device, directly)(shard)


def directly(shard: Any) -> Any:
    """Begins to copy into memory of the interpreter."""
    shard.copy_to_host_async()
    return shard


def through_pinned(shard: Any) -> Any:
    """Begins to copy into memory that the device writes to by itself."""
    return jax.device_put(shard, shard.sharding.with_memory_kind(_PINNED))


def faster(device: jax.Device, first: BeginCopy, second: BeginCopy) -> BeginCopy:
    """Returns the faster of two ways; the first if the second fails or brings other bytes."""
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


class SocketsRemote:
    """Sends parts to other processes as messages of a :class:`PeerNetwork`, and receives theirs.

    Args:
        other_ways: ranks whose large parts a subclass carries in another way.
    """

    def __init__(
        self,
        network: PeerNetwork,
        *,
        routes: RoutingTable,
        inbox: Inbox,
        held: HeldBytes,
        workers: Workers,
        other_ways: frozenset[int] = frozenset(),
    ) -> None:
        self._network, self._routes, self._inbox = network, routes, inbox
        self._held, self._workers, self._other_ways = held, workers, other_ways
        self._staging = Staging()

    def open(self) -> None:
        """Takes messages from now on, also those that came before."""
        self._network.subscribe_packed(PART, self._receive)

    def close(self) -> None:
        """Takes no more messages."""
        self._network.unsubscribe(PART)

    def prepare(self, plan: EdgePlan) -> None:
        """Opens connections for large arrays, and learns how to copy from devices that have memory of their own.

        Called before the first part of the edge, on any thread.
        """
        parts = {**plan.outgoing, **plan.incoming}
        large = {rank for rank, slots in parts.items() if num_bytes_of(slots) >= LARGE_ARRAY_BYTES}
        self._network.open_array_connections(large - self._other_ways - {plan.rank})
        if not plan.is_source_on_host:
            for slot in (slot for slots in plan.outgoing.values() for slot in slots):
                self._staging.learn(plan.leaves[slot.leaf].device(slot.device, is_source=True))

    # -- on the compute thread ---------------------------------------------------------------------------------------

    def stage_for_send(self, plan: EdgePlan, receiver: int, leaves: Sequence[Any]) -> Any:
        """Gets a part ready to be sent, from the arrays of a payload: as bytes, or as a function that waits for the
        copies to the host and returns the bytes."""
        slots, num_bytes = plan.outgoing[receiver], plan.outgoing_bytes[receiver]
        if plan.is_source_on_host:
            return PackedPart(
                *pack_pieces(slots, [piece_on_host(slot, leaves[slot.leaf]) for slot in slots]), num_bytes
            )
        begun: dict[tuple[int, int], Any] = {}  # several pieces may be cut from one shard, which is copied once
        for slot in slots:
            if (slot.leaf, slot.device) not in begun:
                leaf = leaves[slot.leaf]
                shard = shard_at(leaf, 0) if slot.is_replicated else shard_of(slot, leaf)
                begun[slot.leaf, slot.device] = self._staging.begin(shard)

        def fetch() -> PackedPart:
            shards = {which: np.asarray(copy) for which, copy in begun.items()}
            pieces = [shards[slot.leaf, slot.device][slot.within or ...] for slot in slots]
            return PackedPart(*pack_pieces(slots, pieces), num_bytes)

        return fetch

    def send_at_once(self, receiver: int, key: MessageKey, staged: Any) -> Any:
        """Sends a staged part, if that can be done now; returns None if so, else the part, for ``send``.

        Called on the compute thread, or on the one that waits for its tasks.
        """
        if not isinstance(staged, PackedPart):
            return staged
        small, frames, num_bytes = staged
        confirmed = partial(self._held.add, sent=-num_bytes)
        self._held.add(sent=num_bytes)  # before, for it may be confirmed at once
        if self._network.send_at_once(receiver, PART, pack_key(key) + small, frames, confirmed):
            return None
        confirmed()
        return staged

    # -- on the event loop -------------------------------------------------------------------------------------------

    def send(self, receiver: int, key: MessageKey, staged: Any) -> None:
        """Sends a staged part."""
        if not isinstance(staged, PackedPart):
            self._workers.submit(staged, lambda packed: self.send(receiver, key, packed))
            return
        small, frames, num_bytes = staged
        self._held.add(sent=num_bytes)
        confirmed = partial(self._held.add, sent=-num_bytes)
        self._network.send_arrays(receiver, PART, pack_key(key) + small, frames, confirmed)

    def _receive(self, sender: int, header: bytes, frames: list[memoryview]) -> None:
        key = unpack_key(header)
        plan = self._routes.plan_from(key.message, key.bucket, sender)
        pieces = unpack_pieces(plan.incoming[sender], header[KEY_BYTES:], frames)
        self._inbox.add_part(plan, key, sender, pieces)
