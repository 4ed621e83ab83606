"""Sleeps that end at a given time, as exactly as the machine can."""

import ctypes
import threading
import time

_PR_SET_TIMERSLACK = 29
_LATENESS_GAIN = 0.1
_MAX_LATENESS_S = 2e-4


class Sleeper:
    """Sleeps on the calling thread, and ends on time on average.

    A sleep ends some 0.05 to 0.1 ms late, which no device would. So the usual lateness is taken off the next sleeps.
    """

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


_thread = threading.local()


def reduce_timer_slack() -> bool:
    """Has this thread's sleeps end within a microsecond of their time on Linux, instead of 50; returns whether they
    do."""
    try:
        return ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1) == 0
    except (AttributeError, OSError):
        return False
