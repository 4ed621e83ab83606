"""The end of a run that cannot go on: the ranks exchange the states of their stages for a moment, and make one report.

The first failure that a rank meets or hears of is the one it reports. It sends the state of its own stages to all ranks
to which it has a connection, and waits for a moment for theirs. A rank passes on news that is new to it, once, so the
news reaches every rank over any connections that are left, and in a small run every rank ends with the wait-for graph
of the whole. In a large run the number of stages is bounded, so no rank sends or keeps more than a constant.

Every rank learns of losses from its own network, which has asked the suspected ranks. Claims of another rank about
losses are only quoted, and only while the own network says nothing: if a connection broke, the other may mean ranks
that are well.
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event

from rrfp_jax.layout import Layout, name_unit
from rrfp_jax.runtime.control_plane import Peers
from rrfp_jax.runtime.failure import (
    FailureNews,
    NoProgress,
    PeerLost,
    RunFailed,
    StageState,
    TaskFailed,
    WaitForReport,
    shorten_for_report,
)
from rrfp_jax.runtime.transports.interface import TransportFailed
from rrfp_jax.waiting import wait_for

GATHERING_S = 1.0
"""Time for the reports of other ranks, unless half the silence deadline is less."""
_MAX_STATES = 64
"""Largest number of other ranks' stages in a report."""
_COLLECTING_S = 0.01
"""News that comes within this time is passed on together."""


@dataclass
class Failure:
    """A failure on its way to becoming the error that a run ends with."""

    kind: type[RunFailed]
    summary: str
    states: list[StageState]
    """The states of this rank's stages."""
    cause: BaseException | None = None
    origin: int | None = None
    """The rank that met it; None: this one."""
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that this rank's own network takes for lost, with the way in which that was noticed."""
    heard: dict[int, list[StageState]] = field(default_factory=dict)
    """The states that other ranks report of their stages."""
    claims: dict[int, str] = field(default_factory=dict)
    """Ranks that the origin takes for lost, if the summary is about them alone."""

    def __post_init__(self) -> None:
        self.summary = shorten_for_report(self.summary)

    def hear(self, news: FailureNews, rank: int) -> FailureNews | None:
        """Adds the news of others; returns the part that was new to this rank, if any."""
        if sum(map(len, self.heard.values())) >= _MAX_STATES:
            return None
        states = {r: told for r, told in news.states.items() if r not in self.heard and r != rank}
        self.heard |= states
        return self.news(states, {}, rank) if states else None

    def news(self, states: Mapping[int, list[StageState]], lost: Mapping[int, str], rank: int) -> FailureNews:
        """Returns the news for other ranks: why this rank ends, with these states and losses."""
        return FailureNews(
            kind=self.kind.__name__,
            origin=rank if self.origin is None else self.origin,
            summary=self.summary,
            states=dict(states),
            lost=dict(lost),
        )

    def is_complete(self, layout: Layout, rank: int) -> bool:
        """Returns whether every rank has reported or is lost, and this rank's own network has come to a conclusion on
        claims of losses."""
        # A rank that fell silent and was heard all the same is no conclusion: the network broke, and soon says where.
        is_judged = not self.claims or bool(self.lost.keys() - self.heard.keys())
        return is_judged and len({rank, *self.heard, *self.lost}) == layout.num_ranks

    def answer(self, rank: int) -> None:
        """Corrects a claim that this rank is lost: it lives, so the connection between the two has broken."""
        if rank in self.claims and not self.lost.keys() - self.heard.keys():
            assert self.origin is not None
            one, other = sorted((rank, self.origin))
            self.summary = f"rank {one} and rank {other} lost sight of each other"
            self.claims.clear()

    def error(self, layout: Layout | None) -> RunFailed:
        """Returns the error with the whole report."""
        states = [*self.states, *(state for heard in self.heard.values() for state in heard)]
        died = sorted(self.lost.keys() - self.heard.keys())
        is_elsewhere = self.origin is not None and self.kind is TaskFailed
        summaries = [] if layout is None else [lost_summary(layout, rank, self.lost[rank]) for rank in died]
        if not (self.claims and died):
            is_quoted = is_elsewhere or self.claims
            summaries.append(f"rank {self.origin} gave up: {self.summary}" if is_quoted else self.summary)
        # A collective fails too where a rank of it died, and may be seen to fail first.
        kind = PeerLost if is_elsewhere or (died and self.kind is TaskFailed) else self.kind
        failure = kind(
            WaitForReport(
                summary="; ".join(dict.fromkeys(summaries)),
                stages=tuple(sorted(states, key=lambda state: (state.stage, state.rank or 0))),
                lost_ranks=tuple(died),
                origin=self.origin if is_elsewhere else None,
                lost_stages=() if layout is None else tuple(sorted({u for r in died for u in layout.units_of(r)})),
            )
        )
        failure.__cause__ = self.cause
        return failure


