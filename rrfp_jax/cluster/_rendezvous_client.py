"""The clients of the rendezvous: a rank that joins its run, and the launcher of another node."""

import os
import socket as sockets
import threading
import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import zmq

from rrfp_jax.cluster._rendezvous_server import (
    MAX_ANSWER_BYTES,
    MEMBER_ROLE,
    MOMENT_S,
    SERVER_ROLE,
    SILENT_S,
    WAITING_S,
    RendezvousFailed,
)
from rrfp_jax.cluster._zmq_sockets import HANDSHAKE_FAILURES, connect_socket, connection_events, monitor_of, new_socket
from rrfp_jax.cluster.keys import RunKey
from rrfp_jax.cluster.rendezvous import JoinRequest, LauncherReport, Member, ProcessEnding, RunStatus
from rrfp_jax.cluster.wire import MalformedMessage, pack_plain, unpack_plain
from rrfp_jax.records import MalformedRecord, from_plain, to_plain

_REPEAT_S = 1.0
_RECONNECT_MS = 500
_MARGIN_S = 2.0
"""Seconds by which clients give up later than the rendezvous, so that they hear its decision."""
_MAX_REFUSALS = 3
"""Number of refusals in a row after which the keys must differ."""
_FAREWELL_MS = 2000


def meet(
    address: str,
    request: JoinRequest,
    key: RunKey,
    *,
    deadline_s: float = 60.0,
    brought: dict[int, bytes] | None = None,
) -> tuple[Member, ...]:
    """Joins the rendezvous at ``address`` (``tcp://host:port``). Returns all members, ascending by rank.

    Blocks until the decision, at most until the rendezvous' own deadline (once it has answered) or ``deadline_s``.
    Where the process comes back to a run under way, ``brought`` is filled with the data that each rank has told before
    the first step.

    Raises:
        RendezvousFailed: with the reason, where ranks are missing or differ, this one is refused, the run key is not
            the rendezvous', or nobody answers.
        ValueError: where the request is larger than 1 MiB.
    """
    said = pack_plain({"kind": "hello", "hello": to_plain(request)})
    next_s, until_s, has_answered = 0.0, time.monotonic() + deadline_s, False
    with closing(Client(address, key)) as client:
        while (now_s := time.monotonic()) < until_s:
            if now_s >= next_s and not has_answered:
                client.say(said)
                next_s = now_s + _REPEAT_S
            answer = client.hear(until_s)
            if client.num_refused >= _MAX_REFUSALS:
                raise RendezvousFailed(
                    f"the rendezvous at {address} does not accept this process's run key: every process of a run "
                    "needs the key that its launcher made"
                )
            match answer:
                case {"kind": "waiting", "remaining_s": float() as remaining_s}:
                    # From now on the rendezvous' own deadline counts, and it answers without being asked again.
                    has_answered = True
                    until_s = time.monotonic() + remaining_s + _MARGIN_S
                case {"kind": "failed", "text": str() as text}:
                    raise RendezvousFailed(text)
                case {"kind": "come back", "members": members, "brought": list(data)} if brought is not None:
                    brought |= dict(data)
                    return tuple(from_plain(tuple[Member, ...], members))
                case {"kind": "complete", "members": members}:
                    return tuple(from_plain(tuple[Member, ...], members))
    state = "fell silent" if has_answered else "did not answer: is the launcher running, and the address right?"
    raise RendezvousFailed(f"the rendezvous at {address} {state}")


