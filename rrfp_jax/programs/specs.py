"""Shapes and dtypes as data: small helpers over ``jax.ShapeDtypeStruct``."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Specs = Any
"""A pytree of ``jax.ShapeDtypeStruct``."""


def spec_of(tree: Any) -> Specs:
    """Returns the shapes of a pytree of arrays or specs, in the dtypes that JAX computes with, without weak types.

    Raises ValueError for typed random keys, which can neither be sent nor saved.
    """

    def spec(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            place = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise ValueError(
                f"there are typed random keys, {leaf.dtype}{list(leaf.shape)}{place}, which cannot be sent or saved: "
                "give their numbers, jax.random.key_data(key), and make keys of them with jax.random.wrap_key_data"
            )
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map_with_path(spec, tree)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is floating or complex: only such leaves have a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def gradient_spec(tree: Specs) -> Specs:
    """Returns the shapes of the gradient of a pytree: the same tree, with None for leaves that have no gradient."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)


def accumulator_spec(params: Specs) -> Specs:
    """Returns the shapes of sums of gradients: in float32, or in float64 as the parameters, placed like these."""

    def sums(param: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = jnp.promote_types(param.dtype, jnp.float32)
        return jax.ShapeDtypeStruct(param.shape, dtype, sharding=param.sharding)

    return jax.tree.map(sums, params)


def num_bytes(tree: Any) -> int:
    """Returns the bytes of all leaves of a pytree of arrays or specs, on one of the devices that hold them."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def pick(layers: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the layers of these names."""
    return {name: layers[name] for name in names}


def spec_text(tree: Any) -> str:
    """Returns words for error messages: ``float32[4,128]``, several leaves joined by commas."""
    return ", ".join(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(tree)) or "nothing"
