"""Processes and signals: waits that notice signals, and pools whose processes end with the one that asked for them.

CPython handles a signal on the main thread before its next bytecode, or when the signal itself interrupts a wait. One
that comes between the last bytecode and the wait is handled when the wait ends, which may be never: a Ctrl-C right
after a step's line was lost in 11 of 120 runs. So no wait here is longer than a moment.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext

_T = TypeVar("_T")
_MOMENT_S = 0.5
_SAFE_PATH = "PYTHONSAFEPATH"


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


@contextmanager
def spawning() -> "Iterator[SpawnContext]":
    """Yields the context of a pool's processes, which are started within the block.

    Python starts them by ``python -c``, which looks for modules in the current folder first. A user's file there, such
    as ``queue.py``, must not take the place of a module.
    """
    import multiprocessing  # on first use: most who wait start no pool

    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield multiprocessing.get_context("spawn")
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def end_with_parent() -> None:
    """Makes a new process of a pool ignore Ctrl-C, which its parent answers, and end when its parent ends.

    Each process calls it first.
    """

    import multiprocessing

    def wait_for_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait_for_parent, name="parent", daemon=True).start()