class LauncherLink:
    """The connection of another node's launcher to the head, in a thread of its own; close it.

    ``is_accepted`` says that the head has answered to this key, ``is_gone`` that it has ended, or not answered for a
    while since.

    Args:
        node: number of the launcher's node.
        is_sure: whether the head can have no other key than this, since no other attempt has one.
        on_status: called on that thread whenever there is news.
        notice: called there with sentences for the user while the head does not answer.
    """

    def __init__(
        self,
        address: str,
        key: RunKey,
        node: int,
        *,
        is_sure: bool = True,
        on_status: Callable[[RunStatus], None],
        notice: Callable[[str], None],
    ) -> None:
        self._address, self._key, self._node, self._is_sure = address, key, node, is_sure
        self._ranks: tuple[int, ...] = ()
        self._on_status, self._notice = on_status, notice
        self.is_accepted = self.is_gone = False
        self._status, self._version = RunStatus(), -1
        self._endings: dict[int, ProcessEnding] = {}
        self._is_closing = False
        self._wake_read, self._wake_write = sockets.socketpair()
        self._client = Client(address, key, self._wake_read.fileno())
        self._thread = threading.Thread(target=self._run, name="rrfp-head", daemon=True)
        self._thread.start()

    def takes(self, ranks: tuple[int, ...]) -> None:
        """Reports the ranks that the launcher starts, once it knows which nodes take part."""
        self._ranks = ranks
        self._wake_write.send(b"\0")

    def ended(self, rank: int, code: int, *, at_s: float | None = None, by_launcher: str = "", number: int = 0) -> None:
        """Reports the end of a process of this node, now or at ``time.monotonic() == at_s``, until the head has it."""
        at_s = time.monotonic() if at_s is None else at_s
        ending = ProcessEnding(code=code, at_s=at_s, by_launcher=by_launcher, number=number)
        self._endings = {**self._endings, rank: ending}
        self._wake_write.send(b"\0")

    def is_settled(self, missing: Collection[int] = (), *, may_come: bool = True) -> bool:  # noqa: ARG002 - it is there
        """Returns whether the head is gone, or knows all that was reported here while no rank is ``missing``."""
        known = {(rank, ending.number) for rank, ending in self._status.endings.items()}
        return self.is_gone or (not missing and {(r, each.number) for r, each in self._endings.items()} <= known)

    @property
    def is_refused(self) -> bool:
        """Whether the place has another key, that of another attempt or run."""
        return self._client.num_refused >= _MAX_REFUSALS

    def why_not(self) -> str:
        """Returns why the head has not accepted this launcher yet."""
        if not self.is_refused:
            return "it does not answer"
        if not self._is_sure:
            return "it serves another attempt, or was given another run key than this node"
        return "it answers, but not to this node's run key: give the same to all nodes"

    def close(self) -> None:
        self._is_closing = True
        self._wake_write.send(b"\0")
        self._thread.join()
        self._wake_read.close()
        self._wake_write.close()

    def _run(self) -> None:
        with closing(self._client) as client:
            started_s = time.monotonic()
            next_s, waiting_s, was_refused, num_unanswered = 0.0, WAITING_S, False, 0
            while not self._is_closing:
                now_s = time.monotonic()
                if now_s >= next_s and client.is_connected:
                    client.say(self._report())
                    next_s = now_s + _REPEAT_S
                    num_unanswered += 1
                answer = client.hear(now_s + _REPEAT_S)
                if client.was_woken or (answer is not None and self._read(answer)):
                    next_s = 0.0
                if answer is not None:
                    self.is_accepted, num_unanswered = True, 0
                    continue
                # A head that has answered once and refuses now is another one: this attempt's has ended.
                is_refused = self.is_refused
                if self.is_accepted:
                    is_unreached = client.num_unreached >= _MAX_REFUSALS
                    self.is_gone |= is_refused or is_unreached or num_unanswered * _REPEAT_S > SILENT_S
                elif now_s > started_s + waiting_s or is_refused > was_refused:
                    self._notice(
                        f"waiting for the head at {self._address} ({now_s - started_s:.0f} s): {self.why_not()}"
                    )
                    waiting_s, was_refused = 2 * max(waiting_s, now_s - started_s), is_refused
            # The head need not wait for this launcher any more. A head that is gone cannot be told.
            if not self.is_gone:
                client.linger_ms = _FAREWELL_MS
                client.say(self._report(is_leaving=True))

    def _report(self, *, is_leaving: bool = False) -> bytes:
        now_s = time.monotonic()
        endings = {rank: replace(ending, at_s=now_s - ending.at_s) for rank, ending in self._endings.items()}
        report = LauncherReport(
            node=self._node, ranks=self._ranks, endings=endings, version=self._version, is_leaving=is_leaving
        )
        return pack_plain({"kind": "launcher", "report": to_plain(report)})

    def _read(self, answer: dict[str, Any]) -> bool:
        """Takes an answer of the head. Returns whether it is news."""
        match answer:
            case {"kind": "bulletin", "version": int() as version, "bulletin": data} if version != self._version:
                with suppress(MalformedRecord):
                    self._status, self._version = from_plain(RunStatus, data), version
                    self.is_gone |= self._status.is_last
                    self._on_status(self._status)
                    return True
        return False


class Client:
    """A connection to the rendezvous. A byte written to ``wake_fd`` ends :meth:`hear`, as a new connection does."""

    def __init__(self, address: str, key: RunKey, wake_fd: int | None = None) -> None:
        self._wake_fd = wake_fd
        self._context = zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER)
        self._socket.maxmsgsize = MAX_ANSWER_BYTES
        self._socket.reconnect_ivl_max = _RECONNECT_MS
        self._monitor = monitor_of(self._socket)
        self._poller = zmq.Poller()
        for readable in (self._socket, self._monitor, *(() if wake_fd is None else (wake_fd,))):
            self._poller.register(readable, zmq.POLLIN)
        self.num_refused = self.num_unreached = 0
        """Numbers of failures in a row."""
        self.is_connected = self.was_woken = False
        self.linger_ms = 0
        try:
            connect_socket(self._socket, address, key.pair(MEMBER_ROLE), key.pair(SERVER_ROLE).public)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"'{address}' is no address of a rendezvous: give tcp://host:port") from error

    def say(self, data: bytes) -> None:
        """Sends a message, or drops it where there is no connection."""
        with suppress(zmq.Again):  # refused, and not yet connected again: said again later
            self._socket.send(data, zmq.NOBLOCK)

    def hear(self, until_s: float) -> dict[str, Any] | None:
        """Returns the next answer before ``until_s``, at most a moment later, or None."""
        left_s = min(MOMENT_S, max(0.0, until_s - time.monotonic()))
        ready = dict(self._poller.poll(round(left_s * 1000) + 1))
        was_connected = self.is_connected
        for event in connection_events(self._monitor):
            kind = int(event["event"])
            self.is_connected = kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.num_refused += bool(kind & HANDSHAKE_FAILURES)
            self.num_unreached += kind == zmq.EVENT_CLOSED
            if self.is_connected:
                self.num_refused = self.num_unreached = 0
        self.was_woken = self.is_connected and not was_connected
        if self._wake_fd is not None and self._wake_fd in ready:
            self.was_woken = bool(os.read(self._wake_fd, 4096))
        if self._socket not in ready:
            return None
        try:
            answer = unpack_plain(self._socket.recv(zmq.NOBLOCK), MAX_ANSWER_BYTES)
        except MalformedMessage:
            return None
        return answer if isinstance(answer, dict) else None

    def close(self) -> None:
        """Frees the sockets; what was said may take ``linger_ms`` to go out."""
        self._monitor.close()
        self._socket.close(linger=self.linger_ms)
        self._context.term()
