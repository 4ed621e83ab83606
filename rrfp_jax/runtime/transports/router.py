"""The transport of a process: each part of a message takes the nearest way to each rank that needs it.

Between units of this process payloads are handed over (as views of NumPy's if devices share the host's memory, else
from device to device); between processes they go through sockets or JAX's transfer servers. Plain data, such as reports
and verdicts, always goes through sockets, from the rank of the sending unit that
:func:`~rrfp_jax.runtime.transports.edges.sender_for` names.

An array takes this way: ``send_array`` and ``SocketsRemote.stage_for_send`` cut it on the compute thread,
``send_at_once`` or the event loop's ``send`` hand the part to the network; at the receiver ``SocketsRemote._receive``
unpacks it, and the ``Inbox`` assembles and delivers the message.
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
from rrfp_jax.runtime.transports.device_pieces import DeviceCut, DeviceReshard
from rrfp_jax.runtime.transports.edges import EdgePlan
from rrfp_jax.runtime.transports.interface import Deliver, Failed, HeldBytes, TransportFailed, Workers
from rrfp_jax.runtime.transports.messages import Inbox, MessageKey, pack_key, piece_on_host, unpack_key
from rrfp_jax.runtime.transports.routing import EdgeOf, RoutingTable
from rrfp_jax.runtime.transports.sockets import SocketsRemote
from rrfp_jax.schedules import Placement

if TYPE_CHECKING:
    from rrfp_jax.runtime.transports.transfer import TransferServer  # not part of every build of JAX

Selection = Literal["auto", "sockets", "transfer"]
"""The way of arrays between processes. ``sockets`` work on every backend, and their connections prove who speaks.
``transfer`` saves large arrays the way through the host's memory; small parts go through sockets anyway. ``auto`` tries
between each two neighbours whether transfer works, if devices have memory of their own, and takes sockets on others,
which are faster there."""

EAGER_BYTES = 1 << 16
"""Up to this size, sockets cost less than a transfer, even encrypted."""

_Move = Callable[[Any], Any]
_CONTROL = b"control"
_MAX_CONTROL_BYTES = 1 << 28
_CLOSE_TIMEOUT_S = 2.0


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
        server: "TransferServer | None" = None,
        transfer_ranks: Iterable[int] = (),
        eager_bytes: int = EAGER_BYTES,
    ) -> None:
        if network is None and layout.num_ranks > 1:
            raise ValueError(f"{layout.describe()} need a network: give the PeerNetwork of rank {rank}")
        self._rank, self._network = rank, network
        self._deliver, self._failed = deliver, failed
        self._moves: dict[EdgePlan, list[_Move]] = {}
        """The function that hands over each array of an edge within this process."""
        self._own_cuts: dict[EdgePlan, list[DeviceCut]] = {}
        """The pieces of arrays on devices that stay in this process, of edges between several."""
        self._routes = RoutingTable(layout, placement, rank, edge, prepare=self._prepare, num_buckets=num_buckets)
        self.held = HeldBytes()
        """Bytes on their way, and their peak."""
        num_workers = 1 if network is None else network.array_connections
        self._fetching = Workers("rrfp-fetch", num_workers, self._worker_failed)
        self._assembling = Workers("rrfp-assemble", num_workers, self._worker_failed)
        self._inbox = Inbox(deliver, self._assembling, self.held)
        self._is_closed = False
        self._remote: SocketsRemote | None = None
        if network is None:
            return
        common: dict[str, Any] = {
            "routes": self._routes,
            "inbox": self._inbox,
            "held": self.held,
            "workers": self._fetching,
        }
        if server is not None and (ranks := frozenset(transfer_ranks)):
            from rrfp_jax.runtime.transports.transfer import TransferRemote

            self._remote = TransferRemote(
                network, server, ranks=ranks, eager_bytes=eager_bytes, failed=failed, **common
            )
        else:
            self._remote = SocketsRemote(network, **common)
        self._remote.open()  # last, since messages may be waiting
        network.subscribe_packed(_CONTROL, self._receive_control)

    # -- called from any thread --------------------------------------------------------------------------------------

    def prepare(self, messages: Iterable[Message]) -> None:
        """Works out the routes of these messages ahead of the first one. Raises ValueError for edges that cannot be."""
        for message in messages:
            self._routes.prepare(message)

    def close(self) -> None:
        """Takes no more messages, which the network keeps for the next transport, and stops the threads. May be called
        again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._remote is not None and self._network is not None:
            self._network.unsubscribe(_CONTROL)
            self._remote.close()
        self._fetching.close(_CLOSE_TIMEOUT_S)
        self._assembling.close(_CLOSE_TIMEOUT_S)

    def _prepare(self, plan: EdgePlan) -> None:
        if plan.is_in_process:
            self._moves[plan] = [_move(plan, index) for index in range(len(plan.leaves))]
            return
        if not plan.is_source_on_host:
            self._own_cuts[plan] = [DeviceCut(plan, slot) for slot in plan.outgoing.get(self._rank, ())]
        if self._remote is not None:
            self._remote.prepare(plan)

    # -- on the compute thread ---------------------------------------------------------------------------------------

    def send_array(
        self,
        payload: Any,
        stage: int,  # noqa: ARG002 - the message says it too
        message: Message,
        bucket: int = 0,
        step: int | None = None,
    ) -> Any:
        """See :meth:`Transport.send_array`. Raises ValueError if the arrays are not those of the edge."""
        plan = self._routes.of(message, bucket).plan
        if plan is None:
            return payload
        leaves = plan.flatten(payload)
        if plan.is_in_process:
            handed = [move(leaf) for move, leaf in zip(self._moves[plan], leaves, strict=True)]
            return handed[0] if plan.is_single else plan.treedef.unflatten(handed)
        key, remote = None if step is None else MessageKey(step, message, bucket), self._remote
        parts = []
        for receiver, slots in plan.outgoing.items():
            if receiver != self._rank:
                assert remote is not None
                part = remote.stage_for_send(plan, receiver, leaves)
                # a part that leaves from this thread saves a turn of the event loop, which may be busy
                if key is not None and (part := remote.send_at_once(receiver, key, part)) is None:
                    continue
            elif plan in self._own_cuts:
                part = [cut(leaves[cut.slot.leaf]) for cut in self._own_cuts[plan]]
            else:
                part = [piece_on_host(slot, leaves[slot.leaf]) for slot in slots]
            parts.append((receiver, part))
        return _StagedPayload(plan, bucket, parts)

    # -- in turns ----------------------------------------------------------------------------------------------------

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        """See :meth:`Transport.send`."""
        if isinstance(payload, _StagedPayload):
            if payload.parts:
                assert self._network is not None
                self._network.on_loop(self._send_parts, step, message, payload)
            return
        route = self._routes.of(message)
        if route.plan is not None:
            self._deliver(stage, step, message, payload)
            return
        packed: bytes | None = None
        for receiver in route.receivers:
            if receiver == self._rank:
                self._deliver(route.target_unit, step, message, payload)
                continue
            assert self._network is not None
            if packed is None:
                packed = pack_plain(payload, _MAX_CONTROL_BYTES)
            self._network.send_arrays(receiver, _CONTROL, pack_key(MessageKey(step, message)), [packed])

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _send_parts(self, step: int, message: Message, payload: _StagedPayload) -> None:
        plan, bucket, parts = payload
        key = MessageKey(step, message, bucket)
        for receiver, staged in parts:
            if receiver == self._rank:
                self._inbox.add_part(plan, key, receiver, staged)
            else:
                assert self._remote is not None
                self._remote.send(receiver, key, staged)

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


def check_selection(selection: str) -> None:
    """Raises ValueError for a transport that does not exist."""
    if selection not in get_args(Selection):
        raise ValueError(f"the transport is '{selection}': choose one of {', '.join(get_args(Selection))}")


def _move(plan: EdgePlan, index: int) -> _Move:
    """Returns the function that turns an array of an edge within this process into that of the receiving program."""
    leaf = plan.leaves[index]
    if leaf.is_whole_on_host:
        return np.asarray
    if plan.stays:
        return lambda value: value
    # in most other cases JAX goes over the host's memory, which on CPU is faster than programs that cut and paste
    on_host = plan.is_source_on_host and plan.is_target_on_host
    if on_host or leaf.source == leaf.target or len(leaf.source.boxes) == 1:
        return partial(jax.device_put, device=leaf.target_sharding)
    return DeviceReshard(plan, index)
