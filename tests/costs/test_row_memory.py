"""What a row takes in bytes where its chunks differ."""

from dataclasses import replace

import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.costs.forecast import ChunkBytes, bytes_in_row, forecast_memory
from rrfp_jax.schedules import ScheduleRequest, build_schedule

SMALL = ChunkBytes(fixed=1000, stash=30, owed=30, inputs=5, output_grads=5, outputs=5, temporaries=50)
LARGE = replace(SMALL, stash=300, owed=200)


def test_a_row_of_one_chunk_takes_its_microbatches_and_what_waits_beside_them() -> None:
    table = build_schedule("1f1b", ScheduleRequest(num_stages=3, num_microbatches=8))
    sizes = dict.fromkeys(range(3), SMALL)
    assert [bytes_in_row(table, stage, sizes | {0: replace(SMALL, inputs=0)}) for stage in range(3)] == [
        3 * 35,
        2 * 35 + 1 * 5,  # of three on stage 0 one may wait
        1 * 35 + 1 * 5,
    ]


def test_what_is_owed_to_weight_gradients_counts_from_the_input_gradient_on() -> None:
    table = build_schedule("zb-h1", ScheduleRequest(num_stages=3, num_microbatches=8))
    order = Ordering(schedule=table, consume="strict").resolve(table.placement, table.graph)
    little, much = replace(LARGE, owed=20), replace(LARGE, stash=20)
    for stage, held in enumerate(table.peak_in_flight()):
        assert held == 3
        waits = 5 * min(stage, 1) * 3
        few = bytes_in_row(table, stage, dict.fromkeys(range(3), little))
        assert (3 - stage) * 305 + stage * 20 <= few <= (3 - stage) * 305 + stage * 20 + waits
        forecast = forecast_memory(order, dict.fromkeys(range(3), little), 8)[stage]
        assert forecast.peak == 1000 + few + 55
        many = bytes_in_row(table, stage, dict.fromkeys(range(3), much))
        assert (2 - stage) * 25 + (stage + 1) * 200 <= many <= (3 - stage) * 25 + (stage + 1) * 200 + waits


@pytest.mark.parametrize("name", ["zb-v", "v-half", "dualpipe-v", "gis"])
def test_large_and_small_chunks_are_not_at_their_peaks_together(name: str) -> None:
    table = build_schedule(name, ScheduleRequest(num_stages=4, num_microbatches=16))
    order = Ordering(schedule=table, consume="strict").resolve(table.placement, table.graph)
    sizes = {chunk: LARGE if chunk >= 4 else SMALL for chunk in range(8)}
    forecasts = forecast_memory(order, sizes, 16)
    for stage, forecast in enumerate(forecasts):
        chunks = table.placement.chunks_of_stage[stage]
        held = most = 0
        for kind, chunk, _ in table.orders[stage]:
            in_flight = sizes[chunk].stash + sizes[chunk].output_grads
            held += in_flight * (kind == "F")
            most = max(most, held)
            held += {"F": 0, "I": sizes[chunk].owed - in_flight, "W": -sizes[chunk].owed}[kind]
            most = max(most, held)
        of_stage = bytes_in_row(table, stage, sizes)
        assert most <= of_stage <= most + 16 * sum(sizes[chunk].inputs for chunk in chunks)
        assert forecast.peak == 2000 + of_stage + 55
    evenly = forecast_memory(order, dict.fromkeys(range(8), LARGE), 16)
    assert any(forecast.peak < other.peak - 300 for forecast, other in zip(forecasts, evenly, strict=True))
