"""Models with layers of several kinds: they train what the plain loop does, and layers of a kind share programs."""

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rrfp_jax.models import LanguageModelConfig, language_model
from rrfp_jax.models.config import ExpertsConfig, GlobalLayers, LayerVariant, RopeScaling
from rrfp_jax.programs.sameness import identity
from rrfp_jax.schedules import linear
from tests.pipelines import make_pipeline
from tests.plain_loop import assert_same_training, train_plainly
from tests.test_pipeline_context import make_batches

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden": 16, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 32, "init_std": 0.1,
}  # fmt: skip
FAMILIES = {
    "gemma3": LanguageModelConfig(
        **SIZES,
        qk_norm=True,
        sliding_window=5,
        global_layers=GlobalLayers(every=2, rope_theta=1e6, rope_scaling=RopeScaling(kind="linear", factor=8)),
        variant=LayerVariant(
            activation="gelu_tanh", norm_offset=True, post_norms=True, scaled_embedding=True, query_scalar=7.0
        ),
        tie_embeddings=True,
    ),
    "gpt_oss": LanguageModelConfig(
        **SIZES,
        rope_scaling=RopeScaling(kind="yarn", factor=4, original_max_positions=8, truncate=False),
        qkv_bias=True,
        sliding_window=5,
        global_layers=GlobalLayers(every=2),
        variant=LayerVariant(sinks=True, output_bias=True),
        experts=ExpertsConfig(num_experts=4, experts_per_token=2, biases=True, swiglu_limit=0.05),
    ),
    "glm4": LanguageModelConfig(
        **SIZES,
        head_dim=6,
        qkv_bias=True,
        variant=LayerVariant(post_norms=True, rotary_dim=4, interleaved=True),
    ),
}
OPTIMIZER = optax.adamw(3e-3, weight_decay=0.01, eps=1e-3)
"""The large epsilon keeps the rounding of the smallest gradients from deciding the direction of their update."""
NUM_STEPS = 3


def batches(*, packed: bool) -> list[dict[str, np.ndarray]]:
    kept = ("tokens", "targets", "weights", *(("positions", "segments") if packed else ()))
    return [{name: batch[name] for name in kept} for batch in make_batches(NUM_STEPS)]


@cache
def plain(family: str, *, packed: bool) -> Any:
    (chunk,) = language_model(FAMILIES[family]).split(1, packed=packed)
    start = jax.jit(chunk.init)(jax.random.key(1))
    return train_plainly([chunk], start, OPTIMIZER, batches(packed=packed), clip_norm=1.0)


def _from_1(params: Any) -> Any:
    """Returns parameters with 1 added to scales and biases: those that begin at 0 have no size to compare with."""
    return jax.tree.map_with_path(lambda path, leaf: leaf + path[-1].key.endswith(("scale", "bias")), params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        {"hint": "bfw"},
        {"layers_per_chunk": [2.5, 1.5, 3.5, 0.5], "packed": True},
        {"mesh": {"tensor": 2}, "remat": "full"},
        {"mesh": {"fsdp": 2}, "hint": "bfw", "remat": "dots"},
        {"mesh": {"expert": 2}},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_four_stages_train_what_the_plain_loop_does(family: str, way: dict[str, Any]) -> None:
    way = dict(way)
    packed, counts = way.pop("packed", False), way.pop("layers_per_chunk", None)
    chunks = language_model(FAMILIES[family]).split(None if counts else 4, layers_per_chunk=counts, packed=packed)
    options = {"placement": linear(4), "optimizer": OPTIMIZER, "clip_norm": 1.0, "progress_deadline_s": 120} | way
    with make_pipeline(chunks, **options) as pipeline:
        state, losses = pipeline.init(jax.random.key(1)), []
        for batch in batches(packed=packed):
            state, metrics = pipeline.step(state, batch)
            losses.append(metrics.result().loss)
        params = jax.tree.map(np.array, pipeline.params(state))
    expected_losses, expected = plain(family, packed=packed)
    assert_same_training(losses, _from_1(params), expected_losses, _from_1(expected))


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_chunks_with_layers_of_the_same_kinds_are_one(family: str) -> None:
    """Two layers a chunk are a local and a global one, in the middle; one layer a chunk makes two kinds of chunks."""
    for num_chunks, num_kinds in ((4, 1), (8, 2)):
        chunks = language_model(FAMILIES[family]).split(num_chunks)
        assert len({identity(chunk.apply.function) for chunk in chunks[1:-1]}) == num_kinds
