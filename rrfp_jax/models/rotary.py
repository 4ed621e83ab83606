"""Rotary position embeddings (Su et al. 2021): waves, turns, and heads that are turned by them."""

import math

import jax
import jax.numpy as jnp

from rrfp_jax.models.rope_scaling import LINEAR, YARN, RopeScaling


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


def wave_numbers(half: int, theta: float, scaling: RopeScaling | None = None) -> jax.Array:
    """Radians per token of each wave, float32 ``[half]``, after :class:`rrfp_jax.models.rope_scaling.RopeScaling`."""
    plain = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return plain
    if scaling.kind == LINEAR:
        return plain / scaling.factor
    kept = _kept_of_yarn(half, theta, scaling) if scaling.kind == YARN else _kept_of_llama3(plain, scaling)
    return plain * (kept + (1 - kept) / scaling.factor)


def _kept_of_llama3(plain: jax.Array, scaling: RopeScaling) -> jax.Array:
    """How much of each wave stays as it is, from 0 to 1."""
    own = scaling.settings
    low, high = own["low_freq_factor"], own["high_freq_factor"]
    return jnp.clip((own["original_max_positions"] * plain / (2 * math.pi) - low) / (high - low), 0, 1)


def _kept_of_yarn(half: int, theta: float, scaling: RopeScaling) -> jax.Array:
    """Likewise. The last number of a wave is taken as ``2 * half - 1``, as published weights expect."""
    own = scaling.settings

    def number(of_turns: float) -> float:
        """Of the wave, not whole, of which so many fit into the first training's texts."""
        return half * math.log(own["original_max_positions"] / (2 * math.pi * of_turns)) / math.log(theta)

    begin = max(math.floor(number(own["beta_fast"])), 0)
    end = min(math.ceil(number(own["beta_slow"])), 2 * half - 1)
    return 1 - jnp.clip((jnp.arange(half, dtype=jnp.float32) - begin) / ((end - begin) or 0.001), 0, 1)
