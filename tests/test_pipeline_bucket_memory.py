"""Memory with microbatches of several sizes: forecast by the largest, bounded and measured by their own."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.data.balancing import hill
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.schedules import linear
from rrfp_jax.testing import DelayedStage
from tests import ragged
from tests.ragged import CHUNKS, EDGES, LENGTHS, as_batch, make_microbatch
from tests.runtime.logged_runs import replays_as_recorded

NUM_MICROBATCHES = 12
OPTIMIZER = optax.adamw(1e-2)
MIXED = ["large", "small", "small"] * 4


@pytest.fixture(scope="module")
def base() -> Iterator[Pipeline]:
    pipeline = Pipeline(CHUNKS, placement=linear(5), edges=EDGES, optimizer=OPTIMIZER)
    yield pipeline
    pipeline.close()


def microbatches(sizes: list[str]) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shapes = {"large": (max(LENGTHS), 4, True), "small": (min(LENGTHS), 0, False)}
    return [
        make_microbatch(rng, length, num_images, has_sound=has_sound)
        for length, num_images, has_sound in map(shapes.__getitem__, sizes)
    ]


def run(pipeline: Pipeline, sizes: list[str], *, in_hill: bool = False) -> Any:
    """A step's result; ``in_hill``: large microbatches come together, in the middle."""
    batch = as_batch(microbatches(sizes))
    with pipeline:
        state = pipeline.init(jax.random.key(0))
        pipeline.prepare(batch, buckets=ragged.all_buckets())
        _, metrics = pipeline.step(state, batch, order=hill([size == "large" for size in sizes]) if in_hill else None)
        return metrics.result()


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("options", [{"hint": "f-priority", "window": 3}, {"hint": "bfw", "window": 2}], ids=str)
@pytest.mark.parametrize(
    ("sizes", "in_hill"),
    [(["large"] * 12, False), (["small"] * 12, False), (MIXED, False), (MIXED, True)],
    ids=["large", "small", "mixed", "in hill"],
)
def test_what_is_measured_never_exceeds_what_was_predicted(
    base: Pipeline, options: dict[str, Any], sizes: list[str], in_hill: bool
) -> None:
    pipeline = base.reordered(Ordering(**options))
    result = run(pipeline, sizes, in_hill=in_hill)
    for forecast, peak in zip(pipeline.forecast, result.peak_memory_bytes, strict=True):
        assert forecast.fixed <= peak <= forecast.peak


@pytest.mark.slow
def test_small_microbatches_take_less_memory_than_large_ones() -> None:
    """One is in flight at a time, whatever arrives when; the update of plain SGD takes no more than a microbatch."""
    order = Ordering(hint="f-priority", window=1)
    plain = Pipeline(CHUNKS, placement=linear(5), edges=EDGES, optimizer=optax.sgd(1e-2))
    small, large = (run(plain.reordered(order), [size] * 12).peak_memory_bytes for size in ("small", "large"))
    assert all(one < other for one, other in zip(small[2:], large[2:], strict=True))


def held_at_most(result: Any, chunk: int) -> int:
    """The most microbatches that a chunk held at a time, from the start of F to the end of B."""
    changes = []
    for span in result.timeline.spans:
        if span.task.chunk == chunk and span.task.kind in ("F", "B"):
            is_first = span.task.kind == "F"
            changes.append((span.start_s if is_first else span.end_s, 1 if is_first else -1))
    held = np.cumsum([change for _, change in sorted(changes)])
    return int(held.max())


def test_a_window_in_bytes_admits_more_small_microbatches_than_large_ones(base: Pipeline) -> None:
    counted = base.reordered(Ordering(hint="f-priority", window=2))
    run(counted, ["large"] * NUM_MICROBATCHES)
    room = 2 * max(forecast.per_microbatch for forecast in counted.forecast)
    order = Ordering(hint="f-priority", window=f"{room}B")
    slow_loss = base.options.__class__(wrap_stage=lambda stage: DelayedStage(stage, lambda *_: 2e-3))
    held = {}
    for size in ("large", "small"):
        pipeline = base.reordered(order, options=slow_loss)
        result = run(pipeline, [size] * NUM_MICROBATCHES)
        held[size] = held_at_most(result, 2)
        for forecast, peak in zip(pipeline.forecast, result.peak_memory_bytes, strict=True):
            assert peak <= forecast.peak
        assert pipeline.order.capacities == (room,) * 5
    assert held["large"] == 2
    assert held["small"] > 2
    in_hill = base.reordered(order, options=slow_loss)
    result = run(in_hill, MIXED, in_hill=True)
    for forecast, peak in zip(in_hill.forecast, result.peak_memory_bytes, strict=True):
        assert peak <= forecast.peak


def test_logs_of_weighed_microbatches_can_be_replayed(base: Pipeline) -> None:
    counted = base.reordered(Ordering(hint="f-priority", window=2))
    run(counted, ["large"] * NUM_MICROBATCHES)
    room = 2 * max(forecast.per_microbatch for forecast in counted.forecast)
    pipeline = base.reordered(Ordering(hint="f-priority", window=f"{room}B"))
    run(pipeline, MIXED)
    for log in pipeline.runtime.logs().values():
        assert replays_as_recorded(log)


def test_a_window_that_holds_no_large_microbatch_is_refused(base: Pipeline) -> None:
    with base.reordered(Ordering(window="100B")) as pipeline:
        pipeline.init(jax.random.key(0))
        with pytest.raises(ValueError, match=r"window of 100 B holds no microbatch on stage \d"):
            pipeline.prepare(as_batch(microbatches(["small"] * 2)), buckets=ragged.all_buckets())
