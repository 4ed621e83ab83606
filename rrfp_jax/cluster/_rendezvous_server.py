"""The server of the rendezvous, at which the ranks of a run meet before ``jax.distributed`` starts.

``jax.distributed.initialize`` aborts the process when a rank is missing. So all ranks come here first: within a
deadline either everyone learns everyone's address, or everyone learns who is missing and which settings differ. The
server stays afterwards: the launchers of other nodes report how their ranks end, and get a :class:`RunStatus` of all.
Ranks that go on through losses report whom they suspect; by that, and by the ends of processes, the server declares
epochs (:mod:`rrfp_jax.core.membership`). All sides repeat all that they know until the other has it, so lost messages
and connections do no harm. The launcher or a supervisor hosts it.
"""

import logging
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import zmq

from rrfp_jax.cluster._zmq_sockets import (
    WATCHED_EVENTS,
    Gate,
    UnprovenConnections,
    bind_socket,
    connection_events,
    monitor_of,
    new_socket,
)
from rrfp_jax.cluster.config import LOOPBACK
from rrfp_jax.cluster.keys import RunKey
from rrfp_jax.cluster.rendezvous import (
    JoinRequest,
    LauncherReport,
    Member,
    MemberReport,
    NewcomerReport,
    ProcessEnding,
    Rendezvous,
    RollCall,
    RunStatus,
    name_ranks,
)
from rrfp_jax.cluster.wire import MAX_HEADER_BYTES, MalformedMessage, pack_plain, unpack_plain
from rrfp_jax.core.membership import (
    DeclareCompleted,
    DeclareEpoch,
    EpochDeclared,
    FetchState,
    HeadInstruction,
    HeadMembership,
    NewcomerTold,
    RankGone,
    RankLeft,
    RankTold,
    ReleaseHolds,
)
from rrfp_jax.layout import Layout
from rrfp_jax.records import MalformedRecord, from_plain, to_plain

_LOG = logging.getLogger(__name__)
SERVER_ROLE, MEMBER_ROLE = "rendezvous", "member"
MAX_ANSWER_BYTES = 64 << 20
"""Largest answer, which names all members of the run."""
MOMENT_S = 0.25
"""Longest wait, so that Ctrl-C is noticed."""
SILENT_S = 10.0
"""Silence after which the other side of a launcher's connection counts as gone."""
_FETCH_S = 60.0
"""Seconds that the others hold at most for a newcomer that fetches the state of the run."""
_LINGER_MS = 1000
_STOP_TIMEOUT_S = 5.0
WAITING_S = 4.0
"""Time after which it is first said who is missing; then after twice as long each time."""
_MAX_COMPLAINTS, _MAX_NAMELESS = 32, 5
_NO_RANK = "an end of rank {} of {}"
_OTHER_KEY = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)


class RendezvousFailed(RuntimeError):
    """The ranks did not come together; the text says who is missing and what differs."""


