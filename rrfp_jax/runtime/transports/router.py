"""The transport of a process: each part of a message takes the nearest way to each rank that needs it.

Between units of this process payloads are handed over (as views of NumPy's where devices share the host's memory, else
from device to device); between processes they go through sockets or JAX's transfer servers. Plain data, such as reports
and verdicts, always goes through sockets, from the rank of the sending unit that
:func:`~rrfp_jax.runtime.transports.routes.sender_for` names.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import numpy as np

from rrfp_jax.cluster import MalformedMessage, PeerNetwork
from rrfp_jax.cluster.wire import pack_plain, unpack_plain
from rrfp_jax.core import Message
from rrfp_jax.layout import Layout
from rrfp_jax.runtime.transports.edges import EdgePlan
from rrfp_jax.runtime.transports.inbox import Inbox
from rrfp_jax.runtime.transports.interface import Deliver, Failed, HeldBytes, Remote, TransportFailed
from rrfp_jax.runtime.transports.parts import Cut, Key, Reshard, on_host, pack_key, unpack_key
from rrfp_jax.runtime.transports.sockets_remote import SocketsRemote
from rrfp_jax.runtime.transports.ways import EdgeOf, Way, Ways
from rrfp_jax.runtime.transports.workers import Workers
from rrfp_jax.schedules import Placement

if TYPE_CHECKING:
    from rrfp_jax.runtime.transports.transfer_server import TransferServer  # not part of every build of JAX

Selection = Literal["auto", "sockets", "transfer"]
"""How arrays travel between processes. ``sockets`` work on every backend, and their connections prove who speaks.
``transfer`` saves large arrays the way through the host's memory; what is small goes through sockets anyway. ``auto``
tries between each two neighbours whether transfer works, where devices have memory of their own, and takes sockets
elsewhere, which are faster there."""

EAGER_BYTES = 1 << 16
"""Up to so many bytes, sockets cost less than a transfer, even encrypted."""

_Move = Callable[[Any], Any]
_CONTROL = b"control"
_MAX_CONTROL_BYTES = 1 << 28
_CLOSE_TIMEOUT_S = 2.0


class _Shipment(NamedTuple):
    """A payload on its way: what is left to do for the ranks that receive it."""

    plan: EdgePlan
    bucket: int
    parts: list[tuple[int, Any]]


class PipelineTransport:
    """Carries the messages of one pipeline, for all units of this process, from now on until it is closed.

    Args:
        layout, placement: which rank hosts which unit, and which chunk belongs to which unit.
        rank: this process.
        network: how to reach the others; None where there are none. What they have sent ahead is delivered now.
        edge: what a message carries, and how it lies at both ends; None for plain data.
        deliver: called on the event loop with every message for a unit of this rank.
        failed: called on the event loop with an error after which messages are missing.
        num_buckets: how many shapes the messages of an edge may have, one for each bucket of microbatches.
        server: through which arrays travel to and from ``transfer_ranks``; others, or all without one, take sockets.
        eager_bytes: with a server, parts of up to so many bytes go through sockets nevertheless.
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
        server: "TransferServer | None" = None,
        transfer_ranks: Iterable[int] = (),
        eager_bytes: int = EAGER_BYTES,
    ) -> None:
        if network is None and layout.num_ranks > 1:
            raise ValueError(f"{layout.describe()} need a network: give the PeerNetwork of rank {rank}")
        self._rank, self._network = rank, network
        self._deliver, self._failed = deliver, failed
        self._moves: dict[EdgePlan, list[_Move]] = {}
        """How each array of an edge within this process is handed over."""
        self._own_cuts: dict[EdgePlan, list[Cut]] = {}
        """The pieces of arrays on devices that stay in this process, of edges between several."""
        self._ways = Ways(layout, placement, rank, edge, prepare=self._prepare, num_buckets=num_buckets)
        self.held = HeldBytes()
        """Bytes on their way, and their peak."""
        num_workers = 1 if network is None else network.array_connections
        self._fetching = Workers("rrfp-fetch", num_workers, self._worker_failed)
        self._assembling = Workers("rrfp-assemble", num_workers, self._worker_failed)
        self._inbox = Inbox(deliver, self._assembling, self.held)
        self._is_closed = False
        ranks = frozenset(transfer_ranks)
        self._remote = None if network is None else self._make_remote(network, server, ranks, eager_bytes)
        if network is not None and self._remote is not None:  # last, since messages may be waiting
            self._remote.open()
            network.subscribe_packed(_CONTROL, self._receive_control)

    def _make_remote(
        self, network: PeerNetwork, server: "TransferServer | None", ranks: frozenset[int], eager_bytes: int
    ) -> Remote:
        common: dict[str, Any] = {"ways": self._ways, "inbox": self._inbox, "held": self.held}
        sockets = SocketsRemote(network, workers=self._fetching, **common)
        if server is None or not ranks:
            return sockets
        from rrfp_jax.runtime.transports.transfer_remote import TransferRemote

        return TransferRemote(
            network, server, sockets, ranks=ranks, eager_bytes=eager_bytes, failed=self._failed, **common
        )

    # -- called from any thread --------------------------------------------------------------------------------------

    def prepare(self, messages: Iterable[Message]) -> None:
        """Work out the routes of these messages ahead of the first one. Raises ValueError for edges that cannot be."""
        for message in messages:
            self._ways.prepare(message)

    def close(self) -> None:
        """Take no more messages, which the network keeps for the next, and stop the threads. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._remote is not None and self._network is not None:
            self._network.unsubscribe(_CONTROL)
            self._remote.close()
        self._fetching.close(_CLOSE_TIMEOUT_S)
        self._assembling.close(_CLOSE_TIMEOUT_S)

    def _prepare(self, plan: EdgePlan) -> None:
        if plan.is_local or plan.stays:
            self._moves[plan] = [_move(plan, index) for index in range(len(plan.leaves))]
            return
        if not plan.is_source_on_host:
            self._own_cuts[plan] = [Cut(plan, slot) for slot in plan.outgoing.get(self._rank, ())]
        if self._remote is not None:
            self._remote.prepare(plan)

    # -- on the compute thread ---------------------------------------------------------------------------------------

    def ship(
        self,
        payload: Any,
        stage: int,  # noqa: ARG002 - the message says it too
        message: Message,
        bucket: int = 0,
        step: int | None = None,
    ) -> Any:
        """See :meth:`Transport.ship`. Raises ValueError where the arrays are not what the edge says."""
        plan = self._ways.of(message, bucket).plan
        if plan is None:
            return payload
        leaves = plan.flatten(payload)
        if plan.is_local or plan.stays:
            handed = [move(leaf) for move, leaf in zip(self._moves[plan], leaves, strict=True)]
            return handed[0] if plan.is_single else plan.treedef.unflatten(handed)
        key, remote = None if step is None else Key(step, message, bucket), self._remote
        parts = []
        for receiver in plan.outgoing:
            part = self._offer(plan, receiver, leaves)
            if key is not None and remote is not None and receiver != self._rank:
                part = remote.send_at_once(receiver, key, part)
            if part is not None:
                parts.append((receiver, part))
        return _Shipment(plan, bucket, parts)

    def _offer(self, plan: EdgePlan, receiver: int, leaves: list[Any]) -> Any:
        if receiver == self._rank:
            if plan in self._own_cuts:
                return [cut(leaves[cut.slot.leaf]) for cut in self._own_cuts[plan]]
            return [on_host(slot, leaves[slot.leaf]) for slot in plan.outgoing[receiver]]
        assert self._remote is not None
        return self._remote.offer(plan, receiver, leaves)

    # -- in turns ----------------------------------------------------------------------------------------------------

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        """See :meth:`Transport.send`."""
        if isinstance(payload, _Shipment):
            if payload.parts:
                assert self._network is not None
                self._network.on_loop(self._send_parts, step, message, payload)
            return
        way = self._ways.of(message)
        if way.plan is not None:
            self._deliver(stage, step, message, payload)
        else:
            self._send_control(way, step, message, payload)

    def _send_control(self, way: Way, step: int, message: Message, payload: Any) -> None:
        packed: bytes | None = None
        for receiver in way.receivers:
            if receiver == self._rank:
                self._deliver(way.target_unit, step, message, payload)
                continue
            assert self._network is not None
            if packed is None:
                packed = pack_plain(payload, _MAX_CONTROL_BYTES)
            what = receiver, _CONTROL, pack_key(Key(step, message)), [packed]
            if not self._network.send_at_once(*what):
                self._network.on_loop(self._network.send_arrays, *what)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _send_parts(self, step: int, message: Message, shipment: _Shipment) -> None:
        plan, bucket, parts = shipment
        key = Key(step, message, bucket)
        for receiver, offered in parts:
            if receiver == self._rank:
                self._inbox.part(plan, key, receiver, offered)
            else:
                assert self._remote is not None
                self._remote.send(receiver, key, offered)

    def _receive_control(self, sender: int, header: bytes, frames: list[memoryview]) -> None:
        step, message, _ = unpack_key(header)
        way = self._ways.expected(message)
        if way.plan is not None or len(frames) != 1:
            raise MalformedMessage(f"rank {sender} sends plain data as the message '{message}'")
        self._deliver(way.target_unit, step, message, unpack_plain(frames[0], _MAX_CONTROL_BYTES))

    def _worker_failed(self, error: Exception) -> None:
        failure = TransportFailed(f"rank {self._rank} could not put data where it belongs: {error!r}")
        failure.__cause__ = error
        self._failed(failure)


def check_selection(selection: str) -> None:
    """Raise ValueError for a transport that does not exist."""
    if selection not in get_args(Selection):
        raise ValueError(f"the transport is '{selection}': choose one of {', '.join(get_args(Selection))}")


def _move(plan: EdgePlan, index: int) -> _Move:
    """How an array of an edge within this process becomes what the receiving program takes."""
    leaf = plan.leaves[index]
    if leaf.is_whole_on_host:
        return np.asarray
    if plan.stays:
        return _as_it_is
    # in most other cases JAX goes over the host's memory, which on CPU is faster than programs that cut and paste
    on_host = plan.is_source_on_host and plan.on_host
    if on_host or leaf.source == leaf.target or len(leaf.source.boxes) == 1:
        return partial(jax.device_put, device=leaf.target_sharding)
    return Reshard(plan, index)


def _as_it_is(value: Any) -> Any:
    return value
