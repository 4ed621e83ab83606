"""The best cut is what looking at every cut finds."""

from collections.abc import Mapping
from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rrfp_jax.core import Ordering
from rrfp_jax.costs import CutModel, LayerCosts, ModelCosts
from rrfp_jax.costs.forecast import forecast_memory
from rrfp_jax.planner import best_cut as best_cut_module
from rrfp_jax.planner.best_cut import best_cut, cut_inside
from rrfp_jax.planner.cut_problem import LayerCutProblem, MemoryBudget
from rrfp_jax.planner.integer_cut import solve
from rrfp_jax.schedules import Placement, ScheduleRequest, build_schedule, linear, looped, v_shaped, waves
from rrfp_jax.simulation import simulate
from tests.planner.cut_models import MICROBATCHES, PLACEMENTS, every_cut, fits, largest_ms, models, rooms
from tests.simulation.helpers import RULES

LAYER = LayerCosts(
    forward_ms=2.0, input_gradient_ms=2.0, weight_gradient_ms=2.0, fixed_bytes=1000, stash_bytes=100, output_bytes=10
)
HEAD = LayerCosts(forward_ms=9.0, input_gradient_ms=9.0, weight_gradient_ms=9.0, fixed_bytes=4000)


def language_model(num_layers: int, **more: object) -> ModelCosts:
    types = {"embedding": LayerCosts(forward_ms=0.1, input_gradient_ms=0.0, weight_gradient_ms=0.1)}
    names = ("embedding", *["layer"] * num_layers, "head")
    return ModelCosts(layers=names, types=types | {"layer": LAYER, "head": HEAD}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", PLACEMENTS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), share=st.floats(0.1, 0.9), split=st.booleans())
@pytest.mark.one_in(2)
def test_cuts_inside_layers_equal_looking_at_every_cut_of_halves(
    kind: str, data: st.DataObject, share: float, split: bool
) -> None:
    placement = data.draw(st.sampled_from(PLACEMENTS[kind]))
    costs = data.draw(models(placement.num_chunks, placement.num_stages))

    def with_halves(types: Mapping[str, LayerCosts]) -> dict[str, LayerCosts]:
        parts = {"b:attention": share, "b:mlp": 1 - share}
        return {**types, **{name: types["b"].at_speed(1 / part) for name, part in parts.items()}}

    stages = tuple(replace(stage, types=with_halves(stage.types)) for stage in costs.stages)
    costs = replace(costs, types=with_halves(costs.types), stages=stages)
    halved = costs.in_halves()
    if comb(halved.num_layers - 1, placement.num_chunks - 1) > 3000:
        return
    cut = best_cut(costs, placement, MICROBATCHES, split=split)
    found = cut_inside(cut) or cut
    least_ms = min(map(largest_ms, every_cut(halved, placement, split=split)))
    np.testing.assert_allclose(largest_ms(found), least_ms, rtol=1e-9)
    assert found.costs.in_halves() == halved
    assert sum(found.layer_counts) == costs.num_layers
    bounds = {stop for _, stop in found.bounds}
    assert all(at + 1 in bounds for at, name in enumerate(found.costs.layers) if name == "b:attention")


@pytest.mark.parametrize("kind", PLACEMENTS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_equals_looking_at_every_cut(kind: str, data: st.DataObject) -> None:
    check_against_every_cut(kind, data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACEMENTS)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_equals_looking_at_every_cut_of_many(kind: str, data: st.DataObject) -> None:
    check_against_every_cut(kind, data)


def check_against_every_cut(kind: str, data: st.DataObject) -> None:
    placement = data.draw(st.sampled_from(PLACEMENTS[kind]))
    costs, split = data.draw(models(placement.num_chunks, placement.num_stages)), data.draw(st.booleans())
    room = data.draw(rooms(placement) | st.none())
    cuts = every_cut(costs, placement, split=split)
    fitting_ms = [largest_ms(cut) for cut in cuts if room is None or fits(cut, room)]
    if not fitting_ms:
        with pytest.raises(ValueError, match="was found that fits: at best stage"):
            best_cut(costs, placement, MICROBATCHES, split=split, memory=room)
        return
    found = best_cut(costs, placement, MICROBATCHES, split=split, memory=room)
    np.testing.assert_allclose(largest_ms(found), min(fitting_ms), rtol=1e-9)
    assert room is None or fits(found, room)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_integer_program_equals_looking_at_every_cut(data: st.DataObject) -> None:
    check_program(data.draw(st.sampled_from([*PLACEMENTS])), data)


@pytest.mark.parametrize("task_ms", [0.0, 0.3])
@pytest.mark.parametrize("placement", [looped(2, 2), v_shaped(4), looped(4, 4)], ids=str)
def test_cuts_of_several_chunks_do_not_depend_on_how_the_backward_runs(placement: Placement, task_ms: float) -> None:
    """So the planner looks for them once."""
    for num_layers in (16, 23, 30):
        costs = language_model(num_layers, task_ms=task_ms)
        split, whole = (best_cut(costs, placement, MICROBATCHES, split=split) for split in (True, False))
        assert largest_ms(replace(split, split=False)) == pytest.approx(largest_ms(whole))


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACEMENTS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_integer_program_equals_looking_at_every_cut_of_many(kind: str, data: st.DataObject) -> None:
    check_program(kind, data)


def check_program(kind: str, data: st.DataObject) -> None:
    placement = data.draw(st.sampled_from(PLACEMENTS[kind]))
    costs, room = data.draw(models(placement.num_chunks, placement.num_stages)), data.draw(rooms(placement) | st.none())
    problem = LayerCutProblem(
        costs=costs,
        placement=placement,
        num_microbatches=MICROBATCHES,
        split=True,
        memory=room,
    )
    cuts = list(every_cut(costs, placement, split=True))
    fitting_ms = [largest_ms(cut) for cut in cuts if room is None or fits(cut, room)]
    bounds, is_proven = solve(problem, below_ms=np.inf, at_least_ms=0.0, most_nodes=10_000)
    assert is_proven
    assert (bounds is None) == (not fitting_ms)
    if bounds is not None:
        best_ms = min(fitting_ms)
        np.testing.assert_allclose(problem.stage_ms(problem.chunk_ms(bounds)).max(), best_ms, rtol=1e-5)
        assert problem.excess(bounds)[0] == 1.0
        nothing, is_proven = solve(problem, below_ms=best_ms, at_least_ms=0.0, most_nodes=10_000)
        assert nothing is None
        assert is_proven
    best_ms = min(map(largest_ms, cuts))
    assert best_cut_module._lower_bound_ms(problem, 2 * best_ms) <= best_ms * (1 + 1e-9)


@pytest.mark.parametrize("placement", [looped(2, 2), v_shaped(4), waves(2, 2), looped(3, 2)])
def test_where_cuts_are_too_many_transfers_and_the_program_find_the_same(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = ModelCosts(layers=("a",) * 5 + ("b",) * 6 + ("head",), types={"a": LAYER, "b": HEAD, "head": HEAD})
    room = MemoryBudget(limits=(21_000,) * placement.num_stages, footprints=(6,) * placement.num_stages)
    for limits in (None, room):
        monkeypatch.setattr(best_cut_module, "_FEW", 5_000)
        looked_up = best_cut(costs, placement, MICROBATCHES, memory=limits)
        monkeypatch.setattr(best_cut_module, "_FEW", 0)
        searched = best_cut(costs, placement, MICROBATCHES, memory=limits)
        assert largest_ms(searched) == pytest.approx(largest_ms(looked_up), rel=1e-9)
        assert limits is None or fits(searched, limits)


@pytest.mark.parametrize("placement", [linear(8), looped(8, 2), v_shaped(8), waves(8, 2)])
def test_a_large_model_keeps_all_its_layers_and_the_best_stage_is_proven(placement: Placement) -> None:
    cut = best_cut(language_model(42), placement, 32)
    problem = LayerCutProblem(costs=cut.costs, placement=placement, num_microbatches=32, split=True)
    assert sum(cut.counts) == 44
    largest_work_ms = max(cut.stage_work_ms) / 32
    assert best_cut_module._lower_bound_ms(problem, largest_work_ms) == pytest.approx(largest_work_ms, rel=1e-6)
    assert cut.counts == best_cut(language_model(42), placement, 32).counts


def test_the_head_may_be_alone_and_early_stages_get_less_where_that_costs_nothing() -> None:
    assert best_cut(language_model(4), linear(3), 4).counts == (3, 2, 1)
    costs = ModelCosts(layers=("layer",) * 10, types={"layer": LAYER})
    assert best_cut(costs, linear(4), 4).counts == (2, 2, 3, 3)


def test_memory_moves_layers_from_stages_that_hold_more() -> None:
    costs = ModelCosts(layers=("layer",) * 12, types={"layer": LAYER})
    tight = MemoryBudget(limits=(3 * 1000 + 4 * 300 + 100,) * 3 + (None,), held=(4.0, 3.0, 2.0, 1.0))
    assert best_cut(costs, linear(4), 4, memory=tight).counts == (3, 3, 3, 3)
    tighter = MemoryBudget(limits=(2 * 1000 + 4 * 220 + 10, *tight.limits[1:]), held=tight.held)
    assert best_cut(costs, linear(4), 4, memory=tighter).counts == (2, 3, 3, 4)


@pytest.mark.parametrize(
    ("schedule", "placement", "consume"), [("1f1b", linear(4), "strict"), ("zb-v", v_shaped(4), "ready")]
)
def test_the_memory_of_an_order_is_that_of_its_forecast(schedule: str, placement: Placement, consume: str) -> None:
    cut = best_cut(language_model(14), placement, 8, split=schedule != "1f1b")
    table = build_schedule(schedule, ScheduleRequest(num_stages=4, num_microbatches=8))
    for ordering in (Ordering(schedule=table, consume=consume), Ordering(hint="bf-deep", window=3)):
        order = ordering.resolve(placement, cut.graph)
        forecast = [stage.peak for stage in forecast_memory(order, dict(enumerate(cut.chunk_bytes)), 8)]
        problem = LayerCutProblem(
            costs=cut.costs,
            placement=placement,
            num_microbatches=8,
            split=cut.split,
            memory=MemoryBudget.of_order(order, (10**9,) * 4),
        )
        bounds = np.cumsum((0, *cut.counts))[None]
        assert problem.stage_bytes(bounds)[0].tolist() == forecast


def test_what_cannot_be_is_one_sentence() -> None:
    costs = language_model(4)
    with pytest.raises(ValueError, match="6 layers, ends included, do not fill 8 chunks on 8 stages: give fewer"):
        best_cut(costs, linear(8), 4)
    with pytest.raises(ValueError, match="2 parts that share no chunk, and 1 chunks"):
        best_cut(language_model(4, ends=frozenset({2})), linear(1), 4)
    with pytest.raises(ValueError, match="limits 0: give at least 1"):
        MemoryBudget(limits=(0, 1), held=(1.0, 1.0))
    with pytest.raises(ValueError, match="give held or footprints"):
        MemoryBudget(limits=(1,), held=(1.0,), footprints=(1,))
    with pytest.raises(ValueError, match="1 limits for 2 stages"):
        best_cut(costs, linear(2), 4, memory=MemoryBudget(limits=(10,), held=(1.0, 1.0)))
    with pytest.raises(ValueError, match="2 held for 2 stages and 4 chunks: give 4"):
        best_cut(costs, v_shaped(2), 4, memory=MemoryBudget(limits=(10, 10), held=(1.0, 1.0)))
    with pytest.raises(ValueError, match=r"stage \d needs .* KiB of 3.906 KiB: hold fewer activations"):
        best_cut(costs, linear(2), 4, memory=MemoryBudget(limits=(4000, 4000), held=(1.0, 1.0)))


# -- the step of 1F1B --------------------------------------------------------------------------------------------------


def ended_model(layers: int, *, embedding: float, head: float, backward: float) -> ModelCosts:
    times = {"embedding": embedding, "layer": 1.0, "head": head}
    types = {
        name: LayerCosts(forward_ms=each, input_gradient_ms=backward * each, weight_gradient_ms=0.0)
        for name, each in times.items()
    }
    return ModelCosts(layers=("embedding", *["layer"] * layers, "head"), types=types)


def simulated_ms(cut: CutModel) -> float:
    """The time of a step of strict 1F1B, with no time between the stages."""
    request = ScheduleRequest(num_stages=cut.placement.num_stages, num_microbatches=cut.num_microbatches)
    order = Ordering(schedule=build_schedule("1f1b", request), consume="strict").resolve(cut.placement, cut.graph)
    return simulate(order.arbiters(RULES), cut.simulated_costs()).timeline.makespan_s() * 1e3


def told_ms(cut: CutModel) -> float:
    problem = LayerCutProblem(
        costs=cut.costs, placement=cut.placement, num_microbatches=cut.num_microbatches, split=cut.split
    )
    first, stop = zip(*cut.bounds, strict=True)
    return float(best_cut_module._step_ms_by_stage(problem)[range(len(first)), first, stop].max())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_step_takes_at_least_what_its_stages_tell(data: st.DataObject) -> None:
    stages, microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    ends = [data.draw(st.floats(0.1, 6.0)) for _ in range(2)]
    costs = ended_model(9, embedding=ends[0], head=ends[1], backward=data.draw(st.floats(0.5, 3.0)))
    inner = sorted(data.draw(st.sets(st.integers(1, 10), min_size=stages - 1, max_size=stages - 1)))
    counts = tuple(np.diff([0, *inner, 11]).tolist())
    cut = CutModel(
        costs=costs, counts=counts, placement=linear(stages), num_microbatches=microbatches, split=False
    )  # fmt: skip
    assert told_ms(cut) <= simulated_ms(cut) * (1 + 1e-9)


@pytest.mark.parametrize("counts", [(2, 3, 3, 3), (3, 3, 3, 2), (4, 3, 2, 2), (3, 2, 4, 2)])
def test_with_many_microbatches_it_takes_just_that(counts: tuple[int, ...]) -> None:
    costs = ended_model(9, embedding=0.4, head=1.7, backward=2.0)
    cut = CutModel(costs=costs, counts=counts, placement=linear(4), num_microbatches=24, split=False)
    assert told_ms(cut) == pytest.approx(simulated_ms(cut), rel=1e-9)


@pytest.mark.parametrize(("embedding", "head"), [(0.3, 3.0), (1.5, 2.0), (0.5, 4.0), (2.0, 6.5)])
def test_of_cuts_whose_fullest_stages_are_alike_none_takes_less(embedding: float, head: float) -> None:
    costs = ended_model(10, embedding=embedding, head=head, backward=2.0)
    cuts = list(every_cut(costs, linear(4), split=False))
    found = best_cut(costs, linear(4), MICROBATCHES, split=False)
    least_ms = min(map(largest_ms, cuts))
    alike = [cut for cut in cuts if largest_ms(cut) <= least_ms * (1 + 1e-9)]
    assert len(alike) > 1
    assert largest_ms(found) == pytest.approx(least_ms)
    assert simulated_ms(found) == pytest.approx(min(map(simulated_ms, alike)))
