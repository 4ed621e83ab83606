"""Longest paths over a table are what the simulator measures, and never below the bound."""

from dataclasses import replace

import numpy as np
import pytest

from rrfp_jax.core import Ordering, StepRules
from rrfp_jax.costs import CutModel, LayerCosts, LinkCosts, ModelCosts, Noise
from rrfp_jax.planner.best_cut import best_cut
from rrfp_jax.planner.judging import quick_bound_ms, step_bound_ms, strict_times_ms, walk_of
from rrfp_jax.planner.records import LINEAR, LOOPED, WAVES, PlanShape, Point
from rrfp_jax.schedules import ScheduleRequest, build_schedule
from rrfp_jax.simulation import simulate

LAYER = LayerCosts(
    forward_ms=2.0,
    input_gradient_ms=2.1,
    weight_gradient_ms=1.7,
    update_ms=0.5,
    gradient_bytes=3_000_000,
    output_bytes=1000,
)
HEAD = LayerCosts(forward_ms=5.0, input_gradient_ms=4.0, weight_gradient_ms=3.0, update_ms=2.0)
LINKS = LinkCosts(latency_ms=0.3, gb_per_s=0.01, control_ms=0.2)


def a_cut(name: str, stages: int, replicas: int = 1, **more: object) -> tuple[CutModel, Ordering]:
    table = build_schedule(name, ScheduleRequest(num_stages=stages, num_microbatches=12))
    chunks = table.placement.num_chunks
    costs = ModelCosts(
        layers=("layer",) * (chunks + 3) + ("head",), types={"layer": LAYER, "head": HEAD}, links=LINKS, **more
    )  # type: ignore[arg-type]
    counts = (2, 3, *[1] * (chunks - 3), 2)
    cut = CutModel(
        costs=costs,
        counts=counts,
        placement=table.placement,
        num_microbatches=12,
        split=bool(table.graph.split),
        replicas=replicas,
    )
    return cut, Ordering(schedule=table, consume="strict")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "hanayo"])
@pytest.mark.parametrize("task_ms", [0.0, 0.1])
def test_as_simulated(name: str, task_ms: float) -> None:
    cut, ordering = a_cut(name, 6, replicas=2, task_ms=task_ms)
    draws = Noise.alike(0.3).draws(cut.durations_ms, 5, np.random.default_rng(1))
    arbiters = ordering.resolve(cut.placement, cut.graph).arbiters(StepRules(lockstep=True))
    run = simulate(arbiters, cut.simulated_costs(draws), machine=cut.machine, num_steps=6)
    assert ordering.schedule is not None
    found = strict_times_ms(cut, walk_of(ordering.schedule), draws)
    np.testing.assert_allclose(run.step_ms[1:], np.roll(found, -1), rtol=1e-9)


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v"])
def test_no_order_is_below_the_bound(name: str) -> None:
    cut, ordering = a_cut(name, 4)
    assert ordering.schedule is not None
    nominal = float(strict_times_ms(cut, walk_of(ordering.schedule), cut.durations_ms)[0])
    assert 0.8 * nominal < step_bound_ms(cut) <= nominal


@pytest.mark.parametrize("family", [LINEAR, LOOPED, WAVES])
@pytest.mark.parametrize("split", [True, False])
def test_the_quick_bound_is_below_that_of_any_cut(family: str, split: bool) -> None:
    for stages, count in ((2, 1), (3, 4), (4, 32)):
        shape = PlanShape(num_stages=stages, num_microbatches=count, data=2)
        point = Point(shape=shape, family=family, chunks=1 if family == LINEAR else 2)
        costs = a_cut("1f1b", 4)[0].costs
        costs = replace(costs, layers=("layer",) * 8 + ("head",))
        quick = quick_bound_ms(point, costs, split=split)
        cut = best_cut(costs, point.placement, count, split=split, replicas=2)
        assert 0 < quick <= step_bound_ms(cut) * (1 + 1e-9)
