"""Silence is counted while this process is awake, and a loop that stands still counts like silence."""

from rrfp_jax.cluster.failure_detector import HeartbeatClock


def wait(clock: HeartbeatClock, start_s: float, seconds: float) -> float:
    steps = round(seconds / clock.interval_s)
    for i in range(1, steps + 1):
        clock.advance(start_s + i * clock.interval_s)
    return start_s + steps * clock.interval_s


def test_a_silent_peer_is_named_an_interval_before_the_deadline() -> None:
    clock = HeartbeatClock([1, 2], 8.0, 100.0)
    now_s = wait(clock, 100.0, 5)
    clock.hear(2, 0.0)
    now_s = wait(clock, now_s, 2)
    assert clock.overdue() == []
    now_s = wait(clock, now_s, 1)
    assert clock.overdue() == [(1, "silent for 8.0 s", False)]
    clock.forget(1)
    assert clock.overdue() == []


def test_a_process_that_slept_blames_nobody() -> None:
    clock = HeartbeatClock([1], 8.0, 0.0)
    clock.advance(3600.0)
    assert clock.overdue() == []
    wait(clock, 3600.0, 9)
    assert clock.overdue()


def test_a_loop_that_stands_still_is_named_and_may_recover() -> None:
    clock = HeartbeatClock([1], 8.0, 0.0)
    clock.hear(1, 7.9)
    assert clock.overdue() == []
    clock.hear(1, 8.1)
    assert clock.overdue() == [(1, "its event loop has not run for 8.1 s", True)]
    clock.hear(1, 0.0)
    assert clock.overdue() == []


def test_strangers_are_not_heard() -> None:
    clock = HeartbeatClock([1], 8.0, 0.0)
    clock.hear(5, 100.0)
    assert clock.overdue() == []
