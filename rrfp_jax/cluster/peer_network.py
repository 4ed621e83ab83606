"""The network among the ranks of a run: small messages and arrays, authenticated, watched, with bounded memory."""

import asyncio
import logging
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import zmq

from rrfp_jax.cluster._array_link import ArrayLink
from rrfp_jax.cluster._channel import MAX_TOPIC_BYTES, Channel, Handler, PackedHandler, Topics
from rrfp_jax.cluster._direct_link import MAX_FRAMES, DirectLink
from rrfp_jax.cluster._liveness import Liveness
from rrfp_jax.cluster._private_connections import NUM_LISTENERS, PrivateConnections
from rrfp_jax.cluster._zmq_link import ZmqLink
from rrfp_jax.cluster._zmq_sockets import Gate, UnprovenConnections, rank_role
from rrfp_jax.cluster.config import ARRAY_CONNECTIONS, LOOPBACK, ClusterConfig, PeerAddress, host_of
from rrfp_jax.cluster.failure_detector import patience_s, watched
from rrfp_jax.cluster.host import FILES_FOR_MESSAGES, FILES_OF_NETWORK, require_descriptors
from rrfp_jax.cluster.keys import RunKey
from rrfp_jax.cluster.loop_thread import runs_here
from rrfp_jax.cluster.rendezvous import name_ranks
from rrfp_jax.cluster.wire import MAX_HEADER_BYTES, QuietLog, pack_plain

_LOG = logging.getLogger(__name__)

LARGE_ARRAY_BYTES = 1 << 18
"""Arrays of at least this many bytes travel over array connections. Smaller ones take the connections for messages: the
thread that has them sends them itself, where a thread of an array connection would first have to wake up, on a core
that computes only after some milliseconds."""
_CLOSE_TIMEOUT_S = 5.0
_PAUSE_S = 0.01


