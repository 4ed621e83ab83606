"""An event loop in a thread of its own."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rrfp_jax.cluster import LoopThread


def test_calls_run_on_the_loop_and_return_or_raise():
    thread = LoopThread("rrfp-test")
    try:
        assert thread.call(lambda: threading.current_thread().name) == "rrfp-test"
        assert thread.call(lambda: thread.call(lambda: 7)) == 7  # from the loop itself
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda: 1 / 0)
    finally:
        thread.close()
    thread.close()
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


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux's")
@pytest.mark.parametrize(("around", "within"), [("SCHED_BATCH", "SCHED_OTHER"), ("SCHED_OTHER", "SCHED_OTHER")])
def test_it_need_not_wait_for_the_threads_of_a_bound_process(around: str, within: str):
    def policy_within() -> int:
        os.sched_setscheduler(0, getattr(os, around), os.sched_param(0))  # this thread's, and of those that it starts
        loop = LoopThread()
        try:
            return loop.call(os.sched_getscheduler, 0)
        finally:
            loop.close()

    with ThreadPoolExecutor(1) as bound:
        assert bound.submit(policy_within).result() == getattr(os, within)
