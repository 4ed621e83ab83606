"""cuDNN's attention on CPU devices: JAX's own primitives, with the formula in the place of the kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

# What JAX asks of the machine before it traces cuDNN's attention; there is no public way to trace for another machine.
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.interpreters import mlir

from rrfp_jax.models import attention
from rrfp_jax.programs.target import Target, tracing_for

HOPPER = Target(platform="gpu", kind="NVIDIA H100 80GB HBM3", is_nvidia=True, capability=(9, 0))


@contextmanager
def cudnn_on_cpu(target: Target = HOPPER) -> Iterator[None]:
    """Traces within the block are for an NVIDIA GPU, and programs that are compiled from them run here."""
    for primitive, kernel in (
        (fused._dot_product_attention_fwd_p, _forward),
        (fused._dot_product_attention_bwd_p, _backward),
    ):
        mlir.register_lowering(primitive, mlir.lower_fun(kernel, multiple_results=True), platform="cpu")
    attention._cudnn_refusal.cache_clear()
    with mock.patch.object(fused, "check_cudnn_version", return_value=91_000), tracing_for(target):
        yield
    attention._cudnn_refusal.cache_clear()


def _forward(*operands: Any, is_training: bool, **params: Any) -> tuple[jax.Array, ...]:
    query, key, value, lengths = *operands[:3], operands[5]
    mixed = _formula(query, key, value, lengths, **params)
    statistics = jnp.zeros((query.shape[0], query.shape[2], query.shape[1]), jnp.float32)
    return (mixed, statistics) if is_training else (mixed,)


def _backward(*operands: Any, variadic_args: tuple[bool, bool], **params: Any) -> tuple[jax.Array, ...]:
    assert variadic_args == (False, False)  # no bias, and no gradient of one
    lengths, mixed_grad = operands[5], operands[12]
    return jax.vjp(lambda *heads: _formula(*heads, lengths, **params), *operands[:3])[1](mixed_grad)


def _formula(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array,
    *, scale: float, mask_type: Any, sliding_window_length: int | None, **params: Any,
) -> jax.Array:  # fmt: skip
    del params
    group, at = query.shape[2] // key.shape[2], jnp.arange(query.shape[1])
    key, value = (jnp.repeat(part, group, axis=2) for part in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * scale
    distance = at[:, None] - at
    is_seen = jnp.ones_like(distance, bool)[None, None]
    if mask_type == fused.MaskType.CAUSAL:
        is_seen &= (distance >= 0) & (distance < (sliding_window_length or len(at)))
    if mask_type == fused.MaskType.PADDING:
        is_seen &= (at < lengths[:, None])[:, None, None]
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value.astype(jnp.float32)).astype(query.dtype)
