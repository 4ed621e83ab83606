"""Attention in tiles, with a streaming softmax: no more than one tile of scores exists at a time.

Queries come in tiles ``[tiles, batch, kv_heads, group, tile, head_dim]``, keys and values in tiles ``[tiles, batch,
tile, kv_heads, head_dim]``; ``group`` are the query heads that read one key head. Each call computes a list of pairs
``(query tile, key tile)``, which may be known only when the program runs; a mask decides token by token which scores of
a pair count. So one function serves for the diagonal of a causal mask, for the tiles below it, and for keys that arrive
from another device (:mod:`rrfp_jax.models._context_attention`).

The statistics are those of Milakov and Gimelshein (2018) as flash attention keeps them (Dao et al. 2022): for every
query the largest score so far, and the sum of the exponentials relative to it; float32, as the sums are. The backward
computes the scores again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from rrfp_jax.programs.remat import KEPT_BY_DOTS

LARGEST_TILE = 1024
"""Largest number of queries, or of keys, in a tile: the scores of a pair of 8 heads are 32 MiB in float32."""
_UNSEEN = -1e30
"""Score of a masked key, and the largest score of a query that has attended to nothing yet."""

TileMask = Callable[[jax.Array, jax.Array], jax.Array]
"""Maps the numbers of a query tile and a key tile to the scores that count, bool ``[1 or batch, 1, 1, tile, tile]``."""


class Places(NamedTuple):
    """The places of tokens in their sequences, tile by tile."""

    positions: jax.Array
    """Positions, int32 ``[tiles, tile]``."""
    segments: jax.Array | None = None
    """Segment ids of packed rows, int32 ``[tiles, batch, tile]``."""


class KeyValueTiles(NamedTuple):
    """Keys and values in tiles, or their gradients; with the segment ids of packed rows where these travel along."""

    keys: jax.Array
    values: jax.Array
    segments: jax.Array | None = None

    @classmethod
    def of(cls, key: jax.Array, value: jax.Array, tile: int, segments: jax.Array | None = None) -> "KeyValueTiles":
        """Cuts keys and values into tiles of ``tile`` positions."""
        keys, values = _key_tiles(key, tile), _key_tiles(value, tile)
        return cls(keys, values, None if segments is None else _key_tiles(segments, tile))


class SoftmaxState(NamedTuple):
    """The softmax over the keys so far, float32."""

    sums: jax.Array
    """Weighted sums of values, ``[tiles, batch, kv_heads, group, tile, head_dim]``."""
    largest: jax.Array
    """Largest scores, ``[tiles, batch, kv_heads, group, tile]``."""
    totals: jax.Array
    """Sums of exponentials, shaped like ``largest``."""


class QueryTiles(NamedTuple):
    """Queries that have attended to all keys, in tiles, with the gradient of their output."""

    queries: jax.Array
    logsums: jax.Array
    """Logarithms of the sums of exponentials, as :func:`finished` returns them."""
    mixed_grads: jax.Array
    overlaps: jax.Array
    """Products of the output with its gradient, summed over ``head_dim``; float32."""

    @classmethod
    def of(
        cls, query: jax.Array, mixed: jax.Array, logsums: jax.Array, mixed_grad: jax.Array, *, num_keys: int, tile: int
    ) -> "QueryTiles":
        """Cuts queries, output and gradient ``[batch, length, heads, head_dim]`` into tiles."""
        products = mixed_grad.astype(jnp.float32) * mixed.astype(jnp.float32)
        tiles = partial(query_tiles, num_keys=num_keys, size=tile)
        return cls(tiles(query), logsums, tiles(mixed_grad), tiles(products).sum(-1))


class AttentionGradients(NamedTuple):
    """Gradients with respect to queries, keys and values in tiles, float32."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array


# -- pairs of tiles ----------------------------------------------------------------------------------------------------


def initial_softmax(queries: jax.Array, sinks: jax.Array | None = None) -> SoftmaxState:
    """Returns the state before the first pair; ``sinks`` ``[heads]`` are scores that count already, without values."""
    sums = jnp.zeros_like(queries, jnp.float32)
    rows = sums[..., 0]
    if sinks is None:
        return SoftmaxState(sums, rows + _UNSEEN, rows)
    return SoftmaxState(sums, rows + sinks.reshape(*rows.shape[2:4], 1), rows + 1)


def sink_gradients(own: QueryTiles, sinks: jax.Array) -> jax.Array:
    """Returns the gradients of ``sinks`` ``[heads]`` from the queries of this device."""
    weights = jnp.exp(sinks.reshape(*own.logsums.shape[2:4], 1) - own.logsums)
    return -(weights * own.overlaps).sum((0, 1, 4)).reshape(-1)


