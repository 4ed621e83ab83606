"""Matrix products in float8, each operand scaled by its own largest magnitude (current scaling).

An operand is divided by its scale and rounded: activations and weights to e4m3, with three bits behind the point, and
gradients to e5m2, which has two but reaches further. Products add up in float32 and are multiplied by both scales
again, forwards and for both gradients; what is kept for the weight gradient is the rounded operand. Parameters, their
gradients and the optimizer never see float8.

A scale depends on nothing but its operand, so results do not depend on the order of microbatches, and there is no
state of scales that checkpoints would carry. Other rows of the microbatch do count, by their largest magnitude.

Scales are powers of two. Then division and multiplication are exact, and a result is the same wherever a compiler
multiplies by the scale; and floating-point numbers lose no precision by it. Infinity and NaN make the scale NaN, and
so all results: the step is then skipped as any other that is not finite.

Products that read the same input (:func:`joint_products`: queries, keys and values; gate and up) are one, as if their
matrices lay side by side: one scale for the matrices, one for the gradients. Otherwise the devices of ``tensor`` would
have to sum each input gradient by itself.

XLA makes kernels of NVIDIA GPUs for these operands from capability 8.9 on. On CPUs the rounded operands are multiplied
in the dtype of the result: the same rounding, and slower.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rrfp_jax.hardware import CPU
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.programs.splitting.joined import widens
from rrfp_jax.programs.target import Target, current_target

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_EXPONENTS = {E4M3: 8, E5M2: 15}
"""Exponents of the largest numbers, 448 and 57344, which are both 1.75 times a power of two."""
_LEAST_CAPABILITY = (8, 9)


def check_float8(target: Target) -> None:
    """Raises ValueError, with the remedy, for a device that has no products in float8, unless it is a CPU."""
    if target.platform != CPU and (target.capability or (0, 0)) < _LEAST_CAPABILITY:
        raise ValueError(
            f"{target.kind} has no matrix products in float8: leave model.fp8 out, or take NVIDIA GPUs of compute "
            "capability 8.9 or later, such as L4, H100, B200"
        )


def float8_notes(config: LanguageModelConfig, target: Target) -> list[str]:
    """Returns what a user should know before products in float8 are computed.

    Raises the ValueError of :func:`check_float8`.
    """
    if config.fp8 is None:
        return []
    check_float8(target)
    notes = []
    if target.platform == CPU:
        notes.append(
            f"fp8 is emulated: CPUs have no products in float8, so rounded operands are multiplied in "
            f"{config.compute_dtype}"
        )
    if config.num_sparse_layers:
        notes.append(
            f"fp8 leaves the products of experts in {config.compute_dtype}: their matrices are gathered for every "
            "microbatch, and would have to be rounded as often"
        )
    return notes


class Scaled(NamedTuple):
    """An operand of a product."""

    values: jax.Array
    scale: jax.Array | None
    """The number by which the values are to be multiplied, a float32 power of two; None: they are as they should be."""


def rounded(dtype: Any, *arrays: jax.Array) -> list[Scaled]:
    """Returns arrays in a float8 dtype, with the scale of the largest magnitude in any of them."""
    largest = reduce(jnp.maximum, [jnp.max(jnp.abs(array)).astype(jnp.float32) for array in arrays])
    # the least power of two that brings it to at most 1.75 * 2**exponent: a larger mantissa needs the next one
    bits = (jax.lax.bitcast_convert_type(largest, jnp.int32) + 0x1FFFFF) & 0x7F800000
    bits = jnp.maximum(bits - (_EXPONENTS[dtype] << 23), 1 << 23)
    scale = jnp.where(jnp.isfinite(largest), jax.lax.bitcast_convert_type(bits, jnp.float32), jnp.nan)
    return [Scaled((array * (1 / scale).astype(array.dtype)).astype(dtype), scale) for array in arrays]


def scaled_einsum(subscripts: str, left: Scaled, right: Scaled, dtype: Any) -> jax.Array:
    """Returns the sums of products of two operands, scaled back, in a dtype."""
    values = left.values, right.values
    if left.values.dtype.itemsize == 1 and current_target().platform == CPU:
        values = (values[0].astype(dtype), values[1].astype(dtype))
    return _scaled_back(jnp.einsum(subscripts, *values, preferred_element_type=dtype), left, right)


def _scaled_back(product: jax.Array, *operands: Scaled) -> jax.Array:
    # one after the other: the product of two small scales might be zero
    scales = [each.scale.astype(product.dtype) for each in operands if each.scale is not None]
    return reduce(jnp.multiply, scales, product)


def joint_products(x: jax.Array, matrices: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the products of ``x`` ``[..., in_dim]`` with matrices ``[in_dim, out_dim]``, in the dtype of ``x``."""
    check_float8(current_target())
    return _products(str(matrices[0].dtype), x, tuple(matrices))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(param_dtype: str, x: Any, matrices: Any) -> tuple[jax.Array, ...]:
    return _forward(param_dtype, x, matrices)[0]


def _forward(_: str, x: Any, matrices: Any) -> Any:
    (operand,), weights = rounded(E4M3, x), rounded(E4M3, *matrices)
    products = tuple(scaled_einsum("...k,kn->...n", operand, weight, x.dtype) for weight in weights)
    return products, (operand, weights)


def _backward(
    param_dtype: str, residuals: Any, grads: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    operand, weights = residuals
    dtype, gradients = grads[0].dtype, rounded(E5M2, *grads)
    # all have the same scales, so they are summed before they are scaled, and devices sum once
    unscaled = [
        scaled_einsum("...n,kn->...k", grad._replace(scale=None), weight._replace(scale=None), dtype)
        for grad, weight in zip(gradients, weights, strict=True)
    ]
    x_grad = _scaled_back(reduce(jnp.add, unscaled), gradients[0], weights[0])
    dtype_of_sum = jnp.float32 if widens() else dtype
    matrix_grads = (scaled_einsum("...k,...n->kn", operand, grad, dtype_of_sum) for grad in gradients)
    return x_grad, tuple(each.astype(param_dtype) for each in matrix_grads)


_products.defvjp(_forward, _backward)
