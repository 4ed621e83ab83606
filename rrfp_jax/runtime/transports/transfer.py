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

Before the first step, each two neighbours try an exchange. Every rank tells the address of its server and offers a
small array to each neighbour; then each fetches the arrays of the others within a deadline and compares the bytes. All
ranks gather the results, so that both ends of an edge come to the same choice: arrays go by transfer between two ranks
that have both fetched from each other, and through sockets between others. A call that hangs is left behind on a thread
of its own.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from rrfp_jax.cluster import MalformedMessage, PeerNetwork
from rrfp_jax.cluster.rendezvous import name_ranks
from rrfp_jax.cluster.wire import field
from rrfp_jax.runtime.failure import TransportFailed
from rrfp_jax.runtime.transports.edges import EdgePlan, RoutingTable, num_bytes_of
from rrfp_jax.runtime.transports.messages import (
    Deliver,
    DeviceCut,
    Failed,
    HeldBytes,
    Inbox,
    MessageKey,
    Workers,
    assemble_message,
    pack_key,
    prepare_pasting,
    unpack_key,
)

_T = TypeVar("_T")
_DEADLINE_S = 20.0
"""Time for a server to start, and for its neighbours to fetch from it."""
_ADDRESS, _OFFERS, _WHY = "address", "offers", "why"
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
        from jax.experimental import transfer  # It is not part of every build of JAX.

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
    """One end of the exchange that tries transfers, for a device of this process."""

    def __init__(self, server: TransferServer, rank: int, device: jax.Device) -> None:
        self._server, self._device, self._rank = server, device, rank
        self._offered: list[Any] = []
        self.address = server.address
        """The address from which the others fetch."""

    def offer(self, rank: int) -> int:  # noqa: ARG002 - all are offered the same
        """Lets a rank fetch this rank's pattern, once, under the number that is returned."""
        array, number = jax.device_put(_pattern(self._rank), self._device), self._server.number()
        self._offered.append(array)
        self._server.offer(number, [array])
        return number

    def fetch(self, rank: int, address: str, number: int) -> None:
        """Fetches the pattern of another rank. Raises an error if that fails or other bytes come."""
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


