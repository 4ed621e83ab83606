"""Parts through JAX's transfer servers: the receiver fetches arrays from the sender's device to its own.

The sender offers its arrays under a number, once they are complete, then tells the receiver, who pulls them, waits for
their arrival on a thread of its own, and confirms. (In this order, and with a thread per wait: pulls that are posted
ahead of their offers can wait for each other for ever.) An offered array is owned here until the confirmation, which
travels with the next offer that goes that way, or after a moment.

On CPU an array is delivered when it has arrived. Elsewhere it is delivered when it has been asked for: it would be seen
to arrive only when the device has done all that was launched before.

Small parts go through sockets, whole, as message libraries send them too: a pull costs several times what it takes to
carry 64 KiB along, encrypted, with the message that would announce it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from rrfp_jax.cluster import MalformedMessage, PeerNetwork
from rrfp_jax.cluster.wire import field
from rrfp_jax.runtime.transports.edges import EdgePlan, num_bytes_of
from rrfp_jax.runtime.transports.inbox import Inbox, assemble
from rrfp_jax.runtime.transports.interface import Failed, HeldBytes, Remote, TransportFailed
from rrfp_jax.runtime.transports.parts import Cut, Key, pack_key, prepare_pasting, pull_spec, unpack_key
from rrfp_jax.runtime.transports.sockets_remote import SocketsRemote
from rrfp_jax.runtime.transports.transfer_server import TransferServer
from rrfp_jax.runtime.transports.ways import Ways
from rrfp_jax.runtime.transports.workers import Workers

_OFFER, _CONFIRMATION = "transfer-offer", "transfer-confirmation"
_KEY, _NUMBER, _CONFIRMED = "k", "n", "c"
_NUM_WAITING = 4
_CLOSE_TIMEOUT_S = 1.0
_CONFIRM_BYTES = 1 << 16
_CONFIRM_DELAY_S = 0.05


class Offer(NamedTuple):
    """Arrays that a peer may fetch."""

    number: int
    arrays: list[Any]
    num_bytes: int


class _Owed:
    """What was fetched from a peer and has not been confirmed to it."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.num_bytes = 0

    def add(self, number: int, num_bytes: int) -> None:
        self.numbers.append(number)
        self.num_bytes += num_bytes

    def take(self) -> list[int]:
        numbers, self.numbers, self.num_bytes = self.numbers, [], 0
        return numbers


