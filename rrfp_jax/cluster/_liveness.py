"""Liveness: a thread that sends this rank's heartbeat, hears the others', and watches their connections.

It has connections of its own, so a heartbeat never queues behind an array. They go to the neighbours in the graph of
watchers and to all ranks with which messages are exchanged. A rank tells its neighbours at once of anything that it
notices of another, and they tell theirs (:class:`~rrfp_jax.cluster.failure_detector.FailureDetector` says what all
conclude). A connection that closes is tried again at once: where the port then refuses, the process is gone; where it
is open, only the connection broke. Silence counts from the deadline on. A rank that ends in good order says farewell
first.

The heartbeat comes from this thread, not from the event loop, and tells how long the loop has not run: a loop that is
busy for less than the deadline is no reason to give a rank up, a loop that hangs is.
"""

import logging
import math
import os
import threading
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import zmq

from rrfp_jax.cluster._admission import LISTENER_EVENTS, Gate, UnprovenConnections
from rrfp_jax.cluster._peer_loss import PeerLossCallbacks
from rrfp_jax.cluster._zmq_link import ZmqLink
from rrfp_jax.cluster._zmq_sockets import ConnectionEvent, QuietLog, connection_events, monitor_of
from rrfp_jax.cluster.failure_detector import Broken, FailureDetector, HeartbeatClock, Left, Lost, Suspicion
from rrfp_jax.cluster.wire import MalformedMessage, field, pack_plain, unpack_plain

_LOG = logging.getLogger(__name__)
FAREWELL_LINGER_S = 1.0
_SOON_S = 0.005
_FAREWELL_S = 0.5
"""Seconds that a farewell may still be on its way after a connection of the same peer has closed, and that a closed
connection may take to be made anew."""
_REFUSAL_S = 1.0
"""Seconds that a peer may refuse connections at the start; it has been listening since before the rendezvous."""
_ANSWER_S = 0.3
"""Seconds that a suspected rank has to answer, or a heartbeat's interval where that is less."""


