"""Who is alive: a thread that publishes this rank's heartbeat, hears the others', and watches their connections.

It has connections of its own, so a heartbeat never queues behind an array. A closed connection is reported at once,
silence after the deadline. A rank that ends in good order says farewell first and is then not reported as lost. With it
goes whom that rank has lost, since it may end for just that: so nobody takes a consequence for the cause. The heartbeat
comes from this thread, not from the event loop, and tells how long the loop has not run: a loop that is busy
for less than the deadline is no reason to give a rank up, one that hangs is.
"""

import logging
import socket as sockets
import threading
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq

from rrfp_jax.runtime.network.gate import Gate
from rrfp_jax.runtime.network.keys import RunKey
from rrfp_jax.runtime.network.plain import MAX_HEADER_BYTES, MalformedMessage, field, pack, unpack
from rrfp_jax.runtime.network.pulse import Pulse
from rrfp_jax.runtime.network.sockets import (
    ConnectionEvent,
    Context,
    QuietLog,
    Socket,
    bind,
    connect_as,
    connection_events,
    new_socket,
    rank_role,
    serve_as,
    watch,
)

_LOG = logging.getLogger(__name__)
_FAREWELL_LINGER_MS = 1000
_PUBLISH_HIGH_WATER = 64
_WELCOME_S = 0.005
_SUSPICION_S = 0.5
"""How long a farewell may still be on its way after another connection of the same peer has closed."""
_REFUSAL_S = 1.0
"""How long a peer may refuse connections at the start; it has been listening since before the rendezvous."""


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """Where the thread reports to; called on it."""

    connected: Callable[[], None]
    """Every connection to every peer stands, and each has been heard; called once."""
    lost: Callable[[int, str], None]
    left: Callable[[int], None]


