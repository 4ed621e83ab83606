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
from typing import NamedTuple

import jax
import jax.numpy as jnp

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


def result(state: Softmax) -> tuple[jax.Array, jax.Array]:
    """The mixed values, float32 like the sums, and the logarithm of each query's sum of exponentials."""
    return state.sums / state.totals[..., None], state.largest + jnp.log(state.totals)


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


def causal(queries: Places, keys: Places, window: int | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Which keys of a pair of tiles the queries see, bool ``[1 or batch, 1, 1, tile, tile]``."""

    def seen(query: jax.Array, key: jax.Array) -> jax.Array:
        distance = queries.positions[query][:, None] - keys.positions[key][None, :]
        is_seen = (distance >= 0)[None, None, None]
        if window is not None:
            is_seen &= distance < window
        if queries.segments is None or keys.segments is None:
            return is_seen
        own, other = queries.segments[query], keys.segments[key]
        return is_seen & (own[:, None, None, :, None] == other[:, None, None, None, :])

    return seen


def _scores(queries: jax.Array, keys: jax.Array) -> jax.Array:
    return _product("bkgtd,bskd->bkgts", queries, keys) * queries.shape[-1] ** -0.5


def _product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)
