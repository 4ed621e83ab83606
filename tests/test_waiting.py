"""Waits hear of signals that did not interrupt them, and processes of pools end with the one that asked for them."""

import os
import signal
import subprocess
import sys
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


PROGRAM = """
import sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from rrfp_jax.waiting import end_with_parent

if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=get_context(sys.argv[1]), initializer=end_with_parent) as pool:
        ends = [pool.submit(time.sleep, 300) for _ in range(2)]
        print(*(child.pid for child in active_children()), flush=True)
        ends[0].result()
"""


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="processes are looked up in /proc")
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_processes_of_a_pool_end_with_a_parent_that_is_killed(method, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    parent = subprocess.Popen([sys.executable, program, method], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    assert all(map(lives, workers))
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    until_s = time.monotonic() + 30
    while any(map(lives, workers)) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not any(map(lives, workers))
