"""Who is alive: a thread that sends this rank's heartbeat, hears the others', and watches their connections.

It has connections of its own, so a heartbeat never queues behind an array. They go to the neighbours in the
:mod:`~rrfp_jax.network.watch_graph` and to all with whom messages are exchanged; what one rank notices of
another, it tells its neighbours at once, and they tell theirs
(:class:`~rrfp_jax.network.judgement.Judgement` says what all conclude from it). A connection that closes is
tried again at once: where the port then refuses, the process is gone; where it is open, only the connection broke.
Silence counts from the deadline on. A rank that ends in good order says farewell first.

The heartbeat comes from this thread, not from the event loop, and tells how long the loop has not run: a loop that is
busy for less than the deadline is no reason to give a rank up, one that hangs is.
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
from dataclasses import dataclass

import zmq

from rrfp_jax.network.gate import Gate
from rrfp_jax.network.judgement import Accusation, Broken, Judgement, Left, Lost
from rrfp_jax.network.link import Link
from rrfp_jax.network.plain import MalformedMessage, field, pack, unpack
from rrfp_jax.network.pulse import Pulse
from rrfp_jax.network.sockets import (
    ConnectionEvent,
    QuietLog,
    connection_events,
    heed_listener,
    watch,
    watch_listener,
)
from rrfp_jax.network.unproven import Unproven

_LOG = logging.getLogger(__name__)
FAREWELL_LINGER_S = 1.0
_SOON_S = 0.005
_SUSPICION_S = 0.5
"""How long a farewell may still be on its way after a connection of the same peer has closed, and how long one that
closed may take to be made anew."""
_REFUSAL_S = 1.0
"""How long a peer may refuse connections at the start; it has been listening since before the rendezvous."""
_ANSWER_S = 0.3
"""How long one who is accused has to answer, or a heartbeat's interval where that is less."""


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """Where the thread reports to; called on it."""

    connected: Callable[[], None]
    """Every connection to every peer stands, and each has been heard; called once."""
    lost: Callable[[int, str], None]
    left: Callable[[int], None]
    broken: Callable[[str], None]
    """Ranks live that no longer hear each other; called at most once."""


