"""Rows of several samples: each is what it would be alone, and none shows in the bits of its neighbours."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.models import LanguageModelConfig, RopeScaling, language_model
from rrfp_jax.models.config import GlobalLayers, LayerVariant
from tests.models.reference import make_leaves, reference_loss, run_chunks, small_config

LENGTHS = (4, 6, 5)
FAMILIES = {
    "llama": small_config(rope_scaling=RopeScaling(factor=8.0, original_max_positions=16)),
    "qwen": small_config(qk_norm=True, qkv_bias=True, tie_embeddings=True),
    "mistral": small_config(sliding_window=3),
    "gemma": small_config(
        sliding_window=3,
        global_layers=GlobalLayers(every=2, rope_theta=50.0),
        variant=LayerVariant(
            activation="gelu_tanh", norm_offset=True, post_norms=True, scaled_embedding=True, sinks=True
        ),
    ),
    "glm": small_config(qkv_bias=True, variant=LayerVariant(post_norms=True, rotary_dim=4, interleaved=True)),
    "partly turned": small_config(variant=LayerVariant(rotary_dim=2, query_scalar=5.0)),
}


def packed_leaves(config: LanguageModelConfig) -> dict[str, Any]:
    """Three samples in one row with two tokens of padding, and a row of one sample and much padding."""
    leaves = make_leaves(config, batch=2, length=17)
    leaves["segments"] = np.zeros((2, 17), np.int32)
    leaves["positions"] = np.tile(np.arange(17, dtype=np.int32), (2, 1))
    for row, lengths in enumerate([LENGTHS, (3,)]):
        for number, (start, length) in enumerate(zip(np.cumsum([0, *lengths]), lengths, strict=False)):
            leaves["segments"][row, start : start + length] = number + 1
            leaves["positions"][row, start:] = np.arange(17 - start)
    leaves["weights"] = leaves["weights"] * (leaves["segments"] > 0)
    return leaves


def logits(config: LanguageModelConfig, leaves: dict[str, Any], *, packed: bool) -> np.ndarray:
    """Of a model of four layers, ``[batch, length, vocab_size]``, by one token's loss for every target."""
    *chunks, head = language_model(config).split(layers_per_chunk=[2, 2, 0], packed=packed)
    params = [chunk.init(jax.random.key(0)) for chunk in (*chunks, head)]

    @jax.jit
    def losses(leaves: dict[str, Any]) -> jax.Array:
        hidden = run_chunks(chunks, params[:-1], leaves)
        targets = jnp.arange(config.vocab_size)

        def loss(vector: jax.Array, target: jax.Array) -> jax.Array:
            one = {"targets": target[None, None], "weights": jnp.ones((1, 1))}
            return head.apply(params[-1], vector[None, None], one, key=None)[0]

        return jax.vmap(jax.vmap(jax.vmap(loss, (None, 0)), (0, None)), (0, None))(hidden, targets)

    return -np.asarray(losses(leaves))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_is_what_it_is_alone(family):
    config = FAMILIES[family]
    leaves = packed_leaves(config)
    together = logits(config, leaves, packed=True)
    assert np.isfinite(together).all()
    for start, length in zip(np.cumsum([0, *LENGTHS]), LENGTHS, strict=False):
        own = {name: leaf[:1, start : start + length] for name, leaf in leaves.items()}
        np.testing.assert_allclose(
            together[:1, start : start + length], logits(config, own, packed=False), atol=1e-5, rtol=1e-5
        )


@pytest.mark.one_in(6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_sample_does_not_show_in_its_neighbours(family, compute_dtype):
    config = replace(FAMILIES[family], compute_dtype=compute_dtype)
    leaves = packed_leaves(config)
    is_second = (leaves["segments"] == 2) & (np.arange(2)[:, None] == 0)
    changed = leaves | {"tokens": np.where(is_second, (leaves["tokens"] + 1) % config.vocab_size, leaves["tokens"])}
    before, after = (logits(config, each, packed=True) for each in (leaves, changed))
    np.testing.assert_array_equal(before[~is_second], after[~is_second])
    assert np.abs(before[is_second] - after[is_second]).max() > 1e-2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_loss_equals_the_reference_and_padding_gives_no_nan(family):
    config = FAMILIES[family]
    chunks, leaves = language_model(config).split(1, packed=True), packed_leaves(config)
    assert chunks[0].leaves == ("tokens", "positions", "segments", "targets", "weights")
    params = [chunks[0].init(jax.random.key(0))]
    loss, gradients = jax.jit(jax.value_and_grad(lambda params: run_chunks(chunks, params, leaves)[0]))(params)
    assert float(loss) == pytest.approx(reference_loss(config, params[0], leaves)[0], rel=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_chunks_without_layers_read_no_positions():
    chunks = language_model(small_config()).split(layers_per_chunk=[0, 2, 2, 0], packed=True)
    assert [chunk.leaves for chunk in chunks] == [
        ("tokens",), ("positions", "segments"), ("positions", "segments"), ("targets", "weights"),
    ]  # fmt: skip
    assert chunks[1].own.kind == chunks[2].own.kind
