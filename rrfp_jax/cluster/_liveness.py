"""Liveness: a thread that sends this rank's heartbeat, hears the others', and watches their connections.

It has connections of its own, so a heartbeat never queues behind an array. They go to the neighbours in the graph of
watchers and to all ranks with which messages are exchanged. A rank tells its neighbours at once of anything that it
notices of another, and they tell theirs (:class:`~rrfp_jax.cluster.failure_detector.FailureDetector` says what all
conclude). A connection that closes is tried again at once: where the port then refuses, the process is gone; where it
is open, only the connection broke. Silence counts from the deadline on. A rank that ends in good order says farewell
first.

The heartbeat comes from this thread, not from the event loop, and tells how long the loop has not run: a loop that is
busy for less than the deadline is no reason to give a rank up, a loop that hangs is. It also tells what the rank does,
which is quoted where the rank is silent afterwards.
"""

import errno
import logging
import math
import os
import socket
import threading
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import zmq

from rrfp_jax.cluster._zmq_link import ZmqLink
from rrfp_jax.cluster._zmq_sockets import HANDSHAKE_FAILURES, Gate, UnprovenConnections, connection_events, monitor_of
from rrfp_jax.cluster.config import Address
from rrfp_jax.cluster.failure_detector import (
    Broken,
    Conclusion,
    FailureDetector,
    HeartbeatClock,
    Left,
    Lost,
    Suspicion,
    patience_s,
)
from rrfp_jax.cluster.wire import MalformedMessage, QuietLog, field, pack_plain, unpack_plain
from rrfp_jax.waiting import wait_for

_LOG = logging.getLogger(__name__)
_FAREWELL_LINGER_S = 1.0
_SOON_S = 0.005
_FAREWELL_S = 0.5
"""Seconds that a farewell may still be on its way after a connection of the same peer has closed, and that a closed
connection may take to be made anew."""
_REFUSAL_S = 1.0
"""Seconds that a peer may refuse connections at the start; it has been listening since before the rendezvous."""
_ANSWER_S = 0.3
"""Seconds that a suspected rank has to answer, or a heartbeat's interval where that is less."""
_MORE_LOSSES_S = 0.3
"""Seconds within which others may be missed after the first, which may have ended for the loss of one of them."""
_CONNECTS_S = 2.0
"""Seconds in which a process that lives takes a connection; its host may be busy."""
_OWN_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)
_MAX_ACTIVITY = 120