def attend_pairs(
    state: SoftmaxState, queries: jax.Array, keys: KeyValueTiles, pairs: jax.Array, mask: TileMask
) -> SoftmaxState:
    """Returns the state after these ``pairs`` too, int32 ``[pairs, 2]``."""

    def attend(state: SoftmaxState, pair: jax.Array) -> tuple[SoftmaxState, None]:
        query, key = pair[0], pair[1]
        scores, is_seen = _scores(queries[query], keys.keys[key]), mask(query, key)
        largest = jnp.maximum(state.largest[query], jnp.where(is_seen, scores, _UNSEEN).max(-1))
        exps = jnp.where(is_seen, jnp.exp(scores - largest[..., None]), 0)
        # sums so far are relative to the old largest score
        kept = jnp.exp(state.largest[query] - largest)
        added = _product("bkgts,bskd->bkgtd", exps.astype(keys.values.dtype), keys.values[key])
        return SoftmaxState(
            state.sums.at[query].set(state.sums[query] * kept[..., None] + added),
            state.largest.at[query].set(largest),
            state.totals.at[query].set(state.totals[query] * kept + exps.sum(-1)),
        ), None

    return jax.lax.scan(attend, state, pairs)[0]


def finished(state: SoftmaxState, dtype: Any) -> list[jax.Array]:
    """Returns the output, shaped as queries before they were cut, and the logarithm of each query's sum of exponentials
    in float32. Both have the name by which a rematerialised chunk keeps them for the backward."""
    mixed = untiled(state.sums / state.totals[..., None]).astype(dtype)
    return [checkpoint_name(part, KEPT_BY_DOTS) for part in (mixed, state.largest + jnp.log(state.totals))]


def attend_pairs_backward(
    gradients: AttentionGradients, own: QueryTiles, keys: KeyValueTiles, pairs: jax.Array, mask: TileMask
) -> AttentionGradients:
    """Returns the gradients with those of these ``pairs`` added."""
    size = own.queries.shape[-1] ** -0.5

    def add(sums: AttentionGradients, pair: jax.Array) -> tuple[AttentionGradients, None]:
        query, key = pair[0], pair[1]
        tile, outer = own.queries[query], own.mixed_grads[query]
        scores = _scores(tile, keys.keys[key])
        # the weights again, from the scores and the logarithm of their sum
        weights = jnp.where(mask(query, key), jnp.exp(scores - own.logsums[query][..., None]), 0)
        weight_grads = _product("bkgtd,bskd->bkgts", outer, keys.values[key])
        score_grads = (weights * (weight_grads - own.overlaps[query][..., None]) * size).astype(tile.dtype)
        return AttentionGradients(
            sums.queries.at[query].add(_product("bkgts,bskd->bkgtd", score_grads, keys.keys[key])),
            sums.keys.at[key].add(_product("bkgts,bkgtd->bskd", score_grads, tile)),
            sums.values.at[key].add(_product("bkgts,bkgtd->bskd", weights.astype(outer.dtype), outer)),
        ), None

    return jax.lax.scan(add, gradients, pairs)[0]


def tile_mask(queries: Places, keys: Places, *, is_causal: bool, window: int | None) -> TileMask:
    """Returns the mask of pairs of tiles: a token attends to its segment, and with ``is_causal`` to no later token."""

    def mask(query: jax.Array, key: jax.Array) -> jax.Array:
        is_near = None
        if is_causal:
            distance = queries.positions[query][:, None] - keys.positions[key][None, :]
            is_near = (distance >= 0)[None, None, None]
            if window is not None:
                is_near &= distance < window
        if queries.segments is None or keys.segments is None:
            is_same = jnp.ones((1,) * 5, bool)
        else:
            own, other = queries.segments[query], keys.segments[key]
            is_same = own[:, None, None, :, None] == other[:, None, None, None, :]
        return is_same if is_near is None else is_near & is_same

    return mask


def query_tiles(query: jax.Array, num_keys: int, size: int) -> jax.Array:
    """Cuts queries ``[batch, length, heads, head_dim]`` into tiles of ``size`` positions, for ``num_keys`` key
    heads."""
    batch, local, heads, dim = query.shape
    tiles = query.reshape(batch, local // size, size, num_keys, heads // num_keys, dim)
    return tiles.transpose(1, 0, 3, 4, 2, 5)


def _key_tiles(part: jax.Array, size: int) -> jax.Array:
    """Cuts keys, values or segments, ``[batch, length, ...]``, into tiles of ``size`` positions."""
    return part.reshape(len(part), -1, size, *part.shape[2:]).swapaxes(0, 1)


def untiled(tiles: jax.Array) -> jax.Array:
    """Undoes :func:`query_tiles`."""
    num, batch, num_keys, group, tile, dim = tiles.shape
    return tiles.transpose(1, 0, 4, 2, 3, 5).reshape(batch, num * tile, num_keys * group, dim)


def _scores(queries: jax.Array, keys: jax.Array) -> jax.Array:
    return _product("bkgtd,bskd->bkgts", queries, keys) * queries.shape[-1] ** -0.5


def _product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)


