"""The other processes of a run, as this one's driver sees them: notes within groups, outcomes, failures, gatherings.

All of it are small messages of plain data over the run's :class:`PeerNetwork`. What comes before a driver is attached
is kept for it. Rank 0 collects: the outcomes of steps, for metrics and pictures, and what ranks bring to a gathering.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rrfp_jax.arbitration import Note
from rrfp_jax.planning.layout import Layout
from rrfp_jax.records import MalformedRecord, from_plain, to_plain
from rrfp_jax.runtime.network import MalformedMessage, PeerNetwork
from rrfp_jax.runtime.network.plain import field, pack, unpack

_NOTE, _OUTCOME, _FAILURE, _GATHER, _CLOCK = "note", "outcome", "failure", "gather", "clock"
_NUM_CLOCK_PINGS = 8
_MAX_TIMELINE_BYTES = 1 << 30
_MOMENT_S = 0.5
"""No wait is longer, so that a signal that comes just before one is noticed soon."""


class PeerFailed(ConnectionError):
    """A gathering cannot be completed: a rank is lost or has given up, or the time is over."""


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

    def __init__(self, network: PeerNetwork, layout: Layout) -> None:
        self.network, self.layout, self.rank = network, layout, network.rank
        self.clock_offset_s = 0.0
        """What to add to this process's clock to have rank 0's; zero until :meth:`synchronise`."""
        self._listener: Listener | None = None
        self._kept: list[Callable[[Listener], None]] = []
        self._gatherings: dict[str, _Gathering] = {}
        self._pongs: dict[int, threading.Event] = {}
        self._pings: list[tuple[float, float]] = []
        self._gone: str | None = None
        handlers = {
            _NOTE: self._note,
            _OUTCOME: self._outcome,
            _FAILURE: self._failure,
            _GATHER: self._gather,
            _CLOCK: self._clock,
        }
        for topic, handler in handlers.items():
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
        """Tell every rank that this one gives up; no gathering can be completed any more."""
        self.lose(f"rank {self.rank} gave up: {failure.get('summary')}")
        for rank in range(self.layout.num_ranks):
            if rank != self.rank:
                self.network.send(rank, _FAILURE, {"failure": dict(failure)})

    def lose(self, what: str) -> None:
        """A rank is gone for good: every gathering that is not complete fails."""
        self._gone = what
        for gathering in list(self._gatherings.values()):
            gathering.complete.set()

    def _note(self, _: int, header: dict[str, Any], __: list[memoryview]) -> None:
        unit, step, member = (field(header, name, int) for name in ("unit", "step", "member"))
        note = _note_from(field(header, "note", list))
        self._hand_over(lambda listener: listener.heard(unit, step, member, note))

    def _outcome(self, _: int, header: dict[str, Any], frames: list[memoryview]) -> None:
        unit, step = field(header, "unit", int), field(header, "step", int)
        timeline = unpack(bytes(frames[0]) if frames else b"", _MAX_TIMELINE_BYTES)
        self._hand_over(lambda listener: listener.outcome(unit, step, header.get("outcome"), timeline))

    def _failure(self, rank: int, header: dict[str, Any], _: list[memoryview]) -> None:
        failure = field(header, "failure", dict)
        self.lose(f"rank {rank} gave up: {failure.get('summary')}")
        self._hand_over(lambda listener: listener.failed(rank, failure))

    def _hand_over(self, call: Callable[[Listener], None]) -> None:
        if self._listener is None:
            self._kept.append(call)
        else:
            call(self._listener)

    # -- called from any thread but the loop's -----------------------------------------------------------------------

    def gather(self, name: str, data: Any = None, *, deadline_s: float | None = None) -> dict[int, Any]:
        """Bring plain data to rank 0 and wait until every rank has; returns everybody's, by rank, to everybody.

        ``name`` is new for every gathering, and the same on all ranks. Raises PeerFailed where a rank is lost before,
        or does not come within the deadline; without one the ranks are waited for as long as all of them live.
        """
        gathering = self._gathering(name)
        if self._gone is not None:
            gathering.complete.set()
        if self.rank:
            self.network.send_threadsafe(0, _GATHER, {"name": name, "data": data})
        else:
            self.network.call_soon(lambda: self._bring(name, 0, data))
        until_s = math.inf if deadline_s is None else time.monotonic() + deadline_s
        while not gathering.complete.wait(min(_MOMENT_S, max(0.0, until_s - time.monotonic()))):
            if time.monotonic() >= until_s:
                break
        del self._gatherings[name]
        if len(gathering.brought) == self.layout.num_ranks:
            return gathering.brought
        if self._gone is not None:
            raise PeerFailed(self._gone)
        missing = [r for r in range(self.layout.num_ranks) if r not in gathering.brought] if not self.rank else "others"
        raise PeerFailed(f"{name}: {missing} did not come within {deadline_s:g} s")

    def synchronise(self, *, deadline_s: float = 5.0) -> None:
        """Measure how far this process's clock is from rank 0's, to half a round trip."""
        if not self.rank:
            return
        for number in range(_NUM_CLOCK_PINGS):
            self._pongs[number] = pong = threading.Event()
            self.network.send_threadsafe(0, _CLOCK, {"number": number, "sent_s": time.perf_counter()})
            if not pong.wait(deadline_s):
                raise PeerFailed(f"rank 0 did not answer rank {self.rank} within {deadline_s:g} s")
        self.clock_offset_s = min(self._pings)[1]

    def _gather(self, rank: int, header: dict[str, Any], _: list[memoryview]) -> None:
        name = field(header, "name", str)
        if not self.rank:
            self._bring(name, rank, header.get("data"))
        else:
            gathering = self._gathering(name)
            gathering.brought = dict(enumerate(field(header, "all", list)))
            gathering.complete.set()

    def _bring(self, name: str, rank: int, data: Any) -> None:
        gathering, num_ranks = self._gathering(name), self.layout.num_ranks
        gathering.brought[rank] = data
        if len(gathering.brought) == num_ranks:
            everything = [gathering.brought[r] for r in range(num_ranks)]
            for other in range(1, num_ranks):
                self.network.send(other, _GATHER, {"name": name, "all": everything})
            gathering.complete.set()

    def _gathering(self, name: str) -> "_Gathering":
        return self._gatherings.setdefault(name, _Gathering())  # atomic: the loop and a caller may both be first

    def _clock(self, rank: int, header: dict[str, Any], _: list[memoryview]) -> None:
        number, sent_s = field(header, "number", int), field(header, "sent_s", float)
        if not self.rank:
            self.network.send(rank, _CLOCK, {**header, "clock_s": time.perf_counter()})
            return
        now_s = time.perf_counter()
        self._pings.append((now_s - sent_s, field(header, "clock_s", float) - (sent_s + now_s) / 2))
        self._pongs.pop(number).set()


class _Gathering:
    def __init__(self) -> None:
        self.brought: dict[int, Any] = {}
        self.complete = threading.Event()


def _note_from(plain: list[Any]) -> Note:
    try:
        note: Note = from_plain(Note, plain)
    except MalformedRecord as error:
        raise MalformedMessage(str(error)) from error
    return note
