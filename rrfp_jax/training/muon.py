"""Muon's direction: momentum, made nearly orthogonal by Newton-Schulz steps (Jordan et al. 2024), matrix by matrix.

An array of more than two dimensions is a stack of matrices, its last two dimensions: the experts of a layer are
orthogonalised each by itself. optax takes the steps; they need whole matrices, and programs see whole arrays wherever
these lie: where a mesh cuts a matrix, or replicas share the momentum, the compiler brings the parts together.
"""

import math
from typing import Any

import jax
import optax
from optax import contrib


def scale_by_muon(
    *, beta: float, nesterov: bool, num_steps: int, consistent_rms: float
) -> optax.GradientTransformation:
    """For arrays of two dimensions or more, ``[..., rows, columns]``, such as a product's ``[in, out]``.

    With ``consistent_rms`` the entries of an update have about this root mean square (Liu et al. 2025); with 0 its
    spectral norm is about ``sqrt(max(1, columns / rows))``.
    """

    def last_two(updates: Any) -> Any:
        return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(-2, -1), updates)

    def scaled(update: jax.Array) -> jax.Array:
        rows, columns = update.shape[-2:]
        by_rms = math.sqrt(max(rows, columns)) * consistent_rms
        return update * (by_rms or math.sqrt(max(1, columns / rows)))

    return optax.chain(
        contrib.scale_by_muon(beta=beta, nesterov=nesterov, ns_steps=num_steps, weight_dimension_numbers=last_two),
        optax.stateless(lambda updates, params: jax.tree.map(scaled, updates)),
    )
