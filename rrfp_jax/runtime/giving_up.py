"""How a run ends that cannot go on: what every rank says about it, gathered for a moment, and one report of all.

The first failure that a rank meets or hears of is the one it reports. It tells all others at once, with the state of
its own stages, and waits for a moment for theirs, so that every rank ends with the wait-for graph of the whole run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.planning.layout import Layout
from rrfp_jax.runtime.report import NoProgress, PeerLost, RunFailed, StageState, WaitForReport

GATHERING_S = 1.0
"""How long other ranks' reports are waited for, or half the silence deadline where that is less."""


@dataclass
class Failure:
    """A failure on its way to becoming the error that a run ends with."""

    kind: type[RunFailed]
    summary: str
    states: list[StageState]
    """Of this rank's stages, then of those that others tell."""
    cause: BaseException | None = None
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that died or fell silent, with how that was noticed."""
    heard_of: set[int] = field(default_factory=set)
    """Ranks whose states are in."""

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
        if rank not in self.heard_of:
            self.heard_of.add(rank)
            self.states += [StageState.from_plain(state) for state in plain["states"]]
            self.lost.update(map(tuple, plain["lost"]))

    def is_complete(self, layout: Layout, rank: int) -> bool:
        """Whether nobody is left to be heard."""
        return len(self.heard_of | set(self.lost) | {rank}) == layout.num_ranks

    def error(self, layout: Layout | None) -> RunFailed:
        """The error with the whole report."""
        lost = sorted(self.lost)
        summary = self.summary
        if layout is not None:
            others = [f"rank {r} ({_hosted(layout, r)}) was lost: {self.lost[r]}" for r in lost]
            summary = "; ".join(dict.fromkeys([summary, *others]))
        failure = self.kind(
            WaitForReport(
                summary=summary,
                stages=tuple(sorted(self.states, key=lambda state: (state.stage, state.rank or 0))),
                lost_ranks=tuple(lost),
                lost_stages=() if layout is None else tuple(sorted({u for r in lost for u in layout.units_of(r)})),
            )
        )
        failure.__cause__ = self.cause
        return failure


def lost_rank(layout: Layout, rank: int, reason: str, states: Sequence[StageState]) -> Failure:
    """The failure of a run of which a rank was lost."""
    summary = f"rank {rank} ({_hosted(layout, rank)}) was lost: {reason}"
    return Failure(PeerLost, summary, list(states), lost={rank: reason})


def failed_rank(rank: int, plain: Mapping[str, Any], states: Sequence[StageState]) -> Failure:
    """The failure of a run that another rank gave up: no progress is everybody's, a failed task is that rank's."""
    is_shared = plain["kind"] == NoProgress.__name__
    kind = NoProgress if is_shared else PeerLost
    failure = Failure(kind, f"rank {rank} gave up: {plain['summary']}", list(states))
    failure.hear(rank, plain)
    return failure


def _hosted(layout: Layout, rank: int) -> str:
    units = ", ".join(map(str, layout.units_of(rank)))
    return f"stage {units}" if len(layout.units_of(rank)) == 1 else f"stages {units}"
