"""Sleeping until a given time, as exactly as the machine can."""

import ctypes
import threading
import time

_PR_SET_TIMERSLACK = 29
_LATENESS_GAIN = 0.1
_MAX_LATENESS_S = 2e-4


class Sleeper:
    """Sleeps on whatever thread asks for it.

    A sleep ends some 0.05 to 0.1 ms late, which no device would. So the usual lateness is taken off the next sleeps:
    they end when they should on average.
    """

    def __init__(self) -> None:
        self._usual_lateness_s = 0.0

    def until(self, time_s: float) -> None:
        """Sleep until then (``time.perf_counter``), on average."""
        remaining_s = time_s - time.perf_counter() - self._usual_lateness_s
        if remaining_s > 0:
            sleep_exactly(remaining_s)
            late_s = time.perf_counter() - time_s
            corrected_s = self._usual_lateness_s + _LATENESS_GAIN * late_s
            self._usual_lateness_s = min(max(0.0, corrected_s), _MAX_LATENESS_S)


def sleep_exactly(seconds: float) -> None:
    """Sleep at least so long, and not longer than waking up takes."""
    if not hasattr(_thread, "is_exact"):
        _thread.is_exact = reduce_timer_slack()
    time.sleep(seconds)


_thread = threading.local()


def reduce_timer_slack() -> bool:
    """Let this thread's sleeps end within a microsecond of their time on Linux, instead of 50."""
    try:
        return ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1) == 0
    except (AttributeError, OSError):
        return False
