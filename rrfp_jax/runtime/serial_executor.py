"""The serial executor: calls from many threads run one after another, on whichever thread submits one.

The arbiters of a process and the objects around them belong to no thread. They belong to the call that runs, and
:class:`SerialExecutor` runs one call at a time. It is a combining lock: a call submitted while another thread holds
the lock, or from within a call, is queued, and the holder runs it after its current call. No caller blocks.

Why not hand every call to the event loop, which is simpler? The thread on which a task ends then chooses its stage's
next task, and neither that thread nor the loop has to be woken for it. A wake-up takes longer than everything else that
the runtime does for a task: measured with four stages and tasks that do no work, a step takes half to three quarters of
the time that it takes with all calls on the loop. Where the loop must be woken, :class:`WakeUp` does it for half of
the cost of ``call_soon_threadsafe``, which makes a handle and a context, and within uvloop turns the loop twice with
five system calls. A descriptor that the loop reads is served in the turn that it wakes: one write, one wait and one
read.

Timers and most of the network belong to the loop alone: a call that needs them has the loop do that.
"""

import os
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from rrfp_jax.cluster.loop_thread import runs_here

_T = TypeVar("_T")
_CALLS_AT_ONCE = 8
"""Calls after which a stage's thread leaves the rest to the loop: its own stage may have work for it."""


class SerialExecutor:
    """Runs the calls of one process, one at a time.

    Args:
        loop: the event loop, which runs calls that other threads leave to it.
        is_running: asked before each call; the call is dropped where it returns False.
        failed: called with an error that a call has raised; the executor is shut down by then.
    """

    def __init__(
        self, loop: AbstractEventLoop, is_running: Callable[[], bool], failed: Callable[[Exception], None]
    ) -> None:
        self._loop, self._is_running, self._failed = loop, is_running, failed
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...], bool]] = deque()
        """Queued calls with their arguments, and whether they run even after the shutdown."""
        self._lock = threading.Lock()
        """Held by the thread that runs calls. Others only try it, except in :meth:`run_exclusive`."""
        self._holder: int | None = None
        self._is_shut_down = False
        self._wake_up = WakeUp(loop, self._run)
        self.start, self.stop, self.close = self._wake_up.start, self._wake_up.stop, self._wake_up.close

    def submit(self, function: Callable[..., None], *arguments: Any) -> None:
        """Runs a call on this thread, or queues it behind the call that is running."""
        self._calls.append((function, arguments, False))
        self._run()

    def submit_to_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """Queues a call and wakes the loop, so that this thread need not run it; another thread may."""
        self._calls.append((function, arguments, False))
        self._wake_up.ring()

    def submit_always(self, function: Callable[..., None], *arguments: Any) -> None:
        """Submits a call that also runs after the shutdown."""
        self._calls.append((function, arguments, True))
        self._run()

    def run_exclusive(self, function: Callable[[], _T]) -> _T:
        """Blocks until no other call is running and returns the result of a function; within a call, runs it at
        once."""
        if self._holder == threading.get_ident():
            return function()
        try:
            with self._lock:
                return function()
        finally:
            self._run()

    def shut_down(self) -> None:
        """Drops all calls from now on, except those of :meth:`submit_always`."""
        self._is_shut_down = True

    def _run(self) -> None:
        while self._calls and self._lock.acquire(False):
            is_enough, error = False, None
            self._holder = threading.get_ident()
            try:
                is_enough = self._run_some()
            except Exception as caught:
                self.shut_down()
                error = caught
            finally:
                # A thread that tried the lock in vain has queued its call before, so the loop above looks once more.
                self._holder = None
                self._lock.release()
            if error is not None:
                self._failed(error)
            if is_enough and self._calls and not runs_here(self._loop):
                self._wake_up.ring()
                return

    def _run_some(self) -> bool:
        """Runs queued calls; returns whether it stopped at the limit."""
        calls = self._calls
        for _ in range(_CALLS_AT_ONCE):
            if not calls:
                return False
            function, arguments, is_always = calls.popleft()
            if is_always or (self._is_running() and not self._is_shut_down):
                function(*arguments)
        return True


class WakeUp:
    """Has the event loop make one call.

    A wake-up on its way serves everything until it arrives: callers first queue the work and then ring, and
    the call looks for it.

    Args:
        call: made on the loop; must not raise.
    """

    def __init__(self, loop: AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop, self._call = loop, call
        self._is_ringing = False
        self._number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if hasattr(os, "eventfd") else None
        """The descriptor, on Linux; elsewhere None."""

    def ring(self) -> None:
        """Has the loop make the call, unless it is about to; for any thread."""
        if self._is_ringing:
            return
        self._is_ringing = True
        if self._number is not None:
            os.eventfd_write(self._number, 1)
            return
        with suppress(RuntimeError):  # The loop may have been closed meanwhile.
            self._loop.call_soon_threadsafe(self._rung)

    def start(self) -> None:
        """Makes the call from now on, also for rings that came before; on the loop."""
        if self._number is not None:
            self._loop.add_reader(self._number, self._rung)

    def stop(self) -> None:
        """Makes the call no more; on the loop."""
        if self._number is not None:
            self._loop.remove_reader(self._number)

    def close(self) -> None:
        """Frees the descriptor. No thread may ring any more, for its number may then be another file's."""
        if self._number is not None:
            os.close(self._number)
            self._number = None

    def _rung(self) -> None:
        if self._number is not None:
            os.eventfd_read(self._number)
        # Cleared before the call looks, so that nothing that comes meanwhile is missed.
        self._is_ringing = False
        self._call()