def lost_rank(layout: Layout, rank: int, reason: str, states: Sequence[StageState]) -> Failure:
    """Returns the failure of a run that has lost a rank."""
    return Failure(PeerLost, lost_summary(layout, rank, reason), list(states), lost={rank: reason})


def failure_elsewhere(news: FailureNews, states: Sequence[StageState]) -> Failure:
    """Returns the failure of a run that another rank gave up, without the states in that rank's news."""
    kinds = {kind.__name__: kind for kind in (NoProgress, TaskFailed)}
    kind = kinds.get(news.kind, PeerLost)
    claims = dict(news.lost) if kind is PeerLost else {}
    return Failure(kind, news.summary, list(states), origin=news.origin, claims=claims)


def lost_summary(layout: Layout, rank: int, reason: str) -> str:
    """Returns the sentence on a rank that died or fell silent."""
    units = layout.units_of(rank)
    if layout.data > 1 or len(units) == 1:
        hosted = " and ".join(name_unit(unit, layout.stages_of_replica) for unit in units)
    else:
        hosted = f"stages {', '.join(map(str, units))}"
    return f"rank {rank} ({hosted}) was lost: {reason}"


class FailureReport:
    """The end of a run that cannot go on; everything but ``wait`` happens on the event loop.

    Args:
        peers: the other processes; None if there are none.
        deadline_s: the silence deadline; half of it bounds the wait for other ranks.
        states: returns the states of this rank's stages.
        ended: called once with the error, when the report is complete.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        peers: Peers | None,
        deadline_s: float,
        states: Callable[[], list[StageState]],
        ended: Callable[[RunFailed], None],
    ) -> None:
        self._loop, self._peers, self._states, self._ended = loop, peers, states, ended
        self._wait_s = min(GATHERING_S, deadline_s / 2)
        self._complete = Event()
        self._untold: FailureNews | None = None
        self.failing: Failure | None = None
        """The failure for which the run is being given up; None while it goes on."""
        self.error: RunFailed | None = None
        """The error that ends the run, once it is known."""

    def begin(self, failure: Failure) -> None:
        """Announces a failure to the other ranks and waits for their reports; only the first failure counts."""
        if self.failing is not None:
            return
        self.failing = failure
        if self._peers is not None:
            # before all else, so that nothing can keep the end from coming
            self._loop.call_later(self._wait_s, self._end)
            own = {self._peers.rank: failure.states[:_MAX_STATES]}
            self._peers.announce(failure.news(own, failure.claims or failure.lost, self._peers.rank))
        self._end_when_complete()

    def heard(self, news: FailureNews) -> None:
        """Takes the news of another rank's failure."""
        assert self._peers is not None
        self.begin(failure_elsewhere(news, [] if self.failing else self._states()))
        assert self.failing is not None
        if (new := self.failing.hear(news, self._peers.rank)) is not None:
            self._tell_soon(new)
        self._end_when_complete()

    def lost(self, rank: int, reason: str) -> None:
        """Takes note that another rank died or fell silent; every rank notices by itself."""
        assert self._peers is not None
        if self.failing is None:
            self.begin(lost_rank(self._peers.layout, rank, reason, self._states()))
        else:
            self.failing.lost.setdefault(rank, reason)
            self._end_when_complete()

    def broken(self, text: str) -> None:
        """Takes note that the network broke between ranks that live, which outweighs claims of losses."""
        if self.failing is None:
            self.begin(Failure(PeerLost, text, self._states()))
        elif self.failing.kind is PeerLost or isinstance(self.failing.cause, TransportFailed):
            self.failing.kind, self.failing.summary = PeerLost, text
            self.failing.claims.clear()
            self._end_when_complete()

    def wait(self) -> RunFailed:
        """Blocks until the report is complete and returns the error. For other threads, after :meth:`begin`."""
        wait_for(self._complete)
        assert self.error is not None
        return self.error

    def _tell_soon(self, news: FailureNews) -> None:
        if self._untold is None:
            self._untold = news
            self._loop.call_later(_COLLECTING_S, self._tell)
        else:
            self._untold.states.update(news.states)

    def _tell(self) -> None:
        if self._untold is not None:
            assert self._peers is not None
            untold, self._untold = self._untold, None
            self._peers.announce(untold)

    def _end_when_complete(self) -> None:
        assert self.failing is not None
        if self._peers is None or self.failing.is_complete(self._peers.layout, self._peers.rank):
            self._end()

    def _end(self) -> None:
        if self.error is None:
            assert self.failing is not None
            self._tell()
            if self._peers is not None:
                self.failing.answer(self._peers.rank)
            self.error = self.failing.error(None if self._peers is None else self._peers.layout)
            self._complete.set()
            self._ended(self.error)
