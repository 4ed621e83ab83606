"""The quickest order of a cut in given memory."""

import pytest

from rrfp_jax.costs import CutModel, LayerCosts, LinkCosts, ModelCosts
from rrfp_jax.planner.order_search import search_orders
from tests.planner.order_cuts import PART, PLACEMENTS, homogeneous, simulated_makespan_ms


@pytest.mark.parametrize(("name", "bound_ms"), [("linear", 270.0), ("v", 255.0), ("waves", 247.5)])
def test_enough_memory_gives_an_order_that_none_can_beat(name: str, bound_ms: float) -> None:
    best = search_orders(homogeneous(PLACEMENTS[name](4), 8), [4 * PART] * 4)[0]
    assert best.makespan_ms == best.bound_ms == bound_ms
    assert max(best.peak) <= 4 * PART
    best.table.validate()


@pytest.mark.slow
@pytest.mark.parametrize("memory", [8, 12, 16])
def test_eight_homogeneous_stages_come_within_two_percent_of_the_bound_over_placements(memory: int) -> None:
    found = [search_orders(homogeneous(place(8), 32), [memory * PART] * 8)[0] for place in PLACEMENTS.values()]
    assert min(best.makespan_ms for best in found) == min(best.bound_ms for best in found) == 977.5


def test_all_orders_take_what_the_simulator_says_and_the_best_comes_first() -> None:
    cut = homogeneous(PLACEMENTS["looped 2"](4), 8, hop_ms=1.5)
    found = search_orders(cut, [5 * PART] * 4, budget=20_000)
    assert len(found) > 3
    times_ms = [order.makespan_ms for order in found]
    assert times_ms == sorted(times_ms)
    assert times_ms == pytest.approx([simulated_makespan_ms(cut, order) for order in found])
    assert all(max(order.table.peak_activations()) <= 5 for order in found)
    assert any(order.is_named for order in found)


def test_launching_and_sizes_take_time_and_rounding_does_not_matter() -> None:
    layer = LayerCosts(forward_ms=1 / 3, input_gradient_ms=1 / 7, weight_gradient_ms=1 / 11, output_bytes=1000)
    links = LinkCosts(latency_ms=1 / 13, gb_per_s=0.017)
    costs = ModelCosts(layers=("layer",) * 9, types={"layer": layer}, links=links, task_ms=1 / 17)
    cut = CutModel(costs=costs, counts=(1, 2, 2, 1, 1, 2), placement=PLACEMENTS["v"](3), num_microbatches=7)
    found = search_orders(cut, None, budget=3_000)
    simulated_ms = [simulated_makespan_ms(cut, order) for order in found]
    assert [order.makespan_ms for order in found] == pytest.approx(simulated_ms, abs=1e-4)
    assert all(order.makespan >= order.problem.bound for order in found)


def test_the_same_cut_gives_the_same_orders() -> None:
    cut = homogeneous(PLACEMENTS["v"](4), 8, hop_ms=1.0)
    assert search_orders(cut, [3 * PART] * 4) == search_orders(cut, [3 * PART] * 4)


def test_a_fused_cut_has_fused_orders() -> None:
    cut = homogeneous(PLACEMENTS["linear"](4), 8, split=False)
    best = search_orders(cut, [4 * PART] * 4)[0]
    assert best.makespan_ms == pytest.approx(330)
    assert not best.table.graph.split


def test_memory_that_holds_nothing_has_no_order() -> None:
    cut = homogeneous(PLACEMENTS["v"](2), 4)
    assert search_orders(cut, [PART / 4] * 2) == []
    with pytest.raises(ValueError, match="memory is given for 3 stages of 2"):
        search_orders(cut, [1.0] * 3)
