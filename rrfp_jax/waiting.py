"""Waiting on the main thread, so that signals are noticed.

CPython handles a signal on the main thread before its next bytecode, or when the signal itself interrupts a wait. One
that comes between the last bytecode and the wait is handled when the wait ends, which may be never: a Ctrl-C right
after a step's line was lost in 11 of 120 runs. So no wait here is longer than a moment.
"""

import threading
import time
from concurrent.futures import Future, wait
from typing import TypeVar

_T = TypeVar("_T")
_MOMENT_S = 0.5


def result_of(future: "Future[_T]") -> _T:
    """``future.result()``, however long that takes, with signals noticed within half a second."""
    while not future.done():
        wait((future,), _MOMENT_S)
    return future.result()


def wait_for(event: threading.Event, timeout_s: float | None = None) -> bool:
    """``event.wait(timeout_s)``, with signals noticed within half a second; None waits for ever."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while not event.is_set():
        left_s = _MOMENT_S if until_s is None else until_s - time.monotonic()
        if left_s <= 0:
            return False
        event.wait(min(left_s, _MOMENT_S))
    return True
