"""The launcher: attempts at a run, restarted where that may help, or the supervision of ranks that others start.

An attempt starts this node's ranks, passes signals on, and ends all together. After the first failure the other ranks
have time to end by themselves, each with its own report; then they are asked to end (SIGTERM), and at last killed. Told
to stop, the launcher passes every signal on and waits; Ctrl-C after that ends the ranks in the same way. Two kinds of
failure leave the ranks nothing to report, so they are killed in a moment: if the ranks did not come together, those
that have not come yet would only be refused; and if the coordination service dies, JAX aborts them all, and each might
blame another that was aborted first.

A launcher stays until the ends of all ranks of the run are known to all launchers, so that all return the same code. It
waits for others no longer than ``grace_s`` after its own ranks have ended, and not for launchers that are gone, or were
not there when the time to come together was over. A supervisor is a launcher without ranks: it stays until it is told
to stop, or the run cannot go on.

**To blame.** When a process dies, the others notice and end too, with codes that only say so; they may even be seen to
end first. So the cause is the earliest ending of the least derived kind: a reason of its own; told to stop (7); could
not come together (6); lost another (5); ended by the launcher. A process that a signal killed closes its connections a
moment before it can be seen to end, and others may take that for a failed task of their own: among endings of about the
same time it is to blame. If the coordination service died first, no rank is to blame: JAX aborts them all.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import datetime
from functools import partial

from rrfp_jax import exit_codes as codes
from rrfp_jax.cluster import LauncherLink, RunKey, RunStatus
from rrfp_jax.cluster._head import TOLD_TO_STOP, HeadFailed, LauncherParts, RunHead, host_head, join_head
from rrfp_jax.cluster.child_processes import (
    ASKING,
    Child,
    Guardian,
    LauncherEvent,
    LauncherEvents,
    Output,
    RankEnded,
    rank_cores,
    rank_environment,
)
from rrfp_jax.cluster.child_script import python_module
from rrfp_jax.cluster.config import (
    COORDINATOR,
    NUM_RANKS,
    OWN_COMMANDS,
    RANK_COUNTS,
    RENDEZVOUS,
    RESTARTS_LEFT,
    SPARE,
    STARTED,
    LaunchSettings,
    Membership,
)
from rrfp_jax.cluster.rendezvous import ProcessEnding, name_ranks

_RESTART_S = 1.0
"""Least time from the start of an attempt to that of the next, so that a run that fails at once does not spin."""
_SPARES_S = 10.0
"""Seconds from the start of a rank to that of spare processes, so that they do not slow it down."""
_LOOK_S, _LOOK_AGAIN_S = 0.25, 0.05
_TERM_S = 5.0
"""Seconds that a rank that is asked to end may take."""
_DRAIN_S = 2.0
_STILL_S = 5.0
"""Seconds that the last ranks may all be stopped by a signal after others have ended."""
_LATE_S = 0.3
"""Seconds for ranks that would come too late to end for the reason that the others had."""
_ABORT_S = 0.15
"""Seconds within which JAX aborts; ranks that miss each other report that later."""
_FENCE_S = 1.0
"""Seconds for a rank that was declared lost to hear of it and end; one that is stopped never does."""
_FAREWELL_S = 2.0
"""Seconds that a supervisor tells ranks that come late of a failure."""
_NOT_STOPPED = "did not end by itself"
_STOOD_STILL = "stood still (SIGSTOP)"
"""Reason for which a launcher ended a rank that others had taken for lost."""
_ABORTED = codes.SIGNALLED + signal.SIGABRT
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
    codes.COMPUTED_WRONGLY: "a device computed wrongly",
    codes.INTERRUPTED: "interrupted",
}
_FINAL = (codes.DONE, codes.BAD_INPUT, codes.NOT_FINITE, codes.COMPUTED_WRONGLY, codes.INTERRUPTED)
"""Exit codes after which another attempt would end alike."""
_LIMITED = (127, _ABORTED, codes.SIGNALLED + signal.SIGSEGV)
"""Exit codes with which JAX ends where the system gives it no more memory or threads."""
_LIMITS = (
    "  a crash without a message of its own is mostly lack of memory or threads: look at ulimit -v and -u, and at the "
    "limits of the container"
)


def launch(
    settings: LaunchSettings, environ: Mapping[str, str], output: Output, *, shared: RunKey | None = None
) -> int:
    """Starts this node's ranks, watches them until they have ended, and restarts them where that may help.

    Must run on the main thread. Returns the exit code of the last attempt.

    Args:
        shared: the key that other hosts know too; None where nobody else needs it (``settings.shares_key``), and each
            attempt makes its own.
    """
    environment = {
        **rank_environment(environ, settings.threads),
        STARTED: f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}",
    }
    with closing(Guardian()) as guardian, LauncherEvents() as events, ExitStack() as stack:
        parts = LauncherParts(
            settings=settings,
            key_of=partial(_key_of, shared),
            environment=environment,
            guardian=guardian,
            events=events,
            output=output,
        )
        stack.callback(_discard, parts.spares)
        number, num_started = 0, 0
        while True:
            next_s = time.monotonic() + _RESTART_S
            attempt = _Attempt(parts, number, num_started)
            code = attempt.run()
            num_started, number = attempt.num_started(), attempt.number
            if code in _FINAL or num_started >= settings.max_restarts:
                break
            while events.stopped_by is None and (left_s := next_s - time.monotonic()) > 0:
                events.next(min(left_s, _LOOK_S))
            if events.stopped_by is not None:
                output.say(f"not restarted after code {code}, since the launcher was told to stop")
                break
            number, num_started = number + 1, num_started + 1
            output.say(f"restart {num_started} of at most {settings.max_restarts}")
        return code


def _key_of(shared: RunKey | None, attempt: int) -> RunKey:
    # Another key for each attempt, so that a process left over from an earlier one cannot take part.
    if shared is None:
        return RunKey.generate()
    return RunKey(shared.expand(f"attempt {attempt}", 32)) if attempt else shared


def _discard(spares: Mapping[int, Child]) -> None:
    for spare in spares.values():
        spare.discard()


class _Attempt:
    """One attempt at the run, on the main thread.

    Args:
        number: 0 for the first attempt.
        num_started: the number of restarts so far, of all ranks together or of one.
    """

    def __init__(self, parts: LauncherParts, number: int, num_started: int) -> None:
        self._parts, self.number, self._num_started = parts, number, num_started
        self._settings, self._events, self._output = parts.settings, parts.events, parts.output
        self._endings = Endings(parts.settings.num_ranks)
        self._status = RunStatus()
        self._alive: dict[int, Child] = {}
        self._numbers: dict[int, int] = {}
        """Numbers of the latest processes of this node's ranks, where they are not 0."""
        self._reasons: dict[int, str] = {}
        """Reasons for which the launcher ended ranks."""
        self._started_s = self._here_ended_s = time.monotonic()
        self._failed_s: float | None = None
        self._met_failure_s: float | None = None
        """Time at which it was known that the ranks did not come together, or that JAX aborts them."""
        self._spares_s = self._started_s
        """Time from which spare processes may be started."""
        self._lost_s = 0.0
        """Time at which the latest rank was declared lost."""
        self._still_since_s: float | None = None
        self._asked_s: float | None = None
        self._num_stops = 0
        self._is_given_up = False

    def run(self) -> int:
        """Starts, watches and ends everything. Returns the exit code of the run."""
        while not self._events.empty():  # an earlier attempt's ranks may still have ended in it
            self._events.get()
        try:
            head = self._find_place()
        except HeadFailed as error:
            self._output.say(f"error: {error}")
            stopped_by = self._events.stopped_by
            if stopped_by is None:
                return codes.START_FAILED
            return codes.INTERRUPTED if stopped_by == signal.SIGINT else codes.PREEMPTED
        try:
            self._start(head)
            while not self._is_over(head):
                # Once something has happened, pauses are short: each adds to the time until the run starts again.
                is_quiet = self._failed_s is None and self._num_stops == 0
                self._handle(self._events.next(_LOOK_S if is_quiet else _LOOK_AGAIN_S), head)
                self._press()
                if self._num_stops == 0 and self._failed_s is None:
                    self._start_again(head)
                    self._grow()
                    self._prepare_spares()
        finally:
            # Ranks end before the head is closed, since JAX aborts a rank that loses its service.
            for child in self._alive.values():
                child.kill()
            for child in self._alive.values():
                child.join(_TERM_S)
            head.close()
            self._output.drain(_DRAIN_S)
        if self._settings.supervises and self._endings.service is None and self._endings.missing():
            return codes.START_FAILED if self._status.failure else codes.DONE
        for line in self._endings.summary(lambda rank: self._output.last_error(f"rank {rank}")):
            self._output.say(line)
        return self._endings.code()

    def num_started(self) -> int:
        """Returns the number of restarts so far, those of single ranks included; once all ranks have ended."""
        ended = {rank: ending.number for rank, ending in self._endings.by_rank.items()}
        ranks = ended.keys() | self._numbers.keys()
        return self._num_started + sum(max(ended.get(rank, 0), self._numbers.get(rank, 0)) for rank in ranks)

    def _find_place(self) -> RunHead:
        """Returns the head once it is known which nodes take part. Raises HeadFailed where too few come."""
        if self._settings.node_rank == 0:
            head = host_head(self._parts, self.number)
        else:
            head, self.number = join_head(self._parts, self.number)
            self._num_started = max(self._num_started, self.number)
        try:
            self._take_place(head)
        except HeadFailed:
            head.close()
            raise
        return head

    def _take_place(self, head: RunHead) -> None:
        while not (nodes := self._status.nodes):
            if self._events.stopped_by is not None:
                raise HeadFailed(TOLD_TO_STOP)
            if self._status.failure is not None or (isinstance(head.board, LauncherLink) and head.board.is_gone):
                raise HeadFailed(self._status.failure or "the head has ended")
            event = self._events.next(_LOOK_AGAIN_S)
            if isinstance(event, RunStatus):
                self._status = event
        if len(nodes) < self._settings.num_nodes:
            here = "" if self._settings.node_rank in nodes else "; this one waits for the next restart"
            self._output.say(f"the run has {len(nodes)} of {self._settings.num_nodes} nodes{here}")
        self._settings = replace(self._settings, present=nodes)
        self._endings = Endings(self._settings.num_ranks)
        if isinstance(head.board, LauncherLink):
            head.board.takes(tuple(self._settings.local_ranks()))
        self._read(self._status)

    def _start(self, head: RunHead) -> None:
        for rank in self._settings.local_ranks():
            # One that is lost comes back in its turn: this launcher was itself started again.
            if rank not in self._status.lost:
                self._start_rank(head, rank)
        num_ranks = self._settings.num_ranks
        if self._settings.supervises:
            self._output.say(
                f"give every rank {RENDEZVOUS}={head.rendezvous} {COORDINATOR}={head.coordinator} {NUM_RANKS}="
                f"{num_ranks}, its RRFP_RANK (or RRFP_DETECT=1), and the run key"
            )
            self._output.tell(
                f"{NUM_RANKS}={num_ranks}\n{RENDEZVOUS}={head.rendezvous}\n{COORDINATOR}={head.coordinator}"
            )

    def _start_rank(self, head: RunHead, rank: int) -> None:
        ranks, number = self._settings.local_ranks(), self._numbers.get(rank, 0)
        membership = Membership(
            rank=rank,
            num_ranks=self._settings.num_ranks,
            rendezvous=head.rendezvous,
            coordinator=head.coordinator,
            attempt=self.number,
            interface=head.interface,
            number=number,
        )
        counts = ",".join(str(count * self._settings.num_processes) for count in self._settings.node_counts)
        left = {RESTARTS_LEFT: str(self._restarts_left()), RANK_COUNTS: counts}
        place = {**membership.environment(), **head.key.environment(), **left}

        def ended(code: int, at_s: float) -> None:
            self._events.put(RankEnded(rank, code, at_s))

        child = self._parts.spares.pop(rank - ranks.start, None)
        if child is None or not child.take_place(place, ended):
            if child is not None:
                child.discard()
            child = self._new_process(rank, place, ended)
        self._alive[rank] = child
        self._output.follow(f"rank {rank}", child.stdout, child.stderr, is_main=rank == 0)
        self._spares_s = time.monotonic() + _SPARES_S

    def _prepare_spares(self) -> None:
        """Starts a spare process for each rank that runs here and has none, where ranks may be started again."""
        if self._settings.command[:2] != (OWN_COMMANDS, "train") or time.monotonic() < self._spares_s:
            return
        first = self._settings.local_ranks().start
        for rank in self._alive:
            if rank - first not in self._parts.spares and self._restarts_left() > 0:
                spare = self._new_process(rank, {SPARE: "1"}, lambda code, at_s: None, stdin=subprocess.PIPE)
                self._parts.spares[rank - first] = spare

    def _new_process(
        self, rank: int, variables: Mapping[str, str], on_end: Callable[[int, float], None], **more: int
    ) -> Child:
        ranks = self._settings.local_ranks()
        return Child(
            python_module(*self._settings.command),
            {**self._parts.environment, **variables},
            self._parts.guardian,
            on_end,
            cores=rank_cores(self._settings.bind, len(ranks))[rank - ranks.start],
            holds=ASKING if self._settings.command[0] == OWN_COMMANDS else (),  # our commands let them in
            **more,
        )

    def _restarts_left(self) -> int:
        return self._settings.max_restarts - self._num_started - sum(self._numbers.values())

    def _start_again(self, head: RunHead) -> None:
        """Starts a new process in place of each that was lost, where the others take it in."""
        if not self._status.takes_back:
            return
        used = self._num_started + sum(
            max(self._numbers.get(rank, 0), self._status.numbers.get(rank, 0))
            for rank in range(self._settings.num_ranks)
        )
        for rank in self._settings.local_ranks():
            if rank in self._alive or rank not in self._status.lost or used >= self._settings.max_restarts:
                continue
            used += 1
            self._numbers[rank] = max(self._numbers.get(rank, 0), self._status.numbers.get(rank, 0)) + 1
            self._reasons.pop(rank, None)
            self._output.say(f"rank {rank} is started again ({used} of at most {self._settings.max_restarts} restarts)")
            self._start_rank(head, rank)

    def _grow(self) -> None:
        """Has the ranks save and end, so that the next attempt has the nodes that have come back."""
        may_grow = self._status.may_grow and self._num_started < self._settings.max_restarts
        if may_grow and self._alive and self._settings.node_rank == 0:
            self._num_stops += 1
            self._output.say("nodes have come back: the ranks save, and start again on more of them")
            for child in self._alive.values():
                child.kill(signal.SIGTERM, alone=True)

    # -- events ------------------------------------------------------------------------------------------------------

    def _handle(self, event: LauncherEvent | None, head: RunHead) -> None:
        match event:
            case RankEnded(rank, code, at_s):
                del self._alive[rank]
                self._here_ended_s = time.monotonic()
                reason = self._reasons.get(rank, "")
                number = self._numbers.get(rank, 0)
                ending = ProcessEnding(code=code, at_s=at_s - self._started_s, by_launcher=reason, number=number)
                # Noted here at once, for the head may be gone; its status, which comes later, is the same for all.
                self._endings.note({rank: ending})
                head.board.ended(rank, code, at_s=at_s, by_launcher=reason, number=number)
            case RunStatus():
                self._read(event)
                if event.needs_service and head.service is not None:
                    head.service.start(self._settings.num_ranks)
            case signal.Signals(name=name):
                self._num_stops += 1
                if self._num_stops > 1 and event == signal.SIGINT and self._alive:
                    self._output.say(f"{name}: told to stop again, all ranks of this node are ended now")
                    self._ask_to_end()
                else:
                    if not self._alive:
                        self._is_given_up = True
                    elif self._num_stops == 1:
                        self._output.say(
                            f"{name} is passed on to the ranks of this node; Ctrl-C (SIGINT) ends them at once"
                        )
                    for child in self._alive.values():
                        child.kill(event, alone=True)
        if self._failed_s is None and self._endings.has_failed():
            self._failed_s = time.monotonic()

    def _read(self, status: RunStatus) -> None:
        # The head knows of all ranks, and its times are the same for all launchers: they replace our own.
        if status.lost != self._status.lost:
            self._lost_s = time.monotonic()
            # An end that was noticed before the head had declared the loss is no failure of the run.
            self._endings.lost = dict(status.lost)
            self._failed_s = None
            new = status.lost.keys() - self._status.lost.keys()
            if new and self._endings.survived and self._settings.max_restarts and not status.takes_back:
                self._output.say(f"{name_ranks(new)} cannot come back: the others save nothing to start from")
        self._status = status
        if status.service is not None and self._endings.service is None:
            self._endings.service = status.service
            ended = f"the coordination service ended with {_meaning(status.service.code)}"
            self._output.say(f"{ended}: JAX now aborts all ranks")
        self._endings.take_back(status.numbers)
        self._endings.note(status.endings)
        if self._met_failure_s is None and (status.failure is not None or self._endings.service is not None):
            self._met_failure_s = time.monotonic()
            if self._settings.supervises and status.failure is not None:
                self._output.say(status.failure)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _press(self) -> None:
        """Asks, then forces, the ranks to end that do not end by themselves."""
        now_s = time.monotonic()
        if self._met_failure_s is not None:
            # These ranks have nothing to report.
            if self._endings.service is not None and now_s > self._met_failure_s + _ABORT_S:
                self._end(self._alive, "had lost the coordination service")
            # After a moment only: a rank that fails for the same reason as the others should say so itself.
            doomed = [rank for rank in self._status.doomed if rank in self._alive and rank not in self._reasons]
            if doomed and now_s > self._met_failure_s + _LATE_S:
                occasion = (self._status.failure or "").splitlines()[0]
                self._output.say(f"{occasion}: {name_ranks(doomed)}, not there yet, will not be waited for")
                self._end(doomed, "had not come to the others")
        # The others go on without these, and must never hear of them again.
        status, own = self._status, self._numbers
        lost = [
            rank
            for rank in status.lost
            if rank in self._alive and rank not in self._reasons and own.get(rank, 0) <= status.numbers.get(rank, 0)
        ]
        if lost and now_s > self._lost_s + _FENCE_S:
            self._end(lost, "had been declared lost")
        # Nobody is left who would take these in.
        if (
            self._alive
            and not self._endings.missing()
            and status.lost.keys() >= self._alive.keys() - self._reasons.keys()
        ):
            self._end(self._alive.keys() - self._reasons.keys(), "had come back too late")
        are_stopped = bool(self._alive) and all(child.is_stopped() for child in self._alive.values())
        # Where the ranks that are left have all been stopped for a while, nothing has failed, but nobody is left who
        # could notice.
        if not are_stopped or len(self._alive) == len(self._settings.local_ranks()):
            self._still_since_s = None
        else:
            self._still_since_s = self._still_since_s or now_s
            if self._failed_s is None and now_s > self._still_since_s + _STILL_S:
                self._failed_s = now_s
        if self._asked_s is not None:
            if now_s > self._asked_s + _TERM_S:
                self._end(self._alive, _NOT_STOPPED)
            return
        # Ranks that are all stopped will not end by themselves, however long they are given.
        may_wait = self._failed_s is None or now_s <= self._failed_s + self._settings.grace_s
        if self._alive and self._failed_s is not None and (are_stopped or not may_wait):
            self._ask_to_end()

    def _ask_to_end(self) -> None:
        if self._asked_s is None:
            self._asked_s = time.monotonic()
            self._end(self._alive, _NOT_STOPPED, signal.SIGTERM, signal.SIGCONT)  # a stopped group must go on to end

    def _end(self, ranks: Iterable[int], reason: str, *signals: int) -> None:
        """Sends signals, by default SIGKILL, to the groups of these ranks."""
        for rank in ranks:
            # The first reason stands: later ones follow from it.
            self._reasons.setdefault(rank, _STOOD_STILL if self._alive[rank].is_stopped() else reason)
            self._alive[rank].kill(*signals)

    def _is_over(self, head: RunHead) -> bool:
        """Returns whether no rank runs here, and there is no news to wait for."""
        if self._alive or self._is_given_up:
            return not self._alive
        missing, now_s = self._endings.missing(), time.monotonic()
        if self._settings.supervises and missing:
            has_failed = self._met_failure_s is not None and now_s > self._met_failure_s + _FAREWELL_S
            return has_failed or self._endings.service is not None
        if self._settings.local_ranks() and now_s > self._here_ended_s + self._settings.grace_s:
            return True  # a node that only waits for the next restart stays
        # All launchers return the same code, so each waits until it knows every end, and until the others know its own.
        return head.board.is_settled(missing, may_come=self._num_stops == 0)


