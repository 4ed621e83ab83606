"""Attention against the head-by-head reference."""

import jax
import numpy as np
import pytest
from flax import nnx

from rrfp_jax.models.decoder import Attention, rotate
from tests.models.reference import reference_attention, reference_rotate, small_config


def test_rotate_is_a_product_of_complex_numbers():
    x = np.random.default_rng(0).normal(size=(2, 50, 3, 8)).astype(np.float32)
    expected = np.empty_like(x)
    for b, t, h in np.ndindex(2, 50, 3):
        expected[b, t, h] = reference_rotate(x[b, t, h], t, 10_000.0)
    np.testing.assert_allclose(rotate(x, 10_000.0), expected, atol=2e-5)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_attention_equals_the_reference(num_kv_heads):
    config = small_config(num_kv_heads=num_kv_heads, rope_theta=100.0, init_std=0.5)
    attention = Attention(config, nnx.Rngs(0))
    x = np.random.default_rng(1).normal(size=(2, 9, config.hidden)).astype(np.float32)
    expected = reference_attention(config, nnx.to_pure_dict(nnx.state(attention)), x)
    np.testing.assert_allclose(attention(x), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_no_token_sees_a_later_one():
    config = small_config()
    attention = Attention(config, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 8, config.hidden))
    changed = x.at[:, 5:].add(1.0)
    before, after = attention(x), attention(changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 1e-3
