"""Averages of the parameters: those of ``optax.ema`` in a plain loop, wherever they lie, and evaluations use them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.checkpoint import newest_step, read_layer_params, read_params
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.shapes import model_params
from rrfp_jax.programs.update_functions import averaged, update_function
from rrfp_jax.runtime.evaluation import EvaluationShapes
from rrfp_jax.schedules import linear, looped
from rrfp_jax.training.loop import RunSaver
from tests.pipelines import make_pipeline
from tests.plain_loop import train_plainly
from tests.programs.toys import plain_model
from tests.test_pipeline_evaluation import plainly
from tests.test_pipeline_layouts import make_chunks
from tests.test_pipeline_training import make_batches

DECAY, NUM_STEPS, CLIP = 0.8, 3, 1.0
OPTIMIZER = optax.adamw(3e-2, weight_decay=0.01)
AVERAGED = averaged(OPTIMIZER, DECAY)
BATCHES = make_batches(NUM_STEPS)
SPOILT = BATCHES[0] | {"weights": np.zeros_like(BATCHES[0]["weights"])}
"""A batch without weight, whose step is left out."""


def plain_average(chunks: Sequence[Chunk], batches: Sequence[Any]) -> Any:
    """The average after each step, by optax's own from the parameters of plain loops of so many steps."""
    params = model_params(chunk.init(jax.random.key(1)) for chunk in chunks)
    ema = optax.ema(DECAY)
    state = ema.init(params)
    for number in range(len(batches)):
        _, now = train_plainly(chunks, params, OPTIMIZER, batches[: number + 1], clip_norm=CLIP)
        average, state = ema.update(jax.tree.map(jnp.asarray, now), state)
    return jax.tree.map(np.array, average)


def assert_close(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        distance, size = np.linalg.norm(one - other), np.linalg.norm(other)
        assert distance <= 1e-5 * size, (distance, size)


def averages_in(pipeline: Pipeline, state: Any) -> Any:
    with pipeline.averaged(state):
        return jax.tree.map(np.array, pipeline.params(state))


def shapes() -> EvaluationShapes:
    return EvaluationShapes(buckets=[{name: leaf[0] for name, leaf in BATCHES[0].items()}])


def check_evaluated(pipeline: Pipeline, state: Any, average: Any) -> None:
    """Evaluations within the block see the average, those outside of it the parameters."""
    params = jax.tree.map(np.array, pipeline.params(state))
    for own, inside in ((average, True), (params, False)):
        if inside:
            with pipeline.averaged(state):
                found = pipeline.evaluate(state, BATCHES[0])
        else:
            found = pipeline.evaluate(state, BATCHES[0])
        np.testing.assert_allclose(found.result().loss_sum, plainly(list(pipeline.chunks), own, BATCHES[0])[0], 1e-5)


@pytest.fixture
def opened() -> Iterator[list[Pipeline]]:
    made: list[Pipeline] = []
    yield made
    for pipeline in made:
        pipeline.close()


@cache
def toy() -> tuple[list[Chunk], Any]:
    chunks = plain_model((1, 1))
    return chunks, plain_average(chunks, BATCHES)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"data": 2, "shard_optimizer": True}],
    ids=["alone", "sharded"],
)
def test_the_average_is_that_of_optax_and_evaluations_use_it(options: Any) -> None:
    chunks, expected = toy()
    with make_pipeline(chunks, placement=linear(2), optimizer=AVERAGED, clip_norm=CLIP, **options) as pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(BATCHES[0], evaluation=shapes())
        initial = jax.tree.map(np.array, pipeline.params(state))
        jax.tree.map(np.testing.assert_array_equal, averages_in(pipeline, state), initial)
        for batch in (BATCHES[0], SPOILT, *BATCHES[1:]):
            state, metrics = pipeline.step(state, batch)
            assert metrics.result().skipped == (batch is SPOILT)
        average = averages_in(pipeline, state)
        assert_close(average, expected)
        check_evaluated(pipeline, state, average)


def test_without_averages_evaluations_see_the_parameters() -> None:
    with make_pipeline(plain_model((1, 1)), placement=linear(2), optimizer=OPTIMIZER) as pipeline:
        state = pipeline.init(jax.random.key(1))
        jax.tree.map(np.testing.assert_array_equal, averages_in(pipeline, state), pipeline.params(state))


