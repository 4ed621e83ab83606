"""Stages of four devices with meshes of any axes train what the plain loop trains, and checkpoints move between them.

Microbatches have four rows and eight positions, so that all of these meshes cut them.
"""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.models import ExpertsConfig, LanguageModelConfig, language_model
from rrfp_jax.models.cuts import ContextCut
from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.schedules import ScheduleRequest, build_schedule, linear
from rrfp_jax.training.loop import RunSaver
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly

NUM_STEPS, NUM_MICROBATCHES, NUM_ROWS, LENGTH, VOCAB = 20, 4, 4, 8, 32
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01)
MESHES: dict[str, Any] = {
    "tensor 2 x fsdp 2": {"tensor": 2, "fsdp": 2},
    "fsdp 4": {"fsdp": 4},
    "expert 2 x fsdp 2": {"expert": 2, "fsdp": 2},
    "context 2 x tensor 2": {"context": 2, "tensor": 2},
    "another on each stage": [{"fsdp": 2, "expert": 2}, {"tensor": 2, "context": 2}],
}
WAYS = {
    "strict, fused": {"schedule": "1f1b", "consume": "strict"},
    "strict, split": {"schedule": "zb-h1", "consume": "strict"},
    "ready with foresight, fused": {"schedule": "1f1b"},
    "ready with foresight, split": {"schedule": "zb-h1"},
}
Result = tuple[list[float], Any]


@cache
def chunks_of(model: str, context: int = 1) -> list[Any]:
    """Two layers in two chunks with tied embeddings; the MLPs of both are experts, or plain."""
    experts = ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=16, balance_coefficient=0.1)
    config = LanguageModelConfig(
        vocab_size=VOCAB,
        hidden=16,
        num_layers=2,
        num_heads=2,
        mlp_dim=32,
        init_std=0.1,
        tie_embeddings=True,
        experts=experts if model == "experts" else None,
    )
    return language_model(config).split(2, context=ContextCut(devices=context) if context > 1 else None)


@cache
def make_batches() -> list[dict[str, np.ndarray]]:
    """Counting sequences; microbatches differ much in weight."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(NUM_STEPS):
        start = rng.integers(0, VOCAB, (NUM_MICROBATCHES, NUM_ROWS, 1))
        sequence = ((start + np.arange(LENGTH + 1)) % VOCAB).astype(np.int32)
        share = rng.random((NUM_MICROBATCHES, 1, 1))
        weights = (rng.random((NUM_MICROBATCHES, NUM_ROWS, LENGTH)) < share).astype(np.float32)
        batches.append({"tokens": sequence[..., :-1], "targets": sequence[..., 1:], "weights": weights})
    return batches


@cache
def plain(model: str) -> Result:
    """What the plain loop comes to."""
    params = {name: layer for chunk in chunks_of(model) for name, layer in chunk.init(jax.random.key(1)).items()}
    return train_plainly(chunks_of(model), params, OPTIMIZER, make_batches(), clip_norm=1.0)


def pipeline_on(mesh: str, way: str, model: str = "dense") -> Pipeline:
    options: dict[str, Any] = dict(WAYS[way])
    request = ScheduleRequest(num_stages=2, num_microbatches=NUM_MICROBATCHES)
    options["schedule"] = build_schedule(options["schedule"], request)
    axes = MESHES[mesh]
    pipeline: Pipeline = make_pipeline(
        chunks_of(model, axes.get("context", 1) if isinstance(axes, dict) else 1),
        placement=linear(2),
        mesh=axes,
        optimizer=OPTIMIZER,
        clip_norm=1.0,
        progress_deadline_s=240,
        **options,
    )
    return pipeline


def train(pipeline: Pipeline, state: PipelineState, batches: list[dict[str, np.ndarray]]) -> tuple[Any, list[float]]:
    results = []
    for batch in batches:
        state, metrics = pipeline.step(state, batch)
        results.append(metrics)
    return state, [metrics.result().loss for metrics in results]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("mesh", "model"),
    [*((mesh, "dense") for mesh in MESHES), ("expert 2 x fsdp 2", "experts"), ("another on each stage", "experts")],
)
def test_every_mesh_trains_what_the_plain_loop_does(mesh: str, model: str, way: str) -> None:
    with pipeline_on(mesh, way, model) as pipeline:
        state, losses = train(pipeline, pipeline.init(jax.random.key(1)), make_batches())
        params = jax.tree.map(np.array, pipeline.params(state))
    assert_same_training(losses, params, *plain(model))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_checkpoints_move_between_all_meshes(model: str, tmp_path: Path) -> None:
    """The state after half of the steps, saved from each mesh and restored into each, its own among them."""
    half, way = NUM_STEPS // 2, "ready with foresight, split"
    losses, params = plain(model)
    for mesh in MESHES:
        with pipeline_on(mesh, way, model) as pipeline:
            saver = RunSaver(tmp_path / mesh, pipeline, every=None, minutes=None, keep=1)
            state, first = train(pipeline, pipeline.init(jax.random.key(1)), make_batches()[:half])
            np.testing.assert_allclose(first, losses[:half], rtol=1e-6)
            saver.save(state, {})
            saver.checkpoints.close()
    for target in MESHES:
        for source in MESHES:
            with pipeline_on(target, way, model) as pipeline:
                saver = RunSaver(tmp_path / source, pipeline, every=None, minutes=None, keep=1)
                found = saver.checkpoints.newest()
                assert found is not None
                assert found.step == half
                state, rest = train(pipeline, saver.restore(found), make_batches()[half:])
                saver.checkpoints.close()
                assert_same_training(rest, jax.tree.map(np.array, pipeline.params(state)), losses[half:], params)
