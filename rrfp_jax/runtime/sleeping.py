"""Sleeps that end at a given time, as exactly as the machine can, and messages that are handed over at one.

A sleep ends some 0.05 to 0.1 ms late, which no device would. So the usual lateness is taken off the next sleeps.
"""

import ctypes
import threading
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from rrfp_jax.core import Message
from rrfp_jax.runtime.serial_executor import WakeUp

_PR_SET_TIMERSLACK = 29
_LATENESS_GAIN = 0.1
_MAX_LATENESS_S, _MAX_DELIVERY_LATENESS_S = 2e-4, 3e-4
_thread = threading.local()

_Due = tuple[float, int, tuple[Any, ...]]
"""Time at which a message is due, its number among messages due at the same time, and the arguments of ``deliver``."""


class Sleeper:
    """Sleeps on the calling thread, and ends on time on average."""

    def __init__(self) -> None:
        self._usual_lateness_s = 0.0

    def until(self, time_s: float) -> None:
        """Sleeps until a time (``time.perf_counter``), on average."""
        remaining_s = time_s - time.perf_counter() - self._usual_lateness_s
        if remaining_s > 0:
            sleep_exactly(remaining_s)
            late_s = time.perf_counter() - time_s
            corrected_s = self._usual_lateness_s + _LATENESS_GAIN * late_s
            self._usual_lateness_s = min(max(0.0, corrected_s), _MAX_LATENESS_S)


def sleep_exactly(seconds: float) -> None:
    """Sleeps for at least so many seconds, and longer only by the time that waking up takes."""
    if not hasattr(_thread, "is_exact"):
        _thread.is_exact = reduce_timer_slack()
    time.sleep(seconds)


def reduce_timer_slack() -> bool:
    """Has this thread's sleeps end within a microsecond of their time on Linux, instead of 50; returns whether they
    do."""
    try:
        return ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1) == 0
    except (AttributeError, OSError):
        return False


class DelayInjection:
    """Delivers each message after a delay, on the event loop, to emulate slow links. One thread calls it at a time.

    The event loop's timers count whole milliseconds, and links take less. So a thread sleeps until a message is due,
    and wakes the loop as the threads of stages do.

    Args:
        deliver: takes unit, step, message and payload.
        delay_s: returns the delay of a message in seconds; with 0 it is handed over at once.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        deliver: Callable[[int, int, Message, Any], None],
        delay_s: Callable[[Message], float],
    ) -> None:
        self._deliver, self._delay_s = deliver, delay_s
        self._came: SimpleQueue[_Due | None] = SimpleQueue()
        self._due: deque[_Due] = deque()
        self._numbers = count()
        self._usual_lateness_s = 0.0
        self._wake_up = WakeUp(loop, self._hand_over)
        self.stop = self._wake_up.stop
        """Hands nothing over any more; on the loop."""
        loop.call_soon_threadsafe(self._wake_up.start)
        self._thread = threading.Thread(target=self._wait, name="rrfp-links", daemon=True)
        self._thread.start()

    def __call__(self, unit: int, step: int, message: Message, payload: Any) -> None:
        seconds = self._delay_s(message)
        if seconds > 0:
            due_s = time.perf_counter() + seconds
            self._came.put((due_s, next(self._numbers), (unit, step, message, payload)))
        else:
            self._deliver(unit, step, message, payload)

    def close(self) -> None:
        """Ends the thread, after :meth:`stop`."""
        self._came.put(None)
        self._thread.join()
        self._wake_up.close()

    def _hand_over(self) -> None:
        while self._due:
            due_s, _, arguments = self._due.popleft()
            late_s = self._usual_lateness_s + _LATENESS_GAIN * (time.perf_counter() - due_s)
            self._usual_lateness_s = min(max(0.0, late_s), _MAX_DELIVERY_LATENESS_S)
            self._deliver(*arguments)

    def _wait(self) -> None:
        reduce_timer_slack()
        waiting: list[_Due] = []
        while True:
            ahead_s = time.perf_counter() + self._usual_lateness_s
            while waiting and waiting[0][0] <= ahead_s:
                self._due.append(heappop(waiting))
                self._wake_up.ring()
            try:
                came = self._came.get(timeout=waiting[0][0] - ahead_s if waiting else None)
            except Empty:
                continue
            if came is None:
                return
            heappush(waiting, came)
