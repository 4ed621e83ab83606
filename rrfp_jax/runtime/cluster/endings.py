"""How the processes of a run ended, and which of them is to blame. Pure.

When a process dies, the others notice and end too, with codes that only say so; they may even be seen to end first. So
the cause is the earliest ending of the least derived kind: a reason of its own; could not come together (6); lost
another (5); ended by the launcher. A process that a signal killed closes its connections a moment before it can be seen
to end, and others may take that for a failed task of their own: among endings of about the same time it is to blame.
"""

import signal
from dataclasses import dataclass

from rrfp_jax.runtime.exit_codes import (
    BAD_INPUT,
    DONE,
    INTERNAL_ERROR,
    INTERRUPTED,
    NO_PROGRESS,
    PEER_LOST,
    PREEMPTED,
    SIGNALLED,
    START_FAILED,
    TASK_FAILED,
)
from rrfp_jax.runtime.network.configuration import name_ranks

_SAME_TIME_S = 1.0
_LATE_SIGNALS = (signal.SIGABRT, signal.SIGTERM)
"""With these a process may end since another did: JAX aborts, and whoever watches terminates."""
_MEANINGS = {
    DONE: "done",
    INTERNAL_ERROR: "internal error",
    BAD_INPUT: "bad input",
    NO_PROGRESS: "no progress",
    TASK_FAILED: "a task failed",
    PEER_LOST: "lost another rank",
    START_FAILED: "could not come together with the others",
    PREEMPTED: "preempted, state saved",
    INTERRUPTED: "interrupted",
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of one rank."""

    rank: int
    code: int
    at_s: float
    """Seconds since the start."""
    was_stopped: bool = False
    """It stood still by a signal when the launcher ended it."""
    by_launcher: bool = False
    """The launcher ended it since it did not end by itself."""

    def how(self) -> str:
        """The ending in words."""
        if self.by_launcher:
            why = "stood still (SIGSTOP)" if self.was_stopped else "did not end by itself"
            return f"{why}: the launcher ended it ({self._meaning()})"
        return self._meaning()

    def _meaning(self) -> str:
        if self.code in _MEANINGS:
            return f"code {self.code}, {_MEANINGS[self.code]}" if self.code else _MEANINGS[self.code]
        try:
            return f"code {self.code}, killed by {signal.Signals(self.code - SIGNALLED).name}"
        except ValueError:
            return f"code {self.code}"

    def derivation(self) -> int:
        """0 for a reason of its own; the larger, the more it only follows from other ranks' ends."""
        return 3 if self.by_launcher else {START_FAILED: 1, PEER_LOST: 2}.get(self.code, 0)

    def was_killed(self) -> bool:
        """Whether a signal ended it out of the blue."""
        return not self.by_launcher and self.code > SIGNALLED and self.code - SIGNALLED not in _LATE_SIGNALS


class Endings:
    """The endings of ranks, as far as they are known.

    Args:
        expected: the ranks that must be heard of; news of others counts too.
    """

    def __init__(self, expected: range) -> None:
        self._expected = expected
        self._by_rank: dict[int, Ending] = {}

    def note(self, ending: Ending) -> None:
        """A rank has ended; told again, the first report stands."""
        self._by_rank.setdefault(ending.rank, ending)

    def missing(self) -> list[int]:
        """The expected ranks whose ending is not known."""
        return [rank for rank in self._expected if rank not in self._by_rank]

    def cause(self) -> Ending | None:
        """The ending to blame; None where all that is known went well."""
        failed = [ending for ending in self._by_rank.values() if ending.code != DONE]
        first = min(failed, key=lambda ending: (ending.derivation(), ending.at_s, ending.rank), default=None)
        if first is None:
            return None
        killed = [e for e in failed if e.was_killed() and e.at_s < first.at_s + _SAME_TIME_S]
        return min(killed, key=lambda ending: ending.at_s, default=first)

    def code(self) -> int:
        """The exit code of the run."""
        cause = self.cause()
        if cause is not None:
            return cause.code
        return PEER_LOST if self.missing() else DONE

    def summary(self) -> list[str]:
        """One line that names the cause, and one per kind of ending."""
        cause, missing = self.cause(), self.missing()
        if cause is None and not missing:
            last_s = max((ending.at_s for ending in self._by_rank.values()), default=0.0)
            return [f"{name_ranks(self._by_rank)} ended well, the last after {last_s:.1f} s"]
        if cause is None:
            return [f"nothing was heard of {name_ranks(missing)}; all others ended well"]
        what = "was stopped" if cause.code == PREEMPTED else "failed"
        lines = [f"the run {what} after {cause.at_s:.1f} s: rank {cause.rank} ({cause.how()})"]
        ways: dict[str, list[Ending]] = {}
        for rank in sorted(self._by_rank):
            ways.setdefault(self._by_rank[rank].how(), []).append(self._by_rank[rank])
        for how, endings in ways.items():
            last_s = max(ending.at_s for ending in endings)
            lines.append(f"  {name_ranks(ending.rank for ending in endings)}: {how} (by {last_s:.1f} s)")
        return [*lines, f"  {name_ranks(missing)}: not heard of"] if missing else lines
