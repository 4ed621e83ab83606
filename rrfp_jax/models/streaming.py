"""Attention in tiles, with a streaming softmax: no more than one tile of scores exists at a time.

Queries come in tiles ``[tiles, batch, kv_heads, group, tile, head_dim]``, keys and values in tiles ``[tiles, batch,
tile, kv_heads, head_dim]``; ``group`` are the query heads that read one key head. Each call looks at a list of pairs
``(query tile, key tile)``, which may be known only when the program runs; what of a pair is seen is decided token by
token. So one function serves for the diagonal of a causal mask, for what lies below it,
and for keys that arrive from another device.

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
"""Of queries and of keys: of 8 heads in float32 the scores of a pair of tiles are 32 MiB."""
_UNSEEN = -1e30
"""Score of what is not seen, and the largest score of a query that has seen nothing yet."""


class Places(NamedTuple):
    """Where tokens stand in their sequences, tile by tile."""

    positions: jax.Array
    """int32 ``[tiles, tile]``."""
    segments: jax.Array | None = None
    """Of packed rows, int32 ``[tiles, batch, tile]``."""


class Softmax(NamedTuple):
    """What was seen so far, float32."""

    sums: jax.Array
    """Of values, ``[tiles, batch, kv_heads, group, tile, head_dim]``."""
    largest: jax.Array
    """Of scores, ``[tiles, batch, kv_heads, group, tile]``."""
    totals: jax.Array
    """Of exponentials, likewise."""


def nothing_seen(queries: jax.Array) -> Softmax:
    """Before the first pair."""
    sums = jnp.zeros_like(queries, jnp.float32)
    rows = sums[..., 0]
    return Softmax(sums, rows + _UNSEEN, rows)


class Keys(NamedTuple):
    """What queries look at, in tiles."""

    keys: jax.Array
    values: jax.Array


class Pairs(NamedTuple):
    """Which tiles of queries look at which of keys."""

    numbers: jax.Array
    """int32 ``[pairs, 2]``."""
    seen: Callable[[jax.Array, jax.Array], jax.Array]
    """Says of a pair which of its tokens do (:func:`causal`)."""


def look(state: Softmax, queries: jax.Array, there: Keys, pairs: Pairs) -> Softmax:
    """What was seen with these pairs too."""

    def one(state: Softmax, pair: jax.Array) -> tuple[Softmax, None]:
        query, key = pair[0], pair[1]
        scores, is_seen = _scores(queries[query], there.keys[key]), pairs.seen(query, key)
        largest = jnp.maximum(state.largest[query], jnp.where(is_seen, scores, _UNSEEN).max(-1))
        exps = jnp.where(is_seen, jnp.exp(scores - largest[..., None]), 0)
        kept = jnp.exp(state.largest[query] - largest)
        added = _product("bkgts,bskd->bkgtd", exps.astype(there.values.dtype), there.values[key])
        return Softmax(
            state.sums.at[query].set(state.sums[query] * kept[..., None] + added),
            state.largest.at[query].set(largest),
            state.totals.at[query].set(state.totals[query] * kept + exps.sum(-1)),
        ), None

    return jax.lax.scan(one, state, pairs.numbers)[0]


def result(state: Softmax, dtype: Any) -> list[jax.Array]:
    """Returns the mixed values as the queries were before they were tiled, and the logarithm of each query's sum of
    exponentials in float32. Both have the name by which a rematerialised chunk keeps them for the backward."""
    mixed = untiled(state.sums / state.totals[..., None]).astype(dtype)
    return [checkpoint_name(part, KEPT_BY_DOTS) for part in (mixed, state.largest + jnp.log(state.totals))]


class Gradients(NamedTuple):
    """With respect to queries, keys and values, float32 in their shapes."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array


class Looked(NamedTuple):
    """Queries that have seen all there is, in tiles, with the gradient of what they got."""

    queries: jax.Array
    logsums: jax.Array
    """As :func:`result` returns them."""
    mixed_grads: jax.Array
    overlaps: jax.Array
    """The products of the result with its gradient, summed over ``head_dim``; float32."""


def look_back(gradients: Gradients, own: Looked, there: Keys, pairs: Pairs) -> Gradients:
    """The gradients with these pairs added."""
    size = own.queries.shape[-1] ** -0.5

    def one(sums: Gradients, pair: jax.Array) -> tuple[Gradients, None]:
        query, key = pair[0], pair[1]
        tile, outer = own.queries[query], own.mixed_grads[query]
        scores = _scores(tile, there.keys[key])
        weights = jnp.where(pairs.seen(query, key), jnp.exp(scores - own.logsums[query][..., None]), 0)
        of_weights = _product("bkgtd,bskd->bkgts", outer, there.values[key])
        of_scores = (weights * (of_weights - own.overlaps[query][..., None]) * size).astype(tile.dtype)
        return Gradients(
            sums.queries.at[query].add(_product("bkgts,bskd->bkgtd", of_scores, there.keys[key])),
            sums.keys.at[key].add(_product("bkgts,bkgtd->bskd", of_scores, tile)),
            sums.values.at[key].add(_product("bkgts,bkgtd->bskd", weights.astype(outer.dtype), outer)),
        ), None

    return jax.lax.scan(one, gradients, pairs.numbers)[0]


