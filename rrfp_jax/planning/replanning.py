"""A table made anew from what a run has recorded, for differences between stages and links that last.

A textbook table assumes stages and links alike. Where one stage or link is slower in every step, another order of the
same tasks wastes less, within the same memory. :func:`replanned` finds one: it simulates ways to execute the present
table (strict, by readiness, with foresight, with shorter holds, and without its ranks by ``bf``) with the mean
durations and the links of the earlier recorded steps, and sorts the tasks of each stage by their starts in each of
these executions. Such rows hold what the execution held, so they stay within the present footprint.

A plan made from means is a gamble where durations vary from microbatch to microbatch, so it is judged by all recorded
steps, task by task, with foresight on both sides, the later ones among them unknown to it. It replaces the present
table only if it is more than :data:`LEAST_GAIN` faster in each of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

import numpy as np

from rrfp_jax.arbitration import (
    Consumption,
    ForesightRules,
    Order,
    StepRules,
    hint_by_name,
    ready,
    schedule_hint,
    strict,
)
from rrfp_jax.arbitration.footprint import memory_changes
from rrfp_jax.schedules.validation import out_of_order
from rrfp_jax.simulation import Costs, Links, Machine, Simulation, recorded, simulate
from rrfp_jax.simulation.jitter import Durations
from rrfp_jax.tasks import Task
from rrfp_jax.timeline import Timeline

LEAST_GAIN = 0.02
"""Of the step: below it the present table stays."""
MAX_TASKS = 40_000
"""In one step of all stages; planning more would hold up a run for too long."""
FIRST_STEPS, MAX_STEPS = 4, 8
"""How many steps are recorded before the first plan, and how many at most for a later one."""
_RULES = StepRules(updates=False)
_SHORT_HOLDS = ForesightRules(patience=0.5, notice=0.0)
"""Between readiness and foresight."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What some steps of a run took. Raises ValueError for fewer than two, of which the first must make a plan."""

    durations_ms: Durations
    """[steps, chunks, microbatches, 3], at least 2 steps."""
    links: Links
    """Latencies between stages, as measured."""

    def __post_init__(self) -> None:
        if len(self.durations_ms) < 2:
            raise ValueError(f"{len(self.durations_ms)} steps were recorded: a plan needs at least 2")


class Plan(NamedTuple):
    """What came of planning."""

    order: Order
    """The present one where nothing better was found."""
    execution: str | None
    """Which execution became the table; None: the present table stays."""
    gain: float
    """How much shorter the recorded steps are with it, in parts of their length; 0 where the present table stays."""


def is_due(num_steps: int) -> bool:
    """Whether to plan after so many steps: first after :data:`FIRST_STEPS`, then whenever their number has doubled."""
    return num_steps >= FIRST_STEPS and not num_steps & (num_steps - 1)


def replanned(order: Order, recording: Recording, *, max_tasks: int = MAX_TASKS) -> Plan:
    """The order with a table that suits the recorded steps better, or as it is.

    Raises ValueError for an order whose tables do not rank what is ready within a footprint.
    """
    if order.footprints is None or order.foresight is None:
        raise ValueError("only a table that ranks what is ready, with footprint and foresight, can be planned anew")
    if sum(1 for _ in order.graph.tasks()) > max_tasks:
        return Plan(order, None, 0.0)
    half = len(recording.durations_ms) // 2
    means = Costs(durations_ms=_means(recording.durations_ms[:half]))
    judged = Costs(durations_ms=recording.durations_ms)
    machine = Machine(links=recording.links)
    present_ms = _steps_ms(order, judged, machine)
    best = Plan(order, None, 0.0)
    known = {rows_of(order)}
    for name, execution in _executions(order):
        rows = _rows(simulate(execution.arbiters(_RULES), means, machine=machine), order.placement.num_stages)
        if rows in known:
            continue
        known.add(rows)
        planned = with_rows(order, rows)
        if not _fits(planned):
            continue
        steps_ms = _steps_ms(planned, judged, machine)
        gains = [1 - new / old for new, old in zip(steps_ms, present_ms, strict=True)]
        if min(gains) > LEAST_GAIN and fmean(gains) > best.gain:
            best = Plan(planned, name, fmean(gains))
    return best


def rows_of(order: Order) -> tuple[tuple[Task, ...], ...]:
    """What ranks the tasks of each stage."""
    return tuple(one.hint.row or () for one in order.consumptions)


def with_rows(order: Order, rows: Iterable[Iterable[Task]]) -> Order:
    """The same order with other rows to rank its tasks by."""
    return replace(order, consumptions=tuple(ready(schedule_hint(row)) for row in rows))


