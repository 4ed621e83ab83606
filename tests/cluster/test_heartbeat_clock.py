"""Silence is counted while this process is awake, and a loop that stands still counts like silence; waits are compared
with those before."""

import pytest

from rrfp_jax.cluster.failure_detector import HeartbeatClock, WaitKind, WaitTimes, patience_s

RUNS, IDLE = (0, True), (0, False)


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


def test_a_process_that_stood_still_knows_so_for_a_moment() -> None:
    clock = HeartbeatClock([1], 60.0, 0.0)
    clock.advance(3.0)
    assert not clock.has_just_woken
    clock.advance(8.0)
    assert clock.has_just_woken
    clock.advance(10.0)
    assert not clock.has_just_woken


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


def test_silence_is_told_before_the_deadline() -> None:
    clock = HeartbeatClock([1, 2], 60.0, 0.0)
    now_s = wait(clock, 0.0, 3)
    clock.hear(2, 0.0)
    wait(clock, now_s, 2)
    assert clock.silent(4.0) == {1: 5.0}
    assert clock.overdue() == []


def test_who_raises_the_deadline_raises_the_patience() -> None:
    assert [patience_s(deadline_s) for deadline_s in (1.0, 60.0, 600.0)] == [4.0, 4.0, 40.0]


class Waits:
    """Looks each second at a rank whose waits each last so long."""

    def __init__(self) -> None:
        self.times, self.now_s, self.num_steps = WaitTimes(4.0), 0.0, 0

    def last(self, kind: WaitKind, seconds: float) -> list[dict[WaitKind, float]]:
        """What is told at each look at a wait that begins now."""
        began_s, until_s = self.now_s, self.now_s + seconds
        told = []
        while self.now_s < until_s:
            self.now_s = min(self.now_s + 1.0, until_s)
            told.append(self.times.look(self.now_s, {kind: began_s}, self.num_steps))
        return told

    def step(self, *waits: tuple[WaitKind, float]) -> list[dict[WaitKind, float]]:
        told = [each for kind, seconds in waits for each in self.last(kind, seconds)]
        self.num_steps += 1
        return told


def test_a_wait_much_longer_than_all_before_is_told() -> None:
    waits = Waits()
    assert not any(waits.step((RUNS, 0.5), (RUNS, 0.5)))
    assert waits.last(RUNS, 6) == [{}, {}, {}, {}, {RUNS: 0.5}, {RUNS: 0.5}]
    assert waits.times.look(waits.now_s, {}, waits.num_steps) == {}


def test_nothing_is_told_in_the_first_step() -> None:
    assert not any(Waits().last(RUNS, 100))


@pytest.mark.parametrize("usual_s", [2.0, 5.0, 90.0])
def test_long_tasks_are_waited_for_four_times_as_long(usual_s: float) -> None:
    waits = Waits()
    assert not any(waits.step((RUNS, usual_s), (RUNS, usual_s)))
    told = waits.last(RUNS, 4 * usual_s + 6)
    assert not any(told[: round(4 * (usual_s - 1))])
    assert told[-1]


def test_each_kind_has_its_own_times() -> None:
    waits = Waits()
    assert not any(waits.step((IDLE, 20), (RUNS, 1), (IDLE, 20)))
    assert not any(waits.last(IDLE, 60))
    assert waits.last(RUNS, 6)[-1] == {RUNS: 1.0}


def test_a_long_wait_is_forgotten_after_ten_steps() -> None:
    waits = Waits()
    assert not any(waits.step((RUNS, 30), (RUNS, 1)))
    for _ in range(9):
        assert not any(waits.step((RUNS, 10)))
        assert not any(waits.step((RUNS, 1))) or waits.num_steps > 10
    for _ in range(11):
        waits.step((RUNS, 1))
    assert waits.last(RUNS, 6)[-1]
