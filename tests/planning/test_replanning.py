"""Tables made anew: they suit differences that last, leave noise alone, and keep to the memory of the first."""

from dataclasses import replace

import numpy as np
import pytest

from rrfp_jax.arbitration import Order, Ordering, StepRules
from rrfp_jax.planning.replanning import (
    Plan,
    Recording,
    _fits,
    is_due,
    replanned,
    rows_of,
    simulate_adapting,
    with_rows,
)
from rrfp_jax.schedules import ScheduleRequest, build_schedule
from rrfp_jax.simulation import (
    Costs,
    Links,
    Machine,
    both_directions,
    constant,
    for_steps,
    lognormal,
    peak_memory,
    simulate,
    straggler,
)

RULES = StepRules(updates=False)
NUM_STEPS = 8


def order_of(name: str, **words: object) -> Order:
    table = build_schedule(name, ScheduleRequest(num_stages=4, num_microbatches=8))
    return Ordering(schedule=table, **words).resolve(table.placement, table.graph)


def durations(order: Order) -> np.ndarray:
    return for_steps(constant((10.0, 10.0, 10.0), order.graph), NUM_STEPS)


def mean_ms(order: Order, costs: Costs, machine: Machine) -> float:
    run = simulate(order.arbiters(RULES), costs, machine=machine, num_steps=NUM_STEPS)
    return float(np.mean(run.step_ms[1:]))


def slow_link() -> Machine:
    return Machine(links=Links(latency_ms=1.0, extra_ms=both_directions({(1, 2): 30.0}, 4)))


def test_a_stage_that_is_always_slower_gets_a_table_that_suits_it() -> None:
    order = order_of("zb-h1")
    slowed = straggler(durations(order), order.placement, 2, 1.3)
    plan = replanned(order, Recording(durations_ms=slowed, links=Links(latency_ms=1.0)))
    machine = Machine(links=Links(latency_ms=1.0))
    assert plan.execution is not None
    assert plan.gain == pytest.approx(0.0262, abs=1e-4)
    assert mean_ms(plan.order, Costs(durations_ms=slowed), machine) < 0.98 * mean_ms(
        order, Costs(durations_ms=slowed), machine
    )


def test_a_slow_link_gets_one_within_the_memory_of_the_first() -> None:
    order, machine = order_of("zb-v"), slow_link()
    costs = Costs(durations_ms=durations(order) / 2)
    plan = replanned(order, Recording(durations_ms=costs.durations_ms, links=machine.links))
    assert plan.gain > 0.05
    assert plan.order.footprints == order.footprints
    held = [
        peak_memory(run.timeline, order.graph, order.placement)
        for one in (order, plan.order)
        for run in [simulate(one.arbiters(RULES), costs, machine=machine, num_steps=NUM_STEPS)]
    ]
    most = [limit / 2 for limit in order.footprints or ()]
    assert all(each <= limit for stage in held for each, limit in zip(stage, most, strict=True))


@pytest.mark.parametrize(
    "name",
    ["1f1b", "1f1b-split", "zb-h1"]
    + [pytest.param(n, marks=pytest.mark.slow) for n in ("zb-h2", "zb-v", "interleaved-1f1b")],
)
def test_where_nothing_differs_or_all_is_noise_the_table_stays(name: str) -> None:
    order = order_of(name)
    for sigma in (0.0, 0.5, 1.0):
        noisy = lognormal(durations(order), sigma, np.random.default_rng(3))
        plan = replanned(order, Recording(durations_ms=noisy, links=Links(latency_ms=1.0)))
        assert plan == Plan(order, None, 0.0)


def test_only_tables_within_a_footprint_are_planned_anew() -> None:
    for words in ({"consume": "strict"}, {"footprint": False}, {"foresight": False}):
        order = order_of("zb-h1", **words)
        with pytest.raises(ValueError, match="with footprint and foresight"):
            replanned(order, Recording(durations_ms=durations(order), links=Links()))


def test_a_table_too_large_to_plan_stays() -> None:
    order = order_of("zb-h1")
    slowed = straggler(durations(order), order.placement, 2, 1.3)
    recording = Recording(durations_ms=slowed, links=Links(latency_ms=1.0))
    assert replanned(order, recording, max_tasks=10) == Plan(order, None, 0.0)


def test_plans_are_due_after_four_steps_and_whenever_as_many_have_passed_again() -> None:
    assert [n for n in range(70) if is_due(n)] == [4, 8, 16, 32, 64]


def test_a_simulated_run_adapts_after_four_steps_and_goes_on() -> None:
    order, machine = order_of("zb-v"), slow_link()
    costs = Costs(durations_ms=durations(order) / 2)
    run, plans = simulate_adapting(order, costs, rules=RULES, machine=machine, num_steps=12)
    assert [(done, plan.execution is not None) for done, plan in plans] == [(4, True), (8, False)]
    assert run.timeline.steps() == list(range(12))
    assert len(run.timeline.spans) == 12 * sum(1 for _ in order.graph.tasks())
    assert max(run.step_ms[5:]) < 0.95 * min(run.step_ms[1:4])
    assert list(run.step_ends_ms) == sorted(run.step_ends_ms)


def test_a_run_that_never_adapts_is_the_run_without() -> None:
    order = order_of("zb-h1")
    costs = Costs(durations_ms=lognormal(durations(order), 0.5, np.random.default_rng(0)))
    run, plans = simulate_adapting(order, costs, rules=RULES, machine=Machine(), num_steps=NUM_STEPS)
    plain = simulate(order.arbiters(RULES), replace(costs), num_steps=NUM_STEPS)
    assert [plan.execution for _, plan in plans] == [None]
    assert run.step_ms == pytest.approx(plain.step_ms)


def test_no_plan_adds_gradients_up_in_another_order() -> None:
    """A deterministic run could not keep to it: the last stage, which holds one, would wait for its own memory."""
    order = order_of("1f1b")
    rows = [list(row) for row in rows_of(order)]
    last = rows[3]
    assert _fits(with_rows(order, rows))
    assert not _fits(with_rows(order, [*rows[:3], [*last[2:4], *last[:2], *last[4:]]]))
