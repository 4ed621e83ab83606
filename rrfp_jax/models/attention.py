"""Causal grouped-query attention with rotary embeddings."""

import jax
import jax.numpy as jnp
from flax import nnx

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.layers import projection


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al. 2021) of ``x``, ``[batch, length, heads, head_dim]``, at positions 0, 1, ...

    Dimension ``i`` of the first half of a head is paired with dimension ``i`` of the second half, as Llama's published
    weights expect, and turned by ``position * theta ** (-2 i / head_dim)``. Angles and products are float32; the
    result has the dtype of ``x``.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    wave_numbers = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * wave_numbers
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(nnx.Module):
    """Every token looks at itself and at earlier ones, ``[batch, length, hidden] -> [batch, length, hidden]``.

    Query head ``h`` reads key and value head ``h // (num_heads / num_kv_heads)`` (Ainslie et al. 2023). Scores and
    softmax are float32.
    """

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        self.head_dim = config.size_per_head
        self.rope_theta = config.rope_theta
        query_dim = config.num_heads * self.head_dim
        key_dim = config.num_key_value_heads * self.head_dim
        self.query = projection(config, config.hidden, query_dim, rngs)
        self.key = projection(config, config.hidden, key_dim, rngs)
        self.value = projection(config, config.hidden, key_dim, rngs)
        self.output = projection(config, query_dim, config.hidden, rngs, to_residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[batch, length, hidden]`` to the same shape and dtype."""
        query = rotate(self._heads(self.query(x)), self.rope_theta)
        key = rotate(self._heads(self.key(x)), self.rope_theta)
        mixed = jax.nn.dot_product_attention(query, key, self._heads(self.value(x)), is_causal=True)
        return self.output(mixed.reshape(*x.shape[:-1], -1))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)
