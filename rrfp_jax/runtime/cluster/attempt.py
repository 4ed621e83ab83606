"""One attempt at a run: start this node's ranks, pass signals on, and end all together.

After the first failure the other ranks have time to end by themselves, each with its own report; then they are asked
to end (SIGTERM), and at last killed. Told to stop, the launcher passes the signal on and waits; told again, it ends
the ranks likewise.
"""

import signal
import sys
import time
from collections.abc import Mapping
from queue import Empty, SimpleQueue

from rrfp_jax.runtime.cluster.binding import rank_cores
from rrfp_jax.runtime.cluster.children import Child, Guardian
from rrfp_jax.runtime.cluster.endings import Ending, Endings
from rrfp_jax.runtime.cluster.events import Event, RankEnded, RankEndedElsewhere, ServiceEnded, Signalled
from rrfp_jax.runtime.cluster.head import Head, HeadFailed, HostedHead, RemoteHead
from rrfp_jax.runtime.cluster.membership import Membership
from rrfp_jax.runtime.cluster.output import Output
from rrfp_jax.runtime.cluster.settings import LaunchSettings
from rrfp_jax.runtime.cluster.signals import STOPPING, SignalInbox
from rrfp_jax.runtime.exit_codes import DONE, PEER_LOST, START_FAILED
from rrfp_jax.runtime.network import RunKey

_LOOK_S = 0.25
_TERM_S = 5.0
"""How long a rank that is asked to end may take."""
_DRAIN_S = 2.0
_STILL_S = 5.0
"""How long the last ranks may all be stopped by a signal after others have ended."""
_NEWS_S = 2.0
"""How long news of a cause on another node may be on its way."""


