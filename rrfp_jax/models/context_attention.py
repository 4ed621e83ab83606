"""Causal attention over sequences that are cut over the mesh axis ``context``.

Device ``i`` of ``n`` computes for its own queries, in ``n`` rounds (fewer with a sliding window): in round ``r`` it
looks at the keys and values of device ``i - r``, tile by tile (:mod:`rrfp_jax.models.streaming`). Pairs of tiles that
no token sees are left out; with balanced positions (:mod:`rrfp_jax.models.context_cut`) that leaves all devices equally
many in every round. There are two ways for keys and values to come:

*gather*: all at once, before the first round; their gradients go home in one sum. Every device holds the keys and
values of the whole sequence for as long as a layer computes, in the backward their float32 gradients too.

*ring* (Liu et al. 2023): from neighbour to neighbour, while the round before is computed. Gradients travel along, one
round behind. A device holds those of three devices at a time, and what travels is the same as with *gather*.

``auto`` takes the ring where the gathered keys and values of a layer would be larger than a device's part of the
residual stream, which every layer keeps anyway: where ``2 n kv_heads / tensor > heads``, keys not divided by ``tensor``
where that does not divide them.

What is kept for the backward is queries, keys, values, the result and one float32 number for each query and head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, get_abstract_mesh

from rrfp_jax.layout import CONTEXT, TENSOR
from rrfp_jax.models.attention import causal_attention
from rrfp_jax.models.context_cut import AUTO, GATHER, RING, ContextCut, SequenceOrder
from rrfp_jax.models.streaming import (
    LARGEST_TILE,
    Gradients,
    Keys,
    Looked,
    Pairs,
    Places,
    Softmax,
    causal,
    key_tiles,
    look,
    look_back,
    nothing_seen,
    query_tiles,
    result,
    untiled,
)


class _Look(NamedTuple):
    """What is known of a call when it is traced."""

    length: int
    order: SequenceOrder
    ring: bool
    tile: int

    @property
    def local(self) -> int:
        """Positions per device."""
        return self.length // self.order.devices

    @property
    def last_round(self) -> int:
        return self.order.devices - 1 if self.is_balanced else self.order.num_hops(self.length)

    @property
    def is_balanced(self) -> bool:
        return self.order.is_balanced(self.length)


def context_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    cut: ContextCut,
    window: int | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """As :func:`rrfp_jax.models.attention.causal_attention`, of positions in the order of ``cut``.

    ``segments`` of packed rows are int32 ``[batch, length]`` in the same order. Traced without a mesh whose ``context``
    has the devices of ``cut``, or where these do not divide the length, it is computed as on one device.
    """
    length, order = query.shape[1], SequenceOrder(cut.devices, window)
    mesh = get_abstract_mesh()
    if mesh.shape.get(CONTEXT, 1) != cut.devices or cut.devices == 1 or length % cut.devices:
        return _uncut(query, key, value, order, segments)
    piece = length // cut.devices // (2 if order.is_balanced(length) else 1)
    tile = next(size for size in range(min(piece, LARGEST_TILE), 0, -1) if piece % size == 0)
    attention = cut.attention if cut.attention != AUTO else automatic(query.shape, key.shape, mesh.shape)
    seen = _Look(length, order, attention == RING, tile)
    cut_spec = PartitionSpec(None, CONTEXT)
    arrays = (query, key, value, segments) if segments is not None else (query, key, value)
    compute = jax.shard_map(
        lambda *local: _attend(*local, *(None,) * (4 - len(local)), seen),
        axis_names={CONTEXT},
        in_specs=(cut_spec,) * len(arrays),
        out_specs=cut_spec,
    )
    return compute(*arrays)


def automatic(query: tuple[int, ...], key: tuple[int, ...], axes: Any) -> str:
    """``gather`` or ``ring`` for queries and keys of these shapes, by the rule above."""
    tensor, (num_keys, head_dim) = axes.get(TENSOR, 1), key[2:]
    gathered = 2 * num_keys * head_dim * axes[CONTEXT] // (tensor if num_keys % tensor == 0 else 1)
    return RING if gathered > query[2] * head_dim else GATHER


def _uncut(
    query: jax.Array, key: jax.Array, value: jax.Array, order: SequenceOrder, segments: jax.Array | None
) -> jax.Array:
    there = order(query.shape[1]) if order.is_balanced(query.shape[1]) else None
    if there is not None:
        home = np.argsort(there)
        query, key, value = (array[:, home] for array in (query, key, value))
        segments = None if segments is None else segments[:, home]
    mixed = causal_attention(query, key, value, window=order.window, segments=segments)
    return mixed if there is None else mixed[:, there]


# -- on one device of the axis -----------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, seen: _Look) -> jax.Array:
    return _forward(query, key, value, segments, seen)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, seen: _Look) -> Any:
    queries, own = query_tiles(query, key.shape[2], seen.tile), _Sent.of(key, value, segments, seen.tile)

    def round_(state: Softmax, held: _Sent, number: Any, pairs: jax.Array) -> Softmax:
        return look(state, queries, Keys(held.keys, held.values), _between(seen, own, held, number, pairs))

    state = _in_rounds(round_, nothing_seen(queries), own, seen)
    mixed, logsums = result(state, query.dtype)
    return mixed, (query, key, value, segments, mixed, logsums)


def _backward(seen: _Look, kept: Any, mixed_grad: jax.Array) -> Any:
    query, key, value, segments, mixed, logsums = kept
    own, tiles = _Sent.of(key, value, segments, seen.tile), partial(query_tiles, num_keys=key.shape[2], size=seen.tile)
    products = mixed_grad.astype(jnp.float32) * mixed.astype(jnp.float32)
    looked = Looked(tiles(query), logsums, tiles(mixed_grad), tiles(products).sum(-1))

    def round_(of_queries: jax.Array, held: _Sent, number: Any, pairs: jax.Array) -> Any:
        there = Keys(held.keys, held.values)
        none = Gradients(of_queries, *(jnp.zeros_like(part, jnp.float32) for part in there))
        sums = look_back(none, looked, there, _between(seen, own, held, number, pairs))
        return sums.queries, Keys(sums.keys, sums.values)

    none = jnp.zeros_like(looked.queries, jnp.float32)
    of_queries, of_sent = _back_in_rounds(round_, none, own, seen)
    of_key, of_value = (part.swapaxes(0, 1).reshape(key.shape) for part in of_sent)
    return untiled(of_queries).astype(query.dtype), of_key.astype(key.dtype), of_value.astype(value.dtype), None


_attend.defvjp(_forward, _backward)


class _Sent(NamedTuple):
    """What a device needs of another, in tiles."""

    keys: jax.Array
    values: jax.Array
    segments: jax.Array | None

    @classmethod
    def of(cls, key: jax.Array, value: jax.Array, segments: Any, tile: int) -> "_Sent":
        keys, values = key_tiles(key, tile), key_tiles(value, tile)
        return cls(keys, values, None if segments is None else key_tiles(segments, tile))


def _between(seen: _Look, own: "_Sent", held: "_Sent", number: Any, pairs: jax.Array) -> Pairs:
    """These pairs of a round, in which a device holds what another sent."""
    positions = jnp.asarray(seen.order(seen.length).reshape(seen.order.devices, -1, seen.tile))
    here = Places(positions[jax.lax.axis_index(CONTEXT)], own.segments)
    there = Places(positions[_source(seen, number)], held.segments)
    return Pairs(pairs, causal(here, there, seen.order.window))


def _source(seen: _Look, number: Any) -> jax.Array:
    """Whose keys a device looks at in a round."""
    return (jax.lax.axis_index(CONTEXT) - number) % seen.order.devices


# -- rounds ------------------------------------------------------------------------------------------------------------


def _in_rounds(round_: Callable[..., Any], state: Any, own: _Sent, seen: _Look) -> Any:
    held, keep = (_shifted(own, seen, 1), None) if seen.ring else (own, jax.lax.all_gather(own, CONTEXT))
    state = round_(state, own, 0, _first_pairs(seen))

    def step(carry: Any, number: Any, *, is_last: bool = False) -> Any:
        state, held = carry
        here = held if seen.ring else _taken(keep, _source(seen, number))
        following = _shifted(held, seen, 1) if seen.ring and not is_last else held
        return round_(state, here, number, _pairs(seen, number)), following

    return _repeated(step, (state, held), seen)[0]


def _back_in_rounds(round_: Callable[..., Any], of_queries: jax.Array, own: _Sent, seen: _Look) -> Any:
    """Of the queries, and of what this device sent."""
    of_queries, of_sent = round_(of_queries, own, 0, _first_pairs(seen))
    if seen.ring:

        def step(carry: Any, number: Any, *, is_last: bool = False) -> Any:
            of_queries, of_sent, held = carry
            arrived = _shifted(of_sent, seen, 1)
            following = held if is_last else _shifted(held, seen, 1)
            of_queries, more = round_(of_queries, held, number, _pairs(seen, number))
            return of_queries, jax.tree.map(jnp.add, arrived, more), following

        of_queries, of_sent, _ = _repeated(step, (of_queries, of_sent, _shifted(own, seen, 1)), seen)
        return of_queries, _shifted(of_sent, seen, -seen.last_round)

    keep, me = jax.lax.all_gather(own, CONTEXT), jax.lax.axis_index(CONTEXT)
    zeros = (jnp.zeros_like(part, jnp.float32) for part in (keep.keys, keep.values))
    of_all = jax.tree.map(lambda sums, part: sums.at[me].set(part), Keys(*zeros), of_sent)

    def add(carry: Any, number: Any, *, is_last: bool = False) -> Any:
        del is_last
        (of_queries, of_all), source = carry, _source(seen, number)
        of_queries, more = round_(of_queries, _taken(keep, source), number, _pairs(seen, number))
        return of_queries, jax.tree.map(lambda sums, part: sums.at[source].add(part), of_all, more)

    of_queries, of_all = _repeated(add, (of_queries, of_all), seen)
    return of_queries, jax.tree.map(lambda part: jax.lax.psum_scatter(part, CONTEXT), of_all)


def _repeated(step: Callable[..., Any], carry: Any, seen: _Look) -> Any:
    """The rounds after the first: one body for all but the last where all have equally many pairs."""
    last = seen.last_round
    if last > 1 and (seen.is_balanced or seen.order.window is None):
        carry = jax.lax.scan(lambda c, number: (step(c, number), None), carry, jnp.arange(1, last, dtype=jnp.int32))[0]
    else:
        for number in range(1, last):
            carry = step(carry, number)
    return step(carry, last, is_last=True) if last else carry


def _shifted(sent: Any, seen: _Look, by: int) -> Any:
    """To the device that comes so many places later."""
    count = seen.order.devices
    return jax.lax.ppermute(sent, CONTEXT, [(i, (i + by) % count) for i in range(count)])


def _taken(gathered: Any, device: jax.Array) -> Any:
    return jax.tree.map(lambda part: part[device], gathered)


# -- pairs of tiles ----------------------------------------------------------------------------------------------------


def _first_pairs(seen: _Look) -> jax.Array:
    """Of a device's own tiles, which ascend: those on and below the diagonal, inside the window."""
    if seen.is_balanced:
        query, key = np.tril_indices(seen.local // seen.tile)
        return _listed(query, key)
    return _listed(*_near(seen, 0))


def _pairs(seen: _Look, number: Any) -> jax.Array:
    if not seen.is_balanced:
        return _listed(*_near(seen, 1 if seen.order.window is None else number))
    half, count = seen.local // seen.tile // 2, seen.local // seen.tile
    later = _listed(*(part.reshape(-1) for part in np.mgrid[:count, :half]))
    earlier = _listed(*(part.reshape(-1) for part in np.mgrid[half:count, :count]))
    return jnp.where(_source(seen, number) < jax.lax.axis_index(CONTEXT), later, earlier)


def _near(seen: _Look, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Tiles that are not too far from each other, of a device and the one so many places before it."""
    count, window = seen.local // seen.tile, seen.order.window
    query, key = (part.reshape(-1) for part in np.mgrid[:count, :count])
    nearest = number * seen.local + (query - key - 1) * seen.tile + 1
    keep = (query >= key) | (number > 0)
    keep &= True if window is None else nearest < window
    return query[keep], key[keep]


def _listed(query: np.ndarray, key: np.ndarray) -> jax.Array:
    return jnp.asarray(np.stack([query, key], axis=1).astype(np.int32))
