"""Causal attention over sequences that are cut over the mesh axis ``context``.

Device ``i`` of ``n`` computes for its own queries, in ``n`` rounds (fewer with a sliding window): in round ``r`` it
attends to the keys and values of device ``i - r``, tile by tile (:mod:`rrfp_jax.models._tiled_attention`). Pairs of
tiles of which no score counts are left out; with balanced positions (:mod:`rrfp_jax.models.cuts`) that leaves all
devices equally many in every round. There are two ways for keys and values to come:

*gather*: all at once, before the first round; their gradients go home in one sum. Every device holds the keys and
values of the whole sequence for as long as a layer computes, in the backward their float32 gradients too.

*ring* (Liu et al. 2023): from neighbour to neighbour, while the round before is computed. Gradients travel along, one
round behind. A device holds those of three devices at a time, and as many bytes travel as with *gather*.

``auto`` takes the ring where the gathered keys and values of a layer would be larger than a device's part of the
residual stream, which every layer keeps anyway: where ``2 n kv_heads / tensor > heads``, keys not divided by ``tensor``
where that does not divide them.

Kept for the backward are queries, keys, values, the result and one float32 number for each query and head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, get_abstract_mesh

from rrfp_jax.layout import CONTEXT, TENSOR
from rrfp_jax.models._tiled_attention import (
    LARGEST_TILE,
    AttentionGradients,
    KeyValueTiles,
    Places,
    QueryTiles,
    SoftmaxState,
    TileMask,
    attend_pairs,
    attend_pairs_backward,
    finished,
    initial_softmax,
    query_tiles,
    sink_gradients,
    tile_mask,
    untiled,
)
from rrfp_jax.models.attention import causal_attention
from rrfp_jax.models.cuts import AUTO_CONTEXT, GATHER, RING, ContextCut, SequenceOrder


def context_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    cut: ContextCut,
    order: SequenceOrder | None = None,
    window: int | None = None,
    segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes :func:`rrfp_jax.models.attention.causal_attention` for positions in this ``order``; None: the one that
    suits the ``window``.

    ``segments`` of packed rows are int32 ``[batch, length]`` in the same order. Traced without a mesh whose ``context``
    has the devices of ``cut``, or if these do not divide the length, it is computed as on one device.
    """
    length, order = query.shape[1], order or SequenceOrder(cut.devices, window)
    mesh = get_abstract_mesh()
    if mesh.shape.get(CONTEXT, 1) != cut.devices or cut.devices == 1 or length % cut.devices:
        places = order(length) if order.is_balanced(length) else None
        if places is not None:
            home = np.argsort(places)
            query, key, value = (array[:, home] for array in (query, key, value))
            segments = None if segments is None else segments[:, home]
        mixed = causal_attention(query, key, value, window=window, segments=segments, sinks=sinks)
        return mixed if places is None else mixed[:, places]

    # pieces must be whole tiles, since a tile's positions are consecutive
    piece = length // cut.devices // (2 if order.is_balanced(length) else 1)
    tile = next(size for size in range(min(piece, LARGEST_TILE), 0, -1) if piece % size == 0)
    attention = cut.attention if cut.attention != AUTO_CONTEXT else gather_or_ring(query.shape, key.shape, mesh.shape)
    plan = _Plan(length, order, window, attention == RING, tile)
    cut_spec = PartitionSpec(None, CONTEXT)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, sinks: Any) -> jax.Array:
        # each device has the gradients from its own queries, and the cast back adds them up
        own = None if sinks is None else jax.lax.pcast(sinks, CONTEXT, to="varying")
        return _attend(query, key, value, (segments, own), plan)

    compute = jax.shard_map(
        attend,
        axis_names={CONTEXT},
        in_specs=(
            *(cut_spec,) * 3,
            None if segments is None else cut_spec,
            None if sinks is None else PartitionSpec(),
        ),
        out_specs=cut_spec,
    )
    return compute(query, key, value, segments, sinks)


def gather_or_ring(query: tuple[int, ...], key: tuple[int, ...], axes: Any) -> str:
    """Returns ``gather`` or ``ring`` for queries and keys of these shapes, by the rule of ``auto``."""
    tensor, (num_keys, head_dim) = axes.get(TENSOR, 1), key[2:]
    gathered = 2 * num_keys * head_dim * axes[CONTEXT] // (tensor if num_keys % tensor == 0 else 1)
    return RING if gathered > query[2] * head_dim else GATHER


