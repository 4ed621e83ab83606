"""How far rotary embeddings turn per token, wave by wave: from a configuration alone, on the host.

Published weights were trained with waves in float32, and far into a text their last bit shows: at position 10,000 it is
a thousandth of a radian. So they are computed here as ``transformers`` does, operation by operation, and are the same
on every platform. Powers are float64's, rounded, since those of float32 differ from library to library.
"""

import math

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.models.rope_scaling import LINEAR, YARN, RopeScaling

Waves = NDArray[np.float32]
"""``[half]``"""


def wave_numbers(half: int, theta: float, scaling: RopeScaling | None = None) -> Waves:
    """Radians per token of each wave, float32 ``[half]``, after :class:`rrfp_jax.models.rope_scaling.RopeScaling`."""
    exponents = (np.arange(half, dtype=np.float32) / np.float32(half)).astype(np.float64)
    lengths = np.power(np.float64(np.float32(theta)), exponents).astype(np.float32)
    plain: Waves = np.float32(1) / lengths
    if scaling is None:
        return plain
    factor = np.float32(scaling.factor)
    if scaling.kind == LINEAR:
        return plain / factor
    if scaling.kind == YARN:
        kept = _kept_of_yarn(half, theta, scaling)
        return np.float32(1) / (factor * lengths) * (np.float32(1) - kept) + plain * kept
    kept = _kept_of_llama3(plain, scaling)
    return (np.float32(1) - kept) * plain / factor + kept * plain


def _kept_of_llama3(plain: Waves, scaling: RopeScaling) -> Waves:
    """How much of each wave stays as it is, from 0 to 1."""
    own = scaling.settings
    low, high = own["low_freq_factor"], own["high_freq_factor"]
    in_tokens = np.float32(1) / plain * np.float32(2 * math.pi)
    num_turns = np.float32(1) / in_tokens * np.float32(own["original_max_positions"])
    return np.clip((num_turns - np.float32(low)) / np.float32(high - low), 0, 1)


def _kept_of_yarn(half: int, theta: float, scaling: RopeScaling) -> Waves:
    """Likewise. The last number of a wave is taken as ``2 * half - 1``, as published weights expect."""
    own = scaling.settings

    def number(of_turns: float) -> float:
        """Of the wave, not whole, of which so many fit into the first training's texts."""
        return half * math.log(own["original_max_positions"] / (2 * math.pi * of_turns)) / math.log(theta)

    begin = max(math.floor(number(own["beta_fast"])), 0)
    end = min(math.ceil(number(own["beta_slow"])), 2 * half - 1)
    width = np.float32((end - begin) or 0.001)
    return np.float32(1) - np.clip((np.arange(half, dtype=np.float32) - np.float32(begin)) / width, 0, 1)
