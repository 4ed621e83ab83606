"""The processes that a launcher starts, and their output: none outlives the launcher, each has cores of its own.

Where all ranks run on all cores, the threads of a rank are moved from core to core and wait behind those of others,
which every hand-over between threads pays for. So each rank keeps to its share; ``child_script`` binds it before its
program starts.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any, BinaryIO, Self

from rrfp_jax.cluster import KEY_FILE_VARIABLE, KEY_VARIABLE, RunStatus, child_script
from rrfp_jax.cluster.config import DETECT, LAUNCHER, PINNED_THREADS
from rrfp_jax.exit_codes import SIGNALLED, STOP_SIGNALS

ASKING = (signal.SIGINT, *STOP_SIGNALS)
"""Signals that ask a run to end."""
_STOPPED_STATES = ("T", "t")
_GUARDIAN_S = 5.0
"""Seconds that the guardian, or a process that is killed, may take to end."""
_SCRIPT = (sys.executable, "-I", "-S", child_script.__file__)
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology"
_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_MAX_PART_BYTES = 1 << 20
"""Largest part of a line that is copied at a time."""
_KEPT_LINES, _KEPT_BYTES = 40, 400
_TELLING = re.compile(
    r"what\(\)|terminate called|check failed|fatal|error|too many|cannot|unable|failed|incarnation|exhausted",
    re.IGNORECASE,
)
_FRAME = re.compile(r"\s*(@|#\d|\*\*\*|File |Fatal Python error|Thread 0x)")
"""Pattern of the lines of a stack, which say where an error happened and not why."""
_GONE = (errno.EPIPE, errno.EIO)
"""Errors of a pipe that has no reader any more, and of a terminal that has hung up."""


def rank_environment(environ: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """Returns the environment of every rank, without its place and the key: pools pinned, output unbuffered."""
    cleaned = {name: value for name, value in environ.items() if name not in (KEY_VARIABLE, KEY_FILE_VARIABLE, DETECT)}
    defaults = {"NPROC": str(PINNED_THREADS), "PYTHONUNBUFFERED": "1", **dict.fromkeys(_POOLS, "1")}
    given = {} if threads is None else {"NPROC": str(threads)}
    return {**defaults, **cleaned, **given, LAUNCHER: "1"}


def rank_cores(bind: str, num_ranks: int) -> list[tuple[int, ...]]:
    """Returns the cores of each rank of this node, of those that this process may use; none where ranks are not bound.

    So the limits of a resource manager (SLURM's, a container's) stand: only the cores that it left the launcher are
    shared out, in even shares of neighbours, or one each in turn where there are fewer cores than ranks.
    """

    def place(core: int) -> tuple[int, int, int]:
        # Socket, physical core, hardware thread. By number alone, the second threads of all cores would follow the
        # first ones: two ranks would share every physical core, and half of them would be far from their GPU.
        folder = Path(_TOPOLOGY.format(core))
        with suppress(OSError, ValueError):  # a sandbox without /sys: their numbers must do
            siblings = (folder / "thread_siblings_list").read_text(encoding="ascii")
            first = int(siblings.replace("-", ",").partition(",")[0])
            return int((folder / "physical_package_id").read_text(encoding="ascii")), first, core
        return 0, core, core

    if bind != "cores" or not num_ranks or sys.platform != "linux":
        return [()] * num_ranks
    cores = sorted(os.sched_getaffinity(0), key=place)
    if len(cores) < num_ranks:
        # In turn, and not the first ranks on the first core: neighbours are the replicas of a stage, which work at the
        # same time. Measured, that is the faster way.
        return [(cores[rank % len(cores)],) for rank in range(num_ranks)]
    bounds = [rank * len(cores) // num_ranks for rank in range(num_ranks + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(bounds)]


class Guardian:
    """Ends process groups when this process is killed; close it when they have ended."""

    def __init__(self) -> None:
        with _holding(ASKING):
            self._process = subprocess.Popen(
                [*_SCRIPT, child_script.GUARDIAN], stdin=subprocess.PIPE, start_new_session=True, text=True
            )
        self._lock = threading.Lock()

    def watch(self, group: int, *, has_ended: bool = False) -> None:
        """Has a group killed if this process dies before the group is told to have ended."""
        assert self._process.stdin is not None
        with self._lock, suppress(BrokenPipeError):  # somebody killed it: ranks are still tied to this process
            print(f"{'-' if has_ended else '+'}{group}", file=self._process.stdin, flush=True)

    def close(self) -> None:
        """Ends the guardian, and kills the groups that have not ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_GUARDIAN_S)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._process.kill()
            self._process.wait()