class Attempt:
    """Runs once, on the main thread.

    Args:
        number: 0 for the first attempt.
        environment: of every rank, but for its place in the run and the key.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        number: int,
        key: RunKey,
        *,
        environment: Mapping[str, str],
        inbox: SignalInbox,
        output: Output,
        guardian: Guardian,
    ) -> None:
        self._settings, self._number, self._key, self._inbox = settings, number, key, inbox
        self._environment, self._output, self._guardian = environment, output, guardian
        self._ranks = settings.local_ranks()
        self._cores = dict(zip(self._ranks, rank_cores(settings.bind, len(self._ranks)), strict=True))
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._inbox.queue = self._events
        self._endings = Endings(range(settings.num_ranks) if settings.hosts_head else self._ranks)
        self._alive: dict[int, Child] = {}
        self._asked: dict[int, bool] = {}
        """The ranks that were asked to end, and whether they stood still by a signal then."""
        self._started_s = time.monotonic()
        self._failed_s: float | None = None
        self._still_since_s: float | None = None
        self._here_ended_s: float | None = None
        self._asked_s: float | None = None
        self._num_stops = 0

    def run(self) -> int:
        """Start, watch and end everything; returns the exit code of the run."""
        try:
            head = self._meet()
        except HeadFailed as error:
            self._output.say(f"error: {error}")
            return START_FAILED
        try:
            for rank in self._ranks:
                self._alive[rank] = self._start(rank, head)
            while not self._is_over():
                self._handle(self._next_event())
                self._press()
        finally:
            self._clear_away(head)
        for line in self._endings.summary():
            self._output.say(line)
        return self._endings.code()

    def _meet(self) -> Head:
        def on_exit(rank: int, code: int) -> None:
            if rank not in self._ranks:
                self._events.put(RankEndedElsewhere(rank, code))

        if not self._settings.hosts_head:
            return RemoteHead(
                self._settings, self._key, on_exit=on_exit, is_stopped=lambda: self._inbox.stopped_by is not None
            )
        return HostedHead(
            self._settings,
            self._key,
            environment=self._environment,
            guardian=self._guardian,
            output=self._output,
            on_exit=on_exit,
            on_service_end=lambda code: self._events.put(ServiceEnded(code)),
        )

    def _start(self, rank: int, head: Head) -> Child:
        membership = Membership(
            rank=rank,
            num_ranks=self._settings.num_ranks,
            rendezvous=head.rendezvous,
            coordinator=head.coordinator,
            attempt=self._number,
            interface=self._settings.listens_on(),
        )

        def ended(code: int, at_s: float) -> None:
            self._events.put(RankEnded(rank, code, at_s))
            head.ended(rank, code)

        environment = {**self._environment, **membership.environment(), **self._key.environment()}
        command, cores = [sys.executable, "-m", *self._settings.command], self._cores[rank]
        child = Child(command, environment, self._guardian, ended, cores=cores)
        self._output.follow(f"rank {rank}", child.stdout, child.stderr, is_main=rank == 0)
        return child

    # -- what happens ------------------------------------------------------------------------------------------------

    def _next_event(self) -> Event | None:
        try:
            return self._events.get(timeout=_LOOK_S)
        except Empty:
            return None

    def _handle(self, event: Event | None) -> None:
        match event:
            case RankEnded(rank, code, at_s):
                was_asked, was_stopped = rank in self._asked, self._asked.get(rank, False)
                self._alive.pop(rank)
                self._note(rank, code, at_s, by_launcher=was_asked, was_stopped=was_stopped)
                if not self._alive:
                    self._here_ended_s = time.monotonic()
            case RankEndedElsewhere(rank, code):
                self._note(rank, code, time.monotonic())
            case ServiceEnded(code):
                self._output.say(f"the coordination service ended with code {code}: JAX now aborts all ranks")
                self._fail()
            case Signalled(number):
                self._signalled(number)

    def _note(self, rank: int, code: int, at_s: float, *, by_launcher: bool = False, was_stopped: bool = False) -> None:
        self._endings.note(
            Ending(
                rank=rank,
                code=code,
                at_s=at_s - self._started_s,
                by_launcher=by_launcher,
                was_stopped=was_stopped,
            )
        )
        if code != DONE:
            self._fail()

    def _fail(self) -> None:
        if self._failed_s is None:
            self._failed_s = time.monotonic()

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        self._num_stops += number in STOPPING
        if number in STOPPING and self._num_stops > 1:
            self._output.say(f"{name}: told to stop again, all ranks of this node are ended now")
            self._ask_to_end()
            return
        if number in STOPPING:
            self._output.say(f"{name} is passed on to the ranks of this node; send it again to end them at once")
        for child in self._alive.values():
            child.pass_on(number)

    # -- how it ends -------------------------------------------------------------------------------------------------

    def _press(self) -> None:
        """Ask, then force, the ranks that do not end by themselves."""
        now_s = time.monotonic()
        if self._failed_s is None and self._stands_still(now_s):
            self._fail()
        if self._asked_s is not None:
            if now_s > self._asked_s + _TERM_S:
                for child in self._alive.values():
                    child.kill()
        elif self._failed_s is not None and self._alive:
            is_late = now_s > self._failed_s + self._settings.grace_s
            if is_late or all(child.is_stopped() for child in self._alive.values()):
                self._ask_to_end()

    def _stands_still(self, now_s: float) -> bool:
        """Whether the ranks that are left have all been stopped for a while: nobody is there to miss them."""
        is_still = 0 < len(self._alive) < len(self._ranks) and all(c.is_stopped() for c in self._alive.values())
        if not is_still:
            self._still_since_s = None
            return False
        self._still_since_s = self._still_since_s or now_s
        return now_s > self._still_since_s + _STILL_S

    def _ask_to_end(self) -> None:
        if self._asked_s is None:
            self._asked_s = time.monotonic()
            for rank, child in self._alive.items():
                self._asked[rank] = child.is_stopped()
                child.terminate()

    def _is_over(self) -> bool:
        """No rank runs here, and there is no news to wait for."""
        if self._here_ended_s is None:
            return False
        waited_s = time.monotonic() - self._here_ended_s
        if self._endings.missing():
            return self._asked_s is not None or waited_s > self._settings.grace_s
        is_derived = self._endings.code() in (PEER_LOST, START_FAILED)
        return self._settings.num_nodes == 1 or not is_derived or waited_s > _NEWS_S

    def _clear_away(self, head: Head) -> None:
        for child in self._alive.values():
            child.kill()
        for child in self._alive.values():
            child.join(_TERM_S)
        head.close()
        self._output.drain(_DRAIN_S)