class Liveness:
    """One rank's heartbeat and its view of the others.

    Args:
        link: carries heartbeats alone; closed here.
        gate: answered by this thread, for all connections of its context.
        data: carries messages; its connections are watched too.
        unproven: the connections that have come to both links.
        deadline_s: see :class:`~rrfp_jax.cluster.failure_detector.HeartbeatClock`.
        callbacks: told of every conclusion, on this thread.
    """

    def __init__(
        self,
        link: ZmqLink,
        gate: Gate,
        data: ZmqLink,
        unproven: UnprovenConnections,
        *,
        deadline_s: float,
        callbacks: PeerLossCallbacks,
    ) -> None:
        self._rank, self._link, self._gate, self._callbacks = link.rank, link, gate, callbacks
        self._deadline_s = deadline_s
        self._monitor, self._data_monitor = monitor_of(link.inbound), monitor_of(data.inbound)
        self._unproven = unproven
        self._listener_monitors = [monitor_of(each.outbound, LISTENER_EVENTS) for each in (link, data)]
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()
        self._garbage = QuietLog(_LOG)
        self._commands: deque[Callable[[], None]] = deque()
        self._loop: AbstractEventLoop | None = None
        self._loop_asked_s: float | None = None
        """When the event loop was asked to answer; None once it has."""
        self._clock = HeartbeatClock((), deadline_s, time.monotonic())
        self._detector = FailureDetector(self._rank, [""] * (self._rank + 1), 0.0)
        self._next_beat_s = 0.0
        self._rank_at: dict[str, int] = {}
        self._watched: set[int] = set()
        self._listeners: set[int] = set()
        self._awaited: set[str] = set()
        """Addresses to which connections do not stand yet."""
        self._unheard: set[int] = set()
        self._is_connected = False
        self._early: set[str] = set()
        """Addresses whose connections stood before this thread was told of them."""
        self._closed: dict[int, float] = {}
        """Ranks whose heartbeats' connection has closed and was not made anew yet, and until when that is awaited."""
        self._silent_data: dict[int, float] = {}
        """Ranks from which messages no longer come, and until when a farewell is awaited."""
        self._running = True
        self._thread = threading.Thread(target=self._run, name="rrfp-liveness", daemon=True)
        self._thread.start()

    # -- called from any thread --------------------------------------------------------------------------------------

    def begin(self, loop: AbstractEventLoop, hosts: Sequence[str]) -> None:
        """Watches this rank's own event loop from now on; ``hosts`` are those of all ranks."""

        def begin() -> None:
            self._loop = loop
            self._clock = HeartbeatClock((), self._deadline_s, time.monotonic())
            self._detector = FailureDetector(self._rank, hosts, min(_ANSWER_S, self._clock.interval_s))

        self._command(begin)

    def follow(self, places: Mapping[int, tuple[str, ...]]) -> None:
        """Expects more ranks: the address of each one's heartbeats, then that of its messages, if any."""
        self._command(lambda: self._follow(places))

    def suspected_by(self, reporter: int, reason: str) -> None:
        """Takes a message by which ``reporter`` takes this rank for lost: heartbeats with that may not get through."""
        self._command(lambda: self._suspect(Suspicion(reporter, self._rank, reason)))

    def connection_ended(self, rank: int) -> None:
        """Notes that a connection that is not watched here has ended: the rank may leave, be gone, or be cut off."""
        self._command(lambda: self._await_farewell(rank))

    def stop(self, timeout_s: float) -> None:
        """Says farewell and ends the thread; the gate is closed with it."""

        def end() -> None:
            self._beat(leaves=True)
            self._running = False

        self._command(end)
        self._thread.join(timeout_s)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with self._waking:
            if self._running:
                os.eventfd_write(self._wake, 1)

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        links = (self._link.inbound, self._link.outbound)
        for readable in (self._gate.socket, *links, self._monitor, self._data_monitor, *self._listener_monitors):
            poller.register(readable, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while self._running:
                poller.poll(1 + round(self._pause_s() * 1000))
                for monitor in self._listener_monitors:
                    self._unproven.heed(monitor)
                # The clock first: whatever is concluded below must not hold a pause of this process against others.
                self._clock.advance(time.monotonic())
                self._gate.answer()
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                while self._commands:
                    self._commands.popleft()()
                self._look()
        except Exception as error:
            _LOG.exception("the liveness thread of rank %d failed", self._rank)
            self._callbacks.lost(self._rank, f"its own watch over the others failed: {error!r}")
        finally:
            self._link.close(FAREWELL_LINGER_S)
            for socket in (self._monitor, self._data_monitor, *self._listener_monitors):
                socket.close()
            self._gate.close()
            with self._waking:  # nobody may write to a descriptor that is closed, and perhaps another's by now
                self._running = False
                os.close(self._wake)

    def _pause_s(self) -> float:
        pauses = [self._clock.interval_s, self._next_beat_s - time.monotonic()]
        awake_s = self._clock.awake_s
        pauses += [until_s - awake_s for until_s in (*self._silent_data.values(), *self._closed.values())]
        if (due_s := self._detector.next_due_s()) is not None:
            pauses.append(due_s - awake_s)
        return max(0.0, min(pauses))

    def _look(self) -> None:
        # A new listener soon hears a heartbeat, from which it knows that it will hear a farewell too.
        if came := self._link.welcome():
            self._listeners.update(came)
            self._beat_soon()
        self._hear()
        for monitor in (self._monitor, self._data_monitor):
            for event in connection_events(monitor):
                self._handle(event, is_data=monitor is not self._monitor)
        # Everything that has come was heard above, so a peer that is overdue now really is.
        for rank, reason, hangs in self._clock.overdue():
            self._suspect_rank(rank, reason, is_certain=hangs)
        for rank, until_s in [*self._silent_data.items(), *self._closed.items()]:
            if self._clock.awake_s > until_s:
                self._suspect_rank(rank, "closed its connection")
        self._conclude()
        if time.monotonic() >= self._next_beat_s:
            self._beat()

    def _follow(self, followed: Mapping[int, tuple[str, ...]]) -> None:
        for rank, places in followed.items():
            if rank not in self._detector.present:
                continue
            self._awaited |= {place for place in places if place not in self._rank_at} - self._early
            self._rank_at |= dict.fromkeys(places, rank)
            if rank not in self._watched:
                self._watched.add(rank)
                self._unheard.add(rank)
                self._clock.expect(rank)
                self._link.connect(rank, places[0])
        self._check_connected()

    def _check_connected(self) -> None:
        if not self._awaited and not self._unheard and not self._is_connected:
            self._is_connected = True
            self._callbacks.connected()

    def _hear(self) -> None:
        while (received := self._link.receive()) is not None:
            rank, frames = received
            try:
                beat = unpack_plain(bytes(frames[0]))
                blocked_s = field(beat, "blocked_s", float)
                hears = self._watched - self._closed.keys() - self._unheard
                is_news = self._detector.learn(beat.get("news"), self._clock.awake_s, hears=hears)
            except MalformedMessage as error:
                self._garbage.warn("a heartbeat of rank %d was dropped: %s", rank, error)
                continue
            self._clock.hear(rank, blocked_s)
            self._closed.pop(rank, None)
            if rank in self._unheard:
                self._unheard.discard(rank)
                self._check_connected()
            if is_news:
                self._beat_soon()
        self._conclude()

    def _handle(self, event: ConnectionEvent, *, is_data: bool) -> None:
        rank, address = self._rank_at.get(event.address), event.address
        if rank is None:
            if event.succeeded:
                self._early.add(address)
        elif event.succeeded:
            self._awaited.discard(address)
            self._check_connected()
        elif rank not in self._detector.present:
            return
        elif event.failed and not event.interrupted:
            self._suspect_rank(rank, f"it cannot be connected to: {event.failed}", is_certain=True)
        elif event.unreachable and address in self._awaited:
            if self._clock.awake_s > _REFUSAL_S:
                self._suspect_rank(rank, "closed: it no longer listens", is_certain=True)
        elif event.unreachable and not is_data and rank in self._closed:
            # The port refuses a connection that was made anew after one had closed: the process is gone.
            self._suspect_rank(rank, "closed its connection", is_certain=True)
        elif event.disconnected and is_data:
            self._await_farewell(rank)
        elif event.disconnected:
            until_s = self._clock.awake_s + _FAREWELL_S
            self._hear()  # a farewell came before the end of the same connection
            if rank in self._detector.present:
                self._closed.setdefault(rank, until_s)
                self._link.greet(rank)

    def _await_farewell(self, rank: int) -> None:
        if rank in self._detector.present:
            self._silent_data.setdefault(rank, self._clock.awake_s + _FAREWELL_S)

    def _suspect_rank(self, rank: int, reason: str, *, is_certain: bool = False) -> None:
        self._silent_data.pop(rank, None)
        if rank in self._closed:
            self._closed[rank] = math.inf  # suspected once; a heartbeat over a new connection still clears it
        self._suspect(Suspicion(self._rank, rank, reason, is_certain))

    def _suspect(self, suspicion: Suspicion) -> None:
        if self._detector.suspect(suspicion, self._clock.awake_s):
            self._next_beat_s = 0.0

    def _conclude(self) -> None:
        for conclusion in self._detector.conclusions(self._clock.awake_s):
            match conclusion:
                case Lost(rank, reason):
                    # The rank still gets heartbeats: if it lives after all, it should hear that it is taken for lost.
                    self._forget(rank)
                    self._callbacks.lost(rank, reason)
                case Left(rank):
                    self._forget(rank)
                    self._listeners.discard(rank)
                    self._callbacks.left(rank)
                case Broken(text):
                    self._callbacks.broken(text)

    def _beat(self, *, leaves: bool = False) -> None:
        self._next_beat_s = time.monotonic() + self._clock.interval_s
        blocked_s = 0.0 if self._loop_asked_s is None else self._clock.awake_s - self._loop_asked_s
        beat = pack_plain({"blocked_s": blocked_s, "news": self._detector.news(leaves=leaves)})
        for rank in self._listeners:
            self._link.send(rank, beat)
        if self._loop is not None and self._loop_asked_s is None:
            self._loop_asked_s = self._clock.awake_s
            try:
                self._loop.call_soon_threadsafe(setattr, self, "_loop_asked_s", None)
            except RuntimeError:  # the loop was closed: nobody listens, and close() will follow or the process ends
                self._loop, self._loop_asked_s = None, None

    def _beat_soon(self) -> None:
        # After a moment, so that one heartbeat takes all news that comes at about the same time.
        self._next_beat_s = min(self._next_beat_s, time.monotonic() + _SOON_S)

    def _forget(self, rank: int) -> None:
        self._silent_data.pop(rank, None)
        self._closed.pop(rank, None)
        self._clock.forget(rank)
        self._link.ignore(rank)