class Liveness:
    """One rank's heartbeat and its view of the others.

    Args:
        link: carries heartbeats alone; closed here.
        gate: answered by this thread, for all connections of its context.
        data: carries messages; its connections are watched too.
        unproven: the connections that have come to both links.
        deadline_s: see :class:`~rrfp_jax.cluster.failure_detector.HeartbeatClock`.
    """

    def __init__(
        self, link: ZmqLink, gate: Gate, data: ZmqLink, unproven: UnprovenConnections, *, deadline_s: float
    ) -> None:
        self._rank, self._link, self._gate, self._deadline_s = link.rank, link, gate, deadline_s
        self._monitor, self._data_monitor = monitor_of(link.inbound), monitor_of(data.inbound)
        self._unproven = unproven
        listens = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self._listener_monitors = [monitor_of(each.outbound, listens) for each in (link, data)]
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
        self._watched: dict[int, str] = {}
        """The ranks from which heartbeats come, each with the address that they come from."""
        self._activity = ""
        self._standstill: tuple[str, Container[int]] | None = None
        self.activities: dict[int, str] = {}
        """The activity that each other rank has told last."""
        self._asked: dict[int, float] = {}
        """Silent ranks that this one has tried to connect to, and until when it does not try again."""
        self._listeners: set[int] = set()
        self._awaited: set[str] = set()
        """Addresses to which connections do not stand yet."""
        self._unheard: set[int] = set()
        self._early: set[str] = set()
        """Addresses whose connections stood before this thread was told of them."""
        self._closed: dict[int, float] = {}
        """Ranks whose heartbeats' connection has closed and was not made anew yet, and until when that is awaited."""
        self._silent_data: dict[int, float] = {}
        """Ranks from which messages no longer come, and until when a farewell is awaited."""
        self._has_followed, self._num_ranks = False, 0
        self._is_decided = threading.Event()
        """Whether all ranks are connected, or one is missed."""
        self._missed: list[str] = []
        """Reasons why :meth:`wait_connected` fails."""
        self.is_mute = False
        """Whether nobody is told of conclusions any more."""
        self._drop: Callable[[int, bool], None] = lambda rank, has_left: None
        self._on_lost: Callable[[int, str], None] = lambda rank, reason: None
        self._on_left: Callable[[int], None] | None = None
        self._on_broken: Callable[[str], None] | None = None
        self._running = True
        self._thread = threading.Thread(target=self._run, name="rrfp-liveness", daemon=True)
        self._thread.start()

    # -- called from any thread --------------------------------------------------------------------------------------

    def begin(
        self,
        loop: AbstractEventLoop,
        hosts: Sequence[str],
        *,
        drop: Callable[[int, bool], None],
        lost: Callable[[int, str], None],
        left: Callable[[int], None] | None,
        broken: Callable[[str], None] | None,
        absent: Iterable[int] = (),
        numbers: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Watches this rank's own event loop from now on, and tells the callbacks there of conclusions.

        Args:
            hosts: the host of every rank.
            drop: called with a rank that is gone, and whether it left in good order, before any other callback.
            lost, left, broken, absent, numbers: see :meth:`PeerNetwork.start`.
        """
        self._drop, self._on_lost, self._on_left, self._on_broken = drop, lost, left, broken
        self._num_ranks = len(hosts)

        def begin() -> None:
            self._loop = loop
            self._clock = HeartbeatClock((), self._deadline_s, time.monotonic())
            self._detector = FailureDetector(self._rank, hosts, min(_ANSWER_S, self._clock.interval_s), numbers)
            self._detector.present -= {*absent}
            self._link.numbers |= numbers

        self._command(begin)

    def follow(self, places: Mapping[int, tuple[str, ...]]) -> None:
        """Expects more ranks: the address of each one's heartbeats, then that of its messages, if any."""

        def follow() -> None:
            self._has_followed = True
            for rank, addresses in places.items():
                if rank not in self._detector.present:
                    continue
                self._awaited |= {address for address in addresses if address not in self._rank_at} - self._early
                self._rank_at |= dict.fromkeys(addresses, rank)
                if rank not in self._watched:
                    self._watched[rank] = addresses[0]
                    self._unheard.add(rank)
                    self._clock.expect(rank)
                    self._link.connect(rank, addresses[0])

        self._command(follow)

    def take_up(self, rank: int, number: int, then: Callable[[], None]) -> None:
        """Lets go of a process of a rank that is gone, for the one with this number; the caller follows it afterwards.

        ``then`` is called on the event loop, after everything that was concluded about the process before.
        """

        def take_up() -> None:
            self._rank_at = {address: each for address, each in self._rank_at.items() if each != rank}
            self._awaited &= self._rank_at.keys()
            self._closed.pop(rank, None)
            self._silent_data.pop(rank, None)
            self._unheard.discard(rank)
            for known in (self._watched, self.activities, self._asked):
                known.pop(rank, None)
            self._clock.forget(rank)
            self._link.take_up(rank, number)
            self._listeners.add(rank)
            self._detector.take_up(rank, number)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(then)

        self._command(take_up)

    def wait_connected(self, timeout_s: float) -> None:
        """Blocks until every connection stands, and each rank that is watched has been heard.

        Raises:
            ConnectionError: where a peer is lost or leaves before, or the time is over.
        """
        if not wait_for(self._is_decided, timeout_s):
            raise ConnectionError(
                f"rank {self._rank} of {self._num_ranks} has not reached all ranks after {timeout_s} s"
            )
        if self._missed:
            time.sleep(_MORE_LOSSES_S)
            raise ConnectionError(f"rank {self._rank} could not connect to {'; '.join(self._missed)}")

    def suspected_by(self, reporter: int, reason: str) -> None:
        """Takes a message by which ``reporter`` takes this rank for lost: heartbeats with that may not get through."""
        self._command(lambda: self._suspect(Suspicion(reporter, self._rank, reason)))

    def leave_judgement(self) -> None:
        """Leaves it to a head from now on to judge this rank's suspicions, which are told as losses."""
        self._command(lambda: setattr(self._detector, "has_head", True))

    def connection_ended(self, rank: int) -> None:
        """Notes that a connection that is not watched here has ended: the rank may leave, be gone, or be cut off."""
        self._command(lambda: self._await_farewell(rank))

    def rule_out(self, rank: int, why: str) -> None:
        """Declares a rank lost, since this one cannot connect to it. The failure detector then reports the loss once: a
        second report could come when a new process of the rank is there, and be taken for its loss."""
        self._command(lambda: self._suspect(Suspicion(self._rank, rank, why, is_certain=True)))

    def tell_activity(self, activity: str, standstill: tuple[str, Container[int]] | None) -> None:
        """Takes note of what this rank does and waits for; see :meth:`PeerNetwork.tell_activity`."""
        self._activity, self._standstill = activity, standstill
        if standstill is not None:
            self._command(self._ask_silent)

    def stop(self, timeout_s: float) -> None:
        """Says farewell and ends the thread; the gate is closed with it."""
        self._command(lambda: self._beat(leaves=True))
        self._command(lambda: setattr(self, "_running", False))
        self._thread.join(timeout_s)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with self._waking:
            if self._running:
                os.eventfd_write(self._wake, 1)

    # -- called on the event loop ------------------------------------------------------------------------------------

    def tell(self, conclusion: Conclusion) -> None:
        """Drops a rank that is gone, and tells the callbacks."""
        if self.is_mute:
            return
        match conclusion:
            case Lost(rank, reason):
                self._drop(rank, False)
                _LOG.warning("rank %d lost rank %d: %s", self._rank, rank, reason)
                self._on_lost(rank, reason)
            case Left(rank):
                self._drop(rank, True)
                if self._on_left is not None:
                    self._on_left(rank)
            case Broken(text):
                _LOG.warning("rank %d: %s", self._rank, text)
                if self._on_broken is not None:
                    self._on_broken(text)
                else:
                    self._on_lost(self._rank, text)

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller, pause_s = zmq.Poller(), 0.0
        links = (self._link.inbound, self._link.outbound)
        for readable in (self._gate.socket, *links, self._monitor, self._data_monitor, *self._listener_monitors):
            poller.register(readable, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while self._running:
                poller.poll(1 + round(pause_s * 1000))
                for event in (each for monitor in self._listener_monitors for each in connection_events(monitor)):
                    self._unproven.heed(event)
                # The clock first: whatever is concluded below must not hold a pause of this process against others.
                self._clock.advance(time.monotonic())
                self._detector.has_just_woken = self._clock.has_just_woken
                self._gate.answer()
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                while self._commands:
                    self._commands.popleft()()
                pause_s = self._look()
        except Exception as error:
            _LOG.exception("the liveness thread of rank %d failed", self._rank)
            why = f"its own watch over the others failed: {error!r}"
            self._report(Lost(self._rank, why), f"rank {self._rank}: {why}")
        finally:
            self._link.close(_FAREWELL_LINGER_S)
            for socket in (self._monitor, self._data_monitor, *self._listener_monitors, self._gate.socket):
                socket.close()
            with self._waking:  # nobody may write to a descriptor that is closed, and perhaps another's by now
                self._running = False
                os.close(self._wake)

    def _look(self) -> float:
        """Takes note of everything that has come, concludes, and beats. Returns the seconds until the next look."""
        # A new listener soon hears a heartbeat, from which it knows that it will hear a farewell too.
        if came := self._link.welcome():
            self._listeners.update(came)
            self._next_beat_s = min(self._next_beat_s, time.monotonic() + _SOON_S)
        self._hear()
        for monitor in (self._monitor, self._data_monitor):
            for event in connection_events(monitor):
                self._handle(event, is_data=monitor is not self._monitor)
        # Everything that has come was heard above, so a peer that is overdue now really is.
        for rank, reason, hangs in self._clock.overdue():
            self._suspect(Suspicion(self._rank, rank, reason, hangs))
        self._ask_silent()
        for rank, until_s in [*self._silent_data.items(), *self._closed.items()]:
            if self._clock.awake_s > until_s:
                self._suspect(Suspicion(self._rank, rank, "closed its connection"))
        self._conclude()
        if self._has_followed and not self._awaited and not self._unheard:
            self._is_decided.set()
        if time.monotonic() >= self._next_beat_s:
            self._beat()
        awake_s, due_s = self._clock.awake_s, self._detector.next_due_s()
        times = [*self._silent_data.values(), *self._closed.values(), *(() if due_s is None else (due_s,))]
        pauses = [self._clock.interval_s, self._next_beat_s - time.monotonic(), *(each - awake_s for each in times)]
        return max(0.0, min(pauses))

    def _hear(self) -> None:
        while (received := self._link.receive()) is not None:
            rank, frames = received
            try:
                beat = unpack_plain(bytes(frames[0]))
                blocked_s, activity = field(beat, "blocked_s", float), field(beat, "activity", str)
                hears = self._watched.keys() - self._closed.keys() - self._unheard
                is_news = self._detector.learn(beat.get("news"), self._clock.awake_s, hears=hears)
            except MalformedMessage as error:
                self._garbage.warn("a heartbeat of rank %d was dropped: %s", rank, error)
                continue
            self._clock.hear(rank, blocked_s)
            self.activities[rank] = activity[:_MAX_ACTIVITY] or "no step under way"
            self._closed.pop(rank, None)
            self._unheard.discard(rank)
            if is_news:
                # After a moment, so that one heartbeat takes all news that comes at about the same time.
                self._next_beat_s = min(self._next_beat_s, time.monotonic() + _SOON_S)
        self._conclude()

    def _handle(self, event: dict[str, Any], *, is_data: bool) -> None:
        kind, address = int(event["event"]), event["endpoint"].decode()
        rank, is_disconnected = self._rank_at.get(address), kind == zmq.EVENT_DISCONNECTED
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._awaited.discard(address)
            if rank is None:
                self._early.add(address)
        elif rank is None or rank not in self._detector.present:
            return
        # Without detail the peer went away or was too slow, and ZeroMQ tries again.
        elif kind & HANDSHAKE_FAILURES and kind != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            why = "its key is not of this run"
            if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                why = f"it does not speak the protocol with this run's key (ZeroMQ event {event['value']:#x})"
            self._suspect(Suspicion(self._rank, rank, f"it cannot be connected to: {why}", is_certain=True))
        elif kind == zmq.EVENT_CLOSED and address in self._awaited:
            if self._clock.awake_s > _REFUSAL_S:
                self._suspect(Suspicion(self._rank, rank, "closed: it no longer listens", is_certain=True))
        elif kind == zmq.EVENT_CLOSED and not is_data and rank in self._closed:
            # The port refuses a connection that was made anew after one had closed: the process is gone.
            self._suspect(Suspicion(self._rank, rank, "closed its connection", is_certain=True))
        elif is_disconnected and is_data:
            self._await_farewell(rank)
        elif is_disconnected:
            until_s = self._clock.awake_s + _FAREWELL_S
            self._hear()  # a farewell came before the end of the same connection
            if rank in self._detector.present:
                self._closed.setdefault(rank, until_s)
                self._link.greet(rank)

    def _await_farewell(self, rank: int) -> None:
        if rank in self._detector.present:
            self._silent_data.setdefault(rank, self._clock.awake_s + _FAREWELL_S)

    def _ask_silent(self) -> None:
        """Tries to connect to silent ranks that may hold this one up, each on a thread of its own."""
        if (standstill := self._standstill) is None:
            return
        for rank in self._clock.silent(patience_s(self._deadline_s)):
            if rank in standstill[1] and self._asked.get(rank, 0.0) <= self._clock.awake_s:
                self._asked[rank] = self._clock.awake_s + _CONNECTS_S + self._clock.interval_s
                ask = partial(self._ask, rank, self._watched[rank])
                with suppress(RuntimeError):  # no thread can be started: the deadline still counts
                    threading.Thread(target=ask, name="rrfp-ask", daemon=True).start()

    def _ask(self, rank: int, address: str) -> None:
        if not _takes_connection(address):
            self._command(lambda: self._is_unanswered(rank))

    def _is_unanswered(self, rank: int) -> None:
        """Suspects a rank that has taken no connection, unless it was heard meanwhile."""
        self._hear()
        silent_s, standstill = self._clock.silent(patience_s(self._deadline_s)).get(rank), self._standstill
        if silent_s is not None and standstill is not None:
            host, last = self._detector.hosts[rank], self.activities.get(rank)
            why = f"silent for {silent_s:.1f} s and takes no connection: see on {host} whether its process is "
            why += f"stopped (ps shows T) or the host cut off; last heard: {last}; here: {standstill[0]}"
            self._suspect(Suspicion(self._rank, rank, why))

    def _suspect(self, suspicion: Suspicion) -> None:
        rank = suspicion.suspect
        if suspicion.reporter == self._rank:
            self._silent_data.pop(rank, None)
            if rank in self._closed:
                self._closed[rank] = math.inf  # suspected once; a heartbeat over a new connection still clears it
        if self._detector.suspect(suspicion, self._clock.awake_s):
            self._next_beat_s = 0.0

    def _conclude(self) -> None:
        for conclusion in self._detector.conclusions(self._clock.awake_s):
            missed = ""
            if isinstance(conclusion, Broken):
                missed = conclusion.text
            else:
                rank = conclusion.rank
                self._silent_data.pop(rank, None)
                self._closed.pop(rank, None)
                self._clock.forget(rank)
                self._link.ignore(rank)
                # A rank that is lost still gets heartbeats: if it lives after all, it should hear what others think.
                if isinstance(conclusion, Lost):
                    missed = f"rank {rank}: {conclusion.reason}"
                else:
                    self._listeners.discard(rank)
                    missed = "" if self._missed else f"rank {rank}: it has ended"
            self._report(conclusion, missed)

    def _report(self, conclusion: Conclusion, missed: str) -> None:
        # Missed only until all were connected: a later loss is told by the callbacks, and nobody waits any more.
        if missed and (self._missed or not self._is_decided.is_set()):
            self._missed.append(missed)
            self._is_decided.set()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop was closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self.tell, conclusion)

    def _beat(self, *, leaves: bool = False) -> None:
        self._next_beat_s = time.monotonic() + self._clock.interval_s
        blocked_s = 0.0 if self._loop_asked_s is None else self._clock.awake_s - self._loop_asked_s
        beat = pack_plain(
            {"blocked_s": blocked_s, "activity": self._activity, "news": self._detector.news(leaves=leaves)}
        )
        for rank in self._listeners:
            self._link.send(rank, beat)
        if self._loop is not None and self._loop_asked_s is None:
            self._loop_asked_s = self._clock.awake_s
            try:
                self._loop.call_soon_threadsafe(setattr, self, "_loop_asked_s", None)
            except RuntimeError:  # the loop was closed: nobody listens, and close() will follow or the process ends
                self._loop, self._loop_asked_s = None, None


def _takes_connection(address: str) -> bool:
    """Returns whether a listening ZeroMQ socket greets a new connection, as it does on ZeroMQ's own thread, however
    busy Python is; True also where this process can make no connection."""
    place = Address.parse(address.removeprefix("tcp://"))
    try:
        with socket.create_connection((place.host, place.port), _CONNECTS_S) as connection:
            return bool(connection.recv(1))
    except OSError as error:
        return error.errno in _OWN_SHORTAGES
