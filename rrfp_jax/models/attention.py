"""Causal attention by the fastest implementation that the platform has for it.

On NVIDIA GPUs that is cuDNN's flash attention, by way of ``jax.nn.dot_product_attention``, where dtype and head size
allow: what its forward keeps for the backward grows with the length of the text. Elsewhere XLA compiles the formula as
it stands, and keeps the scores of every token against every other.

Which one it is, is settled when a program is traced, so that forward and backward agree on what is kept.
"""

import logging
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend

Implementation = Literal["xla", "cudnn"]

_CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
_CUDNN_HEAD_DIM = 128
"""The widest heads that cuDNN takes on every GPU that it supports, in multiples of 8."""


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Every token looks at itself and at earlier ones; scores and softmax are float32.

    ``query`` ``[batch, length, heads, head_dim]``, ``key`` and ``value`` ``[batch, length, kv_heads, head_dim]``, where
    ``kv_heads`` divides ``heads``; returns the shape and dtype of ``query``.
    """
    choice = implementation(get_backend().platform_version, query.dtype, query.shape[-1])
    if choice == "cudnn" and (problem := _refusal(query.shape, key.shape, query.dtype)) is not None:
        _say_once(problem)
        choice = "xla"
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=choice)


def implementation(platform_version: str, dtype: jnp.dtype, head_dim: int) -> Implementation:
    """What a backend should run that describes itself so, for example ``cuda 12080``."""
    fits = dtype in _CUDNN_DTYPES and head_dim <= _CUDNN_HEAD_DIM and not head_dim % 8
    return "cudnn" if platform_version.startswith("cuda") and fits else "xla"


@cache
def _refusal(query: tuple[int, ...], key: tuple[int, ...], dtype: jnp.dtype) -> str | None:
    """Why cuDNN does not take these shapes, if it does not: older GPUs and versions do less."""
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape in (query, key, key)]
    try:
        jax.eval_shape(
            lambda *heads: jax.nn.dot_product_attention(*heads, is_causal=True, implementation="cudnn"), *specs
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None


@cache
def _say_once(problem: str) -> None:
    logging.getLogger(__name__).warning("attention is not fused, and takes more memory and time: %s", problem)
