"""Adapters train what a plain loop trains with the same ones, and nothing else changes or is computed."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.models import AdaptersConfig, LanguageModelConfig, add_adapters, language_model
from rrfp_jax.models.adapters import merged_params
from rrfp_jax.models.cuts import SequenceSlices
from rrfp_jax.programs.chunk import ADAPTERS, microbatch_key, param_specs
from rrfp_jax.schedules import build_schedule, linear
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly

CONFIG = LanguageModelConfig(
    vocab_size=64, hidden=32, num_layers=4, num_heads=4, num_kv_heads=2, mlp_dim=48, tie_embeddings=True
)
ADAPTED = AdaptersConfig(rank=3, alpha=6, targets=("query", "value", "layers.[13].mlp.*"))
OPTIMIZER = optax.adamw(0.02, b2=0.99)
NUM_STEPS, NUM_MICROBATCHES, ROWS, LENGTH = 5, 4, 4, 12


def make_batch(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    tokens = draw.integers(0, CONFIG.vocab_size, (NUM_MICROBATCHES, ROWS, LENGTH + 1)).astype(np.int32)
    weights = draw.integers(0, 2, (NUM_MICROBATCHES, ROWS, LENGTH)).astype(np.float32)
    return {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights}


BATCHES = [make_batch(step) for step in range(NUM_STEPS)]


def trained(chunks: list[Any], **options: Any) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """The initial parameters, the losses and the final parameters of a pipeline."""
    options = {"placement": linear(len(chunks)), "optimizer": OPTIMIZER, "clip_norm": 1.0, "seed": 7, **options}
    with make_pipeline(chunks, **options, progress_deadline_s=60) as pipeline:
        state = pipeline.init(jax.random.key(0))
        initial = jax.tree.map(np.array, pipeline.params(state))
        losses = []
        for batch in BATCHES:
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics.result().loss)
        return initial, losses, jax.tree.map(np.array, pipeline.params(state))


def frozen_of(chunks: list[Any]) -> set[str]:
    return set().union(*(chunk.frozen for chunk in chunks))


@pytest.mark.parametrize(
    ("dropout", "options"),
    [
        pytest.param(0.25, {"hint": "bfw", "remat": "full"}, id="split, remat full, dropout"),
        pytest.param(0.0, {}, id="alone", marks=pytest.mark.slow),
        pytest.param(0.25, {"tensor": 2}, id="tensor 2, dropout", marks=pytest.mark.slow),
        pytest.param(0.25, {"data": 2, "hint": "bfw"}, id="replicas, split, dropout", marks=pytest.mark.slow),
        pytest.param(0.0, {"mesh": {"fsdp": 2}, "remat": "dots"}, id="fsdp 2", marks=pytest.mark.slow),
        pytest.param(0.0, {"data": 2, "shard_optimizer": True}, id="shared state", marks=pytest.mark.slow),
    ],
)
def test_four_stages_train_what_the_plain_loop_trains(dropout: float, options: dict[str, Any]) -> None:
    adapters = AdaptersConfig(rank=3, alpha=6, targets=ADAPTED.targets, dropout=dropout)
    chunks = add_adapters(language_model(CONFIG).split(4), adapters)
    initial, losses, params = trained(chunks, **options)
    frozen = frozen_of(chunks)
    expected = train_plainly(chunks, initial, OPTIMIZER, BATCHES, clip_norm=1.0, frozen=frozen, seed=7)
    assert_same_training(losses, params, *expected)
    for name in frozen:
        jax.tree.map(np.testing.assert_array_equal, params[name], initial[name])
    assert {name for name in params if name not in frozen} == {f"{ADAPTERS}layers.{n}" for n in range(4)}
    assert all(np.any(leaf) for name in params.keys() - frozen for leaf in jax.tree.leaves(params[name]))