class Transfers:
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
        routes: RoutingTable,
        inbox: Inbox,
        held: HeldBytes,
        ranks: frozenset[int],
        eager_bytes: int,
        deliver: Deliver,
        failed: Failed,
    ) -> None:
        self._network, self._routes, self._inbox = network, routes, inbox
        self._held, self._deliver = held, deliver
        self._eager_bytes, self.ranks = eager_bytes, ranks
        self._server, self._first = server, server.number()
        self._offers: dict[int, _Offer] = {}
        self._unconfirmed: dict[int, list[int]] = {rank: [] for rank in ranks}
        """By peer, the numbers of its offers that were fetched and have not been confirmed to it."""
        self._unconfirmed_bytes = dict.fromkeys(ranks, 0)
        self._is_confirming_soon = False
        self._cuts: dict[tuple[EdgePlan, int], list[DeviceCut]] = {}
        self._specs: dict[tuple[EdgePlan, int], list[jax.ShapeDtypeStruct]] = {}
        self._pulling = Workers("rrfp-pull", _NUM_WAITING, failed)
        self._arrivals = Workers("rrfp-arrivals", 1, failed)
        """Waits for arrays that were delivered before their arrival; in order, as devices copy."""

    def open(self) -> None:
        """Takes offers and confirmations from now on, also those that came before."""
        self._network.subscribe(_OFFER, self._receive_offer)
        self._network.subscribe(_CONFIRMATION, lambda sender, header, frames: self._confirmed(header))

    def prepare(self, plan: EdgePlan) -> None:
        """Compiles the programs that cut and paste an edge's pieces on devices."""
        for receiver, slots in plan.outgoing.items():
            if self.takes(plan, receiver):
                self._cuts[plan, receiver] = [DeviceCut(plan, slot) for slot in slots]
        for sender, slots in plan.incoming.items():
            devices = [plan.leaves[slot.leaf].device(slot.device, is_source=False) for slot in slots]
            self._specs[plan, sender] = [
                jax.ShapeDtypeStruct(slot.shape, slot.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
                for slot, device in zip(slots, devices, strict=True)
            ]
        if not plan.is_target_on_host:
            prepare_pasting(plan)

    def close(self) -> None:
        self._network.unsubscribe(_OFFER)
        self._network.unsubscribe(_CONFIRMATION)
        self._pulling.close(_CLOSE_TIMEOUT_S)
        self._arrivals.close(_CLOSE_TIMEOUT_S)

    # -- on the compute thread ---------------------------------------------------------------------------------------

    def takes(self, plan: EdgePlan, receiver: int) -> bool:
        return receiver in self.ranks and plan.outgoing_bytes[receiver] > self._eager_bytes

    def offer(self, plan: EdgePlan, receiver: int, leaves: Sequence[Any]) -> Any:
        """Offers a part to its receiver; returns the offer, for ``announce``."""
        arrays = [cut(leaves[cut.slot.leaf]) for cut in self._cuts[plan, receiver]]
        offer = _Offer(self._server.number(), arrays, plan.outgoing_bytes[receiver])
        self._offers[offer.number] = offer
        self._server.offer(offer.number, arrays)
        return offer

    # -- on the event loop -------------------------------------------------------------------------------------------

    def announce(self, receiver: int, key: MessageKey, offer: _Offer) -> None:
        """Tells the receiver of an offer, and confirms those that were fetched from there."""
        self._held.add(sent=offer.num_bytes)
        header = {_KEY: pack_key(key), _NUMBER: offer.number, _CONFIRMED: self._taken_unconfirmed(receiver)}
        self._network.send(receiver, _OFFER, header)

    def _taken_unconfirmed(self, rank: int) -> list[int]:
        numbers, self._unconfirmed[rank], self._unconfirmed_bytes[rank] = self._unconfirmed[rank], [], 0
        return numbers

    def _receive_offer(self, sender: int, header: dict[str, Any], frames: list[memoryview]) -> None:  # noqa: ARG002
        self._confirmed(header)
        key, number = unpack_key(field(header, _KEY, bytes)), field(header, _NUMBER, int)
        plan = self._routes.plan_from(key.message, key.bucket, sender)
        if number < 0 or sender not in self.ranks or not plan.incoming[sender]:
            raise MalformedMessage(f"offer {number} of rank {sender} does not fit the message '{key.message}'")
        self._held.add(received=num_bytes_of(plan.incoming[sender]))
        self._pulling.submit(
            partial(self._fetch, plan, key, sender, number), partial(self._fetched, plan, key, sender, number)
        )

    def _fetched(self, plan: EdgePlan, key: MessageKey, sender: int, number: int, came: tuple[list[Any], Any]) -> None:
        num_bytes = num_bytes_of(plan.incoming[sender])
        self._held.add(received=-num_bytes)
        pieces, payload = came
        if plan.is_target_on_host:  # It was waited for before, on a thread of its own.
            self._confirm_later(sender, number, num_bytes)
        else:  # the sender must keep the arrays until they are here
            self._arrivals.submit(
                lambda: self._arrive(key, sender, pieces), lambda _: self._confirm_later(sender, number, num_bytes)
            )
        if len(plan.incoming) == 1:
            self._deliver(plan.target_unit, key.step, key.message, payload)
        else:
            self._inbox.add_part(plan, key, sender, pieces)

    def _confirm_later(self, sender: int, number: int, num_bytes: int) -> None:
        """Confirms a fetched offer: at once if many bytes await it, else with the next offer or after a moment."""
        self._unconfirmed[sender].append(number)
        self._unconfirmed_bytes[sender] += num_bytes
        if self._unconfirmed_bytes[sender] >= _CONFIRM_BYTES:
            self._network.send(sender, _CONFIRMATION, {_CONFIRMED: self._taken_unconfirmed(sender)})
        elif not self._is_confirming_soon:
            self._is_confirming_soon = True
            asyncio.get_running_loop().call_later(_CONFIRM_DELAY_S, self._confirm_all)

    def _confirm_all(self) -> None:
        self._is_confirming_soon = False
        for rank, numbers in self._unconfirmed.items():
            if numbers:
                self._network.send(rank, _CONFIRMATION, {_CONFIRMED: self._taken_unconfirmed(rank)})

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
        try:
            jax.block_until_ready([piece for piece in pieces if not piece.is_deleted()])
        except Exception as error:
            raise self._failure(key, sender, error) from error

    def _failure(self, key: MessageKey, sender: int, error: Exception) -> TransportFailed:
        return TransportFailed(
            f"rank {self._network.rank} could not fetch the {key.message} (step {key.step}) from rank {sender}: {error}"
        )


# -- the trial before the first step -----------------------------------------------------------------------------------


def why_untried(platform: str, *, encrypts: bool) -> str | None:
    """Returns why transfer servers are not even tried between devices of a platform; None if they are."""
    if platform == "cpu":
        return "devices share the host's memory, where they are the fastest"
    if encrypts:
        return "arrays are to be encrypted; cluster.encrypt_arrays false lets them go from device to device"
    return None


def try_transfers(
    gather: Callable[[str, Any], Mapping[int, Any]],
    own: int,
    neighbours: Iterable[int],
    make_probe: Callable[[], ServerProbe] | str,
    deadline_s: float = _DEADLINE_S,
) -> dict[tuple[int, int], str]:
    """Returns, by pair of neighbours, the lower one first, why transfer servers do not work between them; "" if they
    do.

    All ranks call this together. Waits for others as ``gather`` does, and for the trial no longer than the deadline.

    Args:
        gather: returns the plain data of all ranks, by rank, once all have brought theirs.
        make_probe: starts this rank's end; or the reason why there is none.
    """
    ranks, probe = sorted(neighbours), None
    said: dict[str, Any] = {"neighbours": ranks}
    if isinstance(make_probe, str):
        said[_WHY] = make_probe
    else:

        def start(make: Callable[[], ServerProbe]) -> tuple[ServerProbe, dict[int, int]]:
            made = make()
            return made, {rank: made.offer(rank) for rank in ranks}

        (started,) = _within(deadline_s, [partial(start, make_probe)])
        if isinstance(started, Exception):
            said[_WHY] = f"a transfer server could not be started: {_first_line(started)}"
        else:
            probe, said[_OFFERS] = started
            said[_ADDRESS] = probe.address
    everybody = gather("transfer servers", said)
    tried: dict[int, str] = {}
    if probe is not None:
        offers = {rank: everybody[rank] for rank in ranks if own in everybody[rank].get(_OFFERS, ())}
        fetches = [partial(probe.fetch, rank, told[_ADDRESS], told[_OFFERS][own]) for rank, told in offers.items()]
        for rank, outcome in zip(offers, _within(deadline_s, fetches), strict=True):
            tried[rank] = _first_line(outcome) if isinstance(outcome, Exception) else ""
    # if no rank has a server, every rank knows it from the first exchange, and the second is left out by all
    found = gather("transfers", [*tried.items()]) if any(_ADDRESS in each for each in everybody.values()) else {}
    whys = {(rank, other): why for rank, pairs in found.items() for other, why in pairs}
    pairs = {(min(a, b), max(a, b)) for a, each in everybody.items() for b in each["neighbours"]}
    return {pair: _why_not(pair, everybody, whys) for pair in sorted(pairs)}


def describe_transfers(found: Mapping[tuple[int, int], str]) -> str:
    """Returns in one line which way arrays take between which ranks, and why."""
    if not found:
        return "no arrays travel between processes"
    reasons: dict[str, list[tuple[int, int]]] = {}
    for pair, why in found.items():
        if why:
            reasons.setdefault(why, []).append(pair)
    if not reasons:
        return (
            "arrays between processes go from device to device (transfer, not encrypted), tried between all neighbours"
        )
    if all(found.values()):
        return f"arrays between processes go through sockets: {'; '.join(reasons)}"
    named = {why: ", ".join(name_ranks(pair) for pair in pairs[:4]) for why, pairs in reasons.items()}
    for why, pairs in reasons.items():
        if len(pairs) > 4:
            named[why] += f" and {len(pairs) - 4} more pairs"
    listed = "; ".join(f"between {pairs}: {why}" for why, pairs in named.items())
    return f"arrays between processes go from device to device (transfer, not encrypted), but through sockets {listed}"


def _why_not(pair: tuple[int, int], everybody: Mapping[int, Any], whys: Mapping[tuple[int, int], str]) -> str:
    for rank in pair:
        if why := everybody[rank].get(_WHY):
            return str(why) if all(_WHY in everybody[each] for each in pair) else f"rank {rank}: {why}"
    for rank, other in (pair, pair[::-1]):
        if why := whys.get((rank, other), "it did not try"):
            return f"rank {rank} could not fetch from rank {other}: {why}"
    return ""


def _within(deadline_s: float, calls: Sequence[Callable[[], _T]]) -> list[_T | Exception]:
    """Returns the result or error of each call, made on a thread of its own; TimeoutError for those that take
    longer."""
    outcomes: dict[int, _T | Exception] = {}
    left = threading.Semaphore(0)

    def run(index: int) -> None:
        try:
            outcomes[index] = calls[index]()
        except Exception as error:
            outcomes[index] = error
        left.release()

    for index in range(len(calls)):
        threading.Thread(target=run, args=(index,), name=f"rrfp-probe-{index}", daemon=True).start()
    until_s = time.monotonic() + deadline_s
    for _ in calls:
        if not left.acquire(timeout=max(0.0, until_s - time.monotonic())):
            break
    late = TimeoutError(f"no answer within {deadline_s:g} s")
    return [outcomes.get(index, late) for index in range(len(calls))]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
