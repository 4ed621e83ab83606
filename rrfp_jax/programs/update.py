"""What runs once per chunk and step: the sum of shared gradients with the norm (R), and the optimizer update (U)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax


def reduce_function(
    names: Sequence[str], own_position: int, uncounted: frozenset[str]
) -> Callable[[Any, tuple[Any, ...]], tuple[dict[str, Any], jax.Array]]:
    """``reduce(accumulators, others) -> (sums, squared_norm)`` for one chunk.

    ``names`` are its shared layers, ``others`` the shared accumulators of the chunks that it shares with, ascending and
    without itself; it stands at ``own_position`` among them. Every holder adds up the same copies in the same order
    (ascending chunk), so all get identical bits. Layers in ``uncounted`` are counted in their owner's norm.
    """

    def reduce(accumulators: Any, others: tuple[Any, ...]) -> tuple[dict[str, Any], jax.Array]:
        copies = [*others[:own_position], accumulators, *others[own_position:]]
        sums = {name: _sum([copy[name] for copy in copies if name in copy]) for name in names}
        counted = {name: sums.get(name, layer) for name, layer in accumulators.items() if name not in uncounted}
        return sums, squared_norm(counted)

    return reduce


def squared_norm(tree: Any) -> jax.Array:
    """The float32 sum of the squares of all leaves, leaf by leaf; not finite if any element is not."""
    total = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(tree):
        total += jnp.sum(jnp.square(leaf)).astype(jnp.float32)
    return total


def update_function(optimizer: optax.GradientTransformation) -> Callable[..., tuple[Any, Any, Any]]:
    """``update(params, optimizer_state, accumulators, scale, apply)``, which returns the first three anew.

    Gradients are ``accumulators * scale`` in the dtype of the parameters; accumulators come back as zeros. Where
    ``apply`` is False, parameters and state come back bit for bit, whatever the accumulators hold.
    """

    def update(params: Any, state: Any, accumulators: Any, scale: jax.Array, apply: jax.Array) -> tuple[Any, Any, Any]:
        grads = jax.tree.map(lambda a, p: (a * scale.astype(a.dtype)).astype(p.dtype), accumulators, params)
        updates, new_state = optimizer.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        params, state = jax.tree.map(
            lambda new, old: jax.lax.select(apply, new, old), (new_params, new_state), (params, state)
        )
        return params, state, jax.tree.map(jnp.zeros_like, accumulators)

    return update


def _sum(copies: list[Any]) -> Any:
    total = copies[0]
    for copy in copies[1:]:
        total = jax.tree.map(jnp.add, total, copy)
    return total
