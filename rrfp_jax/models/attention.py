"""Attention by the fastest implementation that the platform has for it.

On NVIDIA GPUs that is cuDNN's flash attention, by way of ``jax.nn.dot_product_attention``, where dtype, head size and
what is asked allow: what its forward keeps for the backward grows with the length of the text. Elsewhere XLA compiles
the formula as it stands, and keeps the scores of every token against every other.

Which one it is, is settled when a program is traced, so that forward and backward agree on what is kept.

Packed rows hold several samples, told apart by segment ids: a token looks only at tokens of its own id. The weight of
all others is exactly 0, so nothing of a sample shows in the bits of its neighbours. Padding is a segment like any
other, with id 0: each of its tokens looks at itself at least, and no row of the softmax is empty.
"""

import logging
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend

Implementation = Literal["xla", "cudnn"]

_CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
_CUDNN_HEAD_DIM = 128
"""The widest heads that cuDNN takes on every GPU that it supports, in multiples of 8."""


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    window: int | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Every token looks at itself and at earlier ones; scores and softmax are float32.

    ``query`` ``[batch, length, heads, head_dim]``, ``key`` and ``value`` ``[batch, length, kv_heads, head_dim]``, where
    ``kv_heads`` divides ``heads``; returns the shape and dtype of ``query``. With a ``window`` it looks at that many
    tokens, itself included; with ``segments``, int ``[batch, length]``, at those of its own id.
    """
    local = None if window is None or window >= query.shape[1] else (window - 1, 0)
    return _attention(query, key, value, segments, is_causal=True, local_window_size=local)


def full_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, segments: jax.Array | None = None
) -> jax.Array:
    """Every patch or frame looks at all others, those of its own id with ``segments``; otherwise the same."""
    return _attention(query, key, value, segments, is_causal=False)


def implementation(platform_version: str, dtype: jnp.dtype, head_dim: int) -> Implementation:
    """What a backend should run that describes itself so, for example ``cuda 12080``."""
    fits = dtype in _CUDNN_DTYPES and head_dim <= _CUDNN_HEAD_DIM and not head_dim % 8
    return "cudnn" if platform_version.startswith("cuda") and fits else "xla"


def _attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, **asked: Any
) -> jax.Array:
    choice = implementation(get_backend().platform_version, query.dtype, query.shape[-1])
    problem = (
        _refusal(query.shape, key.shape, query.dtype, segments is not None, **asked) if choice == "cudnn" else None
    )
    if problem is not None:
        _say_once(problem)
        choice = "xla"
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation=choice, **asked)


@cache
def _refusal(
    query: tuple[int, ...], key: tuple[int, ...], dtype: jnp.dtype, is_masked: bool, **asked: Any
) -> str | None:
    """Why cuDNN does not take these shapes, if it does not: older GPUs and versions do less, and so does a backward."""
    batch, length = query[:2]
    heads = [jax.ShapeDtypeStruct(shape, dtype) for shape in (query, key, key)]
    mask = jax.ShapeDtypeStruct((batch, 1, length, length), jnp.bool_) if is_masked else None

    def gradients(mask: Any, *heads: Any) -> Any:
        attention = partial(jax.nn.dot_product_attention, mask=mask, implementation="cudnn", **asked)
        mixed, pullback = jax.vjp(attention, *heads)
        return pullback(mixed)

    try:
        jax.eval_shape(gradients, mask, *heads)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None


@cache
def _say_once(problem: str) -> None:
    logging.getLogger(__name__).warning("attention is not fused, and takes more memory and time: %s", problem)
