"""What stages tell of a step of 1F1B is never more than it takes, and decides between cuts that are else alike."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rrfp_jax.arbitration import Agreement, Ordering, StepRules
from rrfp_jax.planning.costs import CutModel, LayerCosts, ModelCosts
from rrfp_jax.planning.cuts import best_cut
from rrfp_jax.planning.cuts.fill_and_drain import step_ms_by_stage
from rrfp_jax.planning.cuts.problem import CutProblem
from rrfp_jax.schedules import ScheduleRequest, build_schedule, linear
from rrfp_jax.simulation import simulate
from tests.planning.cuts.models import MICROBATCHES, every_cut, largest_ms


def model(layers: int, *, embedding: float, head: float, backward: float, task_ms: float = 0.0) -> ModelCosts:
    times = {"embedding": embedding, "layer": 1.0, "head": head}
    types = {
        name: LayerCosts(forward_ms=each, input_gradient_ms=backward * each, weight_gradient_ms=0.0)
        for name, each in times.items()
    }
    return ModelCosts(layers=("embedding", *["layer"] * layers, "head"), types=types, task_ms=task_ms)


def simulated_ms(cut: CutModel) -> float:
    """One step of strict 1F1B, with no time between the stages."""
    request = ScheduleRequest(num_stages=cut.placement.num_stages, num_microbatches=cut.num_microbatches)
    order = Ordering(schedule=build_schedule("1f1b", request), consume="strict").resolve(cut.placement, cut.graph)
    arbiters = order.arbiters(StepRules(updates=False, agreement=Agreement.ALL))
    return simulate(arbiters, cut.simulated_costs()).timeline.makespan_s() * 1e3


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_step_takes_at_least_what_its_stages_tell(data: st.DataObject) -> None:
    stages, microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    ends = [data.draw(st.floats(0.1, 6.0)) for _ in range(2)]
    costs = model(9, embedding=ends[0], head=ends[1], backward=data.draw(st.floats(0.5, 3.0)))
    inner = sorted(data.draw(st.sets(st.integers(1, 10), min_size=stages - 1, max_size=stages - 1)))
    bounds = [0, *inner, 11]
    cut = CutModel(
        costs=costs,
        counts=tuple(np.diff(bounds).tolist()),
        placement=linear(stages),
        num_microbatches=microbatches,
        split=False,
    )
    assert told_ms(cut) <= simulated_ms(cut) * (1 + 1e-9)


def told_ms(cut: CutModel) -> float:
    problem = CutProblem(
        costs=cut.costs, placement=cut.placement, num_microbatches=cut.num_microbatches, split=cut.split
    )
    first, stop = zip(*cut.bounds, strict=True)
    return float(step_ms_by_stage(problem)[range(len(first)), first, stop].max())


@pytest.mark.parametrize("counts", [(2, 3, 3, 3), (3, 3, 3, 2), (4, 3, 2, 2), (3, 2, 4, 2)])
def test_with_many_microbatches_it_takes_just_that(counts: tuple[int, ...]) -> None:
    costs = model(9, embedding=0.4, head=1.7, backward=2.0)
    cut = CutModel(costs=costs, counts=counts, placement=linear(4), num_microbatches=24, split=False)
    assert told_ms(cut) == pytest.approx(simulated_ms(cut), rel=1e-9)


@pytest.mark.parametrize(("embedding", "head"), [(0.3, 3.0), (1.5, 2.0), (0.5, 4.0), (2.0, 6.5)])
def test_of_cuts_whose_fullest_stages_are_alike_none_takes_less(embedding: float, head: float) -> None:
    placement = linear(4)
    costs = model(10, embedding=embedding, head=head, backward=2.0)
    cuts = list(every_cut(costs, placement, split=False, factors=()))
    found = best_cut(costs, placement, MICROBATCHES, split=False)
    least_ms = min(map(largest_ms, cuts))
    alike = [cut for cut in cuts if largest_ms(cut) <= least_ms * (1 + 1e-9)]
    assert len(alike) > 1
    assert largest_ms(found) == pytest.approx(least_ms)
    assert simulated_ms(found) == pytest.approx(min(map(simulated_ms, alike)))
