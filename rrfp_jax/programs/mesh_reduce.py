"""R on several devices: gradients are added up over the replicas of a stage, their norm over all that share them.

Each device looks at its own share, in the manner of ``shard_map``. So the gradients of the replicas, which differ, may
come in as one array that is replicated in name only.

Order of sums
-------------
The copies of a shared layer must end with equal bits on different stages, and a deterministic run must not depend on
the algorithm of a collective nor on which process holds which device. There the terms are gathered and added in
ascending order, first chunk by chunk within a replica, then replica by replica. Elsewhere the collective adds, and
gives all replicas the same bits, since each element is added up once. The norm is always added in order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rrfp_jax.programs.shardings import DATA, WHOLE
from rrfp_jax.programs.update import Tie, ordered_sum


def mesh_reduce_function(
    tie: Tie,
    mesh: Mesh,
    partition: dict[str, Any],
    partitions_of_others: tuple[Any, ...],
    *,
    shares: dict[str, Any] | None = None,
    ordered: bool = False,
) -> Callable[[Any, tuple[Any, ...]], tuple[dict[str, Any], jax.Array]]:
    """``reduce(accumulators, others) -> (reduced, squared_norm)`` for one chunk.

    Args:
        mesh: of a unit (axis ``tensor``), or of a stage (axes ``data`` and ``tensor``), whose replicas are added up.
        partition: how the accumulators are cut, a ``PartitionSpec`` for each.
        partitions_of_others: the same for the shared accumulators of each chunk of ``tie.others``.
        shares: how the reduced gradients are cut; None: as the accumulators.
        ordered: add up replicas in order.
    """
    shares = partition if shares is None else shares

    def reduce(accumulators: Any, others: tuple[Any, ...]) -> tuple[dict[str, Any], jax.Array]:
        sums = tie.sums(accumulators, others)
        layers = accumulators | sums
        if DATA in mesh.axis_names:
            layers = {
                name: jax.tree.map(partial(_over_replicas, ordered=ordered or name in sums), layer, shares[name])
                for name, layer in layers.items()
            }
        return layers, _squared_norm(tie.counted(layers), tie.counted(shares))

    in_specs, out_specs = (partition, partitions_of_others), (shares, WHOLE)
    return jax.shard_map(reduce, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _over_replicas(gradient: jax.Array, share: PartitionSpec, *, ordered: bool) -> jax.Array:
    """The sum over all replicas, or this replica's share of it."""
    cut = next((dim for dim, axis in enumerate(share) if axis == DATA), None)
    if ordered:
        return ordered_sum(list(_terms(gradient, cut)))
    if cut is None:
        return jax.lax.psum(gradient, DATA)
    return jax.lax.psum_scatter(gradient, DATA, scatter_dimension=cut, tiled=True)


def _terms(gradient: jax.Array, cut: int | None) -> jax.Array:
    """``[replicas, ...]``: the gradient of every replica, or its part that makes up this replica's share."""
    if cut is None:
        return jax.lax.all_gather(gradient, DATA)
    num_replicas = jax.lax.axis_size(DATA)
    shape = gradient.shape
    pieces = gradient.reshape(*shape[:cut], num_replicas, shape[cut] // num_replicas, *shape[cut + 1 :])
    return jax.lax.all_to_all(pieces, DATA, split_axis=cut, concat_axis=0)


def _squared_norm(layers: Any, partition: Any) -> jax.Array:
    """The float32 sum of the squares of all leaves, the same on all devices."""
    totals: dict[tuple[str, ...], jax.Array] = {}
    for leaf, spec in zip(jax.tree.leaves(layers), jax.tree.leaves(partition), strict=True):
        axes = tuple(axis for axis in spec if axis is not None)
        totals[axes] = totals.get(axes, jnp.float32(0)) + jnp.sum(jnp.square(leaf)).astype(jnp.float32)
    return ordered_sum([_sum_over(axes, total) for axes, total in sorted(totals.items())]) if totals else jnp.float32(0)


def _sum_over(axes: Sequence[str], total: jax.Array) -> jax.Array:
    for axis in axes:
        total = ordered_sum(list(jax.lax.all_gather(total, axis)))
    return total
