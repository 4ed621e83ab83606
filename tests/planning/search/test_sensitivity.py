"""What faster stages and links give is told by the same decisions, and as a table that is kept to has it."""

from dataclasses import replace

import numpy as np
import pytest

from rrfp_jax.planning.search.candidates import Candidate
from rrfp_jax.planning.search.executed import with_same_decisions
from rrfp_jax.planning.search.judging import draws_for
from rrfp_jax.planning.search.records import Shape
from rrfp_jax.planning.search.sensitivity import bottleneck, sensitivities
from tests.planning.search.test_judging import a_candidate, a_judge


@pytest.mark.parametrize(("consume", "foresight"), [("strict", None), ("ready", False)])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_the_same_decisions_take_the_same_time(consume: str, foresight: bool | None, sigma: float) -> None:
    one, judge = a_candidate(consume, foresight=foresight), a_judge(sigma)
    found = with_same_decisions(one, judge, 6)(one.choice.cut)
    np.testing.assert_allclose(found, judge.times(one, 6).draws_ms, rtol=1e-9)


def test_nothing_is_held_where_decisions_are_known() -> None:
    one, judge = a_candidate("ready"), a_judge(0.5)
    found = with_same_decisions(one, judge, 12)(one.choice.cut)
    simulated = judge.times(one, 12).draws_ms
    assert (found <= simulated * (1 + 1e-9)).all()
    np.testing.assert_allclose(found, simulated, rtol=0.05)


@pytest.mark.parametrize("consume", ["strict", "ready"])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_less_work_is_never_worse_and_helps_most_where_there_is_most(consume: str, sigma: float) -> None:
    one, judge = slow_in_the_middle(a_candidate(consume)), a_judge(sigma)
    found = sensitivities(one, judge, 4, None, lambda: False)
    assert [each.change for each in found] == [f"stage {stage} 10% faster" for stage in range(3)] + ["links 10% faster"]
    assert all(each.gain >= -1e-12 for each in found)
    assert found[1].gain == max(each.gain for each in found) > 0.05
    assert bottleneck(found).startswith("stage 1 10% faster would give")
    step_ms = judge.value(one, 4) * one.choice.shape.batch_size
    assert [each.step_ms for each in found] == pytest.approx([step_ms * (1 - each.gain) for each in found])


def slow_in_the_middle(one: Candidate) -> Candidate:
    cut = replace(one.choice.cut, stage_factors=(1.0, 2.0, 1.0))
    return replace(one, choice=replace(one.choice, cut=cut))


def test_more_memory_and_an_end_that_is_asked_for() -> None:
    one, judge = a_candidate("ready"), a_judge(0.2)
    present = judge.value(one, 4)
    more = sensitivities(one, judge, 4, lambda: present / 2, lambda: False)[-1]
    assert more.change == "1 GiB more per device"
    assert more.gain == pytest.approx(0.5)
    assert not sensitivities(one, judge, 4, lambda: present / 2, lambda: True)


@pytest.mark.parametrize(
    ("sizes", "draws"), [([(4, 8)], 64), ([(8, 64)], 64), ([(2, 2), (8, 128)], 32), ([(64, 512)], 16)]
)
def test_large_pipelines_are_judged_by_fewer_draws(sizes: list[tuple[int, int]], draws: int) -> None:
    assert draws_for([Shape(num_stages=p, num_microbatches=m) for p, m in sizes]) == draws
