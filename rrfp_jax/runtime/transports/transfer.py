"""Parts through JAX's transfer servers: the receiver fetches arrays from the sender's device to its own.

The sender offers its arrays under a number, once they are complete, then tells the receiver, who pulls them, waits for
their arrival on a thread of its own, and confirms. (In this order, and with a thread per wait: pulls that are posted
ahead of their offers can wait for each other for ever.) An offered array is owned here until the confirmation, which
travels with the next offer that goes that way, or after a moment.

On CPU an array is delivered when it has arrived. On other devices it is delivered when it has been asked for: it would
be seen to arrive only when the device has done all that was launched before.

Small parts go through sockets, whole, as message libraries send them too: a pull costs several times as much as to
carry 64 KiB along, encrypted, with the message that would announce it.

Transfer servers prove nothing and encrypt nothing: whoever can reach their port can fetch the arrays on offer.

No other module uses ``jax.experimental.transfer``, which is not part of every build of JAX.
"""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import transfer

from rrfp_jax.cluster import MalformedMessage, PeerNetwork
from rrfp_jax.cluster.wire import field
from rrfp_jax.runtime.transports.device_pieces import DeviceCut, prepare_pasting
from rrfp_jax.runtime.transports.edges import EdgePlan, num_bytes_of
from rrfp_jax.runtime.transports.interface import Failed, HeldBytes, TransportFailed, Workers
from rrfp_jax.runtime.transports.messages import Inbox, MessageKey, assemble_message, pack_key, unpack_key
from rrfp_jax.runtime.transports.routing import RoutingTable
from rrfp_jax.runtime.transports.sockets import SocketsRemote

_OFFER, _CONFIRMATION = "transfer-offer", "transfer-confirmation"
_KEY, _NUMBER, _CONFIRMED = "k", "n", "c"
_NUM_WAITING = 4
_CLOSE_TIMEOUT_S = 1.0
_CONFIRM_BYTES = 1 << 16
_CONFIRM_DELAY_S = 0.05
_PROBE_BYTES = 1 << 18
_CHUNK_BYTES, _NUM_COPIES, _NUM_STREAMS = 8 << 20, 8, 4
"""Size of the chunks of an array on its way, number of chunks under way at a time, and number of connections to a peer.
An array goes faster in chunks that are smaller than it is: one is copied while another is in the network."""
LOCKED_BYTES = 3 * _NUM_COPIES * _CHUNK_BYTES
"""Host memory that a server allocates, and locks if devices copy to and from it by themselves: JAX takes the chunks
once for receiving and twice for copying from devices. With JAX's own chunks of 256 MiB it is 6 GiB."""


class TransferServer:
    """This process's server and its connections to those of others; pipelines come and go.

    Made once JAX has started; listens on ``interface`` until :meth:`close`.
    """

    def __init__(self, interface: str) -> None:
        self._connecting = threading.Lock()
        self._addresses: dict[int, str] = {}
        self._connections: dict[int, Any] = {}
        self._numbers = itertools.count()
        client = jax.local_devices()[0].client
        self._server: Any = transfer.start_transfer_server(
            client,
            f"{interface}:0",
            [f"{interface}:0"] * _NUM_STREAMS,
            max_num_parallel_copies=_NUM_COPIES,
            transfer_size=_CHUNK_BYTES,
        )
        self.address: str = self._server.address()

    def close(self) -> None:
        """Stops listening and frees the memory, once peers have fetched all that they have begun to; nothing can be
        offered or fetched any more. May be called again."""
        with self._connecting:
            self._connections.clear()
            self._server = None  # JAX's server ends with the last reference to it

    def know(self, rank: int, address: str) -> None:
        """Takes note of the address of another rank's server; from any thread."""
        self._addresses[rank] = address

    def number(self) -> int:
        """Returns a number that no offer of this process has had; from any thread."""
        return next(self._numbers)

    def offer(self, number: int, arrays: Sequence[Any]) -> None:
        """Lets a peer fetch arrays under a number, once; they must live until it has."""
        self._server.await_pull(number, arrays)

    def pull(self, rank: int, number: int, specs: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
        """Fetches the arrays that a peer offers; they are ready once all of their bytes are here."""
        with self._connecting:
            if rank not in self._connections:
                self._connections[rank] = self._server.connect(self._addresses[rank])
            connection = self._connections[rank]
        pieces: list[Any] = connection.pull(number, specs)
        return pieces


class ServerProbe:
    """The :class:`~rrfp_jax.runtime.transports.probing.Probe` of a device of this process."""

    def __init__(self, server: TransferServer, rank: int, device: jax.Device) -> None:
        self._server, self._device, self._rank = server, device, rank
        self._offered: list[Any] = []
        self.address = server.address

    def offer(self, rank: int) -> int:  # noqa: ARG002 - all are offered the same
        array, number = jax.device_put(_pattern(self._rank), self._device), self._server.number()
        self._offered.append(array)
        self._server.offer(number, [array])
        return number

    def fetch(self, rank: int, address: str, number: int) -> None:
        self._server.know(rank, address)
        wanted = _pattern(rank)
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        (came,) = self._server.pull(rank, number, [jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=sharding)])
        if not np.array_equal(np.asarray(came), wanted):
            raise ValueError("other bytes came than were offered")


