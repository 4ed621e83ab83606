"""Rotary position embeddings (Su et al. 2021).

Published weights were trained with inverse frequencies in float32, and far into a text their last bit shows: at
position 10,000 it is a thousandth of a radian. So :func:`inv_freq` computes them on the host as ``transformers`` does,
operation by operation, and they are the same on every platform. Powers are float64's, rounded, since those of float32
differ from library to library.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rrfp_jax.models.config import LINEAR_ROPE, YARN_ROPE, RopeScaling


def inv_freq(half: int, theta: float, scaling: RopeScaling | None = None) -> NDArray[np.float32]:
    """Returns the radians per token of each wave, float32 ``[half]``, stretched as ``scaling`` says."""
    one = np.float32(1)
    # float32 and float64 where transformers has them: a wave may differ in no bit
    exponents = (np.arange(half, dtype=np.float32) / np.float32(half)).astype(np.float64)
    lengths = np.power(np.float64(np.float32(theta)), exponents).astype(np.float32)
    plain: NDArray[np.float32] = one / lengths
    if scaling is None:
        return plain
    factor, settings = np.float32(scaling.factor), scaling.settings
    if scaling.kind == LINEAR_ROPE:
        return plain / factor

    # both other kinds keep a part of each wave, from 0 to 1, as it is
    if scaling.kind == YARN_ROPE:
        begin, end = (
            half
            * math.log(settings["original_max_positions"] / (2 * math.pi * settings[num_turns]))
            / math.log(theta)  # number of the wave with these turns in the first training's texts, not whole
            for num_turns in ("beta_fast", "beta_slow")
        )
        # published weights expect 2 * half - 1 as the number of the last wave, although there are only half of them
        first, last = max(math.floor(begin), 0), min(math.ceil(end), 2 * half - 1)
        width = np.float32((last - first) or 0.001)
        kept = one - np.clip((np.arange(half, dtype=np.float32) - np.float32(first)) / width, 0, 1)
        return one / (factor * lengths) * (one - kept) + plain * kept
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    num_tokens = one / plain * np.float32(2 * math.pi)
    turns = one / num_tokens * np.float32(settings["original_max_positions"])
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return (one - kept) * plain / factor + kept * plain


def rope_tables(
    positions: jax.Array, half: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns sine and cosine of the angles at ``positions``, float32 ``[..., 1, half]``, the 1 for heads.

    Both are multiplied by the ``attention_factor`` of a scaling that has one.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * inv_freq(half, theta, scaling)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    if scaling is None or scaling.attention_factor is None:
        return sin, cos
    return scaling.attention_factor * sin, scaling.attention_factor * cos


def apply_rope(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """Turns ``x``, ``[..., length, heads, head_dim]``, by angles ``[..., length, 1, head_dim / 2]``.

    Dimension ``i`` of the first half of a head is paired with dimension ``i`` of the second half, as Llama's published
    weights expect. Products are float32; the result has the dtype of ``x``.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