class PeerNetwork:
    """This rank's place in the network. It listens from the start, so its address can be given to the rendezvous.

    There are two ways to send. Both return at once, and drop messages to a rank that is gone:

    * :meth:`send`, on the event loop: control messages, each a dict and perhaps frames, in order;
    * :meth:`send_arrays`, on any thread: data of any size, by the quickest way, in order among large and among small
      data; perhaps hints, which are dropped where they would have to wait.

    Args:
        rank, num_ranks: this process among all.
        key: the run's key; every peer proves its own, derived from it, before anything it says is read.
        config: the same on all ranks, but for the interface to listen on, by default loopback.
        high_water_bytes: largest number of unconfirmed bytes per peer before further messages wait at the sender, and
            largest number that is kept for topics without a handler.
        number: the number of this process of the rank, from 0, where an earlier one was lost.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        key: RunKey,
        config: ClusterConfig | None = None,
        high_water_bytes: int = 256 << 20,
        array_connections: int = ARRAY_CONNECTIONS,
        number: int = 0,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} of {num_ranks}: ranks count from 0 to {num_ranks - 1}")
        if high_water_bytes <= 0:
            raise ValueError(f"high_water_bytes is {high_water_bytes}: it must be positive")
        self.rank, self.num_ranks = rank, num_ranks
        self._config, self._high_water = config or ClusterConfig(), high_water_bytes
        self.array_connections = array_connections
        """Number of connections over which the arrays between two ranks travel."""
        self.connections: frozenset[int] = frozenset()
        """The ranks that messages can be exchanged with."""
        self._places: dict[int, tuple[str, str]] = {}
        """Addresses of every other rank's heartbeats and messages."""
        self._channels: list[Channel] = []
        """Channels for messages in order, for arrays, and for small data directly; empty before the start."""
        self._arrays: PrivateConnections | None = None
        self._direct: PrivateConnections | None = None
        self._topics = Topics(high_water_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        require_descriptors(FILES_OF_NETWORK, "the network of a run")
        self._context, self._unproven = zmq.Context(), UnprovenConnections(num_ranks)
        try:
            # The gate comes before anything listens: without one, ZeroMQ would admit any key.
            roles = {key.pair(rank_role(r)).public: rank_role(r) for r in range(num_ranks) if r != rank}
            gate = Gate(self._context, roles, QuietLog(_LOG))
            interface = self._config.interface or LOOPBACK
            heartbeats, self._link = (
                ZmqLink(self._context, rank, key, interface, self._unproven, number=number) for _ in range(2)
            )
            self._liveness = Liveness(
                heartbeats, gate, self._link, self._unproven, deadline_s=self._config.silence_deadline_s
            )
        except (ValueError, zmq.ZMQError):
            self._context.destroy(linger=0)
            self._unproven.close()
            raise
        # Called on any thread but the loop's, and the others on any; see :class:`Liveness`.
        self.wait_connected, self.suspected_by = self._liveness.wait_connected, self._liveness.suspected_by
        self.leave_judgement = self._liveness.leave_judgement
        self.address = PeerAddress(heartbeats=heartbeats.address, messages=self._link.address)

    # -- starting and closing: on any thread -------------------------------------------------------------------------

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
        absent: Iterable[int] = (),
        numbers: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Connects to peers and begins to deliver messages on ``loop``.

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
            absent: ranks that are lost already.
            numbers: numbers of the ranks' processes, by rank, where they are not 0.

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
        hosts_of_ranks = {self.rank: host_of(self.address)}
        for rank in sorted(all_others):
            if (address := addresses.get(rank)) is None:
                raise ValueError(f"no address for rank {rank}: give those of all {self.num_ranks} ranks")
            self._places[rank] = address.heartbeats, address.messages
            hosts_of_ranks[rank] = host_of(address)
        # The topics come before anything that may deliver: the liveness thread runs already.
        self._loop = self._topics.loop = loop
        encrypts, high_water = self._config.encrypt_arrays, self._high_water

        def private(topic: str, purpose: str, link: ArrayLink | DirectLink, num_connections: int) -> PrivateConnections:
            made = PrivateConnections(
                purpose,
                self.rank,
                hosts_of_ranks,
                link,
                Channel(link, loop, self._topics, high_water),
                loop=loop,
                num_connections=num_connections,
                encrypts=encrypts,
                tell=lambda rank, header: self.send(rank, topic, header),
                liveness=self._liveness,
            )
            self.subscribe(topic, made.receive)
            return made

        arrays = ArrayLink(encrypts=encrypts, keep_bytes=high_water)
        direct = DirectLink(loop, encrypts=encrypts)
        self._arrays = private("lanes", "arrays", arrays, self.array_connections)
        self._direct = private("direct", "messages", direct, 1)
        messages = Channel(self._link, loop, self._topics, high_water)
        self._channels = [messages, self._arrays.channel, self._direct.channel]
        # The failure detector must know all hosts before the first connection is watched.
        named = hosts or [hosts_of_ranks[rank] for rank in range(self.num_ranks)]
        watches: dict[str, Any] = {"lost": lost, "left": left, "broken": broken}
        self._liveness.begin(loop, named, drop=self._drop, **watches, absent=absent, numbers=numbers)
        self._link.numbers |= numbers
        only_watched = watched(self.rank, self.num_ranks) - peers - {*absent}
        self.connect(peers, only_watched=only_watched)
        for channel in self._channels:
            loop.call_soon_threadsafe(channel.open)

    def connect(self, ranks: Iterable[int], *, only_watched: frozenset[int] = frozenset()) -> None:
        """Begins to exchange messages with more ranks, each of which must name this one likewise.

        Messages may be sent at once, and travel when both ranks have connected.

        Args:
            only_watched: ranks that only heartbeats are exchanged with.

        Raises:
            ValueError: where the system lets this process open too few files.
        """
        self._started()
        new = frozenset(ranks) - {self.rank} - self.connections
        num_files = 2 * len(only_watched) + FILES_FOR_MESSAGES * len(new)
        require_descriptors(num_files, f"connections to {len(new)} of {self.num_ranks} ranks")
        self.connections |= new
        self._liveness.follow({r: self._places[r] for r in new} | {r: self._places[r][:1] for r in only_watched})
        for rank in sorted(new):
            self.on_loop(self._channels[0].add, rank, self._places[rank][1])

    def take_up(self, rank: int, number: int, address: PeerAddress, then: Callable[[], None]) -> None:
        """Exchanges messages with the process of this number of a rank whose process before was lost.

        The same connections are opened as to that one. ``then`` is called on the event loop once messages may be sent.
        """
        assert self._arrays is not None
        assert self._direct is not None
        arrays, direct = self._arrays, self._direct
        opened = [each for each in (arrays, direct) if rank in each.wanted]

        def taken_up() -> None:
            self._places[rank] = address.heartbeats, address.messages
            self.connections -= {rank}
            self._channels[0].take_up(rank, number)
            for private in (arrays, direct):
                private.take_up(rank, number, host_of(address))
            self.connect([rank])
            for private in opened:
                self._open(private, [rank])
            then()

        self._liveness.take_up(rank, number, taken_up)

    def open_array_connections(self, ranks: Iterable[int]) -> None:
        """Has large arrays to and from these ranks take connections of their own; also again.

        It is enough that one of two ranks calls this; arrays that are sent before both are connected wait.

        Raises:
            ValueError: where the system lets this process open too few files.
        """
        self._open(self._arrays, ranks)

    def open_direct_connections(self, ranks: Iterable[int]) -> None:
        """Has small data to and from these ranks take a connection that the event loop itself serves.

        It is used as :meth:`open_array_connections` is.
        """
        self._open(self._direct, ranks)

    def _open(self, private: PrivateConnections | None, ranks: Iterable[int]) -> None:
        self._started()
        assert private is not None
        if new := frozenset(ranks) - private.wanted - {self.rank}:
            # Noted first, so that a second call asks for the others alone.
            private.wanted |= new
            num_files = NUM_LISTENERS + private.num_connections * len(new)
            require_descriptors(num_files, f"{private.purpose} to and from {len(new)} ranks")
            self.connect(new)
            self.call_soon(partial(private.want, new))

    def close(self, linger_s: float = 1.0) -> None:
        """Sends messages under way for up to ``linger_s``, says farewell, and frees sockets, threads and ports.

        May be called more than once. On the loop itself, messages that wait behind the high-water mark are dropped, and
        so are arrays that have not arrived.
        """
        if self._is_closed:
            return
        loop, done = self._loop, threading.Event()
        # The channels belong to the loop. On the loop itself nothing can be awaited, and without one nothing is sent.
        if loop is None or not loop.is_running() or runs_here(loop):
            self._shut(linger_s, done, waits=False)
        else:
            loop.call_soon_threadsafe(self._shut, linger_s, done)
        if not done.wait(_CLOSE_TIMEOUT_S + linger_s):
            _LOG.warning("the event loop is busy: the network of rank %d ends with its process", self.rank)
            return
        self._liveness.stop(_CLOSE_TIMEOUT_S)
        for private in filter(None, (self._arrays, self._direct)):
            private.link.join()  # after the farewell, so that nobody takes it for a connection that broke
        self._context.term()
        self._unproven.close()

    def _shut(self, linger_s: float, done: threading.Event, *, waits: bool = True) -> None:
        """Closes, with ``waits`` once nothing waits behind the high-water mark and all arrays have arrived."""
        # ZeroMQ lingers by itself; private connections do not, so their messages are awaited here.
        held = [channel.held_bytes() for channel in self._channels]
        is_busy = any(waiting for _, waiting in held) or any(unconfirmed for unconfirmed, _ in held[1:])
        if waits and linger_s > 0 and is_busy:
            self._started().call_later(_PAUSE_S, self._shut, linger_s - _PAUSE_S, done)
            return
        linger_s = max(linger_s, 0.0)
        self._is_closed = self._liveness.is_mute = True
        if not self._channels:
            self._link.close(0)
        else:
            self._channels[0].close(linger_s)
        for private in filter(None, (self._arrays, self._direct)):
            private.close(linger_s)
        done.set()

    # -- messages: on any thread -------------------------------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """Seconds of standstill and of silence after which a silent rank is asked."""
        return patience_s(self._config.silence_deadline_s)

    def tell_activity(self, activity: str, standstill: tuple[str, Container[int]] | None) -> None:
        """Says what this rank does, and what it has been waiting for, much longer than usual, with the ranks that may
        hold it up (:mod:`rrfp_jax.cluster.failure_detector`); None: it goes on."""
        self._liveness.tell_activity(activity, standstill)

    def activities(self) -> dict[int, str]:
        """Returns what the ranks whose heartbeats come here last said that they do."""
        return dict(self._liveness.activities)

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Gives the messages of a topic to ``handler``, one per topic.

        Messages that have come before are handed over first, in order.
        """
        self._topics.subscribe(topic.encode(), handler, is_packed=False)

    def subscribe_packed(self, topic: bytes, handler: PackedHandler) -> None:
        """Gives the messages of a topic to ``handler``, with the header as :meth:`send_arrays` took it."""
        self._topics.subscribe(topic, handler, is_packed=True)

    def unsubscribe(self, topic: str | bytes) -> None:
        """Keeps the messages of a topic for the next handler; the bytes that wait for one are bounded."""
        self._topics.handlers.pop(topic.encode() if isinstance(topic, str) else topic, None)

    def in_epoch(self, topic: str) -> str:
        """Returns the name of a topic in the present epoch (:mod:`rrfp_jax.core.membership`). Its messages reach those
        alone who have come to the same epoch: those of an earlier one are dropped, those of a later one are kept."""
        return f"{topic}@{self._topics.epoch}"

    def begin_epoch(self, epoch: int) -> None:
        """Comes to a later epoch; on the event loop."""
        self._topics.begin_epoch(epoch)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Has the event loop make a call in a later turn."""
        self._started().call_soon_threadsafe(call)

    def on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Makes a call on the event loop: now where that runs here, otherwise soon; calls of a thread in order."""
        loop = self._started()
        if runs_here(loop):
            call(*arguments)
        else:
            loop.call_soon_threadsafe(call, *arguments)

    def send_arrays(
        self,
        rank: int,
        topic: bytes,
        header: bytes,
        frames: Sequence[Any] = (),
        on_confirmed: Callable[[], None] | None = None,
        *,
        may_drop: bool = False,
    ) -> None:
        """Sends data, whose header is bytes of the sender's own making, up to 1 MiB.

        Large data take the connections of :meth:`open_array_connections`, small data that of
        :meth:`open_direct_connections`; other messages neither wait for them there nor keep their place before or
        behind them. Where none was opened, data travel in order with the messages of :meth:`send`.

        Args:
            may_drop: whether the message may be lost: it is dropped where it would have to wait behind the high-water
                mark.
        """
        is_large = bool(frames) and sum(memoryview(frame).nbytes for frame in frames) >= LARGE_ARRAY_BYTES
        is_plain = not is_large and len(frames) <= MAX_FRAMES and len(header) <= MAX_HEADER_BYTES
        # From this thread, without a turn of the loop. A rank that is seen among the peers can be sent to: it is added
        # there last.
        if is_plain and self._direct is not None and rank in self._direct.channel.peers:
            self._direct.channel.send(rank, topic, header, frames, on_confirmed, may_drop=may_drop)
            return
        self._check(rank, topic, header)
        is_apart = is_large and self._arrays is not None and rank in self._arrays.channel.peers
        channel = self._channels[1 if is_apart else 0]
        self.on_loop(partial(channel.send, rank, topic, header, frames, on_confirmed, may_drop=may_drop))

    # -- on the event loop -------------------------------------------------------------------------------------------

    def send(
        self,
        rank: int,
        topic: str,
        header: Mapping[str, Any],
        frames: Sequence[Any] = (),
        on_confirmed: Callable[[], None] | None = None,
    ) -> None:
        """Sends a message. Messages of this method to a rank arrive in order.

        Args:
            topic: 1 to 255 bytes of text.
            header: a dict of plain data.
            frames: contiguous buffers, which must not change until the message is confirmed.
            on_confirmed: called on the loop once the peer has received the message.
        """
        name, packed = topic.encode(), pack_plain(header)
        self._check(rank, name, packed)
        self._channels[0].send(rank, name, packed, frames, on_confirmed)

    def _check(self, rank: int, topic: bytes, header: bytes) -> None:
        """Raises ValueError for a message that cannot be sent."""
        self._started()
        if rank not in self.connections:
            raise ValueError(
                f"rank {self.rank} of {self.num_ranks} cannot send to rank {rank}: it has connections to "
                f"{name_ranks(self.connections)}; name others when the network is started, on both sides"
            )
        if not 0 < len(topic) <= MAX_TOPIC_BYTES:
            name = topic[:40].decode(errors="replace")
            raise ValueError(f"the topic '{name}' has {len(topic)} bytes: give 1 to {MAX_TOPIC_BYTES}")
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"a header has {len(header)} bytes, at most {MAX_HEADER_BYTES} travel: use frames")

    def _drop(self, rank: int, has_left: bool) -> None:
        for channel in self._channels:
            channel.drop(rank, has_left=has_left)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise ValueError(f"the network of rank {self.rank} has not started: call start first")
        return self._loop