def query_tiles(query: jax.Array, num_keys: int, size: int) -> jax.Array:
    """Queries ``[batch, length, heads, head_dim]`` in tiles of ``size`` positions, for so many key heads."""
    batch, local, heads, dim = query.shape
    tiles = query.reshape(batch, local // size, size, num_keys, heads // num_keys, dim)
    return tiles.transpose(1, 0, 3, 4, 2, 5)


def key_tiles(part: jax.Array, size: int) -> jax.Array:
    """Keys, values or segments, ``[batch, length, ...]``, in tiles of ``size`` positions."""
    return part.reshape(len(part), -1, size, *part.shape[2:]).swapaxes(0, 1)


def untiled(tiles: jax.Array) -> jax.Array:
    """What is in tiles as queries are, as it was before."""
    num, batch, num_keys, group, tile, dim = tiles.shape
    return tiles.transpose(1, 0, 4, 2, 3, 5).reshape(batch, num * tile, num_keys * group, dim)


def causal(queries: Places, keys: Places, window: int | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Which keys of a pair of tiles the queries see, bool ``[1 or batch, 1, 1, tile, tile]``."""

    def seen(query: jax.Array, key: jax.Array) -> jax.Array:
        distance = queries.positions[query][:, None] - keys.positions[key][None, :]
        is_seen = (distance >= 0)[None, None, None]
        if window is not None:
            is_seen &= distance < window
        return is_seen & same_segment(queries, keys)(query, key)

    return seen


def same_segment(queries: Places, keys: Places) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Likewise where every token sees all of its segment, or of its row where rows are not packed."""

    def seen(query: jax.Array, key: jax.Array) -> jax.Array:
        if queries.segments is None or keys.segments is None:
            return jnp.ones((1,) * 5, bool)
        own, other = queries.segments[query], keys.segments[key]
        return own[:, None, None, :, None] == other[:, None, None, None, :]

    return seen


def _scores(queries: jax.Array, keys: jax.Array) -> jax.Array:
    return _product("bkgtd,bskd->bkgts", queries, keys) * queries.shape[-1] ** -0.5


def _product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)


# -- rows that are whole on a device -----------------------------------------------------------------------------------


class _Look(NamedTuple):
    """What is known of a call when it is traced."""

    is_causal: bool
    window: int | None
    tile: int

    def pairs(self, length: int, segments: Any) -> Pairs:
        """The pairs of tiles of which a token sees another."""
        count = length // self.tile
        query, key = (part.reshape(-1) for part in np.mgrid[:count, :count])
        # of a pair of tiles, the nearest tokens
        nearest = (query - key - 1) * self.tile + 1
        keep = (query >= key) & (nearest < (self.window or length)) if self.is_causal else query >= 0
        positions = jnp.arange(length, dtype=jnp.int32).reshape(count, self.tile)
        places = Places(positions, None if segments is None else key_tiles(segments, self.tile))
        seen = causal(places, places, self.window) if self.is_causal else same_segment(places, places)
        return Pairs(jnp.asarray(np.stack([query[keep], key[keep]], axis=1).astype(np.int32)), seen)


def tiled_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None,
    *, is_causal: bool, window: int | None, largest_tile: int = LARGEST_TILE,
) -> jax.Array:  # fmt: skip
    """Attention as :mod:`rrfp_jax.models.attention` has it, in pairs of tiles of at most ``largest_tile`` positions."""
    length = query.shape[1]
    count = -(-length // largest_tile)
    tile = -(-length // count)
    more = count * tile - length
    if more:  # positions at the end that no other sees
        query, key, value = (jnp.pad(part, ((0, 0), (0, more), (0, 0), (0, 0))) for part in (query, key, value))
        if segments is None and not is_causal:
            segments = jnp.zeros((len(query), length), jnp.int32)
        segments = None if segments is None else jnp.pad(segments, ((0, 0), (0, more)), constant_values=-1)
    return _tiled(query, key, value, segments, _Look(is_causal, window, tile))[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _tiled(query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, look_at: _Look) -> jax.Array:
    return _forward(query, key, value, segments, look_at)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, look_at: _Look) -> Any:
    queries, there = query_tiles(query, key.shape[2], look_at.tile), _keys(key, value, look_at)
    state = look(nothing_seen(queries), queries, there, look_at.pairs(query.shape[1], segments))
    mixed, logsums = result(state, query.dtype)
    return mixed, (query, key, value, segments, mixed, logsums)


def _backward(look_at: _Look, kept: Any, mixed_grad: jax.Array) -> Any:
    query, key, value, segments, mixed, logsums = kept
    tiles = partial(query_tiles, num_keys=key.shape[2], size=look_at.tile)
    products = mixed_grad.astype(jnp.float32) * mixed.astype(jnp.float32)
    looked = Looked(tiles(query), logsums, tiles(mixed_grad), tiles(products).sum(-1))
    there = _keys(key, value, look_at)
    none = Gradients(*(jnp.zeros_like(part, jnp.float32) for part in (looked.queries, *there)))
    sums = look_back(none, looked, there, look_at.pairs(query.shape[1], segments))
    of_key, of_value = (part.swapaxes(0, 1).reshape(key.shape) for part in (sums.keys, sums.values))
    return untiled(sums.queries).astype(query.dtype), of_key.astype(key.dtype), of_value.astype(value.dtype), None


_tiled.defvjp(_forward, _backward)


def _keys(key: jax.Array, value: jax.Array, look_at: _Look) -> Keys:
    return Keys(key_tiles(key, look_at.tile), key_tiles(value, look_at.tile))
