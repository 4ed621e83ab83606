"""Attention against the head-by-head reference."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from rrfp_jax.models import RopeScaling
from rrfp_jax.models._decoder import Attention, apply_rope, inv_freq, rope_tables, row_info
from rrfp_jax.programs.target import Target, tracing_for
from tests.models.encoder_reference import uneven
from tests.models.reference import reference_attention, reference_rotate, small_config


def rotate(x, theta, scaling=None):
    """The embedding at positions 0, 1, ..."""
    return apply_rope(x, *rope_tables(np.arange(x.shape[1]), x.shape[-1] // 2, theta, scaling))


def test_rotate_is_a_product_of_complex_numbers():
    x = np.random.default_rng(0).normal(size=(2, 50, 3, 8)).astype(np.float32)
    expected = np.empty_like(x)
    for b, t, h in np.ndindex(2, 50, 3):
        expected[b, t, h] = reference_rotate(x[b, t, h], t, 10_000.0)
    np.testing.assert_allclose(rotate(x, 10_000.0), expected, atol=2e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_attention_equals_the_reference(num_kv_heads, platform):
    """Where programs are traced for a TPU too, whose projections make heads themselves."""
    config = small_config(num_kv_heads=num_kv_heads, rope_theta=100.0, init_std=0.5, qkv_bias=True)
    attention = Attention(config, nnx.Rngs(0))
    for layer in (attention.query, attention.key, attention.value):
        layer.bias[...] = np.linspace(-1, 1, layer.bias.size, dtype=np.float32)
    x = np.random.default_rng(1).normal(size=(2, 9, config.hidden)).astype(np.float32)
    expected = reference_attention(config, nnx.to_pure_dict(nnx.state(attention)), x)
    with tracing_for(Target(platform=platform, kind=platform)):
        np.testing.assert_allclose(attention(x), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=40)
YARN = RopeScaling(kind="yarn", factor=8.0, original_max_positions=40, beta_fast=4.0, beta_slow=0.25)


@pytest.mark.parametrize("scaling", [SCALING, YARN], ids=["llama3", "yarn"])
def test_waves_are_stretched_as_published(scaling):
    """Below, between and above the two bounds."""
    x = np.random.default_rng(0).normal(size=(1, 40, 1, 16)).astype(np.float32)
    expected = np.stack([reference_rotate(x[0, t, 0], t, 100.0, scaling) for t in range(40)])
    np.testing.assert_allclose(rotate(x, 100.0, scaling)[0, :, 0], expected, atol=2e-5)
    factors = 100.0 ** (-np.arange(8) / 8) / inv_freq(8, 100.0, scaling)
    assert factors[0] == pytest.approx(1)
    assert factors[-1] == pytest.approx(8)
    assert any(1.1 < factor < 7.9 for factor in factors)


def test_a_linear_stretch_is_that_of_all_waves():
    x = np.random.default_rng(0).normal(size=(1, 9, 1, 16)).astype(np.float32)
    turned = rotate(x, 100.0, RopeScaling(kind="linear", factor=4.0))[0, :, 0]
    np.testing.assert_allclose(turned[8], rotate(x[:, 6:], 100.0)[0, 2, 0], atol=1e-6)  # 8 / 4 = 2
    expected = np.stack([reference_rotate(x[0, t, 0], t / 4, 100.0) for t in range(9)])
    np.testing.assert_allclose(turned, expected, atol=1e-5)


def test_yarn_gives_queries_and_keys_a_factor():
    x = np.ones((1, 1, 1, 4), np.float32)
    assert rotate(x, 100.0, YARN)[0, 0, 0, 0] == pytest.approx(0.1 * np.log(8) + 1)
    assert rotate(x, 100.0, replace(YARN, attention_factor=1.5))[0, 0, 0, 0] == pytest.approx(1.5)


@pytest.mark.parametrize(
    "switches",
    [{"qkv_bias": True}, {"qk_norm": True}, {"sliding_window": 1}, {"sliding_window": 4}, {"sliding_window": 99},
     {"rope_scaling": SCALING, "rope_theta": 100.0}, {"rope_scaling": YARN, "rope_theta": 100.0}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("is_packed", [False, True])
def test_switches_equal_the_reference(switches, is_packed):
    config = small_config(init_std=0.5, **switches)
    attention = Attention(config, nnx.Rngs(0))
    params = uneven(nnx.to_pure_dict(nnx.state(attention)))
    nnx.update(attention, params)
    x = np.random.default_rng(1).normal(size=(2, 9, config.hidden)).astype(np.float32)
    segments = np.array([[1, 1, 2, 2, 2, 2, 2, 2, 3], [5, 5, 5, 5, 5, 5, 0, 0, 0]], np.int32)
    positions = np.array([[0, 1, 0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 4, 5, 0, 1, 2]], np.int32)
    leaves = {"positions": positions, "segments": segments} if is_packed else {}
    rows = row_info(config, 9, **leaves) if is_packed else None
    expected = reference_attention(config, params, x, **leaves)
    np.testing.assert_allclose(attention(x, rows), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_no_token_sees_a_later_one():
    config = small_config()
    attention = Attention(config, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 8, config.hidden))
    changed = x.at[:, 5:].add(1.0)
    before, after = attention(x), attention(changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 1e-3
