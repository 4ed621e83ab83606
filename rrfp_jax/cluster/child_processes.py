"""The processes that a launcher starts: each in a session and on cores of its own, and none outlives the launcher.

Where all ranks run on all cores, the threads of a rank are moved from core to core and wait behind those of others,
which every hand-over between threads pays for. So each rank keeps to its share; ``child_reaper`` binds it before its
program starts.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Self

from rrfp_jax.cluster import RunStatus, child_reaper
from rrfp_jax.exit_codes import SIGNALLED, STOP_SIGNALS

ASKING = (signal.SIGINT, *STOP_SIGNALS)
"""Signals that ask a run to end."""
_STOPPED_STATES = ("T", "t")
_GUARDIAN_S = 5.0
"""Seconds that the guardian may take to end."""
_REAPER = (sys.executable, "-I", "-S", child_reaper.__file__)
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology"


def rank_cores(bind: str, num_ranks: int) -> list[tuple[int, ...]]:
    """Returns the cores of each rank of this node, of those that this process may use; none where ranks are not bound.

    So the limits of a resource manager (SLURM's, a container's) stand: only the cores that it left the launcher are
    shared out.
    """
    if bind != "cores" or not num_ranks or sys.platform != "linux":
        return [()] * num_ranks
    return core_shares(sorted(os.sched_getaffinity(0), key=_core_place), num_ranks)


def core_shares(cores: Sequence[int], num_ranks: int) -> list[tuple[int, ...]]:
    """Returns even shares of consecutive cores, one per rank; with fewer cores than ranks, one core each in turn.

    In turn, and not the first ranks on the first core: neighbours are the replicas of a stage, which work at the same
    time. Measured, that is the faster way.
    """
    if len(cores) < num_ranks:
        return [(cores[rank % len(cores)],) for rank in range(num_ranks)]
    bounds = [rank * len(cores) // num_ranks for rank in range(num_ranks + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(bounds)]


def _core_place(core: int) -> tuple[int, int, int]:
    """Returns socket, physical core and hardware thread.

    By number alone, the second threads of all cores would follow the first ones, so that two ranks would share every
    physical core, and half of them far from their GPU.
    """
    folder = Path(_TOPOLOGY.format(core))
    with suppress(OSError, ValueError):  # a sandbox without /sys: their numbers must do
        siblings = (folder / "thread_siblings_list").read_text(encoding="ascii")
        first = int(siblings.replace("-", ",").partition(",")[0])
        return int((folder / "physical_package_id").read_text(encoding="ascii")), first, core
    return 0, core, core


class Guardian:
    """Ends process groups when this process is killed; close it when they have ended."""

    def __init__(self) -> None:
        with _holding(ASKING):
            self._process = subprocess.Popen(
                [*_REAPER, child_reaper.GUARDIAN], stdin=subprocess.PIPE, start_new_session=True, text=True
            )
        self._lock = threading.Lock()

    def watch(self, group: int) -> None:
        """Has a group killed if this process dies before :meth:`release`."""
        self._say(f"+{group}")

    def release(self, group: int) -> None:
        """Leaves a group alone that has ended."""
        self._say(f"-{group}")

    def close(self) -> None:
        """Ends the guardian, and kills the groups that were not released."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_GUARDIAN_S)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._process.kill()
            self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock, suppress(BrokenPipeError):  # somebody killed it: ranks are still tied to this process
            print(line, file=self._process.stdin, flush=True)


class Child:
    """A running process. Start it on the main thread: Linux ties the process to the thread that starts it.

    Args:
        command: the program's path and its arguments.
        holds: signals that wait until the command lets them in, so that they find its handlers.
        cores: the cores that it keeps to; none: it may run on any core.
        on_end: called on a thread of this child with its exit code (128 + n where signal n killed it) and the time
            (``time.monotonic``), once it has ended and the rest of its process group is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        guardian: Guardian,
        on_end: Callable[[int, float], None],
        *,
        holds: Sequence[int] = (),
        cores: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        keeps_to = ",".join(map(str, cores)) or child_reaper.UNBOUND
        self._guardian, self._on_end = guardian, on_end
        # A session of its own: Ctrl-C at a terminal reaches the launcher alone, which passes it on in its own way.
        with _holding(holds):
            self._process = subprocess.Popen(
                [*_REAPER, str(os.getpid()), keeps_to, *command],
                env=dict(environment),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pid, self.stdout, self.stderr = self._process.pid, self._process.stdout, self._process.stderr
        guardian.watch(self.pid)
        self._is_reaped = False
        self._reaping = threading.Lock()
        self._thread = threading.Thread(target=self._wait, name=f"rrfp-wait-{self.pid}", daemon=True)
        self._thread.start()

    def close_stdin(self) -> None:
        """Closes the standard input of the process, if it has one."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def pass_on(self, number: int) -> None:
        """Sends a signal to the process alone, which knows its meaning for the processes that it has started."""
        with self._reaping:
            if not self._is_reaped:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Asks the whole group to end, also where it is stopped."""
        self._signal_group(signal.SIGTERM)
        self._signal_group(signal.SIGCONT)

    def kill(self) -> None:
        """Kills the whole group."""
        self._signal_group(signal.SIGKILL)

    def is_stopped(self) -> bool:
        """Returns whether the process stands still by a signal (SIGSTOP) or under a debugger."""
        with suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
            return state.split()[0] in _STOPPED_STATES
        return False

    def join(self, timeout_s: float) -> bool:
        """Waits until ``on_end`` has returned. Returns whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _signal_group(self, number: int) -> None:
        with self._reaping, suppress(ProcessLookupError, PermissionError):
            if not self._is_reaped:
                os.killpg(self.pid, number)

    def _wait(self) -> None:
        # Not reaped before its group is killed: until then nobody else can have its number.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        ended_s = time.monotonic()
        self.kill()
        # From now on the number may be another process's: no signal is sent to it any more.
        with self._reaping:
            code = self._process.wait()
            self._is_reaped = True
        self._guardian.release(self.pid)
        self._on_end(code if code >= 0 else SIGNALLED - code, ended_s)


@contextmanager
def _holding(numbers: Sequence[int]) -> Iterator[None]:
    """Has processes that are started within the block hold these signals back until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class RankEnded:
    """A rank of this node has ended."""

    rank: int
    code: int
    at_s: float
    """Time of the end by ``time.monotonic``."""


@dataclass(frozen=True)
class Signalled:
    """The launcher got a signal."""

    number: int


LauncherEvent = RankEnded | Signalled | RunStatus


class LauncherEvents:
    """The queue by which every event reaches the launcher's main thread.

    While it is entered, on the main thread, it catches signals, except those that the launcher was started to ignore,
    such as SIGHUP under ``nohup``.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[LauncherEvent] = SimpleQueue()
        self.stopped_by: int | None = None
        """The first signal that asked the run to end."""
        self._before: dict[int, Any] = {}

    def put(self, event: LauncherEvent) -> None:
        """Adds an event; any thread may call it, and a signal may interrupt it."""
        self._queue.put(event)

    def next(self, timeout_s: float) -> LauncherEvent | None:
        """Returns the next event, or None if none comes in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except Empty:
            return None

    def clear(self) -> None:
        """Forgets the events of an earlier attempt."""
        self._queue = SimpleQueue()

    def __enter__(self) -> Self:
        for number in ASKING:
            if number not in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.stopped_by is None:
            self.stopped_by = number
        self.put(Signalled(number))