class TransferRemote(Remote):
    """Offers arrays to other ranks and fetches theirs, over the network's interface.

    Args:
        server: this process's, through which arrays are offered and fetched; knows those of ``ranks``.
        ranks: to and from which arrays travel so; both ends must agree.
        sockets: for parts of up to ``eager_bytes``, and for other ranks.
    """

    def __init__(
        self,
        network: PeerNetwork,
        server: TransferServer,
        sockets: SocketsRemote,
        *,
        ranks: frozenset[int],
        eager_bytes: int,
        ways: Ways,
        inbox: Inbox,
        held: HeldBytes,
        failed: Failed,
    ) -> None:
        self._network, self._ways, self._inbox, self._held = network, ways, inbox, held
        self._sockets, self._eager_bytes, self._ranks = sockets, eager_bytes, ranks
        self._server, self._first = server, server.number()
        self._offers: dict[int, Offer] = {}
        self._owed = {rank: _Owed() for rank in ranks}
        self._is_confirming_soon = False
        self._cuts: dict[tuple[EdgePlan, int], list[Cut]] = {}
        self._specs: dict[tuple[EdgePlan, int], list[jax.ShapeDtypeStruct]] = {}
        self._workers = Workers("rrfp-pull", _NUM_WAITING, failed)
        self._arrivals = Workers("rrfp-arrivals", 1, failed)
        """Waits for what was delivered before its arrival; in order, as devices copy."""

    def prepare(self, plan: EdgePlan) -> None:
        self._sockets.prepare(plan, without=self._ranks)
        for receiver, slots in plan.outgoing.items():
            if receiver not in self._ranks or num_bytes_of(slots) <= self._eager_bytes:
                continue
            self._cuts[plan, receiver] = [Cut(plan, slot) for slot in slots]
        for sender, slots in plan.incoming.items():
            self._specs[plan, sender] = [pull_spec(plan, slot) for slot in slots]
        if not plan.on_host:
            prepare_pasting(plan)

    def open(self) -> None:
        self._sockets.open()
        self._network.subscribe(_OFFER, self._receive_offer)
        self._network.subscribe(_CONFIRMATION, self._receive_confirmation)

    def close(self) -> None:
        self._network.unsubscribe(_OFFER)
        self._network.unsubscribe(_CONFIRMATION)
        self._sockets.close()
        self._workers.close(_CLOSE_TIMEOUT_S)
        self._arrivals.close(_CLOSE_TIMEOUT_S)

    # -- on the compute thread ---------------------------------------------------------------------------------------

    def offer(self, plan: EdgePlan, receiver: int, leaves: Sequence[Any]) -> Any:
        num_bytes = plan.outgoing_bytes[receiver]
        if receiver not in self._ranks or num_bytes <= self._eager_bytes:
            return self._sockets.offer(plan, receiver, leaves)
        arrays = [cut(leaves[cut.slot.leaf]) for cut in self._cuts[plan, receiver]]
        offer = Offer(self._server.number(), arrays, num_bytes)
        self._offers[offer.number] = offer
        self._server.offer(offer.number, arrays)
        return offer

    def send_at_once(self, receiver: int, key: Key, offered: Any) -> Any:
        return self._sockets.send_at_once(receiver, key, offered)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def send(self, receiver: int, key: Key, offered: Any) -> None:
        if not isinstance(offered, Offer):
            self._sockets.send(receiver, key, offered)
            return
        self._held.add(sent=offered.num_bytes)
        confirmed = self._owed[receiver].take()
        header = {_KEY: pack_key(key), _NUMBER: offered.number, _CONFIRMED: confirmed}
        self._network.send(receiver, _OFFER, header)

    def _receive_offer(self, sender: int, header: dict[str, Any], frames: list[memoryview]) -> None:  # noqa: ARG002
        self._confirmed(header)
        key, number = unpack_key(field(header, _KEY, bytes)), field(header, _NUMBER, int)
        plan = self._ways.plan_from(key.message, key.bucket, sender)
        if number < 0 or sender not in self._ranks or not plan.incoming[sender]:
            raise MalformedMessage(f"offer {number} of rank {sender} does not fit the message '{key.message}'")
        self._held.add(received=num_bytes_of(plan.incoming[sender]))
        self._workers.submit(
            lambda: self._fetch(plan, key, sender, number), lambda came: self._fetched(plan, key, sender, number, came)
        )

    def _fetched(self, plan: EdgePlan, key: Key, sender: int, number: int, came: tuple[list[Any], Any]) -> None:
        num_bytes = num_bytes_of(plan.incoming[sender])
        self._held.add(received=-num_bytes)
        pieces, payload = came
        if plan.on_host:
            self._owe(sender, number, num_bytes)
        else:  # its sender must keep it until then
            self._arrivals.submit(
                lambda: self._arrive(key, sender, pieces), lambda _: self._owe(sender, number, num_bytes)
            )
        if len(plan.incoming) == 1:
            self._inbox.whole(plan, key, payload)
        else:
            self._inbox.part(plan, key, sender, pieces)

    # -- confirmations -----------------------------------------------------------------------------------------------

    def _owe(self, sender: int, number: int, num_bytes: int) -> None:
        owed = self._owed[sender]
        owed.add(number, num_bytes)
        if owed.num_bytes >= _CONFIRM_BYTES:
            self._network.send(sender, _CONFIRMATION, {_CONFIRMED: owed.take()})
        elif not self._is_confirming_soon:
            self._is_confirming_soon = True
            asyncio.get_running_loop().call_later(_CONFIRM_DELAY_S, self._confirm_all)

    def _confirm_all(self) -> None:
        self._is_confirming_soon = False
        for rank, owed in self._owed.items():
            if owed.numbers:
                self._network.send(rank, _CONFIRMATION, {_CONFIRMED: owed.take()})

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

    def _fetch(self, plan: EdgePlan, key: Key, sender: int, number: int) -> tuple[list[Any], Any]:
        """The pieces of an offer, and the payload where they are all there is of the message."""
        try:
            pieces = self._server.pull(sender, number, self._specs[plan, sender])
            if plan.on_host:
                jax.block_until_ready(pieces)
        except Exception as error:
            raise self._failure(key, sender, error) from error
        return pieces, assemble(plan, {sender: pieces}) if len(plan.incoming) == 1 else None

    def _arrive(self, key: Key, sender: int, pieces: list[Any]) -> None:
        """Return once the pieces are here."""
        try:
            jax.block_until_ready([piece for piece in pieces if not piece.is_deleted()])
        except Exception as error:
            raise self._failure(key, sender, error) from error

    def _failure(self, key: Key, sender: int, error: Exception) -> TransportFailed:
        return TransportFailed(
            f"rank {self._network.rank} could not fetch the {key.message} (step {key.step}) from rank {sender}: {error}"
        )
