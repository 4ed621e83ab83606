"""What runs once per chunk and step: the sum of shared gradients with the norm (R), and the optimizer update (U)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.shapes import holders


@dataclass(frozen=True)
class Tie:
    """Which layers a chunk shares with which chunks."""

    names: tuple[str, ...]
    """Its shared layers."""
    others: tuple[int, ...]
    """The chunks that it shares with, ascending and without itself."""
    own_position: int
    """Where it stands among them."""
    uncounted: frozenset[str]
    """Layers that are counted in their owner's norm."""

    def sums(self, accumulators: Any, others: tuple[Any, ...]) -> dict[str, Any]:
        """The shared layers' gradients, added up.

        ``others`` has the shared accumulators of the other chunks. Every holder adds up the same copies in the same
        order (ascending chunk), so all get identical bits.
        """
        copies = [*others[: self.own_position], accumulators, *others[self.own_position :]]
        return {name: ordered_sum([copy[name] for copy in copies if name in copy]) for name in self.names}

    def counted(self, layers: dict[str, Any]) -> dict[str, Any]:
        """The layers that this chunk's norm counts."""
        return {name: layer for name, layer in layers.items() if name not in self.uncounted}


def tie_of(chunks: Sequence[Chunk], index: int, sharing: Sequence[int]) -> Tie:
    """What chunk ``index`` shares; ``sharing`` are the chunks that it shares with, ascending and with itself."""
    names = tuple(sorted(chunks[index].shared))
    return Tie(
        names=names,
        others=tuple(chunk for chunk in sharing if chunk != index),
        own_position=tuple(sharing).index(index),
        uncounted=frozenset(name for name in names if holders(chunks, name)[0] != index),
    )


def reduce_function(tie: Tie) -> Callable[[Any, tuple[Any, ...]], tuple[dict[str, Any], jax.Array]]:
    """``reduce(accumulators, others) -> (sums of shared layers, squared_norm)`` for one chunk on one device."""

    def reduce(accumulators: Any, others: tuple[Any, ...]) -> tuple[dict[str, Any], jax.Array]:
        sums = tie.sums(accumulators, others)
        return sums, squared_norm(tie.counted(accumulators | sums))

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


def ordered_sum(trees: Sequence[Any]) -> Any:
    """The sum of some trees, from the first to the last."""
    total = trees[0]
    for tree in trees[1:]:
        total = jax.tree.map(jnp.add, total, tree)
    return total
