"""Parts over the ranks' own network: to the host's memory, through a socket, and from there to the device.

Works on every backend. Where devices share the host's memory a part is sent from where it lies; elsewhere the copy to
the host starts at once (:mod:`.staging`) and is waited for on a worker thread, so that the next task can be launched
meanwhile.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rrfp_jax.cluster import PeerNetwork
from rrfp_jax.cluster.peer_network import LARGE_ARRAY_BYTES
from rrfp_jax.programs.stage_devices import shard_at
from rrfp_jax.runtime.transports.edges import EdgePlan, Slot, local_devices, num_bytes_of
from rrfp_jax.runtime.transports.inbox import Inbox
from rrfp_jax.runtime.transports.interface import HeldBytes, Remote
from rrfp_jax.runtime.transports.parts import KEY_BYTES, Key, on_host, pack, pack_key, shard_of, unpack, unpack_key
from rrfp_jax.runtime.transports.staging import Staging
from rrfp_jax.runtime.transports.ways import Ways
from rrfp_jax.runtime.transports.workers import Workers

TOPIC = b"part"


class Packed(NamedTuple):
    """A part as bytes: its small pieces in one, the others by themselves."""

    small: bytes
    frames: list[memoryview]
    num_bytes: int


class SocketsRemote(Remote):
    """Sends parts as messages of a :class:`PeerNetwork`."""

    def __init__(self, network: PeerNetwork, *, ways: Ways, inbox: Inbox, held: HeldBytes, workers: Workers) -> None:
        self._network, self._ways, self._inbox = network, ways, inbox
        self._held, self._workers = held, workers
        self._staging = Staging()

    def open(self) -> None:
        self._network.subscribe_packed(TOPIC, self._receive)

    def close(self) -> None:
        self._network.unsubscribe(TOPIC)

    def prepare(self, plan: EdgePlan, without: frozenset[int] = frozenset()) -> None:
        """Open connections for arrays where there are large ones; not to the ranks that need none.

        On devices with memory of their own, learn how to copy from them.
        """
        parts = {**plan.outgoing, **plan.incoming}
        large = {rank for rank, slots in parts.items() if num_bytes_of(slots) >= LARGE_ARRAY_BYTES}
        self._network.open_array_connections(large - without - {plan.rank})
        if not plan.is_source_on_host:
            for slot in (slot for slots in plan.outgoing.values() for slot in slots):
                leaf = plan.leaves[slot.leaf]
                self._staging.learn(local_devices(leaf.source_sharding, leaf.shape)[slot.device])

    # -- on the compute thread ---------------------------------------------------------------------------------------

    def offer(self, plan: EdgePlan, receiver: int, leaves: Sequence[Any]) -> Packed | Callable[[], Packed]:
        slots, num_bytes = plan.outgoing[receiver], plan.outgoing_bytes[receiver]
        if plan.is_source_on_host:
            return _packed(slots, [on_host(slot, leaves[slot.leaf]) for slot in slots], num_bytes)
        begun: dict[tuple[int, int], Any] = {}
        for slot in slots:
            if (slot.leaf, slot.device) not in begun:
                leaf = leaves[slot.leaf]
                shard = shard_at(leaf, 0) if slot.is_replicated else shard_of(slot, leaf)
                begun[slot.leaf, slot.device] = self._staging.begin(shard)

        def fetch() -> Packed:
            shards = {which: np.asarray(copy) for which, copy in begun.items()}
            pieces = [shards[slot.leaf, slot.device] for slot in slots]
            cut = [
                shard if slot.within is None else shard[slot.within] for slot, shard in zip(slots, pieces, strict=True)
            ]
            return _packed(slots, cut, num_bytes)

        return fetch

    def send_at_once(self, receiver: int, key: Key, offered: Any) -> Any:
        if not isinstance(offered, Packed):
            return offered
        small, frames, num_bytes = offered
        confirmed = partial(self._held.add, sent=-num_bytes)
        self._held.add(sent=num_bytes)  # before, for it may be confirmed at once
        if self._network.send_at_once(receiver, TOPIC, pack_key(key) + small, frames, confirmed):
            return None
        confirmed()
        return offered

    # -- on the event loop -------------------------------------------------------------------------------------------

    def send(self, receiver: int, key: Key, offered: Packed | Callable[[], Packed]) -> None:
        if not isinstance(offered, Packed):
            self._workers.submit(offered, lambda packed: self.send(receiver, key, packed))
            return
        small, frames, num_bytes = offered
        self._held.add(sent=num_bytes)
        confirmed = partial(self._held.add, sent=-num_bytes)
        self._network.send_arrays(receiver, TOPIC, pack_key(key) + small, frames, confirmed)

    def _receive(self, sender: int, header: bytes, frames: list[memoryview]) -> None:
        key = unpack_key(header)
        plan = self._ways.plan_from(key.message, key.bucket, sender)
        self._inbox.part(plan, key, sender, unpack(plan.incoming[sender], header[KEY_BYTES:], frames))


def _packed(slots: Sequence[Slot], pieces: Sequence[np.ndarray], num_bytes: int) -> Packed:
    return Packed(*pack(slots, pieces), num_bytes)
