"""Random keys through a pipeline: they count steps from the start of the run, and microbatches over the whole step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.programs.chunk import Chunk, microbatch_key
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.schedules import linear
from tests.pipelines import make_pipeline

SEED, NUM_MICROBATCHES, NUM_STEPS, RESUMED_AT = 5, 4, 4, 2
LEARNING_RATE = 0.1
WIDTH = 16
BATCH = {"x": np.linspace(-1.0, 1.0, NUM_MICROBATCHES * WIDTH, dtype=np.float32).reshape(NUM_MICROBATCHES, WIDTH)}


def apply(params: Any, inputs: Any, leaves: Any, *, key: Any) -> Any:
    kept = True if key is None else jax.random.bernoulli(key, 0.5, (WIDTH,))
    return jnp.sum(jnp.square(jnp.where(kept, leaves["x"] * params["dropped"]["w"], 0.0) - 1.0)), jnp.float32(WIDTH)


CHUNK = Chunk(
    name="dropped",
    init=lambda key: {"dropped": {"w": jnp.ones(WIDTH)}},
    apply=apply,
    leaves=("x",),
    uses_key=True,
)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of a plain loop."""

    @jax.jit
    def mean_loss(params: Any, step: Any) -> Any:
        loss, weight = 0.0, 0.0
        for m in range(NUM_MICROBATCHES):
            key = microbatch_key(SEED, step, m)
            outputs = apply(params, None, {"x": BATCH["x"][m]}, key=key)
            loss, weight = loss + outputs[0], weight + outputs[1]
        return loss / weight

    params = {"dropped": {"w": jnp.ones(WIDTH)}}
    losses = []
    for step in range(NUM_STEPS):
        loss, grads = jax.value_and_grad(mean_loss)(params, step)
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
        losses.append(float(loss))
    return losses


def train(
    pipeline: Pipeline, state: PipelineState, num_steps: int, *, evaluates: bool
) -> tuple[PipelineState, list[float]]:
    pipeline.prepare(BATCH, evaluation=EvaluationShapes(buckets=[{"x": BATCH["x"][0]}]) if evaluates else None)
    losses = []
    for _ in range(num_steps):
        if evaluates:
            pipeline.evaluate(state, BATCH)
        state, metrics = pipeline.step(state, BATCH)
        losses.append(metrics.result().loss)
    return state, losses


@pytest.mark.parametrize(("data", "evaluates"), [(1, False), (1, True), (2, False)])
def test_steps_and_microbatches_of_keys_are_those_of_the_run_also_after_a_resume(
    expected: list[float], data: int, evaluates: bool
) -> None:
    """Also where evaluations come between."""
    same = {"placement": linear(1), "data": data, "optimizer": optax.sgd(LEARNING_RATE), "seed": SEED}
    with make_pipeline([CHUNK], **same) as pipeline:
        state, losses = train(pipeline, pipeline.init(jax.random.key(0)), RESUMED_AT, evaluates=evaluates)
        states = [held for _, held in pipeline.chunk_states(state)]
        with pipeline.reordered() as resumed:
            state = resumed.restore(states, RESUMED_AT)
            losses += train(resumed, state, NUM_STEPS - RESUMED_AT, evaluates=evaluates)[1]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert len({round(loss, 4) for loss in losses}) == NUM_STEPS
