"""A text that grows token by token in a cache: the logits, and the likeliest tokens, of whole forwards."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.models import ExpertsConfig, LanguageModelConfig
from rrfp_jax.models.config import (
    GlobalLayers,
    LatentAttentionConfig,
    LayerVariant,
    PredictAheadConfig,
    RopeScaling,
)
from rrfp_jax.models.cuts import plan_cut
from rrfp_jax.models.decoding import CachedDecoder, next_token, nucleus
from rrfp_jax.models.model import decoder_chunk

LENGTH, VOCAB = 12, 19
PLAIN = LanguageModelConfig(vocab_size=VOCAB, hidden=8, num_layers=2, num_heads=2, mlp_dim=8, init_std=0.4)
EVERYTHING = replace(
    PLAIN,
    num_kv_heads=1,
    head_dim=6,
    rope_scaling=RopeScaling(factor=4, original_max_positions=8),
    qkv_bias=True,
    qk_norm=True,
    sliding_window=3,
    global_layers=GlobalLayers(every=2, rope_theta=50.0),
    variant=LayerVariant(
        norm_offset=True,
        post_norms=True,
        scaled_embedding=True,
        query_scalar=5.0,
        sinks=True,
        output_bias=True,
        rotary_dim=4,
        interleaved=True,
    ),
    tie_embeddings=True,
    experts=ExpertsConfig(
        num_experts=4, experts_per_token=2, every=2, shared_mlp_dim=4, capacity_factor=0.5, biases=True
    ),
)


def without_capacity(config: LanguageModelConfig) -> LanguageModelConfig:
    if config.experts is None:
        return config
    return replace(config, experts=replace(config.experts, capacity_factor=None))


def whole_logits(config: LanguageModelConfig, params: Any, tokens: Any, prefix: str = "") -> Any:
    """Of every position, from the chunk that trains."""
    (plan,) = plan_cut(config.num_layers, num_chunks=1)
    chunk = decoder_chunk(without_capacity(config), plan, gives_logits=True, prefix=prefix)
    return chunk.apply(params, None, {"tokens": tokens}, key=None)


def initial(config: LanguageModelConfig, seed: int = 0) -> Any:
    (plan,) = plan_cut(config.num_layers, num_chunks=1)
    return decoder_chunk(config, plan).init(jax.random.key(seed))


def check(config: LanguageModelConfig, num_prompt: int, seed: int = 0) -> None:
    """A prompt in one pass, padded by garbage to the cache's end, then token by token."""
    params = initial(config, seed)
    tokens = jax.random.randint(jax.random.key(seed), (2, LENGTH), 0, VOCAB)
    decoder = CachedDecoder(config)

    @jax.jit
    def grown(params: Any, tokens: Any) -> Any:
        padded = tokens.at[:, num_prompt:].set(VOCAB - 1)
        vectors = decoder.embed(params, padded)
        stream, cache = decoder.decode_step(params, vectors, decoder.empty_cache(2, LENGTH), 0)
        first = decoder.logits(params, stream)[:, :num_prompt]

        def turn(cache: Any, at: Any) -> Any:
            token = jax.lax.dynamic_slice_in_dim(tokens, at, 1, axis=1)
            stream, cache = decoder.decode_step(params, decoder.embed(params, token), cache, at)
            return cache, decoder.logits(params, stream)[:, 0]

        _, rest = jax.lax.scan(turn, cache, jnp.arange(num_prompt, LENGTH))
        return jnp.concatenate([first, jnp.swapaxes(rest, 0, 1)], axis=1)

    expected = jax.jit(lambda params: whole_logits(config, params, tokens))(params)
    np.testing.assert_allclose(grown(params, tokens), expected, atol=1e-5 * float(jnp.abs(expected).max()))


def test_logits_with_the_cache_are_those_of_a_whole_forward() -> None:
    check(EVERYTHING, num_prompt=5)


@pytest.mark.slow
@pytest.mark.parametrize("value_dim", [2, 9])
def test_latent_attention_decodes_what_a_whole_forward_computes(value_dim: int) -> None:
    latent = LatentAttentionConfig(query_rank=5, kv_rank=3, plain_dim=4, rotary_dim=2, value_dim=value_dim)
    ahead = PredictAheadConfig()  # its layers are left out
    check(replace(PLAIN, latent_attention=latent, sliding_window=4, predict_ahead=ahead), num_prompt=5)


@st.composite
def configs(draw: st.DrawFn) -> LanguageModelConfig:
    heads = draw(st.sampled_from([1, 2, 4]))
    scaling = draw(st.sampled_from([None, RopeScaling(factor=8, original_max_positions=16)]))
    experts = draw(
        st.sampled_from(
            [
                None,
                ExpertsConfig(num_experts=3, experts_per_token=1),
                ExpertsConfig(num_experts=4, experts_per_token=3, renormalise=False, dense_layers=(0,)),
            ]
        )
    )
    return LanguageModelConfig(
        vocab_size=VOCAB,
        hidden=8,
        num_layers=draw(st.integers(2, 3)),
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])),
        head_dim=draw(st.sampled_from([2, 4, 10])),
        mlp_dim=12,
        rope_theta=draw(st.sampled_from([100.0, 10_000.0])),
        rope_scaling=scaling,
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([None, 1, 4, 50])),
        experts=experts,
        tie_embeddings=draw(st.booleans()),
        init_std=0.4,
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(configs(), st.integers(1, LENGTH), st.integers(0, 1000))
def test_logits_with_the_cache_are_those_of_whole_forwards_for_any_model(
    config: LanguageModelConfig, num_prompt: int, seed: int
) -> None:
    check(config, num_prompt, seed)


@given(st.lists(st.floats(-6, 6), min_size=7, max_size=7), st.sampled_from([1e-6, 0.2, 0.5, 0.9, 1.0]))
@settings(max_examples=60)
def test_the_nucleus_is_the_smallest_set_with_that_probability(logits: list[float], top_p: float) -> None:
    numbers = np.array([*logits, logits[0]], np.float32)  # two that are equal
    kept = np.isfinite(np.asarray(jax.jit(nucleus)(numbers, np.float32(top_p))))
    likely = np.exp(numbers.astype(np.float64) - numbers.max())
    likely /= likely.sum()
    assert kept.any()
    if not kept.all():
        assert likely[kept].min() >= likely[~kept].max()
    assert likely[kept].sum() >= top_p - 1e-5
    least = likely[kept].min()
    assert kept.sum() == 1 or likely[kept].sum() - least < top_p + 1e-5


def test_what_is_drawn_is_distributed_over_the_nucleus() -> None:
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def drawn(temperature: float, top_p: float) -> np.ndarray:
        draw = jax.vmap(lambda key: next_token(logits, key, temperature=temperature, top_p=top_p))
        return np.bincount(np.asarray(draw(keys)), minlength=4) / len(keys)

    np.testing.assert_allclose(drawn(1.0, 1.0), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(drawn(1.0, 0.7), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(drawn(0.5, 1.0), np.array([25, 9, 2.25, 0.25]) / 36.5, atol=0.03)
    np.testing.assert_array_equal(drawn(0.0, 0.1), [1, 0, 0, 0])