class Liveness:
    """One rank's heartbeat and its view of the others.

    Args:
        link: carries heartbeats alone; this object closes it.
        gate: the gate that this thread answers, for all connections of its context.
        data: carries messages; its connections are watched too.
        unproven: the connections that have come to both links.
        deadline_s: see :class:`~rrfp_jax.network.pulse.Pulse`.
    """

    def __init__(
        self, link: Link, gate: Gate, data: Link, unproven: Unproven, *, deadline_s: float, watchers: Watchers
    ) -> None:
        self._rank, self._link, self._gate, self._watchers = link.rank, link, gate, watchers
        self._deadline_s = deadline_s
        self._monitor, self._data_monitor = watch(link.inbound), watch(data.inbound)
        self._unproven = unproven
        self._listener_monitors = [watch_listener(each.outbound) for each in (link, data)]
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()
        self._garbage = QuietLog(_LOG)
        self._commands: deque[Callable[[], None]] = deque()
        self._loop: AbstractEventLoop | None = None
        self._loop_asked_s: float | None = None
        self._pulse = Pulse((), deadline_s, time.monotonic())
        self._judgement = Judgement(self._rank, [""] * (self._rank + 1), 0.0)
        self._next_beat_s = 0.0
        self._rank_at: dict[str, int] = {}
        self._watched: set[int] = set()
        self._listeners: set[int] = set()
        self._awaited: set[str] = set()
        self._unheard: set[int] = set()
        self._is_connected = False
        self._early: set[str] = set()
        """Connections that stood before this thread was told of them."""
        self._closed: dict[int, float] = {}
        """Whose heartbeats' connection has closed and was not made anew yet, and until when that is waited for."""
        self._suspects: dict[int, float] = {}
        """From whom messages no longer come, and until when a farewell is waited for."""
        self._running = True
        self._thread = threading.Thread(target=self._run, name="rrfp-liveness", daemon=True)
        self._thread.start()

    # -- called from any thread --------------------------------------------------------------------------------------

    def begin(self, loop: AbstractEventLoop, hosts: Sequence[str]) -> None:
        """Watch this rank's own event loop, and know where all ranks are."""
        self._command(lambda: self._begin(loop, hosts))

    def follow(self, places: Mapping[int, tuple[str, ...]]) -> None:
        """Expect more ranks: where the heartbeats of each come from, then where its messages do, if any."""
        self._command(lambda: self._follow(places))

    def accused(self, accuser: int, reason: str) -> None:
        """A message says that ``accuser`` takes this rank for lost; heartbeats with that may not get through."""
        self._command(lambda: self._take_up(Accusation(accuser, self._rank, reason)))

    def suspect(self, rank: int) -> None:
        """A connection to ``rank`` that is not watched here has ended: it may leave, be gone, or be cut off."""
        self._command(lambda: self._suspect(rank))

    def stop(self, timeout_s: float) -> None:
        """Say farewell and end the thread; the gate is closed with it."""
        self._command(self._end)
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
                    heed_listener(monitor, self._unproven)
                self._pulse.advance(time.monotonic())
                self._gate.answer()
                self._obey()
                self._look()
        except Exception as error:
            _LOG.exception("the liveness thread of rank %d failed", self._rank)
            self._watchers.lost(self._rank, f"its own watch over the others failed: {error!r}")
        finally:
            self._close_all()

    def _pause_s(self) -> float:
        pauses = [self._pulse.interval_s, self._next_beat_s - time.monotonic()]
        awake_s = self._pulse.awake_s
        pauses += [until_s - awake_s for until_s in (*self._suspects.values(), *self._closed.values())]
        if (due_s := self._judgement.next_due_s()) is not None:
            pauses.append(due_s - awake_s)
        return max(0.0, min(pauses))

    def _look(self) -> None:
        self._welcome()
        self._hear()
        for monitor in (self._monitor, self._data_monitor):
            for event in connection_events(monitor):
                self._judge(event, is_data=monitor is not self._monitor)
        for rank, reason, hangs in self._pulse.overdue():
            self._accuse(rank, reason, is_certain=hangs)
        for rank, until_s in [*self._suspects.items(), *self._closed.items()]:
            if self._pulse.awake_s > until_s:
                self._accuse(rank, "closed its connection")
        self._conclude()
        if time.monotonic() >= self._next_beat_s:
            self._beat()

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._commands:
            self._commands.popleft()()

    def _begin(self, loop: AbstractEventLoop, hosts: Sequence[str]) -> None:
        self._loop = loop
        self._pulse = Pulse((), self._deadline_s, time.monotonic())
        self._judgement = Judgement(self._rank, hosts, min(_ANSWER_S, self._pulse.interval_s))

    def _follow(self, followed: Mapping[int, tuple[str, ...]]) -> None:
        for rank, places in followed.items():
            if rank not in self._judgement.present:
                continue
            self._awaited |= {place for place in places if place not in self._rank_at} - self._early
            self._rank_at |= dict.fromkeys(places, rank)
            if rank not in self._watched:
                self._watched.add(rank)
                self._unheard.add(rank)
                self._pulse.expect(rank)
                self._link.connect(rank, places[0])
        self._check_connected()

    def _check_connected(self) -> None:
        if not self._awaited and not self._unheard and not self._is_connected:
            self._is_connected = True
            self._watchers.connected()

    def _welcome(self) -> None:
        """A new listener soon hears a heartbeat, from which it knows that it will hear a farewell too."""
        if came := self._link.welcome():
            self._listeners.update(came)
            self._beat_soon()

    def _hear(self) -> None:
        while (received := self._link.receive()) is not None:
            rank, frames = received
            try:
                beat = unpack(bytes(frames[0]))
                blocked_s = field(beat, "blocked_s", float)
                is_news = self._judgement.learn(beat.get("news"), self._pulse.awake_s, hears=self._hears())
            except MalformedMessage as error:
                self._garbage.warn("a heartbeat of rank %d was dropped: %s", rank, error)
                continue
            self._pulse.hear(rank, blocked_s)
            self._closed.pop(rank, None)
            if rank in self._unheard:
                self._unheard.discard(rank)
                self._check_connected()
            if is_news:
                self._beat_soon()
        self._conclude()

    def _hears(self) -> set[int]:
        return self._watched - self._closed.keys() - self._unheard

    def _judge(self, event: ConnectionEvent, *, is_data: bool) -> None:
        rank, address = self._rank_at.get(event.address), event.address
        if rank is None:
            if event.succeeded:
                self._early.add(address)
        elif event.succeeded:
            self._awaited.discard(address)
            self._check_connected()
        elif rank not in self._judgement.present:
            return
        elif event.failed and not event.interrupted:
            self._accuse(rank, f"it cannot be connected to: {event.failed}", is_certain=True)
        elif event.unreachable and address in self._awaited:
            if self._pulse.awake_s > _REFUSAL_S:
                self._accuse(rank, "closed: it no longer listens", is_certain=True)
        elif event.unreachable and not is_data and rank in self._closed:
            self._accuse(rank, "closed its connection", is_certain=True)
        elif event.disconnected:
            self._disconnected(rank, is_data=is_data)

    def _disconnected(self, rank: int, *, is_data: bool) -> None:
        """It may have said farewell, be gone, or be alive behind a connection that broke; soon it is known which."""
        if is_data:
            self._suspect(rank)
            return
        until_s = self._pulse.awake_s + _SUSPICION_S
        self._hear()  # a farewell came before the end of the same connection
        if rank in self._judgement.present:
            self._closed.setdefault(rank, until_s)
            self._link.greet(rank)

    def _suspect(self, rank: int) -> None:
        if rank in self._judgement.present:
            self._suspects.setdefault(rank, self._pulse.awake_s + _SUSPICION_S)

    def _accuse(self, rank: int, reason: str, *, is_certain: bool = False) -> None:
        accusation = Accusation(self._rank, rank, reason, is_certain)
        self._suspects.pop(rank, None)
        if rank in self._closed:
            self._closed[rank] = math.inf
        self._take_up(accusation)

    def _take_up(self, accusation: Accusation) -> None:
        if self._judgement.accuse(accusation, self._pulse.awake_s):
            self._next_beat_s = 0.0

    def _conclude(self) -> None:
        for verdict in self._judgement.verdicts(self._pulse.awake_s):
            match verdict:
                case Lost(rank, reason):
                    self._forget(rank)  # who is taken for lost and lives should hear of it: it goes on being told
                    self._watchers.lost(rank, reason)
                case Left(rank):
                    self._forget(rank)
                    self._listeners.discard(rank)
                    self._watchers.left(rank)
                case Broken(text):
                    self._watchers.broken(text)

    def _beat(self, *, leaves: bool = False) -> None:
        self._next_beat_s = time.monotonic() + self._pulse.interval_s
        blocked_s = 0.0 if self._loop_asked_s is None else self._pulse.awake_s - self._loop_asked_s
        beat = pack({"blocked_s": blocked_s, "news": self._judgement.news(leaves=leaves)})
        for rank in self._listeners:
            self._link.send(rank, beat)
        if self._loop is not None and self._loop_asked_s is None:
            self._loop_asked_s = self._pulse.awake_s
            try:
                self._loop.call_soon_threadsafe(self._loop_answers)
            except RuntimeError:  # the loop was closed: nobody listens, and close() will follow or the process ends
                self._loop, self._loop_asked_s = None, None

    def _beat_soon(self) -> None:
        """With all news that comes at about the same time."""
        self._next_beat_s = min(self._next_beat_s, time.monotonic() + _SOON_S)

    def _loop_answers(self) -> None:
        self._loop_asked_s = None

    def _forget(self, rank: int) -> None:
        self._suspects.pop(rank, None)
        self._closed.pop(rank, None)
        self._pulse.forget(rank)
        self._link.ignore(rank)

    def _end(self) -> None:
        self._beat(leaves=True)
        self._running = False

    def _close_all(self) -> None:
        self._link.close(FAREWELL_LINGER_S)
        for socket in (self._monitor, self._data_monitor, *self._listener_monitors):
            socket.close()
        self._gate.close()
        with self._waking:
            self._running = False
            os.close(self._wake)
