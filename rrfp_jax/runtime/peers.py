"""The other processes of a run, as this one's driver sees them: notes within groups, outcomes, failures, gatherings.

All of it are small messages of plain data over the run's :class:`PeerNetwork`.
"""

import logging
import struct
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from rrfp_jax.cluster import MalformedMessage, PeerNetwork
from rrfp_jax.cluster.failure_detector import watched
from rrfp_jax.cluster.wire import field, pack_plain, unpack_plain
from rrfp_jax.core import Message, Note
from rrfp_jax.layout import Layout
from rrfp_jax.records import MalformedRecord, from_plain, to_plain
from rrfp_jax.runtime.clocks import Clocks
from rrfp_jax.runtime.gatherings import Gatherings, PeerFailed
from rrfp_jax.runtime.outcomes import Outcomes, Summary
from rrfp_jax.runtime.report import FailureNews
from rrfp_jax.runtime.transports.parts import KEY_BYTES, Key, pack_key, unpack_key
from rrfp_jax.schedules.timeline import StepSums
from rrfp_jax.tree import neighbours

__all__ = ["Listener", "PeerFailed", "Peers"]

_LOG = logging.getLogger(__name__)
_NOTE, _TASK, _FAILURE = "note", b"task", "failure"
_UNIT = struct.Struct("<I")
_MAX_NEWS_BYTES = 1 << 26


class Listener(Protocol):
    """What a driver does with messages from other ranks; called on the event loop."""

    def heard(self, unit: int, step: int, member: int, note: Note) -> None:
        """A member of the unit's group says something."""

    def task_announced(self, unit: int, step: int, message: Message) -> None:
        """The task that will send this message to the unit has started elsewhere."""

    def step_ended(self, step: int, summary: Summary) -> None:
        """All units of the run have ended a step; only rank 0 is told."""

    def failed(self, news: FailureNews) -> None:
        """A rank gives up, or tells on that another one does."""


class Peers:
    """Talks to the other ranks, for one driver after another."""

    def __init__(self, network: PeerNetwork, layout: Layout, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.network, self.layout, self.rank = network, layout, network.rank
        self.clocks = Clocks(network, clock)
        self.outcomes = Outcomes(network)
        self.gatherings = Gatherings(network)
        self.gather = self.gatherings.gather
        """See :meth:`Gatherings.gather`."""
        self._listener: Listener | None = None
        self._led = frozenset(unit for unit in layout.units_of(self.rank) if layout.ranks_of(unit)[0] == self.rank)
        """The units that this rank hosts as the first or only one."""
        self._heard: set[str] = set()
        """Ranks of whose stages the news of a failure has told."""
        network.subscribe(_FAILURE, self._failure)

    # -- on any thread -----------------------------------------------------------------------------------------------

    def tell(self, unit: int, member: int, step: int, note: Note) -> None:
        """Say something to a member of a unit's group, which a task there may wait for."""
        ranks = self.layout.ranks_of(unit)
        header = {"unit": unit, "step": step, "member": ranks.index(self.rank), "note": to_plain(note)}
        # queue it even on the loop: a note from another thread that came before goes first (see Wishes.decide)
        self.network.call_soon(partial(self.network.send, ranks[member], _NOTE, header))

    def announce_task(self, unit: int, step: int, message: Message) -> None:
        """Tell a unit, the leader of its group, that what will send it this message has started.

        It travels beside data, for which it never waits: where data wait for room, it is dropped.
        """
        header = _UNIT.pack(unit) + pack_key(Key(step, message))
        self.network.send_if_room(self.layout.ranks_of(unit)[0], _TASK, header)

    def step_ended_here(self, step: int, sums: StepSums, peaks_of_units: Mapping[int, tuple[int, int]]) -> None:
        """The units of this rank have ended a step; see :meth:`Outcomes.add`."""
        self.network.on_loop(self.outcomes.add, step, sums, peaks_of_units)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def attach(self, listener: Listener) -> None:
        """Hand everything that has come and that will come to a driver."""
        self._listener = listener
        self.outcomes.begin(listener.step_ended)
        self.network.subscribe(_NOTE, self._note)
        self.network.subscribe_packed(_TASK, self._task)

    def detach(self) -> None:
        """The driver is closed; what comes from now on is kept for the next."""
        if self._listener is not None:
            self._listener = None
            self.network.unsubscribe(_NOTE)
            self.network.unsubscribe(_TASK)

    def announce(self, news: FailureNews) -> None:
        """Tell this rank's neighbours of a failure; no gathering can be completed any more. Never raises."""
        self.lose(f"rank {news.origin} gave up: {news.summary}")
        try:
            packed = pack_plain(to_plain(news), _MAX_NEWS_BYTES)
            for rank in control_neighbours(self.rank, self.layout.num_ranks):
                self.network.send(rank, _FAILURE, {}, [packed])
        except Exception:  # the run ends all the same; the others notice that this rank is gone
            _LOG.exception("rank %d could not tell the others why it gives up", self.rank)

    def lose(self, what: str) -> None:
        """A rank is gone for good: every gathering that is not complete fails."""
        self.gatherings.fail(what)
        self.clocks.fail(what)

    def _note(self, _: int, header: dict[str, Any], __: list[memoryview]) -> None:
        unit, step, member = (field(header, name, int) for name in ("unit", "step", "member"))
        assert self._listener is not None
        self._listener.heard(unit, step, member, _record(Note, field(header, "note", list)))

    def _task(self, rank: int, header: bytes, _: list[memoryview]) -> None:
        if len(header) != _UNIT.size + KEY_BYTES:
            raise MalformedMessage(f"rank {rank} announces a task in {len(header)} bytes")
        (unit,) = _UNIT.unpack_from(header)
        step, message = unpack_key(header[_UNIT.size :])[:2]
        if unit not in self._led:
            raise MalformedMessage(f"rank {rank} announces a task to unit {unit}, which this rank does not lead")
        assert self._listener is not None
        self._listener.task_announced(unit, step, message)

    def _failure(self, rank: int, _: dict[str, Any], frames: list[memoryview]) -> None:
        if len(frames) != 1:
            raise MalformedMessage(f"rank {rank} tells of a failure in {len(frames)} frames")
        plain = unpack_plain(frames[0], _MAX_NEWS_BYTES)
        # several neighbours tell of the same stages: each is read once
        new = [told for told in field(plain, "states", list) if str(told[:1]) not in self._heard]
        self._heard.update(str(told[:1]) for told in new)
        news: FailureNews = _record(FailureNews, {**plain, "states": new})
        if not 0 <= news.origin < self.layout.num_ranks:
            raise MalformedMessage(f"rank {rank} tells of a failure of rank {news.origin}, which does not exist")
        self.lose(f"rank {news.origin} gave up: {news.summary}")
        if self.rank in news.lost:
            self.network.suspected_by(news.origin, news.lost[self.rank])
        if self._listener is not None:
            self._listener.failed(news)


def control_neighbours(rank: int, num_ranks: int) -> frozenset[int]:
    """Whom a rank exchanges control messages with: its neighbours in the control tree, and those that it watches.

    The tree alone falls apart where a rank is lost; along the others the news of that still reaches everybody.
    """
    return watched(rank, num_ranks).union(neighbours(rank, num_ranks))


def _record(kind: Any, plain: Any) -> Any:
    try:
        return from_plain(kind, plain)
    except MalformedRecord as error:
        raise MalformedMessage(str(error)) from error
