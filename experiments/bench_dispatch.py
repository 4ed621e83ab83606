"""Cost of the host by the moment of its decisions, at a task's end or just in time, in virtual time.

Loss is how much longer a step takes than with a host that takes no time and decides at each task's end. Its part by
*order* is the loss that is left where decisions come as early and the host takes no time; the rest is *idle*: devices
that wait for the host. Just in time, certain choices are handed over early, and the others by a rule of the timer;
*timer alone* hands over none early but by it. *Known ends* is just-in-time with a timer that knows how long each task
will take: no rule can save its loss, most of it where a stage is idle and its next input finds the host asleep. *Slower
links* show that: a host that takes no time, and messages that take as long as it took. *Before the input* saves it
where devices wait for inputs by themselves: as *by default*, which is just in time by the rule that suits the order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.studies import RULES
from rrfp_jax.core import DecisionTimer, Dispatch, Order, TimingRule
from rrfp_jax.schedules import Pair, Task, TaskKind
from rrfp_jax.simulation import Costs, Links, Machine, constant, for_steps, lognormal, simulate
from rrfp_jax.simulation.costs import Durations

ORDERS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf": (1, {"hint": "bf"}),
    "bf-deep": (2, {"hint": "bf-deep"}),
    "1f1b with foresight": (1, {"schedule": "1f1b"}),
    "zb-h1 with foresight": (1, {"schedule": "zb-h1"}),
}
"""Chunks per stage and the words of the ordering, by name. Tables run as they do by default."""
SIZES = ((4, 32), (8, 64))
"""Numbers of stages and microbatches."""
DURATIONS_MS = (2.0, 10.0, 50.0)
"""Mean milliseconds of each F, input gradient and weight gradient."""
SIGMAS = (0.0, 0.5)
HOST_MS = 0.3
NUM_STEPS, NUM_SEEDS = 12, 3
RULES_TO_COMPARE = {
    "0 of 16": TimingRule(window=16),
    "0 of 64": TimingRule(),
    "0.05 of 64": TimingRule(quantile=0.05),
    "0.2 of 64": TimingRule(quantile=0.2),
    "0.5 of 64": TimingRule(quantile=0.5),
}


class Loss(NamedTuple):
    """Loss of each way to decide, in percent of the step."""

    total: float
    order: float

    def __str__(self) -> str:
        return f"{self.total:.2f} ({self.total - self.order:.2f} + {self.order:.2f})"


class Believing(DecisionTimer):
    """Timer that takes the host for as slow as :data:`HOST_MS`, whatever it hears: early decisions at no cost."""

    __slots__ = ()

    def latency(self, seconds: float) -> None:  # noqa: ARG002 - on purpose
        super().latency(HOST_MS / 1e3)


class KnownEnds(DecisionTimer):
    """Timer that knows how long the tasks of one stage take, in the order of their microbatches and steps."""

    __slots__ = ("_durations_ms", "_num_ended")

    def __init__(self, durations_ms: Durations, rule: TimingRule) -> None:
        super().__init__(rule)
        self._durations_ms, self._num_ended = durations_ms, dict[Task, int]()

    def delay_s(self, task: Task | Pair) -> float:
        assert isinstance(task, Task)
        kind, chunk, microbatch = task
        slots = {TaskKind.F: [0], TaskKind.I: [1], TaskKind.W: [2], TaskKind.B: [1, 2]}[kind]
        duration_ms = self._durations_ms[self._num_ended.get(task, 0)][chunk, microbatch, slots].sum()
        return max(0.0, float(duration_ms) - HOST_MS) / 1e3

    def ended(self, task: Task | Pair, duration_s: float) -> None:  # noqa: ARG002 - it knew
        assert isinstance(task, Task)
        self._num_ended[task] = self._num_ended.get(task, 0) + 1


class _Case:
    """One order with the durations of its tasks."""

    def __init__(self, order: Order, durations_ms: Durations) -> None:
        self.order, self.durations_ms = order, durations_ms
        self.free_ms = self._run_ms(Machine(), Dispatch())

    def longer(
        self,
        host_ms: float,
        timer: Callable[[TimingRule], DecisionTimer] | None = None,
        *,
        certain: bool = False,
        awaits_inputs: bool = False,
    ) -> float:
        """Returns by how many percent a step takes longer than with a free host that decides at each task's end."""
        machine = Machine(dispatch_overhead_ms=host_ms, just_in_time=timer, awaits_inputs=awaits_inputs)
        return self._percent(machine, Dispatch(certain=certain))

    def longer_by_links(self, latency_ms: float) -> float:
        """Returns by how many percent a step takes longer where the host stays free and messages have this latency."""
        return self._percent(Machine(links=Links(latency_ms=latency_ms)), Dispatch())

    def _percent(self, machine: Machine, how: Dispatch) -> float:
        return 100 * (self._run_ms(machine, how) / self.free_ms - 1)

    def _run_ms(self, machine: Machine, how: Dispatch) -> float:
        """Returns the milliseconds of all steps but the first, in which timers learn."""
        arbiters = self.order.arbiters(RULES, certain_ahead=how.certain)
        costs = Costs(durations_ms=self.durations_ms)
        return sum(simulate(arbiters, costs, machine=machine, num_steps=NUM_STEPS).step_ms[1:])