# -- rows that are whole on a device -----------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """Static facts of a call."""

    is_causal: bool
    window: int | None
    query_tile: int
    key_tile: int
    offset: int
    """Position of the first query."""

    def pairs(self, num_queries: int, num_keys: int, segments: Any) -> tuple[jax.Array, TileMask]:
        """Returns the pairs of tiles of which a token attends to another, and their mask."""
        query, key = (
            part.reshape(-1) for part in np.mgrid[: num_queries // self.query_tile, : num_keys // self.key_tile]
        )
        # distances of the two nearest tokens of a pair of tiles, and of the two that are farthest apart
        nearest = self.offset + query * self.query_tile - (key + 1) * self.key_tile + 1
        farthest = self.offset + (query + 1) * self.query_tile - 1 - key * self.key_tile
        keep = (farthest >= 0) & (nearest < (self.window or num_keys)) if self.is_causal else query >= 0
        here = Places(self.offset + jnp.arange(num_queries, dtype=jnp.int32).reshape(-1, self.query_tile))
        there = Places(jnp.arange(num_keys, dtype=jnp.int32).reshape(-1, self.key_tile))
        if segments is not None:
            here = here._replace(segments=_key_tiles(segments[0], self.query_tile))
            there = there._replace(segments=_key_tiles(segments[1], self.key_tile))
        pairs = jnp.asarray(np.stack([query[keep], key[keep]], axis=1).astype(np.int32))
        return pairs, tile_mask(here, there, is_causal=self.is_causal, window=self.window)


def tiled_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, sinks: jax.Array | None = None,
    *, is_causal: bool, window: int | None, largest_tile: int = LARGEST_TILE,
) -> jax.Array:  # fmt: skip
    """Computes attention as :mod:`rrfp_jax.models.attention` defines it, in tiles of at most ``largest_tile``
    positions."""
    length, num_keys = query.shape[1], key.shape[1]
    tile, longer = _whole_tiles(length, largest_tile)
    key_tile, more_keys = _whole_tiles(num_keys, largest_tile)
    if segments is None and not is_causal and more_keys > num_keys:
        segments = jnp.zeros((len(key), num_keys), jnp.int32)
    # positions at the end that no other attends to
    query, (key, value) = lengthened(query, longer), (lengthened(part, more_keys) for part in (key, value))
    ids = None
    if segments is not None:
        own = segments[:, num_keys - length :]
        ids = lengthened(own, longer, -1), lengthened(segments, more_keys, -1)
    plan = _Plan(is_causal, window, tile, key_tile, num_keys - length)
    return _tiled(query, key, value, (ids, sinks), plan)[:, :length]


def _whole_tiles(length: int, largest: int) -> tuple[int, int]:
    """Returns the size of a tile, and the length of as many whole ones."""
    count = -(-length // largest)
    tile = -(-length // count)
    return tile, count * tile


def lengthened(part: jax.Array, length: int, value: int = 0) -> jax.Array:
    """Returns rows ``[batch, positions, ...]`` with positions at the end, up to this length, that hold one number."""
    more = length - part.shape[1]
    return jnp.pad(part, ((0, 0), (0, more)) + ((0, 0),) * (part.ndim - 2), constant_values=value) if more else part


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _tiled(query: jax.Array, key: jax.Array, value: jax.Array, beside: tuple[Any, Any], plan: _Plan) -> jax.Array:
    """Computes attention; ``beside`` are segments and sinks, or None."""
    return _forward(query, key, value, beside, plan)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, beside: tuple[Any, Any], plan: _Plan) -> Any:
    segments, sinks = beside
    queries, keys = query_tiles(query, key.shape[2], plan.query_tile), KeyValueTiles.of(key, value, plan.key_tile)
    state = initial_softmax(queries, sinks)
    state = attend_pairs(state, queries, keys, *plan.pairs(query.shape[1], key.shape[1], segments))
    mixed, logsums = finished(state, query.dtype)
    return mixed, (query, key, value, beside, mixed, logsums)


def _backward(plan: _Plan, residuals: Any, mixed_grad: jax.Array) -> Any:
    query, key, value, (segments, sinks), mixed, logsums = residuals
    own = QueryTiles.of(query, mixed, logsums, mixed_grad, num_keys=key.shape[2], tile=plan.query_tile)
    keys = KeyValueTiles.of(key, value, plan.key_tile)
    zeros = AttentionGradients(*(jnp.zeros_like(part, jnp.float32) for part in (own.queries, keys.keys, keys.values)))
    sums = attend_pairs_backward(zeros, own, keys, *plan.pairs(query.shape[1], key.shape[1], segments))
    key_grad, value_grad = (part.swapaxes(0, 1).reshape(key.shape) for part in (sums.keys, sums.values))
    sink_grad = None if sinks is None else sink_gradients(own, sinks)
    gradients = untiled(sums.queries).astype(query.dtype), key_grad.astype(key.dtype), value_grad.astype(value.dtype)
    return *gradients, (None, sink_grad)


_tiled.defvjp(_forward, _backward)
