"""Pipelines whose sequences are cut over the mesh axis ``context`` train what the plain loop does."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.models.config import ExpertsConfig, GlobalLayers, LayerVariant
from rrfp_jax.models.cuts import ContextCut
from rrfp_jax.schedules import linear
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly

OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01, eps=1e-6)
"""With its usual eps, an expert's gradient of 1e-8 becomes a whole update, which its rounding decides."""
CONFIG = LanguageModelConfig(
    vocab_size=32, hidden=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=32, init_std=0.1, tie_embeddings=True
)
WINDOWED = replace(CONFIG, sliding_window=5)
MIXED = replace(
    CONFIG,
    sliding_window=5,
    global_layers=GlobalLayers(layers=(0,), rope_theta=50.0),
    variant=LayerVariant(sinks=True, rotary_dim=2, interleaved=True),
)
SPARSE = replace(CONFIG, experts=ExpertsConfig(num_experts=4, experts_per_token=2, capacity_factor=0.75))
LENGTH = 16


def make_batches(num_steps: int) -> list[dict[str, np.ndarray]]:
    """Rows of two or three samples and some padding; those that do not pack do not read where they begin."""
    rng = np.random.default_rng(0)
    shape = (4, 2, LENGTH)
    batches = []
    for _ in range(num_steps):
        segments = np.sort(rng.integers(1, 4, shape), axis=-1).astype(np.int32)
        segments[..., -2:] = 0
        starts = np.array([[[np.argmax(row == each) for each in row] for row in rows] for rows in segments])
        batches.append(
            {
                "tokens": rng.integers(0, 32, shape).astype(np.int32),
                "targets": rng.integers(0, 32, shape).astype(np.int32),
                "weights": (rng.random(shape) < 0.7).astype(np.float32),
                "segments": segments,
                "positions": (np.arange(LENGTH) - starts).astype(np.int32),
            }
        )
    return batches


@cache
def plain(config: LanguageModelConfig, *, packed: bool, num_steps: int) -> Any:
    """Initial parameters, and what the plain loop makes of them."""
    chunks = language_model(config).split(2, packed=packed)
    initial = make_pipeline(chunks, placement=linear(2), optimizer=OPTIMIZER)
    params = jax.tree.map(np.array, initial.params(initial.init(jax.random.key(1))))
    return train_plainly(chunks, params, OPTIMIZER, make_batches(num_steps), clip_norm=1.0)


def check(
    config: LanguageModelConfig,
    attention: str,
    mesh: dict[str, int],
    *,
    packed: bool = False,
    num_steps: int = 3,
    cut_over: int | None = None,
    **options: Any,
) -> None:
    context = ContextCut(devices=cut_over or mesh["context"], attention=attention)
    chunks = language_model(config).split(2, packed=packed, context=context)
    pipeline = make_pipeline(
        chunks, placement=linear(2), optimizer=OPTIMIZER, clip_norm=1.0, progress_deadline_s=60, mesh=mesh, **options
    )
    with pipeline:
        state, results = pipeline.init(jax.random.key(1)), []
        for batch in make_batches(num_steps):
            state, metrics = pipeline.step(state, batch)
            results.append(metrics.result().loss)
        params = jax.tree.map(np.array, pipeline.params(state))
    assert_same_training(results, params, *plain(config, packed=packed, num_steps=num_steps))


@pytest.mark.slow
def test_a_ring_beside_tensor_parallel_layers_in_packed_rows_with_a_split_backward() -> None:
    check(CONFIG, "ring", {"tensor": 2, "context": 2}, packed=True, hint="bfw")


BESIDE_TENSOR = {"mesh": {"tensor": 2, "context": 2}, "hint": "bfw"}
ALONE = {"mesh": {"context": 4}}
CUT_ROWS = {"mesh": {"context": 2, "fsdp": 2}, "remat": "full", "hint": "bfw"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "attention", "layout"),
    [
        (CONFIG, "ring", ALONE),
        (CONFIG, "gather", BESIDE_TENSOR | {"packed": True}),
        (CONFIG, "ring", CUT_ROWS),
        (CONFIG, "gather", {"mesh": {"context": 2}, "remat": "dots", "packed": True}),
        (CONFIG, "ring", {"mesh": {"context": 2}, "remat": "dots"}),
        (WINDOWED, "ring", BESIDE_TENSOR | {"packed": True}),
        (WINDOWED, "gather", ALONE),
        (MIXED, "ring", BESIDE_TENSOR | {"packed": True}),
        (MIXED, "gather", ALONE),
        (SPARSE, "ring", CUT_ROWS | {"packed": True}),
        (SPARSE, "gather", BESIDE_TENSOR),
    ],
    ids=str,
)
def test_every_layout_trains_what_the_plain_loop_does(
    config: LanguageModelConfig, attention: str, layout: dict[str, Any]
) -> None:
    check(config, attention, **layout)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["ring", "gather"])
def test_twenty_steps(attention: str) -> None:
    check(CONFIG, attention, {"tensor": 2, "context": 2}, num_steps=20, hint="bfw")


@pytest.mark.slow
def test_on_another_mesh_the_same_chunks_compute_the_same() -> None:
    check(CONFIG, "ring", {"fsdp": 2}, packed=True, cut_over=2)
