"""Rotary position embeddings (Su et al. 2021): the turns of waves, and heads that are turned by them."""

import jax
import jax.numpy as jnp

from rrfp_jax.models.rope_scaling import RopeScaling
from rrfp_jax.models.wave_numbers import wave_numbers


def rotate(x: jax.Array, theta: float, scaling: RopeScaling | None = None) -> jax.Array:
    """``x``, ``[batch, length, heads, head_dim]``, turned at positions 0, 1, ...

    Dimension ``i`` of the first half of a head is paired with dimension ``i`` of the second half, as Llama's published
    weights expect, and turned by ``position * theta ** (-2 i / head_dim)``. Angles and products are float32; the
    result has the dtype of ``x``.
    """
    return turned(x, *turns(jnp.arange(x.shape[1]), x.shape[-1] // 2, theta, scaling))


def turns(
    positions: jax.Array, half: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Sine and cosine of the angles at ``positions``, float32 ``[..., 1, half]``, the 1 for heads.

    Both are multiplied by the ``attention_factor`` of a scaling that has one.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * wave_numbers(half, theta, scaling)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    if scaling is None or scaling.attention_factor is None:
        return sin, cos
    return scaling.attention_factor * sin, scaling.attention_factor * cos


def turned(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """``x``, ``[..., length, heads, head_dim]``, turned by angles ``[..., length, 1, head_dim / 2]``."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
