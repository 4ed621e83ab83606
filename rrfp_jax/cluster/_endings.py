"""Ends of the processes of a run, and which of them is to blame. Pure.

When a process dies, the others notice and end too, with codes that only say so; they may even be seen to end first. So
the cause is the earliest ending of the least derived kind: a reason of its own; told to stop (7); could not come
together (6); lost another (5); ended by the launcher. A process that a signal killed closes its connections a moment
before it can be seen to end, and others may take that for a failed task of their own: among endings of about the same
time it is to blame. If the coordination service died first, no rank is to blame: JAX aborts them all.
"""

import signal
from collections.abc import Callable

from rrfp_jax import exit_codes as codes
from rrfp_jax.cluster.rendezvous import ProcessEnding, name_ranks

STOOD_STILL = "stood still (SIGSTOP)"
"""Reason for which a launcher ended a rank that others had taken for lost."""
ABORTED = codes.SIGNALLED + signal.SIGABRT
_SAME_TIME_S = 1.0
_DERIVATION = {codes.PREEMPTED: 1, codes.START_FAILED: 2, codes.PEER_LOST: 3}
"""Degree to which an exit code only follows from other ranks' ends; other codes have a reason of their own, 0."""
_LATE_SIGNALS = (signal.SIGABRT, signal.SIGTERM)
"""Signals that may end a process because another has ended: JAX aborts, and a watcher terminates."""
_MEANINGS = {
    codes.DONE: "done",
    codes.INTERNAL_ERROR: "internal error",
    codes.BAD_INPUT: "bad input",
    codes.NO_PROGRESS: "no progress",
    codes.TASK_FAILED: "a task failed",
    codes.PEER_LOST: "lost another rank",
    codes.START_FAILED: "could not come together with the others",
    codes.PREEMPTED: "preempted, state saved",
    codes.DATA_UNREADABLE: "data could not be read, state saved",
    codes.NOT_FINITE: "too many steps were not finite, state saved",
    codes.INTERRUPTED: "interrupted",
}
_LIMITED = (127, ABORTED, codes.SIGNALLED + signal.SIGSEGV)
"""Exit codes with which JAX ends where the system gives it no more memory or threads."""
_LIMITS = (
    "  a crash without a message of its own is mostly lack of memory or threads: look at ulimit -v and -u, and at the "
    "limits of the container"
)


def meaning(code: int) -> str:
    """Returns a process's exit code in words."""
    if code in _MEANINGS:
        return f"code {code}, {_MEANINGS[code]}" if code else _MEANINGS[code]
    try:
        return f"code {code}, killed by {signal.Signals(code - codes.SIGNALLED).name}"
    except ValueError:
        return f"code {code}"


class Endings:
    """Ends of the ``num_ranks`` ranks of a run, as far as they are known."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.by_rank: dict[int, ProcessEnding] = {}
        self.service: ProcessEnding | None = None
        """End of the coordination service, if it came before those of the ranks."""

    def missing(self) -> list[int]:
        """Returns the ranks whose end is not known."""
        return [rank for rank in range(self._num_ranks) if rank not in self.by_rank]

    def has_failed(self) -> bool:
        """Returns whether the service or any rank is known to have failed."""
        return self.service is not None or any(ending.code for ending in self.by_rank.values())

    def is_services(self) -> bool:
        """Returns whether the coordination service is to blame, since no rank had a reason of its own before."""
        # A loss or an abort before the service's end may already have come of it: connections close first.
        earlier = [e for e in self.by_rank.values() if self.service is not None and e.at_s < self.service.at_s]
        return self.service is not None and all(e.code in (codes.DONE, codes.PEER_LOST, ABORTED) for e in earlier)

    def cause(self) -> int | None:
        """Returns the rank to blame; None where no failure is known."""
        failed = {rank: ending for rank, ending in self.by_rank.items() if ending.code != codes.DONE}

        def derivation(ending: ProcessEnding) -> int:
            return 4 if ending.by_launcher else _DERIVATION.get(ending.code, 0)

        first = min(failed, key=lambda rank: (derivation(failed[rank]), failed[rank].at_s, rank), default=None)
        if first is None:
            return None
        # A process that a signal killed out of the blue is seen to end a moment after others have noticed.
        soon_s = failed[first].at_s + _SAME_TIME_S
        killed = [
            rank
            for rank, ending in failed.items()
            if not ending.by_launcher
            and ending.code > codes.SIGNALLED
            and ending.code - codes.SIGNALLED not in _LATE_SIGNALS
            and ending.at_s < soon_s
        ]
        return min(killed, key=lambda rank: failed[rank].at_s, default=first)

    def code(self) -> int:
        """Returns the exit code of the run."""
        if self.is_services():
            return ABORTED
        if (cause := self.cause()) is not None:
            return self.by_rank[cause].code
        return codes.PEER_LOST if self.missing() else codes.DONE

    def summary(self, last_error: Callable[[int], str | None] = lambda rank: None) -> list[str]:
        """Returns one line that names the cause, and one per kind of ending.

        The line of a crash has the last error that its rank told of, as far as ``last_error`` knows it.
        """
        cause, missing = self.cause(), self.missing()
        last_s = max((ending.at_s for ending in self.by_rank.values()), default=0.0)
        if not self.has_failed() and not missing:
            return [f"{name_ranks(self.by_rank)} ended well, the last after {last_s:.1f} s"]
        if not self.has_failed():
            others = "; all others ended well" if self.by_rank else ""
            return [f"nothing was heard of {name_ranks(missing)}{others}"]
        lines = [self._blame(cause)]
        # One line for each kind of end, not for each of perhaps thousands of ranks.
        ways: dict[str, list[int]] = {}
        for rank in sorted(self.by_rank):
            ways.setdefault(_how(self.by_rank[rank]), []).append(rank)
        for how, ranks in ways.items():
            lines.append(f"  {name_ranks(ranks)}: {how} (by {max(self.by_rank[rank].at_s for rank in ranks):.1f} s)")
        if missing:
            lines.append(f"  {name_ranks(missing)}: not heard of")
        if cause is None or self.is_services() or self.code() not in _LIMITED:
            return lines
        said = last_error(cause)
        return [*lines, _LIMITS if said is None else f"  rank {cause} said last: {said}"]

    def _blame(self, cause: int | None) -> str:
        if self.service is not None and self.is_services():
            return (
                f"the run failed after {self.service.at_s:.1f} s: the coordination service "
                f"({meaning(self.service.code)}), without which JAX aborts all ranks"
            )
        assert cause is not None
        ending = self.by_rank[cause]
        still = [rank for rank, other in self.by_rank.items() if other.by_launcher == STOOD_STILL]
        if still and ending.code == codes.PEER_LOST:
            return f"the run failed after {ending.at_s:.1f} s: {name_ranks(still)} {STOOD_STILL}"
        what = "was stopped" if ending.code == codes.PREEMPTED else "failed"
        return f"the run {what} after {ending.at_s:.1f} s: rank {cause} ({_how(ending)})"


def _how(ending: ProcessEnding) -> str:
    """Returns the end in words."""
    text = meaning(ending.code)
    return f"{ending.by_launcher}: the launcher ended it ({text})" if ending.by_launcher else text