class Liveness:
    """One rank's heartbeat and its view of the others.

    Args:
        gate: answered on this thread, for all connections of ``context``.
        data_sockets: the sockets that carry messages; their connections are watched too.
        deadline_s: see :class:`~rrfp_jax.runtime.network.pulse.Pulse`.
    """

    def __init__(
        self,
        context: Context,
        gate: Gate,
        data_sockets: Sequence[Socket],
        *,
        rank: int,
        key: RunKey,
        interface: str,
        deadline_s: float,
        watchers: Watchers,
    ) -> None:
        self._rank, self._key, self._gate, self._watchers = rank, key, gate, watchers
        self._deadline_s = deadline_s
        pair = key.pair(rank_role(rank))
        self._publisher = new_socket(context, zmq.XPUB)
        self._subscriber = new_socket(context, zmq.SUB)
        self._data_monitors = [watch(socket) for socket in data_sockets]
        self._monitors = [watch(self._publisher), watch(self._subscriber)]
        self._wake_read, self._wake_write = sockets.socketpair()
        try:
            self._publisher.sndhwm = _PUBLISH_HIGH_WATER
            self._publisher.maxmsgsize = MAX_HEADER_BYTES
            self._publisher.xpub_verbose = 1
            serve_as(self._publisher, pair)
            self.address = bind(self._publisher, interface)
        except ValueError:
            self._close_all()
            raise
        self._subscriber.subscribe(b"")
        self._strangers, self._garbage = QuietLog(_LOG), QuietLog(_LOG)
        self._commands: deque[Callable[[], None]] = deque()
        self._loop: AbstractEventLoop | None = None
        self._loop_asked_s: float | None = None
        self._pulse = Pulse((), deadline_s, time.monotonic())
        self._started_s = 0.0
        self._next_beat_s = 0.0
        self._rank_at: dict[str, int] = {}
        self._heartbeats_of: dict[int, str] = {}
        self._awaited: set[str] = set()
        self._unheard: set[int] = set()
        self._is_connected = False
        self._early: set[str] = set()
        """Connections that stood before this thread was told of them."""
        self._present: set[int] = set()
        self._lost: dict[int, str] = {}
        self._suspects: dict[int, float] = {}
        self._running = True
        self._thread = threading.Thread(target=self._run, name="rrfp-liveness", daemon=True)
        self._thread.start()

    # -- called from any thread --------------------------------------------------------------------------------------

    def follow(self, loop: AbstractEventLoop, addresses: Mapping[int, tuple[str, ...]]) -> None:
        """Begin to expect the peers at ``addresses``: by rank, that of heartbeats first."""
        self._command(lambda: self._follow(loop, addresses))

    def stop(self, timeout_s: float) -> None:
        """Say farewell and end the thread; the gate is closed with it."""
        self._command(self._end)
        self._thread.join(timeout_s)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with suppress(OSError):  # the thread has ended and closed its end
            self._wake_write.send(b"\0")

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for readable in (self._gate.socket, self._publisher, self._subscriber, *self._monitors, *self._data_monitors):
            poller.register(readable, zmq.POLLIN)
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        try:
            while self._running:
                pause_s = self._next_beat_s - time.monotonic()
                poller.poll(1 + round(max(0.0, min(pause_s, self._pulse.interval_s)) * 1000))
                self._pulse.advance(time.monotonic())
                self._gate.answer()
                self._obey()
                self._look()
        except Exception as error:
            _LOG.exception("the liveness thread of rank %d failed", self._rank)
            self._watchers.lost(self._rank, f"its own watch over the others failed: {error!r}")
        finally:
            self._close_all()

    def _look(self) -> None:
        self._welcome()
        self._hear()
        for monitor in (*self._monitors, *self._data_monitors):
            for event in connection_events(monitor):
                self._judge(event, is_data=monitor in self._data_monitors)
        if time.monotonic() >= self._next_beat_s:
            self._next_beat_s = time.monotonic() + self._pulse.interval_s
            self._beat()
        for rank, reason in self._pulse.overdue():
            self._lose(rank, reason)
        for rank, until_s in list(self._suspects.items()):
            if self._pulse.awake_s > until_s:
                self._lose(rank, "closed its connection")

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            self._wake_read.recv(4096, sockets.MSG_DONTWAIT)
        while self._commands:
            self._commands.popleft()()

    def _follow(self, loop: AbstractEventLoop, addresses: Mapping[int, tuple[str, ...]]) -> None:
        self._loop = loop
        self._pulse = Pulse(addresses, self._deadline_s, time.monotonic())
        self._present, self._unheard = set(addresses), set(addresses)
        pair = self._key.pair(rank_role(self._rank))
        for rank, places in addresses.items():
            self._rank_at |= dict.fromkeys(places, rank)
            self._awaited.update(places)
            self._heartbeats_of[rank] = places[0]
            connect_as(self._subscriber, pair, self._key.pair(rank_role(rank)).public)
            self._subscriber.connect(places[0])
        self._awaited -= self._early
        self._check_connected()

    def _check_connected(self) -> None:
        if not self._awaited and not self._unheard and not self._is_connected:
            self._is_connected = True
            self._watchers.connected()

    def _welcome(self) -> None:
        """A new listener soon hears a heartbeat, from which it knows that it will hear a farewell too."""
        with suppress(zmq.Again):
            while self._publisher.recv(zmq.NOBLOCK) is not None:
                self._next_beat_s = min(self._next_beat_s, time.monotonic() + _WELCOME_S)

    def _hear(self) -> None:
        while True:
            try:
                data = self._subscriber.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                beat = unpack(data)
                rank, blocked_s = field(beat, "rank", int), field(beat, "blocked_s", float)
                losses = _losses_in(beat)
            except MalformedMessage as error:
                self._garbage.warn("a heartbeat was dropped: %s", error)
                continue
            self._pulse.hear(rank, blocked_s)
            if rank in self._unheard:
                self._unheard.discard(rank)
                self._check_connected()
            if beat.get("leaves") and rank in self._present:
                for other in losses.keys() & self._present:
                    self._lose(other, losses[other])
                self._forget(rank)
                self._watchers.left(rank)

    def _judge(self, event: ConnectionEvent, *, is_data: bool) -> None:
        rank = self._rank_at.get(event.address)
        if rank is None:
            if event.succeeded:
                self._early.add(event.address)
            elif event.failed:
                self._strangers.warn("a connection to %s was dropped: %s", event.address, event.failed)
            return
        if event.succeeded:
            self._awaited.discard(event.address)
            self._check_connected()
        elif rank not in self._present:
            return
        elif event.failed and not event.interrupted:
            self._lose(rank, f"it cannot be connected to: {event.failed}")
        elif event.unreachable and event.address in self._awaited:
            if self._pulse.awake_s > _REFUSAL_S:
                self._lose(rank, "closed: it no longer listens")
        elif event.disconnected:
            self._disconnected(rank, is_data=is_data)

    def _disconnected(self, rank: int, *, is_data: bool) -> None:
        if is_data:
            self._suspects.setdefault(rank, self._pulse.awake_s + _SUSPICION_S)
            self._next_beat_s = min(self._next_beat_s, time.monotonic() + _SUSPICION_S)
            return
        self._hear()  # a farewell came before the end of the same connection
        if rank in self._present:
            self._lose(rank, "closed its connection")

    def _beat(self, *, leaves: bool = False) -> None:
        blocked_s = 0.0 if self._loop_asked_s is None else self._pulse.awake_s - self._loop_asked_s
        beat: dict[str, Any] = {"rank": self._rank, "blocked_s": blocked_s, "leaves": leaves}
        if leaves:
            beat["lost"] = [[rank, reason] for rank, reason in self._lost.items()]
        self._publisher.send(pack(beat), zmq.NOBLOCK)
        if self._loop is not None and self._loop_asked_s is None:
            self._loop_asked_s = self._pulse.awake_s
            try:
                self._loop.call_soon_threadsafe(self._loop_answers)
            except RuntimeError:  # the loop was closed: nobody listens, and close() will follow or the process ends
                self._loop, self._loop_asked_s = None, None

    def _loop_answers(self) -> None:
        self._loop_asked_s = None

    def _lose(self, rank: int, reason: str) -> None:
        self._forget(rank)
        self._lost[rank] = reason
        self._watchers.lost(rank, reason)

    def _forget(self, rank: int) -> None:
        self._present.discard(rank)
        self._suspects.pop(rank, None)
        self._pulse.forget(rank)
        with suppress(zmq.ZMQError):
            self._subscriber.disconnect(self._heartbeats_of[rank])

    def _end(self) -> None:
        self._beat(leaves=True)
        self._publisher.linger = _FAREWELL_LINGER_MS
        self._running = False

    def _close_all(self) -> None:
        for socket in (*self._monitors, *self._data_monitors, self._publisher, self._subscriber):
            socket.close()
        self._gate.close()
        self._wake_read.close()
        self._wake_write.close()


def _losses_in(beat: Mapping[str, Any]) -> dict[int, str]:
    losses = field(beat, "lost", list) if "lost" in beat else []
    try:
        return {int(rank): str(reason) for rank, reason in losses}
    except (TypeError, ValueError) as error:
        raise MalformedMessage("its losses are no pairs of rank and reason") from error