def test_a_bias_that_moves_by_sign_is_averaged_as_it_moves() -> None:
    params = {"layer": {"bias": jnp.zeros(2), "w": jnp.ones(2)}}
    optimizer = averaged(optax.sgd(0.1), 0.5)
    update = update_function(optimizer, {"bias": 0.25})
    sums = {"layer": {"bias": jnp.array([3.0, -2.0]), "w": jnp.array([1.0, 2.0])}}
    state, found = optimizer.init(params), []
    for _ in range(2):
        params, state, _ = update(params, state, sums, jnp.float32(1), jnp.bool_(True))
        found.append(params)
    expected = jax.tree.map(lambda first, second: first / 3 + 2 * second / 3, *found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), state.parameter_average, expected)
    np.testing.assert_allclose(found[1]["layer"]["bias"], [-0.5, 0.5])


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0])
def test_a_decay_out_of_bounds_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="give a number between 0 and 1, such as"):
        averaged(OPTIMIZER, decay)


@pytest.mark.slow
def test_evaluations_with_averages_of_which_replicas_hold_shares_are_refused() -> None:
    options: dict[str, Any] = {"data": 4, "shard_optimizer": True, "reduce": "messages"}
    with make_pipeline(plain_model((1, 1)), placement=linear(2), optimizer=AVERAGED, **options) as pipeline:
        pipeline.init(jax.random.key(1))
        with pytest.raises(ValueError, match="give reduce collective, no shard_optimizer, or no evaluation"):
            pipeline.prepare(BATCHES[0], evaluation=shapes())


LAYOUTS: dict[str, dict[str, Any]] = {
    "4 stages, split": {"placement": linear(4), "hint": "bfw"},
    "2 stages of 2 chunks": {"placement": looped(2, 2)},
    "replicas": {"placement": linear(4), "data": 2},
    "replicas that share the state": {"placement": linear(4), "data": 2, "shard_optimizer": True, "hint": "bfw"},
    "replicas by messages": {"placement": linear(4), "data": 2, "reduce": "messages"},
    "tensor": {"placement": linear(4), "mesh": {"tensor": 2}},
    "fsdp, shared": {"placement": looped(2, 2), "mesh": {"fsdp": 2}, "data": 2, "shard_optimizer": True},
}


@cache
def tied() -> tuple[list[Chunk], Any]:
    chunks = make_chunks(4, tied=True)
    return chunks, plain_average(chunks, BATCHES)


@pytest.mark.slow
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_averages_in_every_layout_and_saved_and_restored_in_another(
    options: dict[str, Any], tmp_path: Path, opened: list[Pipeline]
) -> None:
    chunks, expected = tied()
    # Two steps in one layout, and the third after a restore in the other.
    layouts = [options, LAYOUTS["2 stages of 2 chunks" if options["placement"] == linear(4) else "replicas"]]
    average = None
    for part, layout in enumerate(layouts):
        pipeline = make_pipeline(chunks, optimizer=AVERAGED, clip_norm=CLIP, progress_deadline_s=60, **layout)
        opened.append(pipeline)
        saver = RunSaver(tmp_path, pipeline, every=None, minutes=None, keep=1)
        found = saver.checkpoints.newest()
        state = pipeline.init(jax.random.key(1)) if found is None else saver.restore(found)
        pipeline.prepare(BATCHES[0], evaluation=shapes())
        for batch in BATCHES[2 * part : 2 * part + 2]:
            state, _ = pipeline.step(state, batch)
        average = averages_in(pipeline, state)
        check_evaluated(pipeline, state, average)
        saver.save(state, {})
        saver.checkpoints.close()
        stored = newest_step(tmp_path)
        jax.tree.map(np.testing.assert_array_equal, read_params(stored), average)
        query = read_layer_params(stored, "layers.1")["attention", "query", "kernel"]
        np.testing.assert_array_equal(query, average["layers.1"]["attention"]["query"]["kernel"])
    assert_close(average, expected)


@pytest.mark.slow
def test_parameters_in_bfloat16_have_averages_in_float32_and_evaluations_round_them() -> None:
    chunks = [_in_bfloat16(chunk) for chunk in plain_model((1, 1))]
    with make_pipeline(chunks, placement=linear(2), optimizer=AVERAGED) as pipeline:
        state = pipeline.init(jax.random.key(1))
        pipeline.prepare(BATCHES[0], evaluation=shapes())
        for batch in BATCHES:
            state, _ = pipeline.step(state, batch)
        kept = [part.parameter_average for _, held in pipeline.chunk_states(state) for part in held.optimizer_state]
        assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {np.dtype(np.float32)}
        average = averages_in(pipeline, state)
        expected = jax.tree.map(lambda leaf: np.asarray(leaf.astype(jnp.bfloat16)), model_params(kept))
        jax.tree.map(np.testing.assert_array_equal, average, expected)
        check_evaluated(pipeline, state, average)
        (programs,) = pipeline._model._compiled.values()
        for number, sizes in programs.sizes_of_evaluation.items():  # with the rounded parameters beside their own
            assert sizes.params_bytes == 2 * programs.chunks[number].sizes.params_bytes > 0


def _in_bfloat16(chunk: Chunk) -> Chunk:
    return replace(chunk, init=lambda key: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), chunk.init(key)))
