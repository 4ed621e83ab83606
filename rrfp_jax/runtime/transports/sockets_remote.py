"""Parts over the ranks' own network: to the host's memory, through a socket, and from there to the device.

Works on every backend. Where devices share the host's memory a part is sent from where it lies; elsewhere the copy to
the host starts at once and is waited for on a worker thread, so that the next task can be launched meanwhile.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rrfp_jax.network import PeerNetwork
from rrfp_jax.network.lanes import LANE_BYTES
from rrfp_jax.runtime.transports.edges import EdgePlan, num_bytes_of
from rrfp_jax.runtime.transports.inbox import Inbox
from rrfp_jax.runtime.transports.interface import HeldBytes, Remote
from rrfp_jax.runtime.transports.parts import KEY_BYTES, Key, pack, pack_key, start_copy, unpack, unpack_key
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

    def open(self) -> None:
        self._network.subscribe_packed(TOPIC, self._receive)

    def close(self) -> None:
        self._network.unsubscribe(TOPIC)

    def prepare(self, plan: EdgePlan, without: frozenset[int] = frozenset()) -> None:
        """Open connections for arrays where there are large ones; not to the ranks that need none."""
        parts = {**plan.outgoing, **plan.incoming}
        large = {rank for rank, slots in parts.items() if num_bytes_of(slots) >= LANE_BYTES}
        self._network.open_lanes(large - without - {plan.rank})

    # -- on the compute thread ---------------------------------------------------------------------------------------

    def offer(self, plan: EdgePlan, receiver: int, leaves: Sequence[Any]) -> Packed | Callable[[], Packed]:
        if plan.is_source_on_host:
            return _packed(plan, receiver, leaves)
        for slot in plan.outgoing[receiver]:
            start_copy(slot, leaves[slot.leaf])
        return lambda: _packed(plan, receiver, leaves)

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
        plan = self._ways.plan_from(key.message, sender)
        self._inbox.part(plan, key, sender, unpack(plan.incoming[sender], header[KEY_BYTES:], frames))


def _packed(plan: EdgePlan, receiver: int, leaves: Sequence[Any]) -> Packed:
    small, frames = pack(plan.outgoing[receiver], leaves)
    return Packed(small, frames, plan.outgoing_bytes[receiver])
