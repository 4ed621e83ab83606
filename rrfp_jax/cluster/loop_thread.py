"""An asyncio event loop in a thread of its own.

The loop is uvloop's: an iteration costs a few microseconds less than with asyncio's own, and a task of a stage takes
several.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from rrfp_jax.waiting import result_of

_T = TypeVar("_T")
_STOP_TIMEOUT_S = 5.0


class LoopThread:
    """Runs ``loop`` from its construction until :meth:`close`, in a daemon thread."""

    def __init__(self, name: str = "rrfp-loop") -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., _T], *args: Any, timeout_s: float | None = None) -> _T:
        """Calls ``function(*args)`` on the loop. Returns its result or raises its error; any thread may call this.

        Raises:
            RuntimeError: where the loop is closed.
            TimeoutError: where the call has not ended within ``timeout_s``; it may still do so later.
        """
        if threading.current_thread() is self._thread:  # to wait for itself would never end
            return function(*args)
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return result_of(future, timeout_s)

    def close(self) -> None:
        """Ends the loop after the call it is in; calls scheduled for later are dropped. May be called again."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(_STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()

    def _run(self) -> None:
        # This thread may preempt the others of its process as it wakes, where binding makes all wait their turn. Its
        # turns are short, and all wait for them; ZeroMQ's thread would keep it waiting while it copies a large array.
        if sys.platform == "linux":
            with suppress(OSError):  # refused by a sandbox
                if os.sched_getscheduler(0) == os.SCHED_BATCH:
                    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        self.loop.run_forever()


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
