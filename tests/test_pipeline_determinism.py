"""Deterministic mode: identical bits whatever the order of tasks and their timing."""

from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.pipeline import Pipeline
from rrfp_jax.schedules import ScheduleRequest, build_schedule
from rrfp_jax.tasks import Task, linear
from rrfp_jax.testing import DelayedStage
from tests.test_pipeline_training import NUM_MICROBATCHES, OPTIMIZER, make_batches, make_model

NUM_STEPS = 100
STRICT_1F1B = {
    "consume": "strict",
    "schedule": build_schedule("1f1b", ScheduleRequest(num_stages=3, num_microbatches=NUM_MICROBATCHES)),
}


def random_delay(step: int, task: Task) -> float:
    """Up to a millisecond, another for every task and step."""
    return float(np.random.default_rng((step, ord(task.kind), task.chunk, task.microbatch + 1)).uniform(0, 1e-3))


def train(pipeline: Pipeline, num_steps: int) -> tuple[list[float], dict[str, Any]]:
    with pipeline:
        state = pipeline.init(jax.random.key(1))
        metrics = []
        for batch in make_batches(num_steps):
            state, result = pipeline.step(state, batch)
            metrics.append(result)
        return [m.result().loss for m in metrics], jax.tree.map(np.array, pipeline.params(state))


@pytest.fixture(scope="module")
def base() -> Pipeline:
    return Pipeline(
        make_model(tied=True, layers_per_chunk=(1, 1, 1)), placement=linear(3), optimizer=OPTIMIZER, deterministic=True
    )


@pytest.fixture(scope="module")
def expected(base: Pipeline) -> tuple[list[float], dict[str, Any]]:
    return train(base.reordered(hint="bf", window=1), NUM_STEPS)


@pytest.mark.parametrize("order", [{"hint": "bf"}, {"hint": "bfw"}, {"hint": "fb", "window": 2}, STRICT_1F1B])
@pytest.mark.parametrize("delayed", [False, True])
def test_orders_and_timing_leave_every_bit_alone(
    base: Pipeline, expected: tuple[list[float], dict[str, Any]], order: dict[str, Any], delayed: bool
) -> None:
    wrap = (lambda stage: DelayedStage(stage, random_delay)) if delayed else None
    losses, params = train(base.reordered(**order, wrap_stage=wrap), NUM_STEPS)
    assert losses == expected[0]
    jax.tree.map(np.testing.assert_array_equal, params, expected[1])


def test_without_deterministic_mode_losses_agree_to_rounding(
    base: Pipeline, expected: tuple[list[float], dict[str, Any]]
) -> None:
    free = Pipeline(base.chunks, placement=base.placement, optimizer=OPTIMIZER, hint="f-priority")
    losses, _ = train(free, NUM_STEPS)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