class Child:
    """A running process. Start it on the main thread: Linux ties the process to the thread that starts it.

    A spare process has got ``SPARE`` in its environment and a pipe as ``stdin``: it imports all that its command needs,
    then waits until :meth:`take_place` tells it the rest of its environment.

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
        keeps_to = ",".join(map(str, cores)) or child_script.UNBOUND
        self._guardian, self._on_end = guardian, on_end
        # A session of its own: Ctrl-C at a terminal reaches the launcher alone, which passes it on in its own way.
        with _holding(holds):
            self._process = subprocess.Popen(
                [*_SCRIPT, str(os.getpid()), keeps_to, *command],
                env=dict(environment),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pid, self.stdin = self._process.pid, self._process.stdin
        self.stdout, self.stderr = self._process.stdout, self._process.stderr
        guardian.watch(self.pid)
        self._is_reaped = False
        self._reaping = threading.Lock()
        self._thread = threading.Thread(target=self._wait, name=f"rrfp-wait-{self.pid}", daemon=True)
        self._thread.start()

    def kill(self, *numbers: int, alone: bool = False) -> None:
        """Sends signals, by default SIGKILL, to the whole group.

        With ``alone`` they go to the process, which knows their meaning for the processes that it has started.
        """
        with self._reaping, suppress(ProcessLookupError, PermissionError):
            for number in numbers or (signal.SIGKILL,):
                if not self._is_reaped:
                    (os.kill if alone else os.killpg)(self.pid, number)

    def take_place(self, environment: Mapping[str, str], on_end: Callable[[int, float], None]) -> bool:
        """Has a spare process go on with these variables added; ``on_end`` counts from now on. Returns False where it
        has ended or is stopped."""
        assert self.stdin is not None
        with self._reaping:
            if self._is_reaped or self.is_stopped():
                return False
            self._on_end = on_end
        with suppress(BrokenPipeError), self.stdin:  # one that has just ended is a rank that ended at its start
            self.stdin.write(json.dumps({**environment}).encode())
        return True

    def is_stopped(self) -> bool:
        with suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
            return state.split()[0] in _STOPPED_STATES
        return False

    def discard(self) -> None:
        """Kills a process whose output nobody reads, and closes its pipes."""
        self.kill()
        self.join(_GUARDIAN_S)
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()

    def join(self, timeout_s: float) -> bool:
        """Waits until ``on_end`` has returned. Returns whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wait(self) -> None:
        # Not reaped before its group is killed: until then nobody else can have its number.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        ended_s = time.monotonic()
        self.kill()
        # From now on the number may be another process's: no signal is sent to it any more.
        with self._reaping:
            code = self._process.wait()
            self._is_reaped = True
        self._guardian.watch(self.pid, has_ended=True)
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


LauncherEvent = RankEnded | signal.Signals | RunStatus
"""The end of a rank, a signal that the launcher got, or news of the run."""


class LauncherEvents(SimpleQueue[LauncherEvent]):
    """The queue by which every event reaches the launcher's main thread.

    Any thread may put events, and a signal may interrupt it. While it is entered, on the main thread, it catches
    signals, except those that the launcher was started to ignore, such as SIGHUP under ``nohup``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stopped_by: int | None = None
        """The first signal that asked the run to end."""
        self._before: dict[int, Any] = {}

    def next(self, timeout_s: float) -> LauncherEvent | None:
        try:
            return self.get(timeout=timeout_s)
        except Empty:
            return None

    def __enter__(self) -> Self:
        def receive(number: int, _frame: FrameType | None) -> None:
            if self.stopped_by is None:
                self.stopped_by = number
            self.put(signal.Signals(number))

        for number in ASKING:
            if number not in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Output:
    """Copies the lines of processes to this process's own streams, each with its process's name.

    Args:
        prefix: ``always`` puts ``[rank 2]`` before every line, ``never`` before none, and standard output stays
            standard output, errors stay errors. ``auto`` is as ``always`` on a terminal; elsewhere standard output is
            rank 0's alone, unchanged, so that programs can read it, and what others print goes to the errors.
    """

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO, *, prefix: str) -> None:
        self._stdout, self._stderr = stdout, stderr
        self._is_pure = prefix == "auto" and not stdout.isatty()
        self._marks = prefix != "never"
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._last_errors: dict[str, deque[bytes]] = {}
        """The last lines that each process wrote to its standard error, by its name."""

    def follow(self, name: str, stdout: IO[bytes], stderr: IO[bytes], *, is_main: bool) -> None:
        """Copies both pipes of a process until they close; ``is_main`` says that it is rank 0."""
        mark = f"[{name}] ".encode() if self._marks else b""
        printed = (self._stdout, mark)
        if self._is_pure:
            printed = (self._stdout, b"") if is_main else (self._stderr, mark)
        self._last_errors[name] = deque(maxlen=_KEPT_LINES)
        ways = ((stdout, *printed, None), (stderr, self._stderr, mark, self._last_errors[name]))
        for way in ways:
            thread = threading.Thread(target=self._copy, args=way, name="rrfp-output", daemon=True)
            self._threads.append(thread)
            thread.start()

    def last_error(self, name: str) -> str | None:
        """Returns the last line in which a process told of something that went wrong, shortened; None if there is
        none."""
        for line in reversed(self._last_errors.get(name, ())):
            text = "".join(c for c in line.decode(errors="replace").strip() if c.isprintable())
            if _TELLING.search(text) and not _FRAME.match(text):
                return text
        return None

    def say(self, text: str) -> None:
        """Writes lines of the launcher's own, for people."""
        lines = [f"[launcher] {line}\n" for line in text.splitlines()]
        self._write(self._stderr, "".join(lines).encode())

    def tell(self, text: str) -> None:
        """Writes lines of the launcher's own that a program reads."""
        self._write(self._stdout, f"{text}\n".encode())

    def drain(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _copy(self, source: IO[bytes], target: BinaryIO, mark: bytes, kept: deque[bytes] | None) -> None:
        # A line is copied when it ends, so that lines of several processes are not mixed; a very long one in parts.
        goes_on = False
        with source:
            while part := source.readline(_MAX_PART_BYTES):
                self._write(target, part if goes_on else mark + part)
                if kept is not None and not goes_on:
                    kept.append(part[:_KEPT_BYTES])
                goes_on = not part.endswith(b"\n")
        if goes_on and mark:  # a process ended within a line: the next process begins its own
            self._write(target, b"\n")

    def _write(self, target: BinaryIO, data: bytes) -> None:
        # Where nobody reads any longer, lines go nowhere, and a line that cannot be written now is lost: neither a
        # process that prints nor the launcher may stop for that.
        with self._lock:
            try:
                target.write(data)
                target.flush()
            except OSError as error:
                if error.errno in _GONE:
                    with open(os.devnull, "wb") as nowhere:
                        os.dup2(nowhere.fileno(), target.fileno())
