"""Forecasts of memory: the arithmetic, windows in bytes, and what is said when a run cannot fit."""

from dataclasses import replace

import pytest

from rrfp_jax.planning.forecast import ChunkBytes, check_fits, forecast_stage, window_of_bytes

CHUNK = ChunkBytes(fixed=1000, stash=100, owed=140, inputs=10, output_grads=20, outputs=10, temporaries=50)


def test_a_stage_adds_up_what_it_holds_always_per_microbatch_and_at_once() -> None:
    forecast = forecast_stage([CHUNK, CHUNK], window=3, num_microbatches=8)
    assert forecast.fixed == 2000
    assert forecast.per_microbatch == 2 * (140 + 20)
    assert forecast.per_waiting == 20
    assert forecast.temporaries == 60
    assert forecast.peak == 2000 + 3 * 320 + 100 + 60


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
    assert window_of_bytes(160 * 5 + 159, [CHUNK], 0, 8) == 5
    assert window_of_bytes(2**40, [CHUNK], 0, 8) == 8
    with pytest.raises(ValueError, match="on stage 2, where one takes 160 B"):
        window_of_bytes(159, [CHUNK], 2, 8)


def test_a_run_that_cannot_fit_is_told_the_largest_windows_that_do() -> None:
    forecasts = [forecast_stage([CHUNK], 8, 8), forecast_stage([CHUNK], 4, 8)]
    check_fits(forecasts, [forecasts[0].peak, None])
    with pytest.raises(ValueError, match="largest windows that fit are 7,4"):
        check_fits(forecasts, [forecasts[0].peak - 1, None])
    with pytest.raises(ValueError, match="take a schedule that holds fewer"):
        check_fits(forecasts, [forecasts[0].peak - 1, None], is_strict=True)
    with pytest.raises(ValueError, match="not even one microbatch fits"):
        check_fits(forecasts, [1100, None])


def test_a_footprint_counts_activations_of_the_largest_chunks() -> None:
    small, large = replace(CHUNK, owed=0, stash=30), CHUNK
    forecast = forecast_stage([small, large], 32, 4, footprint=6)
    # 4 of the large chunk, 2 of the small one, whose other 2 wait as inputs
    assert forecast.peak == 2000 + 4 * (140 + 20) + 2 * (30 + 20) + 2 * 10 + 60
    assert forecast_stage([small, large], 32, 4, footprint=8).peak == forecast_stage([small, large], 4, 4).peak
    assert forecast_stage([small, large], 32, 4, footprint=99).peak == forecast_stage([small, large], 4, 4).peak


def test_a_footprint_that_cannot_fit_is_told_what_else_there_is() -> None:
    forecast = forecast_stage([CHUNK], 32, 8, footprint=5)
    check_fits([forecast], [forecast.peak])
    with pytest.raises(ValueError, match=r"with 5 activations of a chunk, .* footprint off with window 4 at most"):
        check_fits([forecast], [forecast.peak - 1])


@pytest.mark.parametrize("inputs", [0, 10, 150, 300])
def test_the_largest_window_fits_and_the_next_larger_one_does_not(inputs: int) -> None:
    chunk = replace(CHUNK, inputs=inputs)
    for limit in range(1000, 4000, 37):
        best = forecast_stage([chunk], 8, 8).largest_window(limit)
        fits = [window for window in range(1, 9) if forecast_stage([chunk], window, 8).peak <= limit]
        assert best == max(fits, default=0)
