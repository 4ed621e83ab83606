"""The processes that a launcher starts: each in a session of its own, and none outlives the launcher."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rrfp_jax.exit_codes import SIGNALLED, STOP_SIGNALS
from rrfp_jax.launch import tether

ASKING = (signal.SIGINT, *STOP_SIGNALS)
"""Signals that ask a run to end."""
_STOPPED_STATES = ("T", "t")
_GUARDIAN_S = 5.0
"""How long the guardian may take to end."""
_TETHER = (sys.executable, "-I", "-S", tether.__file__)


class Guardian:
    """Sees to it that process groups end when this process is killed; close it when they have ended."""

    def __init__(self) -> None:
        with _holding(ASKING):
            self._process = subprocess.Popen(
                [*_TETHER, tether.GUARDIAN], stdin=subprocess.PIPE, start_new_session=True, text=True
            )
        self._lock = threading.Lock()

    def watch(self, group: int) -> None:
        self._say(f"+{group}")

    def release(self, group: int) -> None:
        self._say(f"-{group}")

    def close(self) -> None:
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
        cores: the cores that it keeps to, see :mod:`~rrfp_jax.launch.binding`; none: it may run on any core.
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
        keeps_to = ",".join(map(str, cores)) or tether.UNBOUND
        self._guardian, self._on_end = guardian, on_end
        with _holding(holds):
            self._process = subprocess.Popen(
                [*_TETHER, str(os.getpid()), keeps_to, *command],
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
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def pass_on(self, number: int) -> None:
        """Send a signal to the process alone, which knows what it means for those it has started."""
        with self._reaping:
            if not self._is_reaped:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the whole group to end, also where it is stopped."""
        self._signal_group(signal.SIGTERM)
        self._signal_group(signal.SIGCONT)

    def kill(self) -> None:
        """End the whole group."""
        self._signal_group(signal.SIGKILL)

    def is_stopped(self) -> bool:
        """Whether the process stands still by a signal (SIGSTOP) or under a debugger."""
        with suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
            return state.split()[0] in _STOPPED_STATES
        return False

    def join(self, timeout_s: float) -> bool:
        """Wait until ``on_end`` has returned; whether it has."""
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
        with self._reaping:
            code = self._process.wait()
            self._is_reaped = True
        self._guardian.release(self.pid)
        self._on_end(code if code >= 0 else SIGNALLED - code, ended_s)


@contextmanager
def _holding(numbers: Sequence[int]) -> Iterator[None]:
    """Have processes that are started within the block hold these signals back until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
