"""A wait hears of signals that did not interrupt it."""

import signal
import threading
import time
from concurrent.futures import Future

import pytest

from rrfp_jax.waiting import result_of


def test_a_signal_that_does_not_interrupt_the_wait_is_noticed() -> None:
    # One that another thread takes leaves the main thread's wait alone, as one does that came just before the wait.
    other = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    handler_before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start_s = time.monotonic()
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            result_of(Future[None]())
    finally:
        signal.signal(signal.SIGINT, handler_before)
    assert time.monotonic() - start_s < 10


def test_results_and_errors_come_as_they_are() -> None:
    future, failed = Future[int](), Future[int]()
    threading.Timer(0.05, future.set_result, (7,)).start()
    assert result_of(future) == 7
    failed.set_exception(TimeoutError("the task's own"))
    with pytest.raises(TimeoutError, match="the task's own"):
        result_of(failed)
