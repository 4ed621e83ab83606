"""Attention by the fastest implementation that the platform has for it.

On NVIDIA GPUs that is cuDNN's flash attention, by way of ``jax.nn.dot_product_attention``, where dtype, head size and
what is asked allow: what its forward keeps for the backward grows with the length of the text. Elsewhere XLA compiles
the formula as it stands, and keeps the scores of every token against every other.

Which one it is, is settled when a program is traced, so that forward and backward agree on what is kept.

Packed rows hold several samples, told apart by segment ids: a token looks only at tokens of its own id. That is said by
a bias on the scores, made once for all layers of a chunk (:func:`segment_bias`): unlike a mask, the formula keeps
nothing of it for the backward, and cuDNN keeps one. The weight of all other tokens is exactly 0, so nothing of a sample
shows in the bits of its neighbours. Padding is a segment like any other, with id 0: each of its tokens looks at itself
at least, and no row of the softmax is empty.
"""

import logging
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rrfp_jax.programs.target import Target, current_target

Implementation = Literal["xla", "cudnn"]

_CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
_CUDNN_HEAD_DIM = 128
"""The widest heads that cuDNN takes on every GPU that it supports, in multiples of 8."""
_UNSEEN = -(2.0**41)
"""Score of tokens that are not looked at: far below all others, and small enough for cuDNN to subtract two of them."""


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    window: int | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Every token looks at itself and at earlier ones; scores and softmax are float32.

    ``query`` ``[batch, length, heads, head_dim]``, ``key`` and ``value`` ``[batch, length, kv_heads, head_dim]``, where
    ``kv_heads`` divides ``heads``; returns the shape and dtype of ``query``. With a ``window`` it looks at that many
    tokens, itself included; with the ``bias`` of packed rows, at those of its own segment.
    """
    local = None if window is None or window >= query.shape[1] else (window - 1, 0)
    return _attention(query, key, value, bias, is_causal=True, local_window_size=local)


def full_attention(query: jax.Array, key: jax.Array, value: jax.Array, *, bias: jax.Array | None = None) -> jax.Array:
    """Every patch or frame looks at all others, with ``bias`` at those of its own segment; otherwise the same."""
    return _attention(query, key, value, bias, is_causal=False)


def cached_attention(
    query: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, *, window: int | None = None
) -> jax.Array:
    """As :func:`causal_attention`, for tokens at some ``positions`` of a text whose keys and values lie in a cache.

    ``query`` ``[batch, tokens, heads, head_dim]``, ``positions`` int ``[tokens]``; ``keys`` and ``values`` ``[batch,
    places, kv_heads, head_dim]``, the one at place ``p`` of position ``p``. Places behind a token's own may hold
    anything finite.
    """
    distance = positions[:, None] - jnp.arange(keys.shape[1])
    is_seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return jax.nn.dot_product_attention(query, keys, values, mask=is_seen[None, None], implementation="xla")


def segment_bias(segments: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """What to add to scores so that tokens look at their own segment: ``[batch, 1, length, length]`` of ``dtype``.

    ``segments`` are int ``[batch, length]``; ``dtype`` is that of the queries.
    """
    is_seen = segments[:, None, :, None] == segments[:, None, None, :]
    return jnp.where(is_seen, 0.0, _UNSEEN).astype(dtype)


def implementation(target: Target, dtype: jnp.dtype, head_dim: int) -> Implementation:
    """Returns the implementation that a target should run."""
    fits = dtype in _CUDNN_DTYPES and head_dim <= _CUDNN_HEAD_DIM and not head_dim % 8
    return "cudnn" if target.is_nvidia and fits else "xla"


def _attention(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, **asked: Any) -> jax.Array:
    target = current_target()
    choice = implementation(target, query.dtype, query.shape[-1])
    asked_of_cudnn = (target, query.shape, key.shape, query.dtype, bias is not None)
    problem = _refusal(*asked_of_cudnn, **asked) if choice == "cudnn" else None
    if problem is not None:
        _say_once(problem)
        choice = "xla"
    compute = even_attention if choice == "cudnn" else jax.nn.dot_product_attention
    return compute(query, key, value, bias, implementation=choice, **asked)


def even_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, *, is_causal: bool, **asked: Any
) -> jax.Array:
    """``jax.nn.dot_product_attention`` over an even length, as cuDNN's backward wants it.

    Odd rows, such as those with a class token, get one more position, which no other looks at.
    """
    length = query.shape[1]
    if length % 2:
        query, key, value = (jnp.pad(part, ((0, 0), (0, 1), (0, 0), (0, 0))) for part in (query, key, value))
        if bias is not None:
            bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=_UNSEEN)
        elif not is_causal:
            asked["key_value_seq_lengths"] = jnp.full(len(query), length, jnp.int32)
    return jax.nn.dot_product_attention(query, key, value, bias, is_causal=is_causal, **asked)[:, :length]


@cache
def _refusal(
    target: Target, query: tuple[int, ...], key: tuple[int, ...], dtype: jnp.dtype, is_biased: bool, **asked: Any
) -> str | None:
    """Why cuDNN does not take these shapes, if it does not: older GPUs and versions do less, and so does a backward."""
    del target  # a key of the cache: JAX asks for its capability
    batch, length = query[:2]
    heads = [jax.ShapeDtypeStruct(shape, dtype) for shape in (query, key, key)]
    bias = jax.ShapeDtypeStruct((batch, 1, length, length), dtype) if is_biased else None

    def gradients(bias: Any, *heads: Any) -> Any:
        mixed, pullback = jax.vjp(partial(even_attention, bias=bias, implementation="cudnn", **asked), *heads)
        return pullback(mixed)

    try:
        jax.eval_shape(gradients, bias, *heads)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None


@cache
def _say_once(problem: str) -> None:
    logging.getLogger(__name__).warning("attention is not fused, and takes more memory and time: %s", problem)
