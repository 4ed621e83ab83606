"""Turns: calls of many threads are made one at a time, none is lost, nobody waits, and an end is an end."""

import threading
from collections.abc import Iterator

import pytest

from rrfp_jax.cluster.loop_thread import LoopThread
from rrfp_jax.runtime.turns import Turns

NUM_THREADS, NUM_CALLS = 4, 3000
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
def turns(loop: LoopThread, errors: list[Exception]) -> Iterator[Turns]:
    made = Turns(loop.loop, lambda: True, errors.append)
    loop.call(made.listen)
    yield made
    loop.call(made.hush)
    made.close()


def test_calls_of_many_threads_are_made_one_at_a_time_and_none_is_lost(turns: Turns) -> None:
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
            turns.call(made)
            turns.call_on_loop(made)

    threads = [threading.Thread(target=work) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_done.wait(PATIENCE_S)


def test_what_a_call_asks_for_is_made_after_it(turns: Turns) -> None:
    lines: list[str] = []

    def outer() -> None:
        turns.call(lines.append, "inner")
        lines.append("outer")

    turns.call(outer)
    assert lines == ["outer", "inner"]


def test_who_comes_while_another_thread_is_at_it_does_not_wait(turns: Turns) -> None:
    is_inside, may_end, made_on = threading.Event(), threading.Event(), list[str]()

    def long() -> None:
        is_inside.set()
        may_end.wait(PATIENCE_S)

    other = threading.Thread(target=turns.call, args=(long,), name="other")
    other.start()
    assert is_inside.wait(PATIENCE_S)
    turns.call(lambda: made_on.append(threading.current_thread().name))
    assert not made_on
    may_end.set()
    other.join()
    assert made_on == ["other"]


def test_who_wants_to_be_apart_waits_for_the_call_under_way_and_others_come_after(turns: Turns) -> None:
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
        turns.call(lines.append, "left meanwhile")
        return "answer"

    other = threading.Thread(target=turns.call, args=(long,))
    other.start()
    assert is_inside.wait(PATIENCE_S)
    threading.Timer(0.1, may_end.set).start()
    assert turns.apart(apart) == "answer"
    other.join()
    assert lines == ["long", "apart", "left meanwhile"]


def test_what_is_left_while_one_is_apart_is_made_though_that_fails(turns: Turns) -> None:
    lines: list[str] = []

    def apart() -> None:
        turns.call(lines.append, "left meanwhile")
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        turns.apart(apart)
    assert lines == ["left meanwhile"]


def test_a_call_may_be_apart_itself(turns: Turns) -> None:
    answers: list[str] = []
    turns.call(lambda: answers.append(turns.apart(lambda: "answer")))
    assert answers == ["answer"]


def test_a_thread_leaves_the_rest_to_the_loop_after_some_calls(turns: Turns) -> None:
    made_on, is_done = list[str](), threading.Event()

    def made() -> None:
        made_on.append(threading.current_thread().name)
        if len(made_on) == 50:
            is_done.set()

    turns.call(lambda: [turns.call(made) for _ in range(50)])
    assert is_done.wait(PATIENCE_S)
    own = threading.current_thread().name
    assert own in made_on
    assert made_on[-1] == "rrfp-loop"


def test_an_error_ends_all_calls_but_those_that_are_always_made(turns: Turns, errors: list[Exception]) -> None:
    lines: list[str] = []

    def fail() -> None:
        turns.call(lines.append, "behind the error")
        raise ValueError("broken")

    turns.call(fail)
    turns.call(lines.append, "later")
    turns.always(lines.append, "always")
    assert lines == ["always"]
    assert [str(error) for error in errors] == ["broken"]


def test_no_call_is_made_once_the_run_is_given_up(loop: LoopThread) -> None:
    goes_on, lines = [True], list[str]()
    turns = Turns(loop.loop, lambda: goes_on[0], lambda error: None)
    turns.call(lines.append, "before")
    goes_on[0] = False
    turns.call(lines.append, "after")
    turns.always(lines.append, "always")
    assert lines == ["before", "always"]
    turns.close()