def _meaning(code: int) -> str:
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
        self._numbers: dict[int, int] = {}
        self.service: ProcessEnding | None = None
        """End of the coordination service, if it came before those of the ranks."""
        self.lost: dict[int, str] = {}
        """Reasons for which ranks were declared lost."""

    @property
    def survived(self) -> frozenset[int]:
        """Lost ranks without which the others went on; none where all are lost."""
        return frozenset(self.lost if len(self.lost) < self._num_ranks else ())

    def note(self, endings: Mapping[int, ProcessEnding]) -> None:
        """Notes ends of processes; of several processes of a rank the last one counts."""
        for rank, ending in endings.items():
            known = self.by_rank.get(rank)
            if ending.number >= max(self._numbers.get(rank, 0), 0 if known is None else known.number):
                self.by_rank[rank] = ending

    def take_back(self, numbers: Mapping[int, int]) -> None:
        """Forgets the ends of processes before those of these numbers, by rank, which have taken part since."""
        self._numbers = dict(numbers)
        self.by_rank = {r: ending for r, ending in self.by_rank.items() if ending.number >= numbers.get(r, 0)}

    def missing(self) -> list[int]:
        """Returns the ranks that the run still has and whose end is not known."""
        return [rank for rank in range(self._num_ranks) if rank not in self.by_rank and rank not in self.survived]

    def has_failed(self) -> bool:
        """Returns whether anything has failed that others did not survive."""
        survived = self.survived
        return self.service is not None or any(e.code for rank, e in self.by_rank.items() if rank not in survived)

    def is_services(self) -> bool:
        """Returns whether the coordination service is to blame, since no rank had a reason of its own before."""
        # A loss or an abort before the service's end may already have come of it: connections close first.
        earlier = [e for e in self.by_rank.values() if self.service is not None and e.at_s < self.service.at_s]
        return self.service is not None and all(e.code in (codes.DONE, codes.PEER_LOST, _ABORTED) for e in earlier)

    def cause(self) -> int | None:
        """Returns the rank to blame; None where no failure is known."""
        survived = self.survived
        failed = {rank: e for rank, e in self.by_rank.items() if e.code != codes.DONE and rank not in survived}
        if not failed:
            return None
        degrees = {r: 4 if e.by_launcher else _DERIVATION.get(e.code, 0) for r, e in failed.items()}
        first = min(failed, key=lambda rank: (degrees[rank], failed[rank].at_s, rank))
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
        if self.is_services():
            return _ABORTED
        if (cause := self.cause()) is not None:
            return self.by_rank[cause].code
        return codes.PEER_LOST if self.missing() else codes.DONE

    def summary(self, last_error: Callable[[int], str | None] = lambda rank: None) -> list[str]:
        """Returns one line that names the cause, and one per kind of ending.

        The line of a crash has the last error that its rank told of, as far as ``last_error`` knows it.
        """
        cause, missing = self.cause(), self.missing()
        survived = [f"  rank {rank} was lost, and the others went on: {self.lost[rank]}" for rank in self.survived]
        last_s = max((ending.at_s for ending in self.by_rank.values()), default=0.0)
        if not self.has_failed() and not missing:
            well = [rank for rank in self.by_rank if rank not in self.survived]
            return [f"{name_ranks(well)} ended well, the last after {last_s:.1f} s", *sorted(survived)]
        if not self.has_failed():
            others = "; all others ended well" if self.by_rank else ""
            return [f"nothing was heard of {name_ranks(missing)}{others}"]
        lines = []
        if self.service is not None and self.is_services():
            why = f"the coordination service ({_meaning(self.service.code)}), without which JAX aborts all ranks"
            lines.append(f"the run failed after {self.service.at_s:.1f} s: {why}")
        elif cause is not None:
            ending = self.by_rank[cause]
            how_it_ended = "was stopped" if ending.code == codes.PREEMPTED else "failed"
            why = f"rank {cause} ({_how(ending)})"
            still = [rank for rank, other in self.by_rank.items() if other.by_launcher == _STOOD_STILL]
            if still and ending.code == codes.PEER_LOST:
                how_it_ended, why = "failed", f"{name_ranks(still)} {_STOOD_STILL}"
            lines.append(f"the run {how_it_ended} after {ending.at_s:.1f} s: {why}")
        lines += sorted(survived)
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


def _how(ending: ProcessEnding) -> str:
    text = _meaning(ending.code)
    return f"{ending.by_launcher}: the launcher ended it ({text})" if ending.by_launcher else text
