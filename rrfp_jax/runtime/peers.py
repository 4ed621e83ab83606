"""The other processes of a run, as this one's driver sees them: notes within groups, outcomes, failures, gatherings.

All of it are small messages of plain data over the run's :class:`PeerNetwork`. What comes before a driver is attached
is kept for it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rrfp_jax.arbitration import Note
from rrfp_jax.planning.layout import Layout
from rrfp_jax.records import MalformedRecord, from_plain, to_plain
from rrfp_jax.runtime.clocks import Clocks
from rrfp_jax.runtime.gatherings import Gatherings, PeerFailed
from rrfp_jax.runtime.network import MalformedMessage, PeerNetwork
from rrfp_jax.runtime.network.plain import field, pack, unpack

__all__ = ["Listener", "PeerFailed", "Peers"]

_LOG = logging.getLogger(__name__)
_NOTE, _OUTCOME, _FAILURE = "note", "outcome", "failure"
_MAX_TIMELINE_BYTES = 1 << 30
_MAX_REPORT_BYTES = 1 << 26


class Listener(Protocol):
    """What a driver does with messages from other ranks; called on the event loop."""

    def heard(self, unit: int, step: int, member: int, note: Note) -> None:
        """A member of the unit's group says something."""

    def outcome(self, unit: int, step: int, outcome: Any, timeline: list[Any]) -> None:
        """A unit elsewhere has ended a step; only rank 0 is told."""

    def failed(self, rank: int, failure: Mapping[str, Any]) -> None:
        """A rank gives up, and says why."""


class Peers:
    """Talks to the other ranks; subscribes to its topics, so make it before the network starts."""

    def __init__(self, network: PeerNetwork, layout: Layout, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.network, self.layout, self.rank = network, layout, network.rank
        self.clocks = Clocks(network, clock)
        self._gatherings = Gatherings(network)
        self.gather = self._gatherings.gather
        """See :meth:`Gatherings.gather`."""
        self._listener: Listener | None = None
        self._kept: list[Callable[[Listener], None]] = []
        for topic, handler in ((_NOTE, self._note), (_OUTCOME, self._outcome), (_FAILURE, self._failure)):
            network.subscribe(topic, handler)

    def attach(self, listener: Listener) -> None:
        """Hand everything that has come and that will come to a driver; on the event loop."""
        self._listener = listener
        kept, self._kept = self._kept, []
        for call in kept:
            call(listener)

    def detach(self) -> None:
        """The driver is closed; what comes from now on is kept for the next."""
        self._listener = None

    # -- on the event loop -------------------------------------------------------------------------------------------

    def tell(self, unit: int, member: int, step: int, note: Note) -> None:
        """Say something to a member of a unit's group."""
        ranks = self.layout.ranks_of(unit)
        header = {"unit": unit, "step": step, "member": ranks.index(self.rank), "note": to_plain(note)}
        self.network.send(ranks[member], _NOTE, header)

    def report(self, unit: int, step: int, outcome: Any, timeline: list[Any]) -> None:
        """Tell rank 0 that a unit has ended a step here."""
        header = {"unit": unit, "step": step, "outcome": outcome}
        self.network.send(0, _OUTCOME, header, [pack(timeline, _MAX_TIMELINE_BYTES)])

    def announce(self, failure: Mapping[str, Any]) -> None:
        """Tell every rank that this one gives up; no gathering can be completed any more. Never raises."""
        self.lose(f"rank {self.rank} gave up: {failure.get('summary')}")
        try:
            packed = pack(dict(failure), _MAX_REPORT_BYTES)
            for rank in range(self.layout.num_ranks):
                if rank != self.rank:
                    self.network.send(rank, _FAILURE, {}, [packed])
        except Exception:  # the run ends all the same; the others notice that this rank is gone
            _LOG.exception("rank %d could not tell the others why it gives up", self.rank)

    def lose(self, what: str) -> None:
        """A rank is gone for good: every gathering that is not complete fails."""
        self._gatherings.fail(what)
        self.clocks.fail(what)

    def _note(self, _: int, header: dict[str, Any], __: list[memoryview]) -> None:
        unit, step, member = (field(header, name, int) for name in ("unit", "step", "member"))
        note = _note_from(field(header, "note", list))
        self._hand_over(lambda listener: listener.heard(unit, step, member, note))

    def _outcome(self, _: int, header: dict[str, Any], frames: list[memoryview]) -> None:
        unit, step = field(header, "unit", int), field(header, "step", int)
        timeline = unpack(bytes(frames[0]) if frames else b"", _MAX_TIMELINE_BYTES)
        self._hand_over(lambda listener: listener.outcome(unit, step, header.get("outcome"), timeline))

    def _failure(self, rank: int, _: dict[str, Any], frames: list[memoryview]) -> None:
        failure = unpack(bytes(frames[0]) if frames else b"", _MAX_REPORT_BYTES)
        self.lose(f"rank {rank} gave up: {field(failure, 'summary', str)}")
        self._hand_over(lambda listener: listener.failed(rank, failure))

    def _hand_over(self, call: Callable[[Listener], None]) -> None:
        if self._listener is None:
            self._kept.append(call)
        else:
            call(self._listener)


def _note_from(plain: list[Any]) -> Note:
    try:
        note: Note = from_plain(Note, plain)
    except MalformedRecord as error:
        raise MalformedMessage(str(error)) from error
    return note
