"""How a run ends that cannot go on: what every rank says about it, gathered for a moment, and one report of all.

The first failure that a rank meets or hears of is the one it reports. It tells all others at once, with the state of
its own stages, and waits for a moment for theirs, so that every rank ends with the wait-for graph of the whole run.
"""

import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.planning.layout import Layout
from rrfp_jax.runtime.peers import Peers
from rrfp_jax.runtime.report import NoProgress, PeerLost, RunFailed, StageState, TaskFailed, WaitForReport, shortened
from rrfp_jax.waiting import wait_for

GATHERING_S = 1.0
"""How long other ranks' reports are waited for, or half the silence deadline where that is less."""


@dataclass
class Failure:
    """A failure on its way to becoming the error that a run ends with."""

    kind: type[RunFailed]
    summary: str
    states: list[StageState]
    """Of this rank's stages."""
    cause: BaseException | None = None
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that died or fell silent, with how that was noticed."""
    heard: dict[int, list[StageState]] = field(default_factory=dict)
    """What other ranks tell of their stages."""

    def __post_init__(self) -> None:
        self.summary = shortened(self.summary)

    def as_plain(self) -> dict[str, Any]:
        """For the other ranks."""
        return {
            "kind": self.kind.__name__,
            "summary": self.summary,
            "states": [state.as_plain() for state in self.states],
            "lost": [[rank, reason] for rank, reason in self.lost.items()],
        }

    def hear(self, rank: int, plain: Mapping[str, Any]) -> None:
        """Add what another rank says."""
        if rank not in self.heard:
            self.heard[rank] = [StageState.from_plain(state) for state in plain["states"]]
            self.lost.update(map(tuple, plain["lost"]))

    def is_complete(self, layout: Layout, rank: int) -> bool:
        """Whether nobody is left to be heard."""
        return len({rank, *self.heard, *self.lost}) == layout.num_ranks

    def error(self, layout: Layout | None) -> RunFailed:
        """The error with the whole report."""
        states = [*self.states, *(state for heard in self.heard.values() for state in heard)]
        died = sorted(self.lost.keys() - self.heard.keys())
        summaries = [self.summary]
        if layout is not None:
            summaries = [*(lost_summary(layout, rank, self.lost[rank]) for rank in died), self.summary]
        # A collective fails too where a rank of it died, and may be seen to fail first.
        kind = PeerLost if died and self.kind is TaskFailed else self.kind
        failure = kind(
            WaitForReport(
                summary="; ".join(dict.fromkeys(summaries)),
                stages=tuple(sorted(states, key=lambda state: (state.stage, state.rank or 0))),
                lost_ranks=tuple(died),
                lost_stages=() if layout is None else tuple(sorted({u for r in died for u in layout.units_of(r)})),
            )
        )
        failure.__cause__ = self.cause
        return failure


def lost_rank(layout: Layout, rank: int, reason: str, states: Sequence[StageState]) -> Failure:
    """The failure of a run of which a rank was lost."""
    return Failure(PeerLost, lost_summary(layout, rank, reason), list(states), lost={rank: reason})


def failed_rank(rank: int, plain: Mapping[str, Any], states: Sequence[StageState]) -> Failure:
    """The failure of a run that another rank gave up: a failed task is that rank's, all else is everybody's."""
    kind = NoProgress if plain["kind"] == NoProgress.__name__ else PeerLost
    is_its_own = plain["kind"] == TaskFailed.__name__
    summary = f"rank {rank} gave up: {plain['summary']}" if is_its_own else plain["summary"]
    failure = Failure(kind, summary, list(states))
    failure.hear(rank, plain)
    return failure


def lost_summary(layout: Layout, rank: int, reason: str) -> str:
    """The sentence on a rank that died or fell silent."""
    return f"rank {rank} ({_hosted(layout, rank)}) was lost: {reason}"


class GivingUp:
    """The end of a run that cannot go on; everything but ``wait`` happens on the event loop.

    Args:
        peers: the other processes; None where there are none.
        deadline_s: other ranks are waited for no longer than half of it.
        ended: called once with the error, when nobody is waited for any more.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        peers: Peers | None,
        deadline_s: float,
        ended: Callable[[RunFailed], None],
    ) -> None:
        self._loop, self._peers, self._ended = loop, peers, ended
        self._wait_s = min(GATHERING_S, deadline_s / 2)
        self._complete = threading.Event()
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
            self._peers.announce(failure.as_plain())
        self._end_when_complete()

    def heard(self, rank: int, plain: Mapping[str, Any], states: Callable[[], Sequence[StageState]]) -> None:
        """Another rank gives up; ``states`` are this rank's own."""
        if self.failing is None:
            self.begin(failed_rank(rank, plain, states()))
        else:
            self.failing.hear(rank, plain)
            self._end_when_complete()

    def lost(self, rank: int, reason: str, states: Callable[[], Sequence[StageState]]) -> None:
        """Another rank died or fell silent."""
        assert self._peers is not None
        if self.failing is None:
            self.begin(lost_rank(self._peers.layout, rank, reason, states()))
        else:
            self.failing.lost.setdefault(rank, reason)
            self._end_when_complete()

    def wait(self) -> RunFailed:
        """The error, once it is known; for other threads, after :meth:`begin` is on its way."""
        wait_for(self._complete)
        assert self.error is not None
        return self.error

    def _end_when_complete(self) -> None:
        assert self.failing is not None
        if self._peers is None or self.failing.is_complete(self._peers.layout, self._peers.rank):
            self._end()

    def _end(self) -> None:
        if self.error is None:
            assert self.failing is not None
            self.error = self.failing.error(None if self._peers is None else self._peers.layout)
            self._complete.set()
            self._ended(self.error)


def _hosted(layout: Layout, rank: int) -> str:
    units = ", ".join(map(str, layout.units_of(rank)))
    return f"stage {units}" if len(layout.units_of(rank)) == 1 else f"stages {units}"