# -- on one device of the axis -----------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """Static facts of a call, and the pairs of tiles of its rounds, int32 ``[pairs, 2]``."""

    length: int
    order: SequenceOrder
    window: int | None
    ring: bool
    tile: int

    @property
    def is_balanced(self) -> bool:
        """Whether each device holds an early and a late piece."""
        return self.order.is_balanced(self.length)

    @property
    def last_round(self) -> int:
        """Number of the last round, counted from 0."""
        if self.is_balanced:
            return self.order.devices - 1
        return SequenceOrder(self.order.devices, self.window).num_hops(self.length)

    def source(self, number: Any) -> jax.Array:
        """Returns the device to whose keys this one attends in round ``number``."""
        return (jax.lax.axis_index(CONTEXT) - number) % self.order.devices

    def shifted(self, tree: Any, by: int) -> Any:
        """Sends arrays to the device that comes ``by`` places later."""
        count = self.order.devices
        return jax.lax.ppermute(tree, CONTEXT, [(i, (i + by) % count) for i in range(count)])

    def mask(self, own: KeyValueTiles, held: KeyValueTiles, number: Any) -> TileMask:
        """Returns the mask of round ``number``, in which a device holds the tiles ``held`` of another."""
        positions = jnp.asarray(self.order(self.length).reshape(self.order.devices, -1, self.tile))
        here = Places(positions[jax.lax.axis_index(CONTEXT)], own.segments)
        there = Places(positions[self.source(number)], held.segments)
        return tile_mask(here, there, is_causal=True, window=self.window)

    def pairs(self, number: Any) -> jax.Array:
        """Returns the pairs of round ``number``, which may be traced unless it is 0."""
        local = self.length // self.order.devices
        count, window = local // self.tile, self.window
        is_first = isinstance(number, int) and number == 0
        if self.is_balanced and is_first:
            # a device's own tiles ascend, so those on and below the diagonal count
            return _listed(*np.tril_indices(count))
        if self.is_balanced:
            # an earlier device: all my queries see its early piece; a later one: my late piece sees all its keys
            half = count // 2
            later = _listed(*np.mgrid[:count, :half])
            earlier = _listed(*np.mgrid[half:count, :count])
            return jnp.where(self.source(number) < jax.lax.axis_index(CONTEXT), later, earlier)
        # with a window some tiles are too far away; without one all rounds after the first have the same pairs
        hops = 0 if is_first else 1 if window is None else number
        query, key = (part.reshape(-1) for part in np.mgrid[:count, :count])
        nearest = hops * local + (query - key - 1) * self.tile + 1
        keep = (query >= key) | (hops > 0)
        keep &= True if window is None else nearest < window
        return _listed(query[keep], key[keep])


def _listed(query: np.ndarray, key: np.ndarray) -> jax.Array:
    return jnp.asarray(np.stack([query.reshape(-1), key.reshape(-1)], axis=1).astype(np.int32))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query: jax.Array, key: jax.Array, value: jax.Array, beside: tuple[Any, Any], plan: _Plan) -> jax.Array:
    """Computes attention for the queries of this device; ``beside`` are segments and sinks, or None."""
    return _forward(query, key, value, beside, plan)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, beside: tuple[Any, Any], plan: _Plan) -> Any:
    segments, sinks = beside
    queries, own = query_tiles(query, key.shape[2], plan.tile), KeyValueTiles.of(key, value, plan.tile, segments)

    def attend(state: SoftmaxState, held: KeyValueTiles, number: Any, pairs: jax.Array) -> SoftmaxState:
        return attend_pairs(state, queries, held, pairs, plan.mask(own, held, number))

    state = initial_softmax(queries, sinks)
    held, gathered = (plan.shifted(own, 1), None) if plan.ring else (own, jax.lax.all_gather(own, CONTEXT))
    # own keys first, since they are here already; those of others travel meanwhile
    state = attend(state, own, 0, plan.pairs(0))

    def step(carry: Any, number: Any, *, is_last: bool = False) -> Any:
        state, held = carry
        here = held if plan.ring else _taken(gathered, plan.source(number))
        # sent before this round is computed, so that they travel meanwhile
        following = plan.shifted(held, 1) if plan.ring and not is_last else held
        return attend(state, here, number, plan.pairs(number)), following

    mixed, logsums = finished(_later_rounds(step, (state, held), plan)[0], query.dtype)
    return mixed, (query, key, value, beside, mixed, logsums)