Way = Callable[[_Case], Loss]


def bench_dispatch(console: Console | None = None) -> list[tuple[str, dict[str, Loss]]]:
    """Prints and returns the losses of every way to decide, for each case."""
    console = console or make_console()
    rows = []
    for num_stages, num_microbatches in SIZES:
        table = Table(
            title=f"{num_stages} stages x {num_microbatches} microbatches, {HOST_MS} ms of the host per task: "
            "loss in % of the step (idle + order)",
            title_justify="left",
        )
        for heading in ("case", *_ways()):
            table.add_column(heading, justify="left" if heading == "case" else "right")
        for name, order in _orders(num_stages, num_microbatches):
            for duration_ms in DURATIONS_MS:
                for sigma in SIGMAS:
                    losses = _losses(order, duration_ms, sigma)
                    rows.append((f"{name}, {duration_ms:g} ms, sigma {sigma:g}", losses))
                    table.add_row(rows[-1][0], *map(str, losses.values()))
        console.print(table)
    return rows


def _orders(num_stages: int, num_microbatches: int) -> list[tuple[str, Order]]:
    made = []
    for name, (per_stage, words) in ORDERS.items():
        ordering = OrderingOptions(**words)
        order = ordering.resolve(num_stages=num_stages, num_microbatches=num_microbatches, chunks_per_stage=per_stage)
        made.append((name, order))
    return made


def _losses(order: Order, duration_ms: float, sigma: float) -> dict[str, Loss]:
    """Returns the mean losses over some seeds, or over one seed without jitter, as all are alike then."""
    steady = for_steps(constant((duration_ms,) * 3, order.graph), NUM_STEPS)
    seeds = range(NUM_SEEDS if sigma else 1)
    drawn = [lognormal(steady, sigma, np.random.default_rng(seed)) for seed in seeds]
    cases = [_Case(order, one) for one in drawn]
    return {name: _mean([way(case) for case in cases]) for name, way in _ways().items()}


def _mean(losses: Sequence[Loss]) -> Loss:
    return Loss(fmean(loss.total for loss in losses), fmean(loss.order for loss in losses))


def _ways() -> dict[str, Way]:
    ways: dict[str, Way] = {"at the end": _at_the_end, "known ends": _known_ends}
    ways["slower links"] = _slower_links
    ways["timer alone"] = partial(_just_in_time, TimingRule(), certain=False)
    ways["by default"] = _by_default
    ways["before the input"] = partial(_by_default, awaits_inputs=True)
    return ways | {name: partial(_just_in_time, rule) for name, rule in RULES_TO_COMPARE.items()}


def _at_the_end(case: _Case) -> Loss:
    return Loss(case.longer(HOST_MS), 0.0)


def _known_ends(case: _Case) -> Loss:
    timer = partial(KnownEnds, case.durations_ms)
    return Loss(case.longer(HOST_MS, timer, certain=True), case.longer(0.0, timer, certain=True))


def _slower_links(case: _Case) -> Loss:
    return Loss(case.longer_by_links(HOST_MS), 0.0)


def _by_default(case: _Case, *, awaits_inputs: bool = False) -> Loss:
    """Returns the loss just in time, by the rule that suits the order."""
    ways: dict[str, Any] = {"certain": True, "awaits_inputs": awaits_inputs}
    return Loss(case.longer(HOST_MS, DecisionTimer, **ways), case.longer(0.0, Believing, **ways))


def _just_in_time(rule: TimingRule, case: _Case, *, certain: bool = True) -> Loss:
    timers = (lambda _: DecisionTimer(rule)), (lambda _: Believing(rule))
    return Loss(case.longer(HOST_MS, timers[0], certain=certain), case.longer(0.0, timers[1], certain=certain))


if __name__ == "__main__":
    bench_dispatch()
