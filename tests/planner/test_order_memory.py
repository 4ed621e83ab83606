"""What the search thinks fits also fits by the forecast of memory."""

import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.costs import CutModel, LayerCosts, ModelCosts
from rrfp_jax.costs.forecast import forecast_memory
from rrfp_jax.planner.list_scheduler import memory_for_activations
from rrfp_jax.planner.order_search import search_orders
from tests.planner.order_cuts import PLACEMENTS

LAYER = LayerCosts(
    forward_ms=2.0,
    input_gradient_ms=2.0,
    weight_gradient_ms=2.0,
    fixed_bytes=1000,
    stash_bytes=340,
    owed_bytes=200,
    temporaries_bytes=70,
    output_bytes=20,
)
HEAD = LayerCosts(forward_ms=5.0, input_gradient_ms=5.0, weight_gradient_ms=5.0, fixed_bytes=5000, stash_bytes=900)


@pytest.mark.parametrize("name", ["linear", "v", "looped 2", "waves"])
@pytest.mark.parametrize("split", [True, False])
def test_found_orders_fit_by_the_forecast(name: str, split: bool) -> None:
    placement = PLACEMENTS[name](3)
    counts = [2] * placement.num_chunks
    counts[1] += 3
    costs = ModelCosts(layers=("layer",) * (sum(counts) - 1) + ("head",), types={"layer": LAYER, "head": HEAD})
    cut = CutModel(costs=costs, counts=tuple(counts), placement=placement, num_microbatches=9, split=split)
    for limit in (25_000, 14_000):
        room = memory_for_activations(cut, [limit] * 3)
        found = search_orders(cut, room, budget=3_000)
        for order in found:
            made = Ordering(schedule=order.table, consume="strict").resolve(placement, cut.graph)
            forecasts = forecast_memory(made, dict(enumerate(cut.chunk_bytes)), 9)
            assert max(forecast.peak for forecast in forecasts) <= limit
        if not found:
            assert min(room) < 3 * max(each.per_microbatch for each in cut.chunk_bytes)
