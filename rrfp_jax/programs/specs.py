"""Shapes and dtypes as data: small helpers over ``jax.ShapeDtypeStruct``."""

from typing import Any

import jax
import jax.numpy as jnp

Specs = Any
"""A pytree of ``jax.ShapeDtypeStruct``."""


def spec_of(tree: Any) -> Specs:
    """The shapes of a pytree of arrays or specs, in the dtypes that JAX computes with; weak types are dropped."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)), tree)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is floating or complex: only such leaves have a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def gradient_spec(tree: Specs) -> Specs:
    """What the gradient of a pytree looks like: the same tree, with None in place of leaves that have no gradient."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)


def accumulator_spec(params: Specs) -> Specs:
    """Gradients are summed in float32, or in float64 where the parameters are."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)


def num_bytes(tree: Any) -> int:
    """Bytes of all leaves of a pytree of arrays or specs."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def describe(tree: Any) -> str:
    """For error messages: ``float32[4,128]``, several leaves joined by commas."""
    return ", ".join(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(tree)) or "nothing"