def _backward(plan: _Plan, residuals: Any, mixed_grad: jax.Array) -> Any:
    query, key, value, (segments, sinks), mixed, logsums = residuals
    own = KeyValueTiles.of(key, value, plan.tile, segments)
    queries = QueryTiles.of(query, mixed, logsums, mixed_grad, num_keys=key.shape[2], tile=plan.tile)

    def attend(query_grads: jax.Array, held: KeyValueTiles, number: Any, pairs: jax.Array) -> Any:
        zeros = (jnp.zeros_like(part, jnp.float32) for part in (held.keys, held.values))
        gradients = AttentionGradients(query_grads, *zeros)
        sums = attend_pairs_backward(gradients, queries, held, pairs, plan.mask(own, held, number))
        return sums.queries, KeyValueTiles(sums.keys, sums.values)

    query_grads = jnp.zeros_like(queries.queries, jnp.float32)
    rounds = _ring_backward if plan.ring else _gathered_backward
    query_grads, key_grads = rounds(attend, query_grads, own, plan)
    key_grad, value_grad = (part.swapaxes(0, 1).reshape(key.shape) for part in (key_grads.keys, key_grads.values))
    sink_grad = None if sinks is None else sink_gradients(queries, sinks)
    gradients = untiled(query_grads).astype(query.dtype), key_grad.astype(key.dtype), value_grad.astype(value.dtype)
    return *gradients, (None, sink_grad)


_attend.defvjp(_forward, _backward)


# -- rounds ------------------------------------------------------------------------------------------------------------


def _ring_backward(attend: Callable[..., Any], query_grads: jax.Array, own: KeyValueTiles, plan: _Plan) -> Any:
    """Returns the gradients of the queries, and of this device's keys and values, which came round the ring."""
    query_grads, key_grads = attend(query_grads, own, 0, plan.pairs(0))

    def step(carry: Any, number: Any, *, is_last: bool = False) -> Any:
        query_grads, key_grads, held = carry
        # gradients follow the keys that they belong to, one round behind
        arrived = plan.shifted(key_grads, 1)
        following = held if is_last else plan.shifted(held, 1)
        query_grads, more = attend(query_grads, held, number, plan.pairs(number))
        return query_grads, jax.tree.map(jnp.add, arrived, more), following

    carry = query_grads, key_grads, plan.shifted(own, 1)
    query_grads, key_grads, _ = _later_rounds(step, carry, plan)
    # they lie where the keys were in the last round, and go home at once
    return query_grads, plan.shifted(key_grads, -plan.last_round)


def _gathered_backward(attend: Callable[..., Any], query_grads: jax.Array, own: KeyValueTiles, plan: _Plan) -> Any:
    """Returns the gradients of the queries, and of this device's keys and values, summed over all devices."""
    query_grads, key_grads = attend(query_grads, own, 0, plan.pairs(0))
    gathered, me = jax.lax.all_gather(own, CONTEXT), jax.lax.axis_index(CONTEXT)
    zeros = KeyValueTiles(*(jnp.zeros_like(part, jnp.float32) for part in (gathered.keys, gathered.values)))
    # gradients of the keys of all devices in float32, each summed over devices at the end
    all_grads = jax.tree.map(lambda sums, part: sums.at[me].set(part), zeros, key_grads)

    def step(carry: Any, number: Any, *, is_last: bool = False) -> Any:
        del is_last
        (query_grads, all_grads), source = carry, plan.source(number)
        query_grads, more = attend(query_grads, _taken(gathered, source), number, plan.pairs(number))
        return query_grads, jax.tree.map(lambda sums, part: sums.at[source].add(part), all_grads, more)

    query_grads, all_grads = _later_rounds(step, (query_grads, all_grads), plan)
    return query_grads, jax.tree.map(lambda part: jax.lax.psum_scatter(part, CONTEXT), all_grads)


def _later_rounds(step: Callable[..., Any], carry: Any, plan: _Plan) -> Any:
    """Runs the rounds after the first: one body for all but the last if all have equally many pairs."""
    last = plan.last_round
    # a loop compiles its body once; with a window, rounds differ in their pairs, which must be known
    if last > 1 and (plan.is_balanced or plan.window is None):
        carry = jax.lax.scan(lambda c, number: (step(c, number), None), carry, jnp.arange(1, last, dtype=jnp.int32))[0]
    else:
        for number in range(1, last):
            carry = step(carry, number)
    return step(carry, last, is_last=True) if last else carry


def _taken(gathered: Any, device: jax.Array) -> Any:
    return jax.tree.map(lambda part: part[device], gathered)
