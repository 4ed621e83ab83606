"""Sequences in slices: the slices of a chunk are passes of one set of parameters, and train what the plain loop does
with whole sequences."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.core import Ordering
from rrfp_jax.models import ExpertsConfig, LanguageModelConfig, language_model
from rrfp_jax.models.config import GlobalLayers, LayerVariant
from rrfp_jax.models.cuts import SequenceSlices
from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.schedules import Placement, ScheduleRequest, build_schedule, chain, sliced_chain
from rrfp_jax.training.loop import RunSaver
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.test_pipeline_context import make_batches as packed_batches

SIZES = {"vocab_size": 32, "hidden": 16, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 32}
DENSE = LanguageModelConfig(**SIZES, init_std=0.1)
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tie_embeddings=True, z_loss=1e-3),
    "window": replace(DENSE, sliding_window=5),
    "global": replace(
        DENSE,
        sliding_window=5,
        global_layers=GlobalLayers(every=2, rope_theta=50.0),
        variant=LayerVariant(sinks=True),
    ),
    "experts": replace(DENSE, experts=ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=16)),
}
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01, eps=1e-6)
NUM_STEPS = 3


class Uneven(SequenceSlices):
    """The first slice has half of the positions, as where attention costs most."""

    def bounds(self, length: int) -> tuple[int, ...]:
        rest = length - length // 2
        return (0, *(length // 2 + rest * part // (self.number - 1) for part in range(self.number)))


def batches(*, packed: bool = False) -> list[dict[str, np.ndarray]]:
    kept = ("tokens", "targets", "weights", *(("positions", "segments") if packed else ()))
    return [{name: batch[name] for name in kept} for batch in packed_batches(NUM_STEPS)]


@cache
def plain(model: str, *, packed: bool = False) -> Any:
    (chunk,) = language_model(MODELS[model]).split(1, packed=packed)
    start = jax.jit(chunk.init)(jax.random.key(1))
    return train_plainly([chunk], start, OPTIMIZER, batches(packed=packed), clip_norm=1.0)


def make(model: str, slices: SequenceSlices, *, stages: int = 2, packed: bool = False, **way: Any) -> Pipeline:
    chunks = language_model(MODELS[model]).split(way.pop("chunks", stages), packed=packed, slices=slices)
    num_chunks = len(chunks) // slices.number
    placement = Placement(tuple(c % stages for c in range(num_chunks) for _ in range(slices.number)))
    options = {"clip_norm": 1.0, "progress_deadline_s": 120, "window": 4} | way
    return make_pipeline(
        chunks,
        optimizer=OPTIMIZER,
        placement=placement,
        edges=sliced_chain(chain(num_chunks, 1), slices.number).edges,
        **options,
    )


def train(pipeline: Pipeline, *, packed: bool = False) -> tuple[list[float], Any]:
    with pipeline:
        state, results = pipeline.init(jax.random.key(1)), []
        for batch in batches(packed=packed):
            state, metrics = pipeline.step(state, batch)
            results.append(metrics)
        return [metrics.result().loss for metrics in results], jax.tree.map(np.array, pipeline.params(state))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "slices", "way"),
    [
        ("dense", SequenceSlices(2), {"hint": "fb"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("tied", Uneven(3), {"hint": "bfw"}),
                ("experts", Uneven(2), {"hint": "bf-deep", "remat": "full", "packed": True}),
                ("dense", SequenceSlices(2), {"hint": "bf-deep", "remat": "dots"}),
                ("window", SequenceSlices(4), {"hint": "fb"}),
                ("global", SequenceSlices(3), {"hint": "bfw", "packed": True}),
                ("dense", SequenceSlices(3), {"chunks": 4, "hint": "bfw", "packed": True}),
                ("dense", SequenceSlices(2), {"tensor": 2}),
                ("tied", SequenceSlices(2), {"data": 2, "reduce": "messages"}),
                ("dense", SequenceSlices(2), {"data": 2, "shard_optimizer": True}),
            ]
        ),
    ],
    ids=str,
)
def test_slices_train_what_the_plain_loop_does(model: str, slices: SequenceSlices, way: dict[str, Any]) -> None:
    packed = way.get("packed", False)
    assert_same_training(*train(make(model, slices, **way), packed=packed), *plain(model, packed=packed))


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"hint": "fb", "window": 1}, {"hint": "bfw"}], ids=str)
def test_bits_do_not_depend_on_the_order(way: dict[str, Any]) -> None:
    losses, params = train(make("tied", SequenceSlices(3), deterministic=True, hint="bf-deep"))
    others, found = train(make("tied", SequenceSlices(3), deterministic=True, **way))
    assert others == losses
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_a_stage_holds_the_state_of_one_slice() -> None:
    def held(slices: int) -> list[int]:
        with make("dense", SequenceSlices(slices)) as pipeline:
            states = pipeline.chunk_states(pipeline.init(jax.random.key(0)))
            return [sum(leaf.nbytes for leaf in jax.tree.leaves(vars(state))) for _, state in states]

    assert held(3) == held(1)


@pytest.mark.slow
def test_checkpoints_fit_other_numbers_of_slices_and_none(tmp_path: Path) -> None:
    def pipeline_of(slices: int) -> Pipeline:
        return make("tied", SequenceSlices(slices))

    def state_of(pipeline: Pipeline, state: PipelineState) -> Any:
        layers = {name: layer for _, held in pipeline.chunk_states(state) for name, layer in held.params.items()}
        return jax.tree.map(np.array, layers)

    def save(pipeline: Pipeline, state: PipelineState, number: int) -> None:
        saver = RunSaver(tmp_path / str(number), pipeline, every=1, minutes=None, keep=1)
        saver.save(state, {})
        saver.checkpoints.close()

    with pipeline_of(3) as pipeline:
        state, metrics = pipeline.step(pipeline.init(jax.random.key(1)), batches()[0])
        metrics.result()
        save(pipeline, state, 0)
        expected, (_, metrics) = state_of(pipeline, state), pipeline.step(state, batches()[1])
        next_loss = metrics.result().loss
    for number, slices in enumerate((1, 2)):
        with pipeline_of(slices) as pipeline:
            saver = RunSaver(tmp_path / str(number), pipeline, every=1, minutes=None, keep=1)
            found = saver.checkpoints.newest()
            assert found is not None
            state = saver.restore(found)
            jax.tree.map(np.testing.assert_array_equal, state_of(pipeline, state), expected)
            saver.checkpoints.close()
            save(pipeline, state, number + 1)
            _, metrics = pipeline.step(state, batches()[1])
            np.testing.assert_allclose(metrics.result().loss, next_loss, rtol=1e-6)


def test_bits_that_may_differ_are_not_verified() -> None:
    with make("dense", SequenceSlices(2)) as pipeline, pytest.raises(ValueError, match="add up their gradients in any"):
        pipeline.check_verifies()
    with make("dense", SequenceSlices(2), deterministic=True) as pipeline:
        pipeline.check_verifies()


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"capacity_factor": 1.0}, "experts have a capacity, which is of whole sequences"),
        ({"balance_coefficient": 0.01}, "experts add a loss of their router, which is of whole sequences"),
    ],
    ids=["capacity", "router loss"],
)
def test_models_whose_slices_would_compute_something_else_are_refused(experts: dict[str, Any], message: str) -> None:
    config = replace(DENSE, experts=ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=16, **experts))
    with pytest.raises(ValueError, match=message):
        language_model(config).split(2, slices=SequenceSlices(2))


@pytest.mark.slow
@pytest.mark.parametrize("consume", [{"consume": "strict"}, {}], ids=["strict", "foresight"])
def test_four_slices_on_four_stages_hold_seven_sixteenths_and_their_keys(consume: dict[str, Any]) -> None:
    """The published peaks: seven slices on the first stage, where 1F1B holds four microbatches."""
    config, number = LanguageModelConfig(**{**SIZES, "hidden": 32, "num_kv_heads": 1, "mlp_dim": 128}), 8
    rng = np.random.default_rng(0)
    tokens = rng.integers(32, size=(number, 2, 257)).astype(np.int32)
    batch = {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "weights": np.ones((number, 2, 256), np.float32)}

    def held(name: str, slices: int) -> int:
        """What microbatches take on the first stage; every stage is checked against its forecast."""
        request = ScheduleRequest(num_stages=4, num_microbatches=number, slices=slices)
        ordering = Ordering(schedule=build_schedule(name, request), **consume)
        chunks = language_model(config).split(4, slices=SequenceSlices(slices))
        with Pipeline(chunks, optimizer=OPTIMIZER, ordering=ordering) as pipeline:
            state = pipeline.init(jax.random.key(0))
            for _ in range(2):
                state, metrics = pipeline.step(state, batch)
            peaks = metrics.result().peak_memory_bytes
            for peak, forecast in zip(peaks, pipeline.forecast, strict=True):
                assert peak <= forecast.peak <= 1.1 * peak
            return peaks[0] - pipeline.forecast[0].fixed - pipeline.forecast[0].temporaries

    of_keys = 2 * 2 * 256 * config.size_per_head * 4  # two rows of a microbatch, in float32
    assert held("seq1f1b", 4) <= 7 / 16 * held("1f1b", 1) + 2 * of_keys
