"""When to decide what follows a task: by the shortest of the recent tasks and the longest of the recent latencies."""

from random import Random

import pytest

from rrfp_jax.core import DecisionTimer, TimingRule
from rrfp_jax.schedules import Task

F0, F1, B0 = map(Task.parse, ("0F0", "0F1", "0B0"))
OTHER = Task.parse("1F0")


def told(*durations_s, latencies_s=(), **rule):
    timer = DecisionTimer(TimingRule(**rule))
    for duration_s in durations_s:
        timer.ended(F0, duration_s)
    for seconds in latencies_s:
        timer.latency(seconds)
    return timer


def test_what_is_unknown_decides_at_once():
    assert DecisionTimer().delay_s(F0) == 0
    assert told(latencies_s=[0.25]).delay_s(F0) == 0


def test_at_the_shortest_recent_duration_less_the_latency():
    timer = told(4.0, 2.0, 3.0, latencies_s=[0.5])
    assert timer.delay_s(F0) == timer.delay_s(F1) == 1.5


def test_kinds_and_chunks_are_learnt_apart():
    timer = told(4.0)
    timer.ended(B0, 8.0)
    assert [timer.delay_s(task) for task in (F1, B0, OTHER)] == [4.0, 8.0, 0.0]


def test_a_host_that_takes_longer_than_the_task_decides_at_once():
    assert told(1.0, latencies_s=[3.0]).delay_s(F0) == 0


def test_a_latency_that_is_rare_does_not_count():
    assert told(4.0, latencies_s=[1.0] * 19 + [3.0]).delay_s(F0) == 3.0


def test_only_recent_durations_and_latencies_count():
    timer = told(1.0, *[5.0] * 4, window=4)
    assert timer.delay_s(F0) == 5.0
    timer = told(5.0, latencies_s=[4.0, 1.0, 1.0], latency_window=2)
    assert timer.delay_s(F0) == 4.0


@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.5, 1.0])
def test_the_quantile_is_that_of_the_newest_values(quantile):
    random = Random(3)
    timer = DecisionTimer(TimingRule(quantile=quantile, window=16))
    values = []
    for _ in range(200):
        values.append(float(random.randrange(10)))
        timer.ended(F0, values[-1])
        newest = sorted(values[-16:])
        assert timer.delay_s(F0) == newest[int(quantile * (len(newest) - 1))]


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ({"quantile": 1.5}, "quantile is 1.5: give a number between 0 and 1"),
        ({"latency_quantile": -0.1}, "latency_quantile is -0.1"),
        ({"window": 0}, "window is 0: remember at least 1"),
        ({"latency_window": 0}, "latency_window is 0"),
    ],
)
def test_bad_rules_are_refused(rule, what):
    with pytest.raises(ValueError, match=what):
        TimingRule(**rule)