def _pattern(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, _PROBE_BYTES, np.uint8)


class _Offer(NamedTuple):
    """Arrays that a peer may fetch."""

    number: int
    arrays: list[Any]
    num_bytes: int


class _Unconfirmed:
    """The offers of a peer that were fetched and have not been confirmed to it."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.num_bytes = 0

    def take(self) -> list[int]:
        """Returns their numbers, for a confirmation, and forgets them."""
        numbers, self.numbers, self.num_bytes = self.numbers, [], 0
        return numbers


class TransferRemote(SocketsRemote):
    """Offers large parts to some ranks and fetches theirs; all other parts go through sockets.

    Args:
        server: the server of this process, which knows those of ``ranks``.
        ranks: the ranks to and from which arrays travel so; both ends must agree.
        eager_bytes: largest size of a part that goes through sockets all the same.
    """

    def __init__(
        self,
        network: PeerNetwork,
        server: TransferServer,
        *,
        ranks: frozenset[int],
        eager_bytes: int,
        failed: Failed,
        routes: RoutingTable,
        inbox: Inbox,
        held: HeldBytes,
        workers: Workers,
    ) -> None:
        super().__init__(network, routes=routes, inbox=inbox, held=held, workers=workers, other_ways=ranks)
        self._eager_bytes, self._ranks = eager_bytes, ranks
        self._server, self._first = server, server.number()
        self._offers: dict[int, _Offer] = {}
        self._unconfirmed = {rank: _Unconfirmed() for rank in ranks}
        self._is_confirming_soon = False
        self._cuts: dict[tuple[EdgePlan, int], list[DeviceCut]] = {}
        self._specs: dict[tuple[EdgePlan, int], list[jax.ShapeDtypeStruct]] = {}
        self._pulling = Workers("rrfp-pull", _NUM_WAITING, failed)
        self._arrivals = Workers("rrfp-arrivals", 1, failed)
        """Waits for arrays that were delivered before their arrival; in order, as devices copy."""

    def prepare(self, plan: EdgePlan) -> None:
        """Prepares sockets, and compiles the programs that cut and paste on devices."""
        super().prepare(plan)
        for receiver, slots in plan.outgoing.items():
            if self._is_offered(plan, receiver):
                self._cuts[plan, receiver] = [DeviceCut(plan, slot) for slot in slots]
        for sender, slots in plan.incoming.items():
            devices = [plan.leaves[slot.leaf].device(slot.device, is_source=False) for slot in slots]
            self._specs[plan, sender] = [
                jax.ShapeDtypeStruct(slot.shape, slot.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
                for slot, device in zip(slots, devices, strict=True)
            ]
        if not plan.is_target_on_host:
            prepare_pasting(plan)

    def open(self) -> None:
        """Takes parts, offers and confirmations from now on, also those that came before."""
        super().open()
        self._network.subscribe(_OFFER, self._receive_offer)
        self._network.subscribe(_CONFIRMATION, self._receive_confirmation)

    def close(self) -> None:
        """Takes no more messages, and stops the threads."""
        self._network.unsubscribe(_OFFER)
        self._network.unsubscribe(_CONFIRMATION)
        super().close()
        self._pulling.close(_CLOSE_TIMEOUT_S)
        self._arrivals.close(_CLOSE_TIMEOUT_S)

    def _is_offered(self, plan: EdgePlan, receiver: int) -> bool:
        return receiver in self._ranks and plan.outgoing_bytes[receiver] > self._eager_bytes

    # -- on the compute thread ---------------------------------------------------------------------------------------

    def stage_for_send(self, plan: EdgePlan, receiver: int, leaves: Sequence[Any]) -> Any:
        """Offers a large part to its receiver; gets another part ready for sockets."""
        if not self._is_offered(plan, receiver):
            return super().stage_for_send(plan, receiver, leaves)
        arrays = [cut(leaves[cut.slot.leaf]) for cut in self._cuts[plan, receiver]]
        offer = _Offer(self._server.number(), arrays, plan.outgoing_bytes[receiver])
        self._offers[offer.number] = offer
        self._server.offer(offer.number, arrays)
        return offer

    # -- on the event loop -------------------------------------------------------------------------------------------

    def send(self, receiver: int, key: MessageKey, staged: Any) -> None:
        """Announces an offer to its receiver, or sends another part."""
        if not isinstance(staged, _Offer):
            super().send(receiver, key, staged)
            return
        self._held.add(sent=staged.num_bytes)
        confirmed = self._unconfirmed[receiver].take()
        self._network.send(receiver, _OFFER, {_KEY: pack_key(key), _NUMBER: staged.number, _CONFIRMED: confirmed})

    def _receive_offer(self, sender: int, header: dict[str, Any], frames: list[memoryview]) -> None:  # noqa: ARG002
        self._confirmed(header)
        key, number = unpack_key(field(header, _KEY, bytes)), field(header, _NUMBER, int)
        plan = self._routes.plan_from(key.message, key.bucket, sender)
        if number < 0 or sender not in self._ranks or not plan.incoming[sender]:
            raise MalformedMessage(f"offer {number} of rank {sender} does not fit the message '{key.message}'")
        self._held.add(received=num_bytes_of(plan.incoming[sender]))
        self._pulling.submit(
            lambda: self._fetch(plan, key, sender, number), lambda came: self._fetched(plan, key, sender, number, came)
        )

    def _fetched(self, plan: EdgePlan, key: MessageKey, sender: int, number: int, came: tuple[list[Any], Any]) -> None:
        num_bytes = num_bytes_of(plan.incoming[sender])
        self._held.add(received=-num_bytes)
        pieces, payload = came
        if plan.is_target_on_host:
            self._confirm_later(sender, number, num_bytes)
        else:  # the sender must keep the arrays until they are here
            self._arrivals.submit(
                lambda: self._arrive(key, sender, pieces), lambda _: self._confirm_later(sender, number, num_bytes)
            )
        if len(plan.incoming) == 1:
            self._inbox.deliver(plan, key, payload)
        else:
            self._inbox.add_part(plan, key, sender, pieces)

    def _confirm_later(self, sender: int, number: int, num_bytes: int) -> None:
        """Confirms a fetched offer: at once if many bytes await it, else with the next offer or after a moment."""
        waiting = self._unconfirmed[sender]
        waiting.numbers.append(number)
        waiting.num_bytes += num_bytes
        if waiting.num_bytes >= _CONFIRM_BYTES:
            self._network.send(sender, _CONFIRMATION, {_CONFIRMED: waiting.take()})
        elif not self._is_confirming_soon:
            self._is_confirming_soon = True
            asyncio.get_running_loop().call_later(_CONFIRM_DELAY_S, self._confirm_all)

    def _confirm_all(self) -> None:
        self._is_confirming_soon = False
        for rank, waiting in self._unconfirmed.items():
            if waiting.numbers:
                self._network.send(rank, _CONFIRMATION, {_CONFIRMED: waiting.take()})

    def _receive_confirmation(self, sender: int, header: dict[str, Any], frames: list[memoryview]) -> None:  # noqa: ARG002
        self._confirmed(header)

    def _confirmed(self, header: dict[str, Any]) -> None:
        for number in field(header, _CONFIRMED, list):
            if type(number) is int and 0 <= number < self._first:  # of a pipeline that has ended
                continue
            offer = self._offers.pop(number, None) if type(number) is int else None
            if offer is None:
                raise MalformedMessage(f"offer {number!r:.40} is confirmed, which is not out")
            self._held.add(sent=-offer.num_bytes)

    # -- on a waiting thread -----------------------------------------------------------------------------------------

    def _fetch(self, plan: EdgePlan, key: MessageKey, sender: int, number: int) -> tuple[list[Any], Any]:
        """Returns the pieces of an offer, and the payload if they are all there is of the message."""
        try:
            pieces = self._server.pull(sender, number, self._specs[plan, sender])
            if plan.is_target_on_host:
                jax.block_until_ready(pieces)
        except Exception as error:
            raise self._failure(key, sender, error) from error
        return pieces, assemble_message(plan, {sender: pieces}) if len(plan.incoming) == 1 else None

    def _arrive(self, key: MessageKey, sender: int, pieces: list[Any]) -> None:
        """Blocks until the pieces are here."""
        try:
            jax.block_until_ready([piece for piece in pieces if not piece.is_deleted()])
        except Exception as error:
            raise self._failure(key, sender, error) from error

    def _failure(self, key: MessageKey, sender: int, error: Exception) -> TransportFailed:
        return TransportFailed(
            f"rank {self._network.rank} could not fetch the {key.message} (step {key.step}) from rank {sender}: {error}"
        )
