"""When to decide what follows a task: late, but not so late that the device waits for the host.

A driver that posts :class:`rrfp_jax.core.DecideNow` asks this for the moment. Two things are learnt from what it
is told, in seconds of any clock: how long the tasks of each kind and chunk take, and how long the host takes from the
decision to the launch. The decision is due where the task may end within the host's latency: at a low quantile of the
recent durations, less a high quantile of the recent latencies. What is unknown counts as 0, so the first tasks of a
kind decide as they start.

Why so early: a decision that comes too late leaves the device idle for what is missing, one that comes early costs only
that what becomes ready meanwhile has no say. Where an idle second costs c times as much as one by which the decision is
early, the cheapest moment is the 1 / (1 + c) quantile; measured (:mod:`experiments.bench_dispatch`), c is so large that
the shortest of the recent tasks is the best guide.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from rrfp_jax.schedules import Task, TaskKind


@dataclass(frozen=True, kw_only=True)
class TimingRule:
    """How much is remembered and how careful the decision is. Raises ValueError on numbers that mean nothing."""

    quantile: float = 0.0
    """Of the recent durations of a kind and chunk: the share of tasks that may end before their successor is there."""
    window: int = 64
    """How many durations of each kind and chunk are recent."""
    latency_quantile: float = 0.9
    latency_window: int = 64

    def __post_init__(self) -> None:
        for name in ("quantile", "latency_quantile"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number between 0 and 1")
        for name in ("window", "latency_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: remember at least 1")


def timing_rule(*, looks_ahead: bool) -> TimingRule:
    """For a stage with or without foresight: with it, being late costs less, since a stage that has handed over what it
    waits for hides its launches anyway, and an early choice may fill a wait with what another task should have had."""
    return TimingRule(quantile=0.2) if looks_ahead else TimingRule()


class DecisionTimer:
    """Learns how long tasks and the host take; for one stage, on one clock."""

    __slots__ = ("_durations", "_latencies", "rule")

    def __init__(self, rule: TimingRule = TimingRule()) -> None:
        self.rule = rule
        self._durations: dict[tuple[TaskKind, int], _Recent] = {}
        self._latencies = _Recent(rule.latency_window, rule.latency_quantile)

    def ended(self, task: Task, duration_s: float) -> None:
        """A task of this kind and chunk took so long on the device."""
        key = task[:2]
        recent = self._durations.get(key)
        if recent is None:
            recent = self._durations[key] = _Recent(self.rule.window, self.rule.quantile)
        recent.add(duration_s)

    def latency(self, seconds: float) -> None:
        """The host took so long from a decision to its launch."""
        self._latencies.add(seconds)

    def delay_s(self, task: Task) -> float:
        """How long after the task's start to decide what follows it."""
        recent = self._durations.get(task[:2])
        return 0.0 if recent is None else max(0.0, recent.quantile() - self._latencies.quantile())


class _Recent:
    """A quantile of the newest values."""

    __slots__ = ("_newest", "_quantile", "_sorted")

    def __init__(self, size: int, quantile: float) -> None:
        self._newest: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []
        self._quantile = quantile

    def add(self, value: float) -> None:
        newest = self._newest
        if len(newest) == newest.maxlen:
            del self._sorted[bisect_left(self._sorted, newest[0])]
        newest.append(value)
        insort(self._sorted, value)

    def quantile(self) -> float:
        """0 without any."""
        ordered = self._sorted
        return ordered[int(self._quantile * (len(ordered) - 1))] if ordered else 0.0
