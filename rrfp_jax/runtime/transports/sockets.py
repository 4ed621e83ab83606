"""Parts over the ranks' own network: to the host's memory, through a socket, and from there to the device.

Works on every backend. Where devices share the host's memory a part is sent from where it lies; elsewhere the copy to
the host starts at once and is waited for on a worker thread, so that the next task can be launched meanwhile.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rrfp_jax.runtime.network import PeerNetwork
from rrfp_jax.runtime.network.plain import field
from rrfp_jax.runtime.transports.edges import EdgePlan, Slot, num_bytes_of
from rrfp_jax.runtime.transports.inbox import Inbox
from rrfp_jax.runtime.transports.interface import HeldBytes
from rrfp_jax.runtime.transports.parts import Key, key_from_plain, key_to_plain, on_host, pack, shard_of, unpack
from rrfp_jax.runtime.transports.ways import Ways
from rrfp_jax.runtime.transports.workers import Workers

TOPIC = "part"
_KEY, _SMALL = "k", "d"


class Packed(NamedTuple):
    """A part as bytes: its small pieces in one, the others by themselves."""

    small: bytes
    frames: list[memoryview]
    num_bytes: int


class SocketsRemote:
    """Sends parts as messages of a :class:`PeerNetwork`. To be made before the network starts."""

    def __init__(self, network: PeerNetwork, *, ways: Ways, inbox: Inbox, held: HeldBytes, workers: Workers) -> None:
        self._network, self._ways, self._inbox = network, ways, inbox
        self._held, self._workers = held, workers
        network.subscribe(TOPIC, self._receive)

    def prepare(self, plan: EdgePlan) -> None:  # noqa: ARG002 - nothing is compiled
        return

    def connect(self, timeout_s: float) -> None:  # noqa: ARG002 - the network is connected already
        return

    def close(self) -> None:
        return

    # -- on the compute thread ---------------------------------------------------------------------------------------

    def offer(self, plan: EdgePlan, receiver: int, leaves: Sequence[Any]) -> Packed | Callable[[], Packed]:
        slots = plan.outgoing[receiver]
        if all(plan.leaves[slot.leaf].is_source_on_host for slot in slots):
            return _packed(slots, leaves)
        shards = [shard_of(slot, leaves[slot.leaf]) for slot in slots]
        for shard in shards:
            shard.copy_to_host_async()
        return lambda: _packed(slots, leaves)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def send(self, receiver: int, key: Key, offered: Packed | Callable[[], Packed]) -> None:
        if isinstance(offered, Packed):
            self._send(receiver, key, offered)
            return
        self._workers.submit(offered, lambda packed: self._send(receiver, key, packed))

    def _send(self, receiver: int, key: Key, packed: Packed) -> None:
        small, frames, num_bytes = packed
        self._held.add(sent=num_bytes)
        header = {_KEY: key_to_plain(*key), _SMALL: small}
        self._network.send(receiver, TOPIC, header, frames, lambda: self._held.add(sent=-num_bytes))

    def _receive(self, sender: int, header: dict[str, Any], frames: list[memoryview]) -> None:
        key = key_from_plain(header, _KEY)
        plan = self._ways.plan_from(key.message, sender)
        self._inbox.part(plan, key, sender, unpack(plan.incoming[sender], field(header, _SMALL, bytes), frames))


def _packed(slots: Sequence[Slot], leaves: Sequence[Any]) -> Packed:
    small, frames = pack(slots, [on_host(slot, leaves[slot.leaf]) for slot in slots])
    return Packed(small, frames, num_bytes_of(slots))
