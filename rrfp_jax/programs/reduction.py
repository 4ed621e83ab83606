"""The functions of R and U of a chunk: the sum of gradients with its norm, and the optimizer's step.

Nothing is compiled here.

R adds up the copies of a shared layer over the chunks that hold it, and every gradient over the replicas of the stage
where there are several. On several devices each looks at its own share, in the manner of ``shard_map``. So the
gradients of the replicas, which differ, may come in as one array that is replicated in name only.

Order of sums
-------------
The copies of a shared layer must end with equal bits on different stages, and a deterministic run must not depend on
the algorithm of a collective nor on which process holds which device. There the terms are added in ascending order,
first chunk by chunk within a replica, then replica by replica: every replica collects all terms of its share of the
elements, adds them up and hands the sums round, so that no device holds a large gradient more than a few times. All
holders of a shared layer add: sums from one of them would be as many bytes as terms to all, and would leave only when
the terms had come and the replicas had met.
Elsewhere the collective adds, and gives all replicas the same bits, since each element is added up once. The norm is
always added in order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.shapes import holders
from rrfp_jax.programs.shardings import DATA, WHOLE, axes_at, axes_of_spec

_SMALL_BYTES = 64 << 10
"""Bytes up to which one collective that brings more costs less than two."""


@dataclass(frozen=True)
class Tie:
    """The layers that a chunk shares, and the chunks with which it shares them."""

    names: tuple[str, ...]
    """The shared layers that train."""
    sharing: tuple[int, ...]
    """The chunks that it shares with, ascending and with itself."""
    own_position: int
    """The position of the chunk among them."""
    uncounted: frozenset[str]
    """Layers that are counted in their owner's norm."""

    @property
    def others(self) -> tuple[int, ...]:
        """The chunks that it shares with, without itself."""
        return self.of_others(self.sharing)

    def of_others(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the entries of the other chunks, given one entry per chunk of ``sharing``."""
        return (*entries[: self.own_position], *entries[self.own_position + 1 :])

    def sums(self, accumulators: Any, others: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the shared layers' gradients, added up.

        ``others`` has the shared accumulators of the other chunks. Every holder adds up the same copies in the same
        order (ascending chunk), so all get identical bits.
        """
        copies = [*others[: self.own_position], accumulators, *others[self.own_position :]]
        return {name: _ordered_sum([copy[name] for copy in copies if name in copy]) for name in self.names}

    def counted(self, layers: dict[str, Any]) -> dict[str, Any]:
        """Returns the layers that this chunk's norm counts."""
        return {name: layer for name, layer in layers.items() if name not in self.uncounted}


def tie_of(chunks: Sequence[Chunk], index: int, sharing: Sequence[int]) -> Tie:
    """Returns the tie of chunk ``index``; ``sharing`` are the chunks that it shares with, ascending and with itself."""
    names = tuple(sorted(chunks[index].tied))
    uncounted = frozenset(name for name in names if holders(chunks, name)[0] != index)
    return Tie(names, tuple(sharing), tuple(sharing).index(index), uncounted)


def reduce_function(
    tie: Tie,
    mesh: Mesh | None,
    partition: dict[str, Any],
    partitions_of_others: tuple[Any, ...],
    *,
    shares: dict[str, Any] | None = None,
    ordered: bool = False,
) -> Callable[[Any, tuple[Any, ...]], tuple[dict[str, Any], jax.Array]]:
    """Returns ``reduce(accumulators, others) -> (reduced, squared_norm)`` for one chunk.

    Args:
        mesh: of a unit, or of a stage (with the axis ``data`` too), whose replicas are added up;
            None for a unit of one device.
        partition: how the accumulators are cut, a ``PartitionSpec`` for each.
        partitions_of_others: the same for the shared accumulators of each chunk of ``tie.others``.
        shares: how the reduced gradients are cut; None: as the accumulators.
        ordered: add up replicas in order.
    """
    at = partition if shares is None else shares

    def reduce(accumulators: Any, others: tuple[Any, ...]) -> tuple[dict[str, Any], jax.Array]:
        sums = tie.sums(accumulators, others)
        layers = accumulators | sums
        if mesh is not None and DATA in mesh.axis_names:
            layers = {
                name: jax.tree.map(partial(_over_replicas, ordered=ordered or name in sums), layer, at[name])
                for name, layer in layers.items()
            }
        return layers, _squared_norm(tie.counted(layers), tie.counted(at))

    if mesh is None:
        return reduce
    in_specs, out_specs = (partition, partitions_of_others), (at, WHOLE)
    return jax.shard_map(reduce, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def update_function(optimizer: optax.GradientTransformation) -> Callable[..., tuple[Any, Any, Any]]:
    """Returns ``update(params, optimizer_state, accumulators, scale, apply)``, which returns the first three anew.

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


def _over_replicas(gradient: jax.Array, share: PartitionSpec, *, ordered: bool) -> jax.Array:
    """Returns the sum over all replicas, or this replica's share of it."""
    cut = next((dim for dim in range(len(share)) if DATA in axes_at(share, dim)), None)
    if ordered:
        return _ordered_over_replicas(gradient) if cut is None else _ordered_sum(list(_own_terms(gradient, cut)))
    if cut is None:
        return jax.lax.psum(gradient, DATA)
    return jax.lax.psum_scatter(gradient, DATA, scatter_dimension=cut, tiled=True)


def _ordered_over_replicas(gradient: jax.Array) -> jax.Array:
    """Returns the sum over all replicas, in order.

    Each replica adds up all terms of a small gradient, and of a large one the terms of its share.
    """
    if gradient.nbytes <= _SMALL_BYTES:
        return _ordered_sum(list(jax.lax.all_gather(gradient, DATA)))
    elements = gradient.reshape(-1)
    padded = jnp.pad(elements, (0, -elements.size % jax.lax.axis_size(DATA)))
    sums = _ordered_sum(list(_own_terms(padded, 0)))
    return jax.lax.all_gather(sums, DATA, tiled=True)[: elements.size].reshape(gradient.shape)


def _own_terms(gradient: jax.Array, cut: int) -> jax.Array:
    """Returns ``[replicas, ...]``: for every replica the slice of its gradient that is part of this replica's share."""
    num_replicas = jax.lax.axis_size(DATA)
    shape = gradient.shape
    slices = gradient.reshape(*shape[:cut], num_replicas, shape[cut] // num_replicas, *shape[cut + 1 :])
    return jax.lax.all_to_all(slices, DATA, split_axis=cut, concat_axis=0)


def _squared_norm(layers: Any, partition: Any) -> jax.Array:
    """Returns the float32 sum of the squares of all leaves, the same on all devices; not finite if any leaf is not."""
    # leaves that are cut over the same axes are summed first, so that each set of axes needs one collective
    totals: dict[tuple[str, ...], jax.Array] = {}
    for leaf, spec in zip(jax.tree.leaves(layers), jax.tree.leaves(partition), strict=True):
        axes = axes_of_spec(spec)
        totals[axes] = totals.get(axes, jnp.float32(0)) + jnp.sum(_square(leaf)).astype(jnp.float32)
    return _ordered_sum([_sum_over(axes, total) for axes, total in sorted(totals.items())] or [jnp.float32(0)])


def _square(leaf: jax.Array) -> jax.Array:
    return jnp.square(leaf.real) + jnp.square(leaf.imag) if jnp.iscomplexobj(leaf) else jnp.square(leaf)


def _sum_over(axes: Sequence[str], total: jax.Array) -> jax.Array:
    for axis in axes:
        total = _ordered_sum(list(jax.lax.all_gather(total, axis)))
    return total


def _ordered_sum(trees: Sequence[Any]) -> Any:
    """Returns the sum of some trees, added from the first to the last."""
    total = trees[0]
    for tree in trees[1:]:
        total = jax.tree.map(jnp.add, total, tree)
    return total
