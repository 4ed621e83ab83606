"""Draws by which choices are judged, and what is said of those that lost."""

from dataclasses import replace

import numpy as np
import pytest

from rrfp_jax.core import Ordering, StepRules
from rrfp_jax.costs import CostBook, CostEntry, LayerCosts, LinkCosts, Noise
from rrfp_jax.planner.best_cut import best_cut
from rrfp_jax.planner.judging import Judge, draws_for
from rrfp_jax.planner.reasons import Reasons
from rrfp_jax.planner.records import LINEAR, PlanChoice, PlanShape, Point
from rrfp_jax.planner.search import compare_candidates
from rrfp_jax.planner.search_space import SearchSpace
from rrfp_jax.schedules import ScheduleRequest, build_schedule
from rrfp_jax.simulation import simulate

LAYER = LayerCosts(forward_ms=0.1, input_gradient_ms=0.2, weight_gradient_ms=0.3, stash_bytes=1)
BOOK = CostBook(layers=("layer",) * 6, entries=(CostEntry(types={"layer": LAYER}),), links=LinkCosts(latency_ms=0.05))
POINT = Point(shape=PlanShape(num_stages=3, num_microbatches=6), family=LINEAR, chunks=1)


def a_candidate(consume: str, name: str = "zb-h1", *, foresight: bool | None = None) -> PlanChoice:
    cut = best_cut(BOOK.at(microbatch_size=1), POINT.placement, 6, split=True)
    table = build_schedule(name, ScheduleRequest(num_stages=3, num_microbatches=6))
    ordering = Ordering(schedule=table, consume=consume, foresight=foresight)
    return PlanChoice(shape=POINT.shape, cut=cut, is_even=True, ordering=ordering, order_name=name)


def slower(one: PlanChoice, factor: float) -> PlanChoice:
    """The same order where every task takes so many times as long."""
    cut, times = one.cut, ("forward_ms", "input_gradient_ms", "weight_gradient_ms")
    layer = replace(LAYER, **{name: getattr(LAYER, name) * factor for name in times})
    changed = replace(cut, costs=replace(cut.costs, types={"layer": layer}))
    return replace(one, cut=changed)


def a_judge(sigma: float, num_draws: int = 64) -> Judge:
    return Judge(Noise.alike(sigma), num_draws, 0)


@pytest.mark.parametrize(("consume", "foresight"), [("strict", None), ("ready", None), ("ready", False)])
def test_draws_are_those_of_one_run_however_they_are_asked_for(consume: str, foresight: bool | None) -> None:
    one, judge = a_candidate(consume, foresight=foresight), a_judge(0.3)
    few, more, few_again = (judge.draws_ms(one, number) for number in (3, 9, 3))
    assert [len(few), len(more), len(few_again)] == [3, 9, 3]
    np.testing.assert_array_equal(few, more[:3])
    np.testing.assert_array_equal(few, few_again)
    steps_ms = judge.steps_ms(one.cut, 9)
    costs = one.cut.simulated_costs(np.concatenate([steps_ms[:1], steps_ms]))
    machine = one.cut.machine
    run = simulate(one.order.arbiters(StepRules()), costs, machine=machine, num_steps=11)
    np.testing.assert_allclose(more, run.step_ms[2:], rtol=1e-9)


def test_candidates_that_are_behind_are_judged_on_fewer_draws() -> None:
    judge, one, close = a_judge(0.3), a_candidate("strict"), a_candidate("ready")
    beaten = [slower(close, 1.3 + number / 100) for number in range(14)]
    placed = compare_candidates([*beaten, close, one], judge)
    assert placed[-14:] == beaten
    assert [judge.num_known(each) for each in (close, one)] == [64, 64]
    assert [judge.num_known(each) for each in beaten] == [64, *[32] * 3, *[8] * 7, *[2] * 3]


def test_the_best_table_that_is_kept_to_is_not_lost_on_few_draws() -> None:
    judge, simulated = a_judge(0.5), a_candidate("ready")
    others = [slower(simulated, 1 + number / 1000) for number in range(20)]
    best = slower(a_candidate("strict"), 0.5)
    judge.draws_ms(best, 64)[:2] *= 4  # two draws that happen to be long
    assert compare_candidates([*others, best], judge)[0] is best


def test_candidates_are_compared_without_the_luck_of_the_draw() -> None:
    judge, one = a_judge(0.5), a_candidate("ready")
    draws_ms, standing = judge.draws_ms(one, 64), judge.standing(one, 64)
    steps_ms = judge.steps_ms(one.cut, 64)
    works_ms = steps_ms.sum(axis=(1, 2, 3)) / 3
    corrected = draws_ms - works_ms[1:] + works_ms[0]
    assert standing == pytest.approx(corrected.mean() / 6)
    assert corrected.std() < 0.8 * draws_ms.std()


@pytest.mark.parametrize(("consume", "foresight"), [("strict", None), ("ready", None), ("ready", False)])
def test_a_step_without_noise_is_that_of_a_judge_without_noise(consume: str, foresight: bool | None) -> None:
    one, noisy, silent = a_candidate(consume, foresight=foresight), a_judge(0.3), a_judge(0.0)
    assert noisy.nominal_ms(one) == pytest.approx(silent.draws_ms(one, 1)[0])
    noisy.draws_ms(one, 4)
    assert noisy.nominal_ms(one) == pytest.approx(silent.nominal_ms(one))


def why(before: PlanChoice, one: PlanChoice, judge: Judge) -> str:
    reasons = Reasons(BOOK, SearchSpace(devices=3, microbatches=(6,)), judge, None, (), 4)
    return reasons.why_lost(before, one)


@pytest.mark.parametrize("consume", ["strict", "ready"])
def test_what_lies_within_rounding_is_equal(consume: str) -> None:
    one, judge = a_candidate(consume), a_judge(0.0)
    for factor in (1.0, 1 - 1e-13, 1 + 1e-13):
        assert why(one, slower(one, factor), judge) == "equal: no difference"
    assert why(one, slower(one, 1.001), judge).startswith("0.1% longer: work: ")


def test_what_lies_within_the_error_is_equal_with_noise() -> None:
    judge, one, other = a_judge(0.4), a_candidate("strict", "zb-auto"), a_candidate("ready", "zb-h2")
    behind, error = judge.difference(one, other, 64)
    assert 0 < behind <= error
    assert why(one, other, judge) == "equal: no difference beyond the noise"
    assert not why(one, slower(one, 1.2), judge).startswith("equal")


@pytest.mark.parametrize(
    ("sizes", "draws"), [([(4, 8)], 64), ([(8, 64)], 64), ([(2, 2), (8, 128)], 32), ([(64, 512)], 16)]
)
def test_large_pipelines_are_judged_by_fewer_draws(sizes: list[tuple[int, int]], draws: int) -> None:
    assert draws_for([PlanShape(num_stages=p, num_microbatches=m) for p, m in sizes]) == draws
