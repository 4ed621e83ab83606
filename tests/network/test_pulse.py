"""Silence is counted while this process is awake, and a loop that stands still counts like silence."""

from rrfp_jax.network.pulse import Pulse


def wait(pulse: Pulse, start_s: float, seconds: float) -> float:
    steps = round(seconds / pulse.interval_s)
    for i in range(1, steps + 1):
        pulse.advance(start_s + i * pulse.interval_s)
    return start_s + steps * pulse.interval_s


def test_a_silent_peer_is_named_an_interval_before_the_deadline() -> None:
    pulse = Pulse([1, 2], 8.0, 100.0)
    now_s = wait(pulse, 100.0, 5)
    pulse.hear(2, 0.0)
    now_s = wait(pulse, now_s, 2)
    assert pulse.overdue() == []
    now_s = wait(pulse, now_s, 1)
    assert pulse.overdue() == [(1, "silent for 8.0 s", False)]
    pulse.forget(1)
    assert pulse.overdue() == []


def test_a_process_that_slept_blames_nobody() -> None:
    pulse = Pulse([1], 8.0, 0.0)
    pulse.advance(3600.0)
    assert pulse.overdue() == []
    wait(pulse, 3600.0, 9)
    assert pulse.overdue()


def test_a_loop_that_stands_still_is_named_and_may_recover() -> None:
    pulse = Pulse([1], 8.0, 0.0)
    pulse.hear(1, 7.9)
    assert pulse.overdue() == []
    pulse.hear(1, 8.1)
    assert pulse.overdue() == [(1, "its event loop has not run for 8.1 s", True)]
    pulse.hear(1, 0.0)
    assert pulse.overdue() == []


def test_strangers_are_not_heard() -> None:
    pulse = Pulse([1], 8.0, 0.0)
    pulse.hear(5, 100.0)
    assert pulse.overdue() == []
