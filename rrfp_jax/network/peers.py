"""The network among the ranks of a run: small messages and arrays, authenticated, watched, with bounded memory."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import zmq

from rrfp_jax.network.channel import MAX_TOPIC_BYTES, Channel
from rrfp_jax.network.descriptors import FILES_FOR_MESSAGES, FILES_OF_NETWORK, require_descriptors
from rrfp_jax.network.direct_link import DirectLink
from rrfp_jax.network.direct_record import MAX_FRAMES
from rrfp_jax.network.gate import Gate
from rrfp_jax.network.keys import RunKey
from rrfp_jax.network.lane_link import LaneLink
from rrfp_jax.network.lanes import LANE_BYTES, NUM_OWN_FILES, Lanes, OwnLink
from rrfp_jax.network.link import Link
from rrfp_jax.network.liveness import Liveness
from rrfp_jax.network.loop_thread import runs_here
from rrfp_jax.network.losses import Losses
from rrfp_jax.network.plain import MAX_HEADER_BYTES, pack
from rrfp_jax.network.roll_call import name_ranks
from rrfp_jax.network.settings import NetworkSettings, PeerAddress, Traffic, host_of
from rrfp_jax.network.sockets import QuietLog, rank_role
from rrfp_jax.network.topics import Handler, PackedHandler, Topics, unpacked
from rrfp_jax.network.unproven import Unproven
from rrfp_jax.network.watch_graph import watched

_LOG = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
_PAUSE_S = 0.01
_LANES, _DIRECT = "lanes", "direct"


class PeerNetwork:
    """This rank's place in the network. Listens from the start, so that its address can be given to the rendezvous.

    Args:
        rank, num_ranks: this process among all.
        key: the run's key; every peer proves its own, derived from it, before anything it says is read.
    """

    def __init__(self, *, rank: int, num_ranks: int, key: RunKey, settings: NetworkSettings | None = None) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} of {num_ranks}: ranks count from 0 to {num_ranks - 1}")
        self.rank, self.num_ranks = rank, num_ranks
        self._settings = settings or NetworkSettings()
        self._connections: frozenset[int] = frozenset()
        self._places: dict[int, tuple[str, str]] = {}
        self._hosts: dict[int, str] = {}
        self._channels: list[Channel] = []
        """For messages, for arrays, and for small messages directly."""
        self._lanes: Lanes | None = None
        self._direct: Lanes | None = None
        self._wanted: dict[str, frozenset[int]] = {_LANES: frozenset(), _DIRECT: frozenset()}
        self._topics = Topics(self._settings.high_water_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._losses = Losses(rank, num_ranks, self._drop)
        self._is_closed = False
        require_descriptors(FILES_OF_NETWORK, "the network of a run")
        self._context, self._unproven = zmq.Context(), Unproven(num_ranks)
        try:
            self._link = self._open(key)
        except (ValueError, zmq.ZMQError):
            self._context.destroy(linger=0)
            self._unproven.close()
            raise

    def _open(self, key: RunKey) -> Link:
        ranks, settings = range(self.num_ranks), self._settings
        roles = {key.pair(rank_role(r)).public: rank_role(r) for r in ranks if r != self.rank}
        gate = Gate(self._context, roles, QuietLog(_LOG))
        interface = settings.interface
        heartbeats, messages = (Link(self._context, self.rank, key, interface, self._unproven) for _ in range(2))
        self._liveness = Liveness(
            heartbeats,
            gate,
            messages,
            self._unproven,
            deadline_s=settings.silence_deadline_s,
            watchers=self._losses.watchers(),
        )
        self.address = PeerAddress(heartbeats=heartbeats.address, messages=messages.address)
        return messages

    @property
    def connections(self) -> frozenset[int]:
        """The ranks that messages can be exchanged with."""
        return self._connections

    @property
    def array_connections(self) -> int:
        """Over how many connections the arrays between two ranks travel."""
        return self._settings.array_connections

    # -- called from any thread --------------------------------------------------------------------------------------

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Give the messages of a topic to ``handler``, one per topic.

        Where the network has started before, messages that have come meanwhile are handed over first, in order.
        """
        self._topics.subscribe(topic.encode(), unpacked(handler))

    def subscribe_packed(self, topic: bytes, handler: PackedHandler) -> None:
        """Give the messages of a topic to ``handler``, with the header as :meth:`send_packed` took it."""
        self._topics.subscribe(topic, handler)

    def unsubscribe(self, topic: str | bytes) -> None:
        """Keep the messages of a topic for the next who subscribes; what waits for a handler is bounded in bytes."""
        self._topics.unsubscribe(topic.encode() if isinstance(topic, str) else topic)

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        addresses: Mapping[int, PeerAddress],
        *,
        connections: Iterable[int] | None = None,
        hosts: Sequence[str] | None = None,
        lost: Callable[[int, str], None],
        left: Callable[[int], None] | None = None,
        broken: Callable[[str], None] | None = None,
    ) -> None:
        """Connect to peers and begin to deliver messages on ``loop``.

        Args:
            addresses: every rank's address (this rank's own is skipped), as the rendezvous collected them.
            connections: the ranks to exchange messages with, each of which must name this one likewise; by default all,
                which is for few ranks. Heartbeats need some more connections, which are not named.
            hosts: each rank's host, for reports; by default as the addresses name them.
            lost: called on the loop, once per rank, with any rank of the run that died and how that was noticed; with
                this rank itself where its watch over the others has failed.
            left: called on the loop with a rank that closed its network in good order.
            broken: called on the loop, once, where ranks live that no longer hear each other, with a sentence that
                names them and the network between; by default ``lost`` is called with this rank and the sentence.

        Raises:
            ValueError: where addresses are missing or do not fit, or the system lets this process open too few files.
        """
        if self._loop is not None or self._is_closed:
            raise ValueError("the network was started or closed before: make a new one")
        all_others = frozenset(range(self.num_ranks)) - {self.rank}
        peers = all_others if connections is None else frozenset(connections) - {self.rank}
        if not peers <= all_others:
            raise ValueError(
                f"connections name {sorted(peers - all_others)}: ranks count from 0 to {self.num_ranks - 1}"
            )
        self._places = {rank: self._listening(rank, addresses) for rank in sorted(all_others)}
        self._hosts = {rank: host_of(addresses[rank]) for rank in self._places}
        self._losses.start(loop, lost, left, broken)
        self._loop = loop
        self._topics.start(loop)
        settings = self._settings
        hosts = hosts or [host_of(addresses.get(rank, self.address)) for rank in range(self.num_ranks)]
        self._lanes = self._own(
            _LANES,
            "arrays",
            settings.array_connections,
            lambda broken: LaneLink(
                self.rank, encrypts=settings.encrypt_arrays, keep_bytes=settings.high_water_bytes, broken=broken
            ),
        )
        self._direct = self._own(
            _DIRECT,
            "messages",
            1,
            lambda broken: DirectLink(loop, encrypts=settings.encrypt_arrays, broken=broken),
        )
        messages = Channel(self._link, loop, self._topics.deliver, settings.high_water_bytes)
        self._channels = [messages, self._lanes.channel, self._direct.channel]
        self._liveness.begin(loop, hosts)
        self._connect(peers, watched(self.rank, self.num_ranks))
        for channel in self._channels:
            loop.call_soon_threadsafe(channel.open)

    def connect(self, ranks: Iterable[int]) -> None:
        """Exchange messages with more ranks, each of which must name this one likewise; from any thread.

        Messages may be sent at once, and travel when both ranks have connected.

        Raises:
            ValueError: where the system lets this process open too few files.
        """
        self._started()
        self._connect(frozenset(ranks) - {self.rank})

    def _connect(self, ranks: frozenset[int], only_watched: frozenset[int] = frozenset()) -> None:
        new = ranks - self._connections
        only_watched -= ranks
        num_files = 2 * len(only_watched) + FILES_FOR_MESSAGES * len(new)
        require_descriptors(num_files, f"connections to {len(new)} of {self.num_ranks} ranks")
        self._connections |= new
        self._liveness.follow({r: self._places[r] for r in new} | {r: self._places[r][:1] for r in only_watched})
        loop = self._started()
        if runs_here(loop):
            self._add(new)
        else:
            loop.call_soon_threadsafe(self._add, new)

    def _add(self, ranks: frozenset[int]) -> None:
        for rank in sorted(ranks - self._losses.gone):
            self._channels[0].add(rank, self._places[rank][1])

    def _own(
        self,
        topic: str,
        purpose: str,
        num_connections: int,
        make_link: Callable[[Callable[[int, str], None]], OwnLink],
    ) -> Lanes:
        """Connections beside ZeroMQ's, which are agreed on over those."""
        own = Lanes(
            purpose,
            self.rank,
            host_of(self.address),
            self._settings,
            num_connections=num_connections,
            make_link=make_link,
            loop=self._started(),
            deliver=self._topics.deliver,
            tell=lambda rank, header: self.send(rank, topic, header),
            suspect=self._liveness.suspect,
            failed=self._losses.lose,
        )
        self.subscribe(topic, lambda rank, header, _: own.receive(rank, header, self._hosts[rank]))
        return own

    def open_lanes(self, ranks: Iterable[int]) -> None:
        """Have arrays to and from these ranks take connections of their own; from any thread, also again.

        It is enough that one of two ranks calls this; what is sent before both are connected waits.

        Raises:
            ValueError: where the system lets this process open too few files.
        """
        self._want(_LANES, ranks, "arrays to and from", self._settings.array_connections)

    def open_direct(self, ranks: Iterable[int]) -> None:
        """Have small messages of :meth:`send_arrays` take a connection that the event loop itself serves.

        As :meth:`open_lanes` otherwise.
        """
        self._want(_DIRECT, ranks, "messages to and from", 1)

    def _want(self, topic: str, ranks: Iterable[int], what: str, num_connections: int) -> None:
        new = frozenset(ranks) - self._wanted[topic] - {self.rank}
        if not new:
            return
        self._wanted[topic] |= new
        require_descriptors(NUM_OWN_FILES + num_connections * len(new), f"{what} {len(new)} ranks")
        self.connect(new)
        own = self._lanes if topic == _LANES else self._direct
        assert own is not None

        def want() -> None:
            for rank in sorted(new - self._losses.gone):
                own.want(rank)

        self.call_soon(want)

    def _listening(self, rank: int, addresses: Mapping[int, PeerAddress]) -> tuple[str, str]:
        address = addresses.get(rank)
        if address is None:
            raise ValueError(f"no address for rank {rank}: give those of all {self.num_ranks} ranks")
        return address.heartbeats, address.messages

    def wait_connected(self, timeout_s: float) -> None:
        """Wait, on another thread than the loop's, until every connection stands.

        Raises:
            ConnectionError: where a peer is lost or leaves before, or the time is over.
        """
        self._losses.wait_connected(timeout_s)

    def send_threadsafe(
        self,
        rank: int,
        topic: str,
        header: Mapping[str, Any],
        frames: Sequence[Any] = (),
        on_confirmed: Callable[[], None] | None = None,
    ) -> None:
        """:meth:`send` from a thread other than the loop's."""
        self._started().call_soon_threadsafe(lambda: self.send(rank, topic, header, frames, on_confirmed))

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have the event loop run something, from a thread other than its own."""
        self._started().call_soon_threadsafe(call)

    def on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call on the event loop: now where that runs here, otherwise soon; those of a thread in order."""
        loop = self._started()
        if runs_here(loop):
            call(*arguments)
        else:
            loop.call_soon_threadsafe(call, *arguments)

    def send_at_once(
        self,
        rank: int,
        topic: bytes,
        header: bytes,
        frames: Sequence[Any],
        on_confirmed: Callable[[], None] | None = None,
    ) -> bool:
        """:meth:`send_arrays` from any thread, for small data that have a direct connection.

        Returns whether that is so: otherwise nothing was sent, and the loop has to.
        """
        if self._direct is None or not self._takes_directly(rank, frames) or len(header) > MAX_HEADER_BYTES:
            return False
        self._direct.channel.send(rank, topic, header, frames, on_confirmed)
        return True

    def accused(self, accuser: int, reason: str) -> None:
        """A message says that ``accuser`` takes this rank for lost: all are told that it was the network that broke."""
        self._liveness.accused(accuser, reason)

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is under way for up to ``linger_s``, say farewell, and free sockets, threads and ports.

        May be called from any thread, and more than once; on the loop itself, what waits for room at a peer is dropped,
        and so are arrays that have not arrived.
        """
        if self._is_closed:
            return
        loop, done = self._loop, threading.Event()
        if loop is None or not loop.is_running() or runs_here(loop):
            self._shut(linger_s, done)
        else:
            loop.call_soon_threadsafe(self._shut_soon, linger_s, done)
        if not done.wait(_CLOSE_TIMEOUT_S + linger_s):
            _LOG.warning("the event loop is busy: the network of rank %d ends with its process", self.rank)
            return
        self._liveness.stop(_CLOSE_TIMEOUT_S)
        for own in filter(None, (self._lanes, self._direct)):
            own.join()  # after the farewell, so that nobody takes it for a connection that broke
        self._context.term()
        self._unproven.close()

    # -- on the event loop -------------------------------------------------------------------------------------------

    def send(
        self,
        rank: int,
        topic: str,
        header: Mapping[str, Any],
        frames: Sequence[Any] = (),
        on_confirmed: Callable[[], None] | None = None,
    ) -> None:
        """Send a message; returns at once. What goes to a rank that is gone is dropped.

        Messages to a rank arrive in order.

        Args:
            topic: 1 to 255 bytes of text.
            header: a dict of plain data.
            frames: contiguous buffers, which must not change until the message is confirmed.
            on_confirmed: called on the loop once the peer has received the message.
        """
        self.send_packed(rank, topic.encode(), pack(header), frames, on_confirmed)

    def send_apart(self, rank: int, topic: str, header: Mapping[str, Any], frames: Sequence[Any] = ()) -> None:
        """:meth:`send` for what keeps no place among other messages: it takes the quickest way, as arrays do."""
        self.send_arrays(rank, topic.encode(), pack(header), frames)

    def send_packed(
        self,
        rank: int,
        topic: bytes,
        header: bytes,
        frames: Sequence[Any] = (),
        on_confirmed: Callable[[], None] | None = None,
    ) -> None:
        """:meth:`send` for what goes often: the header is bytes of the sender's own making, up to 1 MiB."""
        self._check(rank, topic, header)
        self._channels[0].send(rank, topic, header, frames, on_confirmed)

    def _check(self, rank: int, topic: bytes, header: bytes) -> None:
        """Raise ValueError on what cannot be sent."""
        if not self._channels:
            self._started()
        if rank not in self._connections:
            raise ValueError(
                f"rank {self.rank} of {self.num_ranks} cannot send to rank {rank}: it has connections to "
                f"{name_ranks(self._connections)}; name others when the network is started, on both sides"
            )
        if not 0 < len(topic) <= MAX_TOPIC_BYTES:
            name = topic[:40].decode(errors="replace")
            raise ValueError(f"the topic '{name}' has {len(topic)} bytes: give 1 to {MAX_TOPIC_BYTES}")
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"a header has {len(header)} bytes, at most {MAX_HEADER_BYTES} travel: use frames")

    def send_if_room(self, rank: int, topic: bytes, header: bytes) -> None:
        """:meth:`send_packed` for what may be lost: it is dropped where it would have to wait for room at the peer.

        From any thread.
        """
        self._check(rank, topic, header)
        if self._direct is not None and rank in self._direct:
            self._direct.channel.send_if_room(rank, topic, header)
        else:
            self.on_loop(self._channels[0].send_if_room, rank, topic, header)

    def send_arrays(
        self,
        rank: int,
        topic: bytes,
        header: bytes,
        frames: Sequence[Any],
        on_confirmed: Callable[[], None] | None = None,
    ) -> None:
        """:meth:`send_packed` for data, which take connections of their own where those were opened.

        Large ones take those of :meth:`open_lanes`, small ones that of :meth:`open_direct`. There, other messages
        neither wait for it nor keep their place before or behind it.
        """
        if self.send_at_once(rank, topic, header, frames, on_confirmed):
            return
        if self._lanes is not None and rank in self._lanes and _is_large(frames):
            self._lanes.channel.send(rank, topic, header, frames, on_confirmed)
        else:
            self.send_packed(rank, topic, header, frames, on_confirmed)

    def _takes_directly(self, rank: int, frames: Sequence[Any]) -> bool:
        has_own = self._direct is not None and rank in self._direct
        return has_own and len(frames) <= MAX_FRAMES and not _is_large(frames)

    def traffic(self) -> Traffic:
        """What was sent and what is held now."""
        held = [channel.held_bytes() for channel in self._channels]
        return Traffic(
            num_sent=sum(channel.num_sent for channel in self._channels),
            num_received=sum(channel.num_received for channel in self._channels),
            num_dropped=self._topics.num_dropped + sum(channel.num_dropped for channel in self._channels),
            unconfirmed_bytes=sum(unconfirmed for unconfirmed, _ in held),
            waiting_bytes=sum(waiting for _, waiting in held),
            peak_bytes=max((channel.peak_bytes for channel in self._channels), default=0),
        )

    def _drop(self, rank: int, has_left: bool) -> None:
        for channel in self._channels:
            channel.drop(rank, has_left=has_left)

    def _shut_soon(self, linger_s: float, done: threading.Event) -> None:
        """Close once nothing waits for room at a peer, and all arrays have arrived."""
        own = [held for channel in self._channels[1:] for held in channel.held_bytes()]
        if linger_s > 0 and (self.traffic().waiting_bytes or any(own)):
            self._started().call_later(_PAUSE_S, self._shut_soon, linger_s - _PAUSE_S, done)
        else:
            self._shut(max(linger_s, 0.0), done)

    def _shut(self, linger_s: float, done: threading.Event) -> None:
        self._is_closed = True
        self._losses.close()
        if not self._channels:
            self._link.close(0)
        else:
            self._channels[0].close(linger_s)
        for own in filter(None, (self._lanes, self._direct)):
            own.close(linger_s)
        done.set()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise ValueError(f"the network of rank {self.rank} has not started: call start first")
        return self._loop


def _is_large(frames: Sequence[Any]) -> bool:
    return bool(frames) and sum(memoryview(frame).nbytes for frame in frames) >= LANE_BYTES