def _means(durations_ms: Durations) -> Durations:
    """One step in which all microbatches of a chunk take the mean of its kind."""
    means = durations_ms.mean(axis=(0, 2), keepdims=True)
    return np.broadcast_to(means, (1, *durations_ms.shape[1:])).copy()


def _executions(order: Order) -> list[tuple[str, Order]]:
    """Ways to run the same tasks in no more memory."""
    assert order.footprints is not None
    rows = rows_of(order)
    passes = [order.graph.passes_per_microbatch(chunks) for chunks in order.placement.chunks_of_stage]
    windows = tuple(max(1, limit // each) for limit, each in zip(order.footprints, passes, strict=True))
    unranked = replace(order, foresight=None, footprints=None, windows=windows)

    def alike(one: Consumption) -> tuple[Consumption, ...]:
        return (one,) * len(rows)

    return [
        ("strict", replace(order, foresight=None, footprints=None, consumptions=tuple(map(strict, rows)))),
        ("ready", replace(order, foresight=None)),
        ("foresight", order),
        ("short holds", replace(order, foresight=_SHORT_HOLDS)),
        ("bf", replace(unranked, consumptions=alike(ready(hint_by_name("bf"))))),
        ("bf-deep", replace(unranked, consumptions=alike(ready(hint_by_name("bf-deep"))))),
    ]


def _rows(run: Simulation, num_stages: int) -> tuple[tuple[Task, ...], ...]:
    """Each stage's tasks by start."""
    rows: list[list[Task]] = [[] for _ in range(num_stages)]
    for span in sorted(run.timeline.spans, key=lambda span: span.start_s):
        rows[span.stage].append(span.task)
    return tuple(map(tuple, rows))


def _fits(order: Order) -> bool:
    """Whether every row alone stays within its footprint and read-ahead, and adds gradients up as deterministic runs
    do."""
    assert order.footprints is not None
    if any(bound.limit < bound.needed(order.graph) for bound in order.ahead_bounds()):
        return False
    return out_of_order(order.graph, rows_of(order)) is None and all(
        max(accumulate(memory_changes(row, order.graph)), default=0) <= limit
        for row, limit in zip(rows_of(order), order.footprints, strict=True)
    )


def _steps_ms(order: Order, costs: Costs, machine: Machine) -> list[float]:
    """Makespans of the steps in turn, once what foresight learns has been learnt from them."""
    num_steps = len(costs.durations_ms)
    run = simulate(order.arbiters(_RULES), costs, machine=machine, num_steps=2 * num_steps)
    return [run.timeline.of_step(step).makespan_s() * 1e3 for step in range(num_steps, 2 * num_steps)]


def simulate_adapting(
    order: Order, costs: Costs, *, rules: StepRules, machine: Machine, num_steps: int, dispatch_ahead: int = 0
) -> tuple[Simulation, list[tuple[int, Plan]]]:
    """A simulated run that plans its table anew where :func:`is_due`.

    What it records are the durations of its own tasks; the links are those of ``machine``. Returns the run, and each
    plan with the number of steps before it.
    """
    timeline, step_ends_ms = Timeline(order.placement.num_stages), list[float]()
    plans: list[tuple[int, Plan]] = []
    arbiters = order.arbiters(rules, dispatch_ahead=dispatch_ahead)
    while (done := len(step_ends_ms)) < num_steps:
        until = min(num_steps, max(FIRST_STEPS, 2 * done))
        turned = replace(costs, durations_ms=np.roll(costs.durations_ms, -done, axis=0))
        part = simulate(arbiters, turned, machine=machine, num_steps=until - done)
        begin_ms = step_ends_ms[-1] if step_ends_ms else 0.0
        timeline.extend(part.timeline.shifted(begin_ms / 1e3, done))
        step_ends_ms += [begin_ms + end_ms for end_ms in part.step_ends_ms]
        if until < num_steps and is_due(until):
            durations_ms = recorded(part.timeline.last_steps(MAX_STEPS), order.graph, per_task=True)
            plans.append((until, replanned(order, Recording(durations_ms=durations_ms, links=machine.links))))
            order = plans[-1][1].order
        learnt = [arbiter.estimates() for arbiter in arbiters]
        made = order.arbiters(rules, dispatch_ahead=dispatch_ahead)
        arbiters = [arbiter.fresh(None, known) for arbiter, known in zip(made, learnt, strict=True)]
    return Simulation(timeline=timeline, step_ends_ms=tuple(step_ends_ms)), plans
