"""The connection of a rank to the head, which declares losses (:mod:`rrfp_jax.core.membership`).

It is a connection to the rendezvous' server, authenticated by the run key as that of :func:`meet`, and it stays for the
whole run. Both sides are stateless between messages: a report says all that the rank knows, and is repeated until it is
answered, and again at once whenever the connection is new; the head answers a rank that is behind with the latest
epoch. So a head that cannot be reached for a moment delays declarations, and nothing else.
"""

import socket as sockets
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from rrfp_jax.cluster._rendezvous_client import Client
from rrfp_jax.cluster._rendezvous_server import SILENT_S
from rrfp_jax.cluster.keys import RunKey
from rrfp_jax.cluster.rendezvous import Member, MemberReport, NewcomerReport
from rrfp_jax.cluster.wire import pack_plain
from rrfp_jax.core.membership import EpochDeclared, FetchState, HoldReleased, RunCompleted
from rrfp_jax.layout import Layout
from rrfp_jax.records import MalformedRecord, from_plain, to_plain

_REPEAT_S, _CALM_S = 1.0, SILENT_S / 3
"""Seconds after which a report is repeated that was not answered, and one that was."""


class HeadLink:
    """A rank's connection to the head, in a thread of its own; close it.

    Args:
        address: the rendezvous, ``tcp://host:port``.
        layout: the layout of the run, the same on all ranks.
        on_declared: called on that thread with each epoch that is newer than all before, once with the end of the run,
            and with each news about newcomers.
        brought: data that this rank has brought to gatherings before the first step, packed, for newcomers.
        number: the number of this process of the rank. Where it is not 0 the process is a newcomer, and the head hears
            of it by :meth:`offer`.
    """

    def __init__(
        self,
        address: str,
        key: RunKey,
        rank: int,
        layout: Layout,
        *,
        on_declared: Callable[[EpochDeclared | RunCompleted | HoldReleased | FetchState], None],
        brought: bytes = b"",
        number: int = 0,
    ) -> None:
        self._report = MemberReport(
            rank=rank,
            num_stages=layout.num_stages,
            data=layout.data,
            unit_size=layout.unit_size,
            by_replica=layout.by_replica,
            order=layout.order,
            replicas=layout.replicas,
        )
        self._on_declared = on_declared
        self._number, self._is_newcomer = number, bool(number)
        self._offered: NewcomerReport | None = None
        self._brought = brought
        """Data that the head has not confirmed; empty: nothing."""
        self.members: dict[int, Member] = {}
        """The processes that came back, by rank."""
        self.awaits_newcomers = False
        """Whether new processes of lost ranks are prepared to take part."""
        self._lock = threading.Lock()
        """Held by whoever changes the report."""
        self._answered: MemberReport | None = None
        self._said: MemberReport | None = None
        self._heard_s = time.monotonic()
        self._completed = threading.Event()
        self._is_closing = False
        self._wake_read, self._wake_write = sockets.socketpair()
        self._client = Client(address, key, self._wake_read.fileno())
        self._thread = threading.Thread(target=self._run, name="rrfp-head", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since the head was heard last. Up to a few of them are usual."""
        return time.monotonic() - self._heard_s

    def accuse(self, accusations: tuple[tuple[int, str], ...], *, epoch: int = 0, holds: int | None = None) -> None:
        """Tells the head the living ranks that this one suspects, with reasons, and the step for which it holds in this
        epoch, in place of those told before; from any thread."""
        with self._lock:
            # A hold ends with its epoch, and a later one may have been declared.
            held = holds if epoch == self._report.epoch else None
            self._report = replace(self._report, accusations=accusations, holds=held)
        self._wake()

    def let_go(self) -> None:
        """Tells the head that this rank does not hold any more."""
        self._change(holds=None)

    def take_back(self) -> None:
        """Tells the head that this rank will hold for newcomers."""
        self._change(takes_back=True)

    def offer(self, step: int | None) -> None:
        """Tells the head that this newcomer is prepared, and the step before which it has the state, if it has any."""
        self._offered = NewcomerReport(rank=self._report.rank, number=self._number, step=step)
        self._wake()

    def leave(self, timeout_s: float) -> bool:
        """Tells the head that this rank has come to the end of the run, and blocks until the head knows it. Returns
        whether it does; if not, the end of this process counts as a loss."""
        self._change(has_left=True)
        return self._completed.wait(timeout_s)

    def close(self) -> None:
        """Ends the thread and the connection; not on that thread."""
        self._is_closing = True
        self._wake_write.send(b"\0")
        self._thread.join()
        self._wake_read.close()
        self._wake_write.close()

    def _change(self, **changes: Any) -> None:
        with self._lock:
            self._report = replace(self._report, **changes)
        self._wake()

    def _wake(self) -> None:
        self._wake_write.send(b"\0")

    def _run(self) -> None:
        with closing(self._client) as client:
            next_s = 0.0
            while not self._is_closing:
                now_s = time.monotonic()
                if now_s >= next_s and client.is_connected:
                    if self._is_newcomer:
                        if self._offered is not None:
                            client.say(pack_plain({"kind": "newcomer", "report": to_plain(self._offered)}))
                    else:
                        self._said = self._report
                        client.say(pack_plain({"kind": "member", "report": to_plain(self._said)}))
                        if self._brought:
                            rank = self._report.rank
                            client.say(pack_plain({"kind": "brought", "rank": rank, "data": self._brought}))
                    next_s = now_s + (_CALM_S if self._answered == self._said else _REPEAT_S)
                answer = client.hear(max(next_s, now_s + _REPEAT_S))
                # A new connection may mean a head that has missed the last report, or told an epoch in vain.
                if client.was_woken:
                    next_s = 0.0
                if answer is not None:
                    self._heard_s = time.monotonic()
                    self._read(answer)

    def _read(self, answer: dict[str, Any]) -> None:
        match answer:
            case {"kind": "heard", "newcomers": bool() as awaited}:
                self._answered, self.awaits_newcomers = self._said, awaited
            case {"kind": "newcomers", "are awaited": bool() as awaited}:
                self.awaits_newcomers = awaited
            case {"kind": "kept"}:
                self._brought = b""
            case {"kind": "released", "step": int() as step}:
                self._on_declared(HoldReleased(step))
            case {"kind": "fetch", "step": int() as step} if self._is_newcomer:
                self._on_declared(FetchState((), step))
            case {"kind": "epoch", "declared": data, "members": members}:
                try:
                    declared = from_plain(EpochDeclared, data)
                    self.members |= {each.rank: each for each in from_plain(tuple[Member, ...], members)}
                except MalformedRecord:
                    return
                if declared.epoch > self._report.epoch:
                    self._is_newcomer = False
                    with self._lock:
                        self._report = replace(self._report, epoch=declared.epoch, holds=None)
                    self._on_declared(declared)
            case {"kind": "completed"} if not self._completed.is_set():
                self._completed.set()
                self._on_declared(RunCompleted())