class RendezvousServer(AbstractContextManager["RendezvousServer"]):
    """Runs a :class:`Rendezvous` of ``num_ranks`` ranks on a thread of its own; a context manager, or close it.

    Args:
        deadline_s: seconds that all ranks have to come, once it is known which nodes take part.
        node_counts: all numbers of nodes that the run may have, descending; ``num_ranks`` is for the first. By default
            each rank is a node.
        roll_s: see :class:`RollCall`.
        interface, port: the address to listen on; by default on loopback, on a free port.
        expected: settings of the head; a rank's configuration must have the same, or none of the same name.
        on_status: called on the server's thread whenever there is news.
        notice: called there with sentences for the user: who is waited for, who is refused.
    """

    def __init__(
        self,
        num_ranks: int,
        key: RunKey,
        *,
        deadline_s: float = 60.0,
        node_counts: Sequence[int] = (),
        roll_s: float = 0.0,
        interface: str = LOOPBACK,
        port: int | None = None,
        expected: Mapping[str, Any] | None = None,
        on_status: Callable[[RunStatus], None] | None = None,
        notice: Callable[[str], None] = _LOG.warning,
    ) -> None:
        if num_ranks < 1 or deadline_s <= 0:
            raise ValueError(f"num_ranks {num_ranks} and deadline_s {deadline_s} must be positive")
        self._rules, self._roll = Rendezvous(num_ranks, expected), RollCall(node_counts or (num_ranks,), roll_s)
        self._started_s = time.monotonic()
        self._deadline_s, self._ends_s = deadline_s, self._started_s + deadline_s
        self._on_status, self._notice = on_status, notice
        self._context = zmq.Context()
        self._gate = Gate(self._context, {key.pair(MEMBER_ROLE).public: MEMBER_ROLE})
        self._socket = new_socket(self._context, zmq.ROUTER)
        self._monitor = monitor_of(self._socket, WATCHED_EVENTS | zmq.EVENT_ACCEPTED)
        self._wake_read, self._wake_write = sockets.socketpair()
        self._unproven = UnprovenConnections(num_ranks)
        try:
            self._socket.maxmsgsize = MAX_HEADER_BYTES
            self.address = bind_socket(self._socket, key.pair(SERVER_ROLE), interface, port)
        except ValueError:
            self._free()
            raise
        self._untold: set[bytes] = set()
        """Routes to ranks that have joined and do not know the decision."""
        self._launchers: dict[bytes, tuple[LauncherReport, float]] = {}
        """Last reports of other nodes' launchers, and when they were heard."""
        self._reported: set[bytes] = set()
        """Routes to launchers whose last report is not answered."""
        self._membership: HeadMembership | None = None
        """The living ranks; None until a rank has reported that it goes on through losses."""
        self._members: dict[int, bytes] = {}
        """Routes to such ranks, by rank."""
        self._noted: set[tuple[int, int]] = set()
        """Processes whose ends the membership knows, by rank and number."""
        self._lost: dict[int, str] = {}
        self._numbers: dict[int, int] = {}
        """See :class:`RunStatus`."""
        self._newcomers: dict[int, tuple[Member, bytes]] = {}
        """New processes of lost ranks, and the routes to them."""
        self._takes_back = self._are_awaited = False
        self._held_since_s: float | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._status, self._version = RunStatus(), 0
        self._service: ProcessEnding | None = None
        self._complaints: set[str] = set()
        self._hosts: dict[int, str | None] = {}
        """Host at the other end of each descriptor."""
        self._num_nameless = 0
        self._flaw: str | None = None
        """Fault of the connection that is closed next."""
        self._waiting_s = WAITING_S
        self._running = True
        self._thread = threading.Thread(target=self._serve, name="rrfp-rendezvous", daemon=True)
        self._thread.start()

    # -- called from any thread --------------------------------------------------------------------------------------

    def ended(self, rank: int, code: int, *, at_s: float | None = None, by_launcher: str = "", number: int = 0) -> None:
        """Reports that a process of this node has ended, now or at ``time.monotonic() == at_s``."""
        if not 0 <= rank < self._rules.num_ranks:
            raise ValueError(_NO_RANK.format(rank, self._rules.num_ranks))
        seconds = (time.monotonic() if at_s is None else at_s) - self._started_s
        ending = ProcessEnding(code=code, at_s=seconds, by_launcher=by_launcher, number=number)
        self._command(lambda: self._rules.ended(rank, ending))

    def service_ended(self, code: int, at_s: float) -> None:
        """Reports that the coordination service has ended too early, at ``time.monotonic() == at_s``."""
        self._command(lambda: setattr(self, "_service", ProcessEnding(code=code, at_s=at_s - self._started_s)))

    def is_settled(self, missing: Collection[int] = (), *, may_come: bool = True) -> bool:
        """Returns whether no launcher has to be waited for.

        A launcher is waited for that is present and starts some of the ``missing`` ranks, or has not the latest status
        while none is missing; and one that ``may_come`` before the deadline.
        """
        present = self._present().values()
        if not missing:
            return not self._commands and all(report.version == self._version for report in present)
        has_come = {rank for report, _ in list(self._launchers.values()) for rank in report.ranks}
        is_there = {rank for report in present for rank in report.ranks}
        may_come &= time.monotonic() < self._ends_s
        return not any(rank in is_there or (may_come and rank not in has_come) for rank in missing)

    def _present(self) -> dict[bytes, LauncherReport]:
        since_s = time.monotonic() - SILENT_S
        launchers = list(self._launchers.items())
        return {route: report for route, (report, at_s) in launchers if at_s > since_s and not report.is_leaving}

    def close(self) -> None:
        """Ends the thread and frees the port; ranks that still wait are told that the launcher has ended."""
        if self._thread.is_alive():
            self._command(lambda: setattr(self, "_running", False))
            self._thread.join(_STOP_TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with suppress(OSError):  # the thread has ended
            self._wake_write.send(b"\0")

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = zmq.Poller()
        for readable in (self._gate.socket, self._socket, self._monitor):
            poller.register(readable, zmq.POLLIN)
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        try:
            self._announce()  # launchers start no ranks before they know which nodes take part
            while self._running:
                poller.poll(round(MOMENT_S * 1000))
                self._watch_strangers()
                self._gate.answer()
                with suppress(BlockingIOError):
                    self._wake_read.recv(4096, sockets.MSG_DONTWAIT)
                while self._commands:
                    self._commands[0]()
                    self._commands.popleft()  # afterwards: :meth:`is_settled` must not find it gone and undone
                self._receive()
                # Messages come before the clock: a rank that came in time is not missing because this thread was late.
                waited_s = time.monotonic() - self._started_s
                if self._roll.call((report.node for report in self._present().values()), waited_s):
                    self._rules.num_ranks = self._rules.num_ranks // self._roll.counts[0] * len(self._roll.nodes)
                    self._ends_s = time.monotonic() + self._deadline_s
                if time.monotonic() > self._ends_s:
                    self._rules.expire(self._deadline_s)
                self._look_at_holds()
                if waited_s > self._waiting_s and not self._rules.is_decided:
                    awaited = self._roll.missing() or name_ranks(self._rules.missing())
                    self._notice(f"waiting for {awaited} ({waited_s:.0f} s)")
                    self._waiting_s *= 2
                self._announce()
        except Exception as error:
            _LOG.exception("the rendezvous failed")
            self._rules.give_up(f"the rendezvous itself failed: {error!r}")
        finally:
            self._rules.give_up("the launcher has ended the run")
            self._announce(is_last=True)
            self._free()

    def _receive(self) -> None:
        while True:
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._unproven.has_proven(route.get(zmq.SRCFD))
            try:
                if len(frames) != 1:
                    raise MalformedMessage(f"{len(frames)} frames instead of one")
                match said := unpack_plain(frames[0].bytes):
                    case {"kind": "hello", "hello": data}:
                        self._hear_rank(route.bytes, from_plain(JoinRequest, data))
                    case {"kind": "launcher", "report": data}:
                        self._hear_launcher(route.bytes, from_plain(LauncherReport, data))
                    case {"kind": "member", "report": data}:
                        self._hear_member(route.bytes, from_plain(MemberReport, data))
                    case {"kind": "newcomer", "report": data}:
                        self._hear_newcomer(route.bytes, from_plain(NewcomerReport, data))
                    case {"kind": "brought", "rank": int() as rank, "data": bytes() as data}:
                        self._rules.brought[rank] = data
                        self._reply(route.bytes, {"kind": "kept"})
                    case _:
                        raise MalformedMessage(f"{said!r:.80} is nothing that the rendezvous answers")
            except (MalformedMessage, MalformedRecord, RecursionError) as error:
                self._complain(f"a message to the rendezvous was dropped: {error}")

    def _hear_launcher(self, route: bytes, report: LauncherReport) -> None:
        now_s = time.monotonic()
        if not 0 < report.node < self._roll.counts[0]:
            raise MalformedMessage(f"a report of node {report.node} of {self._roll.counts[0]}")
        for rank, ending in report.endings.items():
            if not 0 <= rank < self._rules.num_ranks:
                raise MalformedMessage(_NO_RANK.format(rank, self._rules.num_ranks))
            # Ages, not times, travel: the clocks of hosts need not agree.
            self._rules.ended(rank, replace(ending, at_s=now_s - ending.at_s - self._started_s))
        self._launchers[route] = report, now_s
        self._reported.add(route)

    def _hear_rank(self, route: bytes, request: JoinRequest) -> None:
        if request.member.number:
            self._meet_newcomer(route, request)
            return
        if refusal := self._rules.admit(request):
            self._complain(f"rank {request.member.rank} ({request.member}) is refused: {refusal.splitlines()[0]}")
            self._reply(route, {"kind": "failed", "text": refusal})
            return
        self._untold.add(route)
        if not self._rules.is_decided:
            self._reply(route, {"kind": "waiting", "remaining_s": max(0.0, self._ends_s - time.monotonic())})

    def _meet_newcomer(self, route: bytes, request: JoinRequest) -> None:
        rank, refusal = request.member.rank, self._rules.refuse_newcomer(request)
        if refusal is None and (self._membership is None or rank in self._membership.living):
            refusal = f"rank {rank} comes back, and was not declared lost"
        if refusal is not None:
            self._complain(refusal)
            self._reply(route, {"kind": "failed", "text": refusal})
            return
        assert self._membership is not None
        if rank in self._newcomers and self._newcomers[rank][0] != request.member:
            # Of the one before, which had perhaps come further, nothing may count any more.
            self._declare(self._membership.handle(RankGone(rank, "was started again")))
        self._newcomers[rank] = request.member, route
        assert self._rules.members is not None
        brought = [[other, data] for other, data in self._rules.brought.items()]
        self._reply(route, {"kind": "come back", "members": to_plain(self._rules.members), "brought": brought})

    def _hear_newcomer(self, route: bytes, report: NewcomerReport) -> None:
        rank, number = report.rank, report.number
        is_awaited = rank in self._newcomers and self._newcomers[rank][0].number == number
        if is_awaited:
            self._newcomers[rank] = self._newcomers[rank][0], route
        elif self._numbers.get(rank) == number:
            self._members[rank] = route  # It has not heard that it takes part.
        else:
            return
        assert self._membership is not None
        if is_awaited or rank in self._membership.living:
            self._declare(self._membership.handle(NewcomerTold(rank, report.step)))

    def _look_at_holds(self) -> None:
        """Ends newcomers for which the others have held for too long."""
        if self._membership is None or not self._membership.holding:
            self._held_since_s = None
            return
        now_s = time.monotonic()
        self._held_since_s = self._held_since_s or now_s
        if now_s > self._held_since_s + _FETCH_S:
            for rank in list(self._membership.newcomers):
                self._numbers[rank] = self._newcomers.pop(rank)[0].number
                self._notice(f"rank {rank} has not fetched the state in {_FETCH_S:g} s, and is not waited for")
                self._declare(self._membership.handle(RankGone(rank, "has not fetched the state")))

    def _hear_member(self, route: bytes, report: MemberReport) -> None:
        rank, num_ranks = report.rank, self._rules.num_ranks
        if not all(0 <= named < num_ranks for named in (rank, *(suspect for suspect, _ in report.accusations))):
            raise MalformedMessage(f"rank {rank} of {num_ranks} accuses {report.accusations!r:.80}")
        if self._membership is None:
            try:
                layout = Layout(
                    num_stages=report.num_stages,
                    data=report.data,
                    tensor=report.unit_size,
                    num_ranks=num_ranks,
                    by_replica=report.by_replica,
                    order=report.order,
                    replicas=report.replicas,
                )
            except ValueError as error:
                raise MalformedMessage(f"rank {rank} tells of a layout that cannot be: {error}") from error
            self._membership = HeadMembership([layout.units_of(other) for other in range(num_ranks)], layout.num_stages)
        self._members[rank] = route
        self._takes_back |= report.takes_back
        told = RankTold(rank, report.epoch, report.accusations, report.holds)
        self._declare(self._membership.handle(RankLeft(rank) if report.has_left else told))
        if report.has_left:
            # A rank that leaves after others gets the answer that these had.
            self._declare(self._membership.handle(told))
        self._reply(route, {"kind": "heard", "newcomers": bool(self._membership.newcomers)})

    def _note_ends(self) -> None:
        """Tells the membership of ranks whose processes have ended."""
        if self._membership is not None:
            ends = {(rank, ending.number): ending.code for rank, ending in self._rules.endings.items()}
            for rank, number in sorted(ends.keys() - self._noted):
                self._noted.add((rank, number))
                is_newcomer = rank in self._newcomers and self._newcomers[rank][0].number == number
                if is_newcomer:
                    del self._newcomers[rank]
                if is_newcomer or self._numbers.get(rank, 0) == number:
                    ended = f"ended with code {ends[rank, number]}"
                    self._declare(self._membership.handle(RankGone(rank, ended)))

    def _declare(self, instructions: Sequence[HeadInstruction]) -> None:
        assert self._membership is not None
        said: dict[str, Any]
        for instruction in instructions:
            routes = self._members
            match instruction:
                case DeclareEpoch(ranks, epoch, living, lost, reason):
                    self._lost |= dict.fromkeys(lost, reason)
                    for rank in self._newcomers.keys() & {*living}:
                        member, self._members[rank] = self._newcomers.pop(rank)
                        self._numbers[rank] = member.number
                        del self._lost[rank]
                        self._rules.take_back(member)
                        self._notice(reason)
                    declared = EpochDeclared(epoch, living, reason)
                    back = [each for each in self._rules.members or () if each.number and each.rank in living]
                    said = {"kind": "epoch", "declared": to_plain(declared), "members": to_plain(tuple(back))}
                    if lost:
                        self._notice(f"{name_ranks(lost)} declared lost: {reason}")
                case DeclareCompleted(ranks):
                    said = {"kind": "completed"}
                case ReleaseHolds(ranks, step):
                    said = {"kind": "released", "step": step}
                case FetchState(ranks, step):
                    said, routes = {"kind": "fetch", "step": step}, {r: at for r, (_, at) in self._newcomers.items()}
            for rank in ranks:
                if rank in routes:
                    self._reply(routes[rank], said)
        if (are_awaited := bool(self._membership.newcomers)) != self._are_awaited:
            self._are_awaited = are_awaited
            for rank in self._membership.living:
                if rank in self._members:
                    self._reply(self._members[rank], {"kind": "newcomers", "are awaited": are_awaited})

    def _announce(self, *, is_last: bool = False) -> None:
        """Tells ranks the decision, and launchers the status if it is new or they have reported."""
        if self._rules.is_decided:
            decision: dict[str, Any] = {"kind": "failed", "text": self._rules.failure}
            if self._rules.members is not None and self._untold:
                decision = {"kind": "complete", "members": to_plain(self._rules.members)}
            for route in self._untold:
                self._reply(route, decision)
            self._untold.clear()
        self._note_ends()
        status = replace(
            self._rules.status(),
            nodes=self._roll.nodes,
            may_grow=self._roll.may_grow,
            service=self._service,
            lost=dict(self._lost),
            numbers=dict(self._numbers),
            takes_back=self._takes_back,
            is_last=is_last,
        )
        is_new = status != self._status
        if is_new:
            self._status, self._version = status, self._version + 1
            if self._on_status is not None:
                self._on_status(status)
        for route, report in self._present().items() if is_new or self._reported else ():
            if is_new or route in self._reported:
                news = {"bulletin": to_plain(status)} if report.version != self._version else {}
                self._reply(route, {"kind": "bulletin", "version": self._version, **news})
        self._reported.clear()

    def _reply(self, route: bytes, said: dict[str, Any]) -> None:
        with suppress(zmq.ZMQError):  # it has gone meanwhile
            self._socket.send_multipart([route, pack_plain(said, MAX_ANSWER_BYTES)], zmq.NOBLOCK)

    def _watch_strangers(self) -> None:
        """Names the hosts whose connections fail.

        ZeroMQ tells a connection's descriptor as it comes and as it goes, and its fault just before it goes.
        """
        for event in connection_events(self._monitor):
            kind, value = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._hosts[value] = self._unproven.heed(event)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._unproven.heed(event)
                host, flaw, self._flaw = self._hosts.pop(value, None), self._flaw, None
                if flaw is None:
                    continue
                # A peer that disconnected before its host was known may reconnect, and be named then.
                self._num_nameless += host is None
                is_known = any(complaint.endswith(flaw) for complaint in self._complaints)
                if host is not None or (self._num_nameless > _MAX_NAMELESS and not is_known):
                    self._complain(f"a process on {host or 'an unknown host'} {flaw}")
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH or (kind, value) == _OTHER_KEY:
                self._flaw = "tries to join with the key of another run or attempt: give the same to all nodes"
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._flaw = "does not speak the protocol of the rendezvous, and is not heard"

    def _complain(self, text: str) -> None:
        # Each once, and not for ever: strangers could cause complaints at will.
        if text not in self._complaints and len(self._complaints) < _MAX_COMPLAINTS:
            self._complaints.add(text)
            self._notice(text)

    def _free(self) -> None:
        self._monitor.close()
        self._socket.close(linger=_LINGER_MS)
        self._gate.socket.close()
        self._wake_read.close()
        self._wake_write.close()
        self._context.term()
        self._unproven.close()
