"""Memory: predicted before the first step, bounded by a window in bytes, refused where it cannot fit, and measured."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule, linear, looped
from tests.pipelines import make_pipeline
from tests.test_pipeline_training import OPTIMIZER, make_batches, make_model

CHUNKS = make_model(tied=False, layers_per_chunk=(1, 1))
BATCH = make_batches(1)[0]


@pytest.fixture(scope="module")
def base() -> Pipeline:
    return Pipeline(CHUNKS, placement=linear(2), optimizer=OPTIMIZER)


def run(pipeline: Pipeline) -> tuple[int, ...]:
    """The measured peaks of one step."""
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        _, metrics = pipeline.step(state, BATCH)
        return metrics.result().peak_memory_bytes


@pytest.mark.parametrize("order", [{"hint": "f-priority"}, {"hint": "bfw"}], ids=["fused", "split"])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_what_is_measured_never_exceeds_what_was_predicted(base: Pipeline, order: dict[str, Any], window: int) -> None:
    pipeline = base.reordered(Ordering(window=window, **order))
    measured = run(pipeline)
    for stage, peak in enumerate(measured):
        forecast = pipeline.forecast[stage]
        assert forecast.fixed < peak <= forecast.peak
        assert forecast.window == window


def test_a_window_in_bytes_becomes_microbatches_of_every_stage(base: Pipeline) -> None:
    numbers = base.reordered(Ordering(window=2))
    run(numbers)
    room = 2 * max(forecast.per_microbatch for forecast in numbers.forecast)
    pipeline = base.reordered(Ordering(window=f"{room}B"))
    run(pipeline)
    assert pipeline.order.windows == tuple(room // f.per_microbatch for f in numbers.forecast)
    assert min(pipeline.order.windows) == 2


def test_a_window_in_bytes_is_that_of_the_stage_in_every_replica() -> None:
    chunks = make_model(tied=False, layers_per_chunk=(2, 0))
    windows, batch = [], {name: np.concatenate([each] * 32) for name, each in BATCH.items()}
    for data in (1, 2):
        with make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER, data=data, window="64KiB") as pipeline:
            pipeline.init(jax.random.key(0))
            pipeline.prepare(batch)
            windows.append(pipeline.order.windows)
    assert windows[0][0] != windows[0][1]
    assert windows[1] == windows[0] * 2


@pytest.fixture(scope="module")
def looped_base() -> Pipeline:
    chunks = make_model(tied=False, layers_per_chunk=(1, 0, 0, 1))
    return Pipeline(chunks, placement=looped(2, 2), optimizer=OPTIMIZER)


def table(name: str) -> ScheduleTable:
    return build_schedule(name, ScheduleRequest(num_stages=2, num_microbatches=4))


@pytest.mark.parametrize("words", [{}, {"window": 4}, {"foresight": False}])
def test_a_footprint_is_what_is_predicted_and_never_exceeded(looped_base: Pipeline, words: dict[str, Any]) -> None:
    pipeline = looped_base.reordered(Ordering(schedule=table("interleaved-1f1b"), **words))
    measured = run(pipeline)
    assert [forecast.footprint for forecast in pipeline.forecast] == list(pipeline.order.footprints or ())
    for peak, forecast in zip(measured, pipeline.forecast, strict=True):
        assert forecast.fixed < peak <= forecast.peak


def test_a_footprint_predicts_less_than_all_microbatches(base: Pipeline) -> None:
    pipeline = base.reordered(Ordering(schedule=table("1f1b")))
    run(pipeline)
    every = base.reordered(Ordering(schedule=table("1f1b"), footprint=False, foresight=False))
    run(every)
    assert [forecast.footprint for forecast in pipeline.forecast] == [2, 1]
    assert [forecast.footprint for forecast in every.forecast] == [None, None]
    assert all(few.peak < all_.peak for few, all_ in zip(pipeline.forecast, every.forecast, strict=True))


def test_a_window_in_bytes_below_the_footprint_is_refused_with_the_numbers(base: Pipeline) -> None:
    numbers = base.reordered(Ordering(window=1))
    run(numbers)
    room = max(forecast.per_microbatch for forecast in numbers.forecast)
    with pytest.raises(ValueError, match=rf"window {room}B has room for 1,\d+ microbatches: window 1 of stage 0 is"):
        run(base.reordered(Ordering(schedule=table("1f1b"), window=f"{room}B")))
    run(base.reordered(Ordering(schedule=table("1f1b"), window=f"{2 * room}B")))


def test_a_window_too_small_for_one_microbatch_is_refused(base: Pipeline) -> None:
    with pytest.raises(ValueError, match="holds no microbatch on stage 0"):
        run(base.reordered(Ordering(window="1KiB")))


@pytest.fixture(scope="module")
def peaks(base: Pipeline) -> Iterator[list[int]]:
    pipeline = base.reordered(Ordering(window=4))
    run(pipeline)
    return [forecast.peak for forecast in pipeline.forecast]


def test_a_run_that_cannot_fit_is_refused_with_the_largest_windows_that_do(base: Pipeline, peaks: list[int]) -> None:
    for limit, message in ((max(peaks) - 1, "largest windows that fit are"), ("4KiB", "not even one microbatch fits")):
        tight = base.reordered(Ordering(window=4), options=RuntimeOptions(memory_limit=limit))
        with pytest.raises(ValueError, match=message):
            run(tight)


@pytest.mark.parametrize("remat", ["dots", "full", ("none", "full"), jax.checkpoint_policies.nothing_saveable])
def test_rematerialisation_holds_less_in_flight(peaks: list[int], remat: Any) -> None:
    pipeline = Pipeline(CHUNKS, placement=linear(2), optimizer=OPTIMIZER, ordering=Ordering(window=4), remat=remat)
    run(pipeline)
    assert pipeline.forecast[1].peak < peaks[1]
    assert (pipeline.forecast[0].peak < peaks[0]) == (remat != ("none", "full"))


def test_unknown_rematerialisation_is_refused() -> None:
    with pytest.raises(ValueError, match="3 entries for 2 chunks"):
        Pipeline(CHUNKS, placement=linear(2), optimizer=OPTIMIZER, remat=("none", "dots", "full"))
    with pytest.raises(ValueError, match="remat is 'some'"):
        run(Pipeline(CHUNKS, placement=linear(2), optimizer=OPTIMIZER, remat="some"))
