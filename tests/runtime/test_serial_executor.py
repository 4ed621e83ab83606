"""The serial executor runs the calls of many threads one at a time, loses none, blocks nobody, and ends for good."""

import os
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from rrfp_jax.cluster.loop_thread import LoopThread
from rrfp_jax.runtime.serial_executor import SerialExecutor, WakeUp

NUM_THREADS, NUM_CALLS, NUM_RINGS = 4, 3000, 2000
PATIENCE_S = 20


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def errors() -> list[Exception]:
    return []


@pytest.fixture
def executor(loop: LoopThread, errors: list[Exception]) -> Iterator[SerialExecutor]:
    made = SerialExecutor(loop.loop, lambda: True, errors.append)
    loop.call(made.start)
    yield made
    loop.call(made.stop)
    made.close()


def test_calls_of_many_threads_are_made_one_at_a_time_and_none_is_lost(executor: SerialExecutor) -> None:
    """Each call reads and writes what the others do, with another thread's chance to run in between."""
    count, is_inside, is_done = [0], [False], threading.Event()

    def made() -> None:
        assert not is_inside[0]
        is_inside[0] = True
        before = count[0]
        threading.Event().wait(0) if before % 64 == 0 else None
        count[0], is_inside[0] = before + 1, False
        if count[0] == 2 * NUM_THREADS * NUM_CALLS:
            is_done.set()

    def work() -> None:
        for _ in range(NUM_CALLS):
            executor.submit(made)
            executor.submit_to_loop(made)

    threads = [threading.Thread(target=work) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_done.wait(PATIENCE_S)


def test_what_a_call_asks_for_is_made_after_it(executor: SerialExecutor) -> None:
    lines: list[str] = []

    def outer() -> None:
        executor.submit(lines.append, "inner")
        lines.append("outer")

    executor.submit(outer)
    assert lines == ["outer", "inner"]


def test_who_comes_while_another_thread_is_at_it_does_not_wait(executor: SerialExecutor) -> None:
    is_inside, may_end, made_on = threading.Event(), threading.Event(), list[str]()

    def long() -> None:
        is_inside.set()
        may_end.wait(PATIENCE_S)

    other = threading.Thread(target=executor.submit, args=(long,), name="other")
    other.start()
    assert is_inside.wait(PATIENCE_S)
    executor.submit(lambda: made_on.append(threading.current_thread().name))
    assert not made_on
    may_end.set()
    other.join()
    assert made_on == ["other"]


def test_who_wants_to_be_apart_waits_for_the_call_under_way_and_others_come_after(executor: SerialExecutor) -> None:
    lines: list[str] = []
    is_inside, may_end, is_apart = threading.Event(), threading.Event(), threading.Event()

    def long() -> None:
        is_inside.set()
        may_end.wait(PATIENCE_S)
        lines.append("long")

    def apart() -> str:
        lines.append("apart")
        is_apart.set()
        may_end.wait(PATIENCE_S)
        executor.submit(lines.append, "left meanwhile")
        return "answer"

    other = threading.Thread(target=executor.submit, args=(long,))
    other.start()
    assert is_inside.wait(PATIENCE_S)
    threading.Timer(0.1, may_end.set).start()
    assert executor.run_exclusive(apart) == "answer"
    other.join()
    assert lines == ["long", "apart", "left meanwhile"]


def test_what_is_left_while_one_is_apart_is_made_though_that_fails(executor: SerialExecutor) -> None:
    lines: list[str] = []

    def apart() -> None:
        executor.submit(lines.append, "left meanwhile")
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        executor.run_exclusive(apart)
    assert lines == ["left meanwhile"]


def test_a_call_may_be_apart_itself(executor: SerialExecutor) -> None:
    answers: list[str] = []
    executor.submit(lambda: answers.append(executor.run_exclusive(lambda: "answer")))
    assert answers == ["answer"]


def test_a_thread_leaves_the_rest_to_the_loop_after_some_calls(executor: SerialExecutor) -> None:
    made_on, is_done = list[str](), threading.Event()

    def made() -> None:
        made_on.append(threading.current_thread().name)
        if len(made_on) == 50:
            is_done.set()

    executor.submit(lambda: [executor.submit(made) for _ in range(50)])
    assert is_done.wait(PATIENCE_S)
    own = threading.current_thread().name
    assert own in made_on
    assert made_on[-1] == "rrfp-loop"


def test_an_error_ends_all_calls_but_those_that_are_always_made(
    executor: SerialExecutor, errors: list[Exception]
) -> None:
    lines: list[str] = []

    def fail() -> None:
        executor.submit(lines.append, "behind the error")
        raise ValueError("broken")

    executor.submit(fail)
    executor.submit(lines.append, "later")
    executor.submit_always(lines.append, "always")
    assert lines == ["always"]
    assert [str(error) for error in errors] == ["broken"]


def test_no_call_is_made_once_the_run_is_given_up(loop: LoopThread) -> None:
    goes_on, lines = [True], list[str]()
    executor = SerialExecutor(loop.loop, lambda: goes_on[0], lambda error: None)
    executor.submit(lines.append, "before")
    goes_on[0] = False
    executor.submit(lines.append, "after")
    executor.submit_always(lines.append, "always")
    assert lines == ["before", "always"]
    executor.close()


@pytest.fixture(params=["descriptor", "call"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "call":
        monkeypatch.delattr(os, "eventfd", raising=False)


@pytest.mark.usefixtures("_way")
def test_what_many_threads_ring_for_is_all_seen(loop: LoopThread) -> None:
    waiting, seen, is_done = deque[int](), list[int](), threading.Event()

    def look() -> None:
        while waiting:
            seen.append(waiting.popleft())
        if len(seen) == NUM_THREADS * NUM_RINGS:
            is_done.set()

    wake_up = WakeUp(loop.loop, look)
    loop.call(wake_up.start)

    def ring(first: int) -> None:
        for number in range(first, first + NUM_RINGS):
            waiting.append(number)
            wake_up.ring()

    threads = [threading.Thread(target=ring, args=(NUM_RINGS * i,)) for i in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_done.wait(10)
    assert sorted(seen) == [*range(NUM_THREADS * NUM_RINGS)]
    loop.call(wake_up.stop)
    wake_up.close()


@pytest.mark.usefixtures("_way")
def test_what_rang_before_the_loop_listens_is_seen(loop: LoopThread) -> None:
    is_seen = threading.Event()
    wake_up = WakeUp(loop.loop, is_seen.set)
    wake_up.ring()
    loop.call(wake_up.start)
    assert is_seen.wait(10)
    loop.call(wake_up.stop)
    wake_up.close()


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="the system has no such descriptors")
def test_its_descriptor_is_free_again(loop: LoopThread) -> None:
    wake_up = WakeUp(loop.loop, lambda: None)
    number = wake_up._number
    assert number is not None
    loop.call(wake_up.start)
    loop.call(wake_up.stop)
    wake_up.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
