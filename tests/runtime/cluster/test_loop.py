"""An event loop in a thread of its own."""

import threading

import pytest

from rrfp_jax.runtime.cluster import LoopThread


def test_calls_run_on_the_loop_and_return_or_raise():
    thread = LoopThread("rrfp-test")
    try:
        assert thread.call(lambda: threading.current_thread().name) == "rrfp-test"
        assert thread.call(lambda: thread.call(lambda: 7)) == 7  # from the loop itself
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda: 1 / 0)
        assert thread.is_running
    finally:
        thread.close()
    thread.close()
    assert not thread.is_running
    assert thread.loop.is_closed()


def test_a_call_that_takes_too_long_does_not_hang_the_caller():
    thread, release = LoopThread(), threading.Event()
    try:
        with pytest.raises(TimeoutError):
            thread.call(release.wait, timeout_s=0.05)
    finally:
        release.set()
        thread.close()


def test_it_can_end_itself():
    thread = LoopThread()
    thread.call(thread.close)
    thread.close()
    assert thread.loop.is_closed()
