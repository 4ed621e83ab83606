"""How a run ends that cannot go on: what every rank says about it, gathered for a moment, and one report of all.

The first failure that a rank meets or hears of is the one it reports. It tells all that it has a connection to, with
the state of its own stages, and waits for a moment for theirs. What is new to a rank it tells on, once, so the news
reaches everybody over any connections that are left, and in a small run every rank ends with the wait-for graph of the
whole. In a large one only so many stages are told of, so no rank sends or keeps more than a constant.

Who is lost every rank hears from its own network, which has asked the accused. What another rank says of losses is only
quoted, and only while the own network says nothing: where a connection broke, the other may mean ranks that are well.
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event

from rrfp_jax.layout import Layout, name_unit
from rrfp_jax.runtime.control_plane import Peers
from rrfp_jax.runtime.report import (
    FailureNews,
    NoProgress,
    PeerLost,
    RunFailed,
    StageState,
    TaskFailed,
    WaitForReport,
    shortened,
)
from rrfp_jax.runtime.transports.interface import TransportFailed
from rrfp_jax.waiting import wait_for

GATHERING_S = 1.0
"""How long other ranks' reports are waited for, or half the silence deadline where that is less."""
_MAX_STATES = 64
"""Of how many stages a report tells."""
_COLLECTING_S = 0.01
"""News that comes within so much time is told on together."""


@dataclass
class Failure:
    """A failure on its way to becoming the error that a run ends with."""

    kind: type[RunFailed]
    summary: str
    states: list[StageState]
    """Of this rank's stages."""
    cause: BaseException | None = None
    origin: int | None = None
    """The rank that met it; None: this one."""
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that this rank's own network takes for lost, with how that was noticed."""
    heard: dict[int, list[StageState]] = field(default_factory=dict)
    """What other ranks tell of their stages."""
    claims: dict[int, str] = field(default_factory=dict)
    """Ranks that the origin takes for lost, where the summary tells of those and nothing else."""

    def __post_init__(self) -> None:
        self.summary = shortened(self.summary)

    def hear(self, news: FailureNews, rank: int) -> FailureNews | None:
        """Add what others say; returns what of it was new to this rank, if anything."""
        room = _MAX_STATES - sum(map(len, self.heard.values()))
        states = {r: told for r, told in news.states.items() if r not in self.heard and r != rank} if room > 0 else {}
        self.heard |= states
        return self.news(states, {}, rank) if states else None

    def news(self, states: Mapping[int, list[StageState]], lost: Mapping[int, str], rank: int) -> FailureNews:
        """What this rank tells others: why it ends, and this of ranks and stages."""
        return FailureNews(
            kind=self.kind.__name__,
            origin=rank if self.origin is None else self.origin,
            summary=self.summary,
            states=dict(states),
            lost=dict(lost),
        )

    def is_complete(self, layout: Layout, rank: int) -> bool:
        """Whether nobody is left to be heard, and this rank's own network has judged what another says of losses.

        A rank that fell silent and was heard all the same is no judgement: the network broke, and soon says where.
        """
        is_judged = not self.claims or bool(self.lost.keys() - self.heard.keys())
        return is_judged and len({rank, *self.heard, *self.lost}) == layout.num_ranks

    def answer(self, rank: int) -> None:
        """This rank lives: if another takes it for lost, what broke is between the two."""
        if rank in self.claims and not self.lost.keys() - self.heard.keys():
            assert self.origin is not None
            one, other = sorted((rank, self.origin))
            self.summary = f"rank {one} and rank {other} lost sight of each other"
            self.claims.clear()

    def error(self, layout: Layout | None) -> RunFailed:
        """The error with the whole report."""
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
    """The failure of a run of which a rank was lost."""
    return Failure(PeerLost, lost_summary(layout, rank, reason), list(states), lost={rank: reason})


def failure_elsewhere(news: FailureNews, states: Sequence[StageState]) -> Failure:
    """The failure of a run that another rank gave up, without what that says of ranks and stages."""
    kinds = {kind.__name__: kind for kind in (NoProgress, TaskFailed)}
    kind = kinds.get(news.kind, PeerLost)
    claims = dict(news.lost) if kind is PeerLost else {}
    return Failure(kind, news.summary, list(states), origin=news.origin, claims=claims)


def lost_summary(layout: Layout, rank: int, reason: str) -> str:
    """The sentence on a rank that died or fell silent."""
    return f"rank {rank} ({_hosted(layout, rank)}) was lost: {reason}"


class FailureReport:
    """The end of a run that cannot go on; everything but ``wait`` happens on the event loop.

    Args:
        peers: the other processes; None where there are none.
        deadline_s: other ranks are waited for no longer than half of it.
        states: tells of this rank's stages.
        ended: called once with the error, when nobody is waited for any more.
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
        """Why the run is being given up; None while it goes on."""
        self.error: RunFailed | None = None
        """What the run ends with, once it is known."""

    def begin(self, failure: Failure) -> None:
        """Tell the others, and end with what they tell; the first failure counts."""
        if self.failing is not None:
            return
        self.failing = failure
        if self._peers is not None:
            self._loop.call_later(self._wait_s, self._end)  # before all else, so that nothing can keep it from coming
            own = {self._peers.rank: failure.states[:_MAX_STATES]}
            self._peers.announce(failure.news(own, failure.claims or failure.lost, self._peers.rank))
        self._end_when_complete()

    def heard(self, news: FailureNews) -> None:
        """Another rank tells of a failure."""
        assert self._peers is not None
        self.begin(failure_elsewhere(news, [] if self.failing else self._states()))
        assert self.failing is not None
        if (new := self.failing.hear(news, self._peers.rank)) is not None:
            self._tell_soon(new)
        self._end_when_complete()

    def lost(self, rank: int, reason: str) -> None:
        """Another rank died or fell silent; every rank notices by itself."""
        assert self._peers is not None
        if self.failing is None:
            self.begin(lost_rank(self._peers.layout, rank, reason, self._states()))
        else:
            self.failing.lost.setdefault(rank, reason)
            self._end_when_complete()

    def broken(self, text: str) -> None:
        """The network broke between ranks that live; that counts for more than what others say of losses."""
        if self.failing is None:
            self.begin(Failure(PeerLost, text, self._states()))
        elif self.failing.kind is PeerLost or isinstance(self.failing.cause, TransportFailed):
            self.failing.kind, self.failing.summary = PeerLost, text
            self.failing.claims.clear()
            self._end_when_complete()

    def wait(self) -> RunFailed:
        """The error, once it is known; for other threads, after :meth:`begin` is on its way."""
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


def _hosted(layout: Layout, rank: int) -> str:
    units = layout.units_of(rank)
    if layout.data > 1 or len(units) == 1:
        return " and ".join(name_unit(unit, layout.stages_of_replica) for unit in units)
    return f"stages {', '.join(map(str, units))}"
