"""Forecasts of memory: the arithmetic, windows in bytes, and what is said when a run cannot fit."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from experiments.emulate import EMULATED_STEP
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.core import Order, Ordering
from rrfp_jax.costs.forecast import (
    ChunkBytes,
    Reach,
    check_stages_fit,
    forecast_memory,
    forecast_stage,
    reaches,
    window_of_bytes,
)
from rrfp_jax.schedules import Edge, PipelineGraph, ScheduleRequest, Task, TaskKind, build_schedule, chain, linear
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import Costs, simulate

CHUNK = ChunkBytes(fixed=1000, stash=100, owed=140, inputs=10, output_grads=20, outputs=10, temporaries=50)


def test_a_stage_adds_up_what_it_holds_always_per_microbatch_and_at_once() -> None:
    forecast = forecast_stage([CHUNK, CHUNK], window=3, num_microbatches=8)
    assert forecast.fixed == 2000
    assert forecast.per_microbatch == 2 * (140 + 20)
    assert forecast.per_waiting == 20
    assert forecast.temporaries == 60
    assert forecast.peak == 2000 + 3 * 320 + 100 + 60


def test_an_update_of_the_only_chunk_runs_when_no_microbatch_is_in_flight() -> None:
    updated = replace(CHUNK, step_temporaries=500)
    assert forecast_stage([updated], 3, 8).peak == forecast_stage([CHUNK], 3, 8).peak == 1000 + 3 * 160 + 50 + 60
    assert forecast_stage([updated], 1, 8).peak == 1000 + 8 * 10 + 500, "eight inputs of the next step may wait"
    assert forecast_stage([updated], 3, 8).largest_window(1000 + 8 * 10 + 499) == 0
    assert forecast_stage([updated], 8, 8, footprint=2).peak == 1000 + 8 * 10 + 500
    assert forecast_stage([updated], 8, 8, in_row=100).peak == 1000 + 8 * 10 + 500
    both = forecast_stage([updated, CHUNK], 1, 8, footprint=2)
    assert both.temporaries == 500, "the other chunk may hold microbatches"
    assert both.peak == forecast_stage([CHUNK, CHUNK], 1, 8, footprint=2).peak + 500 - 60


def test_a_window_beyond_the_microbatches_costs_nothing_more() -> None:
    assert forecast_stage([CHUNK], 32, 4) == forecast_stage([CHUNK], 4, 4)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_all_microbatches_may_wait_for_a_chunk_that_holds_less_in_flight(window: int) -> None:
    runs_forward = replace(CHUNK, stash=0, owed=0, output_grads=0)
    assert forecast_stage([runs_forward], window, 8).peak == 1000 + 8 * 10 + 60
    assert forecast_stage([runs_forward, CHUNK], window, 8).peak == 2000 + window * 160 + (8 - window) * 10 + 80 + 60
    of_bytes = forecast_stage([runs_forward, CHUNK], window, 8, capacity=window * 160)
    assert of_bytes.peak == forecast_stage([runs_forward, CHUNK], window, 8).peak


def test_a_window_in_bytes_reserves_whole_microbatches() -> None:
    assert window_of_bytes(160 * 5 + 159, 160, 0, 8) == 5
    assert window_of_bytes(2**40, 160, 0, 8) == 8
    with pytest.raises(ValueError, match="on stage 2, where one takes 160 B"):
        window_of_bytes(159, 160, 2, 8)


def test_a_run_that_cannot_fit_is_told_the_largest_windows_that_do() -> None:
    forecasts = [forecast_stage([CHUNK], 8, 8), forecast_stage([CHUNK], 4, 8)]
    check_stages_fit(forecasts, [forecasts[0].peak, None])
    with pytest.raises(ValueError, match="largest windows that fit are 7,4"):
        check_stages_fit(forecasts, [forecasts[0].peak - 1, None])
    with pytest.raises(ValueError, match="take a schedule that holds fewer"):
        check_stages_fit(forecasts, [forecasts[0].peak - 1, None], is_strict=True)
    with pytest.raises(ValueError, match="not even one microbatch fits"):
        check_stages_fit(forecasts, [1100, None])


def test_a_footprint_counts_activations_of_the_largest_chunks() -> None:
    small, large = replace(CHUNK, owed=0, stash=30), CHUNK
    forecast = forecast_stage([small, large], 32, 4, footprint=6)
    # 4 of the large chunk, 2 of the small one, whose other 2 wait as inputs
    assert forecast.peak == 2000 + 4 * (140 + 20) + 2 * (30 + 20) + 2 * 10 + 60
    assert forecast_stage([small, large], 32, 4, footprint=8).peak == forecast_stage([small, large], 4, 4).peak
    assert forecast_stage([small, large], 32, 4, footprint=99).peak == forecast_stage([small, large], 4, 4).peak


def test_a_footprint_that_cannot_fit_is_told_what_else_there_is() -> None:
    forecast = forecast_stage([CHUNK], 32, 8, footprint=5)
    check_stages_fit([forecast], [forecast.peak])
    with pytest.raises(ValueError, match=r"with 5 activations of a chunk, .* footprint off with window 4 at most"):
        check_stages_fit([forecast], [forecast.peak - 1])


@pytest.mark.parametrize("inputs", [0, 10, 150, 300])
def test_the_largest_window_fits_and_the_next_larger_one_does_not(inputs: int) -> None:
    chunk = replace(CHUNK, inputs=inputs)
    for limit in range(1000, 4000, 37):
        best = forecast_stage([chunk], 8, 8).largest_window(limit)
        fits = [window for window in range(1, 9) if forecast_stage([chunk], window, 8).peak <= limit]
        assert best == max(fits, default=0)


@pytest.mark.parametrize(("backward", "numbers"), [("fused", [4, 4, 3, 2]), ("split", [4, 7, 5, 3])])
def test_what_waits_is_bounded_by_what_the_sender_holds(backward: str, numbers: list[int]) -> None:
    order = Ordering(window=(4, 3, 2, 1), backward=backward).resolve(linear(4), chain(4, 16, split=backward == "split"))
    assert [reaches(order, stage) for stage in range(4)] == [(Reach(chunks=(0,), number=each),) for each in numbers]
    forecasts = forecast_memory(order, dict.fromkeys(range(4), CHUNK), 16)
    assert forecasts[3].peak == 1000 + 160 + (numbers[3] - 1) * 10 + 60
    few = forecast_memory(order, dict.fromkeys(range(4), CHUNK), 4)
    assert [each.reached for each in few] == [min(4, each) for each in numbers]


def test_what_one_stage_sends_to_several_chunks_its_footprint_bounds_together() -> None:
    table = build_schedule("interleaved-1f1b", ScheduleRequest(num_stages=4, num_microbatches=8))
    order = Ordering(schedule=table).resolve(table.placement, table.graph)
    assert order.footprints == (11, 9, 7, 5)
    first, second = (0,), (1,)
    assert reaches(order, 0) == (Reach(chunks=first, number=11), Reach(chunks=second, number=5))
    assert reaches(order, 1) == (Reach(chunks=first + second, number=11),)
    sizes = dict.fromkeys(range(8), replace(CHUNK, owed=0))
    sizes[0], sizes[5] = replace(sizes[0], inputs=0), replace(sizes[5], inputs=30)
    peaks = [each.peak for each in forecast_memory(order, sizes, 8)]
    # chunk 0 gets nothing, and chunk 4 at most what stage 3 holds
    assert peaks[0] == 2000 + 5 * 10 + (8 * 120 + 3 * 110) + 60
    # 8 for chunk 5, whose inputs are the larger ones, and 3 of the 11 for chunk 1
    assert peaks[1] == 2000 + (8 * 30 + 3 * 10) + (8 * 110 + 1 * 90) + 60


def test_a_row_that_is_kept_to_holds_its_own_activations() -> None:
    table = build_schedule("zb-v", ScheduleRequest(num_stages=4, num_microbatches=16))
    strict = Ordering(schedule=table, consume="strict").resolve(table.placement, table.graph)
    ranked = Ordering(schedule=table).resolve(table.placement, table.graph)
    sizes = dict.fromkeys(range(8), CHUNK)
    by_row = forecast_memory(strict, sizes, 16)
    assert [each.footprint for each in by_row] == list(ranked.footprints or ()) == [8, 8, 8, 8]
    assert max(table.peak_in_flight()) > 4
    for one, other in zip(by_row, forecast_memory(ranked, sizes, 16), strict=True):
        assert one.peak <= other.peak


def test_all_microbatches_may_reach_a_chunk_that_returns_no_gradient() -> None:
    graph = PipelineGraph(num_chunks=3, num_microbatches=16, edges=(Edge(0, 1, carries_gradient=False), Edge(1, 2)))
    order = Ordering(window=2, backward="fused").resolve(linear(3), graph)
    assert [_reached(order, chunk) for chunk in range(3)] == [2, 16, 2]


@pytest.mark.parametrize(
    "words",
    [
        {"schedule": "1f1b", "consume": "strict"},
        {"schedule": "zb-h1", "consume": "strict"},
        {"schedule": "zb-v"},
        {"schedule": "interleaved-1f1b"},
        {"schedule": "interleaved-1f1b", "footprint": "off", "foresight": "off", "window": "5,4,3,2"},
        {"hint": "bf", "window": "4,3,2,1"},
        {"hint": "bfw", "window": "3,4,2,5"},
    ],
    ids=lambda words: " ".join(map(str, words.values())),
)
def test_no_more_microbatches_are_at_a_chunk_than_are_foreseen(words: dict[str, str]) -> None:
    """From the end of the sender's F to the end of the chunk's own backward, in jittered steps."""
    order = OrderingOptions(**words).resolve(num_stages=4, num_microbatches=12)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    durations_ms = rng.lognormal(sigma=1.0, size=(6, order.graph.num_chunks, 12, 3))
    timeline = simulate(order.arbiters(EMULATED_STEP), Costs(durations_ms=durations_ms), num_steps=6).timeline
    for chunk in range(1, order.graph.num_chunks):
        most = max(_most_at(chunk, one, order.graph) for one in timeline.by_step())
        assert most <= _reached(order, chunk)


def _reached(order: Order, chunk: int) -> int:
    placement = order.placement
    place = placement.chunks_of_stage[placement.stage_of_chunk[chunk]].index(chunk)
    (number,) = (each.number for each in reaches(order, placement.stage_of_chunk[chunk]) if place in each.chunks)
    return min(order.graph.num_microbatches, number)


def _most_at(chunk: int, timeline: Timeline, graph: PipelineGraph) -> int:
    ends_s = {span.task: span.end_s for span in timeline.spans}
    last, changes = graph.accumulating_kind(chunk), []
    for m in range(graph.num_microbatches):
        changes += [(ends_s[Task(TaskKind.F, chunk - 1, m)], 1), (ends_s[Task(last, chunk, m)], -1)]
    return max(accumulate(change for _, change in sorted(changes)))
