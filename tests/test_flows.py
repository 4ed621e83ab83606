"""Tokens go through serial and parallel pipes: in order, all of them, never more at once than there are lines."""

import _thread
import doctest
import random
import threading
import time
from collections.abc import Iterator

import pytest

import rrfp_jax.flows
from rrfp_jax import STOP, Pipe, flow
from rrfp_jax.flows import TokenOrder


def num_threads() -> int:
    return sum(thread.name.startswith("flow ") for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert num_threads() == 0


@pytest.mark.parametrize("seed", range(60))
def test_whatever_order_calls_end_in_the_rules_hold(seed: int) -> None:
    draw = random.Random(seed)
    workers = [1, *(draw.choice((1, 1, 2, 3, 5)) for _ in range(draw.randint(1, 4)))]
    lines, num_tokens, stops_at = draw.randint(1, 9), draw.randint(0, 40), draw.choice([0, len(workers) - 1])
    stops_at = stops_at if workers[stops_at] == 1 else 0
    order = TokenOrder(workers, lines)
    running, taken = order.begin(), [list[int]() for _ in workers]
    ended, seen = set[int](), set[tuple[int, int]]()
    for call in running:
        taken[call[0]].append(call[1])
    while not order.is_over:
        assert running, "some call may run until all is over"
        assert len(set(running)) == len(running) <= min(lines, sum(workers))
        assert len({token for _, token in running}) == len(running), "a token is in one pipe at a time"
        for pipe, number in enumerate(workers):
            assert sum(at == pipe for at, _ in running) <= number
        pipe, token = running.pop(draw.randrange(len(running)))
        seen.add((pipe, token))
        if pipe == stops_at and token == num_tokens:
            order.stop(token)
            continue
        following = order.end(pipe, token)
        if pipe == len(workers) - 1:
            ended.add(token)
        for at, next_token in following:
            assert at == 0 or (at - 1, next_token) in seen
            taken[at].append(next_token)
        running += following
        assert len(set(taken[0]) - ended) <= lines
    assert ended == set(range(num_tokens))
    assert order.num_ended == num_tokens
    for pipe, number in enumerate(workers):
        assert len(set(taken[pipe])) == len(taken[pipe])
        assert number > 1 or taken[pipe] == sorted(taken[pipe])


@pytest.mark.parametrize("seed", range(4))
def test_random_pipes_lose_nothing_and_serial_ones_keep_the_order(seed: int) -> None:
    draw = random.Random(seed)
    seen: list[list[int]] = [[] for _ in range(draw.randint(2, 4))]

    def pipe(number: int, workers: int) -> Pipe:
        def run(value: int) -> int:
            if value % 7 == number:
                time.sleep(0.0005)
            seen[number].append(value)
            return value

        return Pipe(run, workers=workers)

    workers = [draw.choice((1, 3)) for _ in seen]
    lines = draw.randint(1, 8)
    assert flow(range(200), *map(pipe, range(len(seen)), workers), lines=lines) == 200
    for number, values in enumerate(seen):
        assert sorted(values) == list(range(200))
        assert workers[number] > 1 or values == list(range(200))


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 5, 64])
def test_a_hundred_thousand_tokens_arrive_in_order(lines: int) -> None:
    got: list[int] = []
    pipes = (lambda value: value + 1, Pipe(lambda value: value * 2, workers=4), got.append)
    assert flow(range(100_000), *pipes, lines=lines) == 100_000
    assert got == list(range(2, 200_002, 2))


def test_no_more_values_live_than_there_are_lines() -> None:
    class Value:
        live = most = 0

        def __init__(self) -> None:
            with lock:
                Value.live += 1
                Value.most = max(Value.most, Value.live)

        def __del__(self) -> None:
            with lock:
                Value.live -= 1

    def wait_a_little(value: Value) -> Value:
        time.sleep(0.0003)
        return value

    lock = threading.Lock()
    pipes = (lambda value: value, Pipe(wait_a_little, workers=4), lambda _: None)
    assert flow((Value() for _ in range(500)), *pipes, lines=6) == 500
    assert (Value.most, Value.live) == (6, 0)


def test_a_parallel_pipe_has_all_its_workers_at_once() -> None:
    together = threading.Barrier(4, timeout=20)
    assert flow(range(8), Pipe(lambda _: together.wait(), workers=4), lines=4) == 8


@pytest.mark.parametrize("place", [0, 2, 3])
def test_an_error_names_its_pipe_and_ends_all_threads(place: int) -> None:
    def broken(value: int) -> int:
        if value == 40:
            raise LookupError("no such word")
        return value

    def quick(value: int) -> int:
        time.sleep(0.001)
        return value

    pipes = [Pipe(quick), Pipe(quick, workers=3), Pipe(quick)]
    source = range(10**9)
    if place:
        pipes[place - 1] = Pipe(broken, workers=pipes[place - 1].workers, name="look up")
    began = time.monotonic()
    with pytest.raises(LookupError, match="no such word") as caught:
        flow(map(broken, source) if not place else source, *pipes, lines=10)
    assert time.monotonic() - began < 5
    assert num_threads() == 0
    name = f"pipe {place}, {'look up' if place else 'the source'}, at token 40"
    assert caught.value.__notes__ == [f"raised in {name}, counted from 0, of a flow"]


def test_a_call_that_does_not_end_holds_no_error_back() -> None:
    forever = threading.Event()

    def stuck(value: int) -> int:
        if value == 0:
            forever.wait(60)
        elif value == 2:
            raise OSError("no space")
        return value

    began = time.monotonic()
    with pytest.raises(OSError, match="no space"):
        flow(range(5), Pipe(stuck, workers=3), lines=3)
    assert time.monotonic() - began < 10
    assert num_threads() == 1
    forever.set()
    while num_threads():
        time.sleep(0.01)


def test_ctrl_c_ends_all_threads() -> None:
    def interrupt(value: int) -> None:
        if value == 3:
            _thread.interrupt_main()
        time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        flow(range(10**9), interrupt, lines=2)


def test_the_source_and_serial_pipes_may_stop() -> None:
    got: list[int] = []
    assert flow([1, 2, STOP, 3], got.append, lines=2) == 2
    assert flow(range(10**9), lambda value: STOP if value == 5 else value, got.append, lines=3) == 5
    assert flow(range(10**9), Pipe(int, workers=2), lambda value: STOP if value == 5 else None, lines=9) == 5
    assert flow([], got.append, lines=1) == 0
    assert got == [1, 2, 0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="a parallel pipe returned STOP, at no place in the order"):
        flow(range(9), Pipe(lambda _: STOP, workers=2), lines=2)


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="flow has no pipe: give at least one callable"):
        flow([1], lines=1)
    for lines in (0, -1, 1.5, True, 10**9):
        with pytest.raises(ValueError, match=r"lines is .*: give at least 1 value"):
            flow([1], print, lines=lines)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a pipe is 7: give a function of one value"):
        flow([1], 7, lines=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers is 0: give at least 1"):
        Pipe(print, workers=0)


def test_the_example_runs() -> None:
    assert doctest.testmod(rrfp_jax.flows) == (0, 6)
