"""The layers of a decoder: embedding, attention with a gated MLP or a mixture of experts, output head.

Each is a Flax NNX class with the dtypes of the configuration filled in: parameters are stored in ``param_dtype`` and
cast to ``compute_dtype`` where they are used. A cut over devices or chunks shows nowhere but in :class:`RowInfo`, where
sequences are cut.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from numpy.typing import NDArray

from rrfp_jax.models._context_attention import context_attention
from rrfp_jax.models._parts import activate, by_heads, from_heads, joined, learned, projection, rms_norm
from rrfp_jax.models.attention import cached_attention, causal_attention
from rrfp_jax.models.config import LINEAR_ROPE, YARN_ROPE, LanguageModelConfig, RopeScaling
from rrfp_jax.models.cuts import ATTENTION, MLP, ContextCut, SequenceOrder, sequence_order
from rrfp_jax.models.experts import MixtureOfExperts
from rrfp_jax.models.loss import HeadLoss, HeadShard
from rrfp_jax.programs.chunk import LayerShard

# -- rotary position embeddings (Su et al. 2021) -----------------------------------------------------------------------


def inv_freq(half: int, theta: float, scaling: RopeScaling | None = None) -> NDArray[np.float32]:
    """Returns the radians per token of each wave, float32 ``[half]``, stretched as ``scaling`` says.

    Published weights were trained with inverse frequencies in float32, and far into a text their last bit shows: at
    position 10,000 it is a thousandth of a radian. So the host computes them as ``transformers`` does, operation by
    operation, and they are the same on every platform. Powers are float64's, rounded, since those of float32 differ
    from library to library.
    """
    one = np.float32(1)
    # float32 and float64 where transformers has them: a wave may differ in no bit
    exponents = (np.arange(half, dtype=np.float32) / np.float32(half)).astype(np.float64)
    lengths = np.power(np.float64(np.float32(theta)), exponents).astype(np.float32)
    plain: NDArray[np.float32] = one / lengths
    if scaling is None:
        return plain
    factor, settings = np.float32(scaling.factor), scaling.settings
    if scaling.kind == LINEAR_ROPE:
        return plain / factor

    # both other kinds keep a part of each wave, from 0 to 1, as it is
    if scaling.kind == YARN_ROPE:
        begin, end = (
            half
            * math.log(settings["original_max_positions"] / (2 * math.pi * settings[num_turns]))
            / math.log(theta)  # number of the wave with these turns in the first training's texts, not whole
            for num_turns in ("beta_fast", "beta_slow")
        )
        if settings["truncate"]:
            begin, end = math.floor(begin), math.ceil(end)
        # published weights expect 2 * half - 1 as the number of the last wave, although there are only half of them
        first, last = max(begin, 0), min(end, 2 * half - 1)
        width = np.float32((last - first) or 0.001)
        kept = one - np.clip((np.arange(half, dtype=np.float32) - np.float32(first)) / width, 0, 1)
        return one / (factor * lengths) * (one - kept) + plain * kept
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    num_tokens = one / plain * np.float32(2 * math.pi)
    turns = one / num_tokens * np.float32(settings["original_max_positions"])
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return (one - kept) * plain / factor + kept * plain


def rope_tables(
    positions: jax.Array, half: int, theta: float, scaling: RopeScaling | None = None, *, by_wave: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns sine and cosine of the angles at ``positions``, float32 ``[..., 1, half]``, the 1 for heads.

    With ``by_wave`` each wave has a position of its own, ``[..., half]``. Both results are multiplied by the
    ``attention_factor`` of a scaling that has one.
    """
    positions = positions.astype(jnp.float32) if by_wave else positions.astype(jnp.float32)[..., None]
    angles = positions[..., None, :] * inv_freq(half, theta, scaling)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    if scaling is None or scaling.attention_factor is None:
        return sin, cos
    return scaling.attention_factor * sin, scaling.attention_factor * cos


def apply_rope(x: jax.Array, sin: jax.Array, cos: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Turns ``x``, ``[..., length, heads, head_dim]``, by angles ``[..., length, 1, head_dim / 2]``.

    Dimension ``i`` of the first half of a head is paired with dimension ``i`` of the second half, as Llama's published
    weights expect. ``interleaved`` pairs neighbours, which come out half a head apart: the scores of attention do not
    depend on the order of dims. Products are float32; the result has the dtype of ``x``.
    """
    if interleaved:
        x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


# -- layers ------------------------------------------------------------------------------------------------------------


class RowInfo(NamedTuple):
    """Positions and segments of the rows of a microbatch, made once for all layers of a chunk.

    Rows of one sample each that are whole on every device need none.
    """

    sin: jax.Array
    """Sine of the rotary angles, float32 ``[batch or 1, length, 1, head_dim / 2]``."""
    cos: jax.Array
    """Cosine of the rotary angles, shaped like ``sin``."""
    segments: jax.Array | None = None
    """Segment ids of packed rows, int32 ``[batch, length]``, those of earlier slices included; a token attends to its
    own segment."""
    cut: ContextCut | None = None
    """How positions are cut over devices; None: they are not."""
    order: SequenceOrder | None = None
    """The order of positions that are cut."""


def row_info(
    config: LanguageModelConfig,
    length: int,
    *,
    is_global: bool = False,
    start: int = 0,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    cut: ContextCut | None = None,
) -> RowInfo | None:
    """Returns the information on rows of ``length`` places from ``start`` on for layers of a kind, or None if these
    need none.

    ``positions`` and ``segments``, both int ``[batch, length]``, are those of packed rows: each token's position in its
    segment, and the segment's id. With a ``cut`` they come in the order that it gives to positions. Where the model has
    ``rope_sections``, ``positions`` are ``[batch, length, 3]``.
    """
    order, sections, by_wave = sequence_order(config, cut), config.layer_variant.rope_sections, False
    if positions is None:
        if cut is None and not start:
            return None
        positions = (start + jnp.arange(length) if order is None else jnp.asarray(order(length)))[None]
    elif sections is not None:
        if positions.ndim != 3 or positions.shape[-1] != len(sections):
            raise ValueError(
                f"positions have shape {positions.shape}, and a model with rope_sections reads three of each token: "
                "its place in time, its row and its column, [rows, length, 3]"
            )
        # to each wave the position by which it turns
        positions, by_wave = positions[..., np.repeat(np.arange(len(sections)), sections)], True
    sin, cos = rope_tables(positions, config.rotary_dim // 2, *config.rope(is_global=is_global), by_wave=by_wave)
    return RowInfo(sin, cos, segments, cut, order)


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, in the places of a cache: ``[batch, places, kv_heads, head_dim]``."""

    keys: jax.Array
    values: jax.Array


class Attention(nnx.Module):
    """Causal self-attention, ``[batch, length, hidden] -> [batch, length, hidden]``.

    Query head ``h`` reads key and value head ``h // (num_heads / num_kv_heads)`` (Ainslie et al. 2023). Scores and
    softmax are float32. The products that ``float8`` names, as ``attention.query``, are in float8.
    """

    def __init__(
        self, config: LanguageModelConfig, rngs: nnx.Rngs, float8: Collection[str] = (), *, is_global: bool = False
    ) -> None:
        self.head_dim = config.size_per_head
        self.rope_theta, self.rope_scaling = config.rope(is_global=is_global)
        self.rotary_dim, self.interleaved = config.rotary_dim, config.layer_variant.interleaved
        self.window = config.window(is_global=is_global)
        variant = config.layer_variant
        scalar = variant.query_scalar
        # attention divides products by the root of a head's width
        self.query_factor = None if scalar is None else math.sqrt(self.head_dim / scalar)
        query_dim = config.num_heads * self.head_dim
        key_dim = config.num_key_value_heads * self.head_dim
        make = partial(projection, config, rngs=rngs)
        self.query = make(config.hidden, query_dim, use_bias=config.qkv_bias, float8="attention.query" in float8)
        self.key = make(config.hidden, key_dim, use_bias=config.qkv_bias, float8="attention.key" in float8)
        self.value = make(config.hidden, key_dim, use_bias=config.qkv_bias, float8="attention.value" in float8)
        self.output = make(
            query_dim,
            config.hidden,
            to_residual=True,
            use_bias=variant.output_bias,
            float8="attention.output" in float8,
        )
        self.query_norm = rms_norm(config, self.head_dim, rngs) if config.qk_norm else None
        self.key_norm = rms_norm(config, self.head_dim, rngs) if config.qk_norm else None
        self.sinks = learned(config, (config.num_heads,), rngs) if variant.sinks else None

    def __call__(self, x: jax.Array, rows: RowInfo | None = None) -> jax.Array:
        """Maps ``[batch, length, hidden]`` to the same shape and dtype."""
        return self.with_keys(x, rows)[0]

    def with_keys(
        self, x: jax.Array, rows: RowInfo | None = None, earlier: Sequence[KVCache] = ()
    ) -> tuple[jax.Array, KVCache]:
        """Computes a slice of a sequence; returns its keys and values too, for later slices.

        ``earlier`` has the keys and values of the slices before this one.
        """
        query, key, value = self._heads(x)
        query, key = (
            # the two calls make equal tables, which the compiler joins
            self._turned(heads, factor, *(self._tables(jnp.arange(x.shape[1])) if rows is None else rows[:2]))
            for heads, factor in ((query, self.query_factor), (key, None))
        )
        own, segments = KVCache(key, value), None if rows is None else rows.segments
        if earlier:
            key, value = (jnp.concatenate(parts, axis=1) for parts in zip(*earlier, own, strict=True))
            # a window spares the keys that no token of this slice reaches
            reach = key.shape[1] if self.window is None else x.shape[1] + self.window - 1
            key, value = key[:, -reach:], value[:, -reach:]
            segments = None if segments is None else segments[:, -reach:]
        options: dict[str, Any] = {"window": self.window, "segments": segments, "sinks": self._sinks()}
        if rows is not None and rows.cut is not None:
            mixed = context_attention(query, key, value, cut=rows.cut, order=rows.order, **options)
        else:
            mixed = causal_attention(query, key, value, **options)
        return from_heads(self.output, checkpoint_name(mixed, "attention")), own

    def decode_step(self, x: jax.Array, cache: KVCache, start: jax.Array) -> tuple[jax.Array, KVCache]:
        """Decode step: tokens at positions from ``start`` on attend to themselves and to the cache.

        Returns the output, shaped like ``x``, and the cache with these tokens in it.
        """
        query, key, value = self._heads(x)
        positions = start + jnp.arange(x.shape[1])
        tables = self._tables(positions)
        new = self._turned(key, None, *tables), value
        # written before attention reads the cache, so that tokens attend to themselves
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(held, part.astype(held.dtype), start, axis=1)
            for held, part in zip(cache, new, strict=True)
        )
        query = self._turned(query, self.query_factor, *tables)
        mixed = cached_attention(query, keys, values, positions, window=self.window, sinks=self._sinks())
        return from_heads(self.output, mixed), KVCache(keys, values)

    def _heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values by head, normalised but not rotated yet."""
        query, key, value = by_heads(x, self.head_dim, self.query, self.key, self.value)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value

    def _sinks(self) -> jax.Array | None:
        return None if self.sinks is None else self.sinks[...].astype(jnp.float32)

    def _turned(self, heads: jax.Array, factor: float | None, sin: jax.Array, cos: jax.Array) -> jax.Array:
        """Returns queries or keys, multiplied by ``factor``, with their rotary dims turned."""
        turned, *rest = jnp.split(heads, [self.rotary_dim], axis=-1) if self.rotary_dim < self.head_dim else [heads]
        if factor is not None:
            # the tables are float32, so the factor costs no rounding of its own
            sin, cos = factor * sin, factor * cos
            rest = [(each.astype(jnp.float32) * factor).astype(each.dtype) for each in rest]
        return jnp.concatenate([apply_rope(turned, sin, cos, interleaved=self.interleaved), *rest], axis=-1)

    def _tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_tables(positions, self.rotary_dim // 2, self.rope_theta, self.rope_scaling)


class LatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-V2, section 2.1), with the methods of :class:`Attention`.

    A head's keys and values are products of a vector that all heads share; behind the plain dims of each key stands a
    rotary key, of which there is one. Queries and keys are put together for every head, so any implementation of
    attention may compute it; the narrower one of values and keys is filled up with zeros, which change nothing.
    """

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        assert config.latent_attention is not None
        self.latent, self.config = config.latent_attention, config
        latent, heads = self.latent, config.num_heads
        # whatever the norms of the stream add, these two add 1e-6 in published models
        norm = replace(config, norm_eps=1e-6)
        if latent.query_rank is None:
            self.query = projection(config, config.hidden, heads * latent.query_dim, rngs)
        else:
            self.query_down = projection(config, config.hidden, latent.query_rank, rngs)
            self.query_norm = rms_norm(norm, latent.query_rank, rngs)
            self.query_up = projection(config, latent.query_rank, heads * latent.query_dim, rngs)
        self.kv_down = projection(config, config.hidden, latent.kv_rank + latent.rotary_dim, rngs)
        self.kv_norm = rms_norm(norm, latent.kv_rank, rngs)
        self.kv_up = projection(config, latent.kv_rank, heads * (latent.plain_dim + latent.value_dim), rngs)
        self.output = projection(config, heads * latent.value_dim, config.hidden, rngs, to_residual=True)

    def __call__(self, x: jax.Array, rows: RowInfo | None = None) -> jax.Array:
        """Maps ``[batch, length, hidden]`` to the same shape and dtype."""
        return self.with_keys(x, rows)[0]

    def with_keys(
        self, x: jax.Array, rows: RowInfo | None = None, earlier: Sequence[KVCache] = ()
    ) -> tuple[jax.Array, KVCache]:
        """Computes a slice of a sequence, as :meth:`Attention.with_keys`."""
        tables = self._tables(jnp.arange(x.shape[1])) if rows is None else (rows.sin, rows.cos)
        query, key, value = self._heads(x, *tables)
        own, segments, window = KVCache(key, value), None if rows is None else rows.segments, self.config.sliding_window
        if earlier:
            key, value = (jnp.concatenate(parts, axis=1) for parts in zip(*earlier, own, strict=True))
            reach = key.shape[1] if window is None else x.shape[1] + window - 1
            key, value = key[:, -reach:], value[:, -reach:]
            segments = None if segments is None else segments[:, -reach:]
        query, key, value = self._of_one_width(query, key, value)
        if rows is not None and rows.cut is not None:
            options: dict[str, Any] = {"cut": rows.cut, "order": rows.order}
            mixed = context_attention(query, key, value, window=window, segments=segments, **options)
        else:
            mixed = causal_attention(query, key, value, window=window, segments=segments)
        return self._joined(checkpoint_name(mixed, "attention")), own

    def decode_step(self, x: jax.Array, cache: KVCache, start: jax.Array) -> tuple[jax.Array, KVCache]:
        """Decode step, as :meth:`Attention.decode_step`."""
        positions = start + jnp.arange(x.shape[1])
        query, *new = self._heads(x, *self._tables(positions))
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(held, part.astype(held.dtype), start, axis=1)
            for held, part in zip(cache, new, strict=True)
        )
        parts = self._of_one_width(query, keys, values)
        mixed = cached_attention(*parts, positions, window=self.config.sliding_window)
        return self._joined(mixed), KVCache(keys, values)

    def _heads(self, x: jax.Array, sin: jax.Array, cos: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values by head; dims that positions turn are turned and come last."""
        latent = self.latent
        if latent.query_rank is None:
            (query,) = by_heads(x, latent.query_dim, self.query)
        else:
            (query,) = by_heads(self.query_norm(self.query_down(x)), latent.query_dim, self.query_up)
        query, turned = jnp.split(query, [latent.plain_dim], axis=-1)
        shared, rotary_key = jnp.split(self.kv_down(x), [latent.kv_rank], axis=-1)
        (both,) = by_heads(self.kv_norm(shared), latent.plain_dim + latent.value_dim, self.kv_up)
        key, value = jnp.split(both, [latent.plain_dim], axis=-1)
        turned, rotary_key = (
            apply_rope(part, sin, cos, interleaved=latent.interleaved) for part in (turned, rotary_key[..., None, :])
        )
        rotary_key = jnp.broadcast_to(rotary_key, (*key.shape[:-1], latent.rotary_dim))
        return jnp.concatenate([query, turned], axis=-1), jnp.concatenate([key, rotary_key], axis=-1), value

    def _of_one_width(
        self, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the three with heads of equal width, for attention that divides scores by the root of it."""
        latent, width = self.latent, self.latent.call_dim
        factor = latent.score_factor(self.config.rope_scaling) * math.sqrt(width / latent.query_dim)
        if factor != 1:
            query = (query.astype(jnp.float32) * factor).astype(query.dtype)
        query, key, value = (jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),)) for x in (query, key, value))
        return query, key, value

    def _joined(self, mixed: jax.Array) -> jax.Array:
        return from_heads(self.output, mixed[..., : self.latent.value_dim])

    def _tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_tables(positions, self.latent.rotary_dim // 2, self.config.rope_theta, self.config.rope_scaling)


class _GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020): ``down(silu(gate(x)) * up(x))``, ``[..., hidden] -> [..., hidden]``; or with GELU."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs, float8: Collection[str] = ()) -> None:
        make, (hidden, inner) = partial(projection, config, rngs=rngs), (config.hidden, config.mlp_dim)
        self.activation = config.layer_variant.activation
        self.gate = make(hidden, inner, float8="mlp.gate" in float8)
        self.up = make(hidden, inner, float8="mlp.up" in float8)
        self.down = make(inner, hidden, to_residual=True, float8="mlp.down" in float8)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., hidden]`` to the same shape, in the compute dtype."""
        gate, up = joined(x, self.gate, self.up)
        return self.down(activate(self.activation, gate) * up)


def residual_norm(config: LanguageModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Returns an RMSNorm over the residual stream."""
    return rms_norm(config, config.hidden, rngs)


class DecoderLayer(nnx.Module):
    """Attention, then the MLP, each on a normalised input and added to the residual stream; or one of the two.

    The MLP of a sparse layer is a mixture of experts. :func:`decoder_layer` makes layers.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        rngs: nnx.Rngs,
        *,
        is_sparse: bool = False,
        is_global: bool = False,
        part: str | None = None,
        float8: Collection[str] = (),
    ) -> None:
        self.config, self.is_sparse, self.is_global, self.part = config, is_sparse, is_global, part
        # a part is left out once it is made, so that the other one has the initial values of the whole layer
        own: Attention | LatentAttention
        if config.latent_attention is None:
            own = Attention(config, rngs, float8, is_global=is_global)
        else:
            own = LatentAttention(config, rngs)
        attention = residual_norm(config, rngs), own
        mlp = residual_norm(config, rngs), (MixtureOfExperts if is_sparse else _GatedMLP)(config, rngs, float8)
        if part != MLP:
            self.attention_norm, self.attention = attention
        if part != ATTENTION:
            self.mlp_norm, self.mlp = mlp
        if config.layer_variant.post_norms:
            if part != MLP:
                self.attention_post_norm = residual_norm(config, rngs)
            if part != ATTENTION:
                self.mlp_post_norm = residual_norm(config, rngs)

    def __call__(
        self,
        x: jax.Array,
        rows: RowInfo | None = None,
        *,
        is_token: jax.Array | None = None,
        counts: jax.Array | None = None,
        order: NDArray[np.int32] | None = None,
        earlier: Sequence[KVCache] | None = None,
    ) -> tuple[jax.Array, jax.Array | None, KVCache | None]:
        """Returns the residual stream, shaped like ``x``, the loss that the layer's router adds, or None, and the keys
        and values of its attention for later slices of the sequence, or None.

        Only attention reads ``rows`` and ``earlier``, the keys and values of earlier slices, None for a whole sequence.
        Only a mixture of experts reads the others; see :class:`MixtureOfExperts`.
        """
        own = None
        if self.part != MLP:
            mixed, own = self.attention.with_keys(self.attention_norm(x), rows, earlier or ())
            x = x + self._normed(mixed, ATTENTION)
        if earlier is None:  # a rematerialised layer would keep what nobody reads
            own = None
        if self.part == ATTENTION:
            return x, None, own
        y, loss = self._feed_forward(x, is_token=is_token, counts=counts, order=order)
        return x + self._normed(y, MLP), loss, own

    def decode_step(self, x: jax.Array, cache: KVCache, start: jax.Array) -> tuple[jax.Array, KVCache]:
        """Decode step of the layer, as :meth:`Attention.decode_step`."""
        mixed, cache = self.attention.decode_step(self.attention_norm(x), cache, start)
        x = x + self._normed(mixed, ATTENTION)
        return x + self._normed(self._feed_forward(x)[0], MLP), cache

    def _normed(self, result: jax.Array, part: str) -> jax.Array:
        """Returns the result of a part as it is added to the stream."""
        if not self.config.layer_variant.post_norms:
            return result
        normed: jax.Array = (self.attention_post_norm if part == ATTENTION else self.mlp_post_norm)(result)
        return normed

    def _feed_forward(self, x: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array | None]:
        normalised = self.mlp_norm(x)
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp(normalised, **options)
        return self.mlp(normalised), None


class AheadLayer(DecoderLayer):
    """Predicts one token further ahead: a decoder layer on the stream so far, joined with the next token's vector
    (DeepSeek-V3, section 2.2), and the norm before the head, which the next such layer reads too."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs, *, is_sparse: bool) -> None:
        super().__init__(config, rngs, is_sparse=is_sparse)
        self.token_norm, self.stream_norm = residual_norm(config, rngs), residual_norm(config, rngs)
        self.join = projection(config, 2 * config.hidden, config.hidden, rngs)
        self.output_norm = residual_norm(config, rngs)

    def predict(self, stream: jax.Array, vectors: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array | None]:
        """Returns the input of the head, shaped like ``stream``, and the loss that the layer's router adds, or None.

        ``stream`` is the input of the head one token back, ``vectors`` are those of the token after each;
        ``options`` are those of a decoder layer.
        """
        both = jnp.concatenate([self.token_norm(vectors), self.stream_norm(stream)], axis=-1)
        hidden, loss, _ = self(self.join(both), **options)
        return self.output_norm(hidden), loss


@cache
def ahead_layer(*, is_sparse: bool) -> Callable[[LanguageModelConfig, nnx.Rngs], AheadLayer]:
    """Returns the function that makes a layer that predicts further ahead."""
    return partial(AheadLayer, is_sparse=is_sparse)


@cache
def decoder_layer(
    *, is_sparse: bool, is_global: bool, part: str | None, float8: tuple[str, ...] = ()
) -> Callable[[LanguageModelConfig, nnx.Rngs], DecoderLayer]:
    """Returns the function that makes a decoder layer, with experts or without, global or not, or a part of it."""
    return partial(DecoderLayer, is_sparse=is_sparse, is_global=is_global, part=part, float8=float8)


class Embedding(nnx.Module):
    """The table ``[vocab_size, hidden]`` of token vectors; a tied head reads the same table."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        self.table = learned(config, (config.vocab_size, config.hidden), rngs)
        self.compute_dtype = jnp.dtype(config.compute_dtype)
        self.float8, self.z_loss = config.has_float8_head, config.z_loss
        self.factor = math.sqrt(config.hidden) if config.layer_variant.scaled_embedding else None

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps ``tokens`` int32 ``[batch, length]`` to vectors ``[batch, length, hidden]`` in the compute dtype."""
        return self._scaled(jnp.take(self.table[...], tokens, axis=0).astype(self.compute_dtype))

    def _scaled(self, vectors: jax.Array) -> jax.Array:
        # the factor is rounded to the compute dtype, as published weights expect
        return vectors if self.factor is None else vectors * jnp.asarray(self.factor, self.compute_dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps ``x`` ``[batch, length, hidden]`` to float32 logits ``[batch, length, vocab_size]``."""
        return self.head_loss().logits(x, self.table[...])

    def loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the loss of the tied head, as :meth:`LMHead.loss`."""
        return self.head_loss()(x, self.table[...], targets, weights)

    def head_loss(self) -> HeadLoss:
        """Returns the loss as a function of the table."""
        return HeadLoss(True, self.compute_dtype.name, self.z_loss, self.float8)


class LMHead(nnx.Module):
    """The output matrix ``[hidden, vocab_size]`` of a model whose embeddings are not tied."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        self.kernel = learned(config, (config.hidden, config.vocab_size), rngs)
        self.compute_dtype = jnp.dtype(config.compute_dtype)
        self.float8, self.z_loss = config.has_float8_head, config.z_loss

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps ``x`` ``[batch, length, hidden]`` to float32 logits ``[batch, length, vocab_size]``."""
        return self.head_loss().logits(x, self.kernel[...])

    def loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the loss with its z-loss, summed over tokens by weight, and the z-loss alone; float32 scalars.

        ``x`` ``[batch, length, hidden]``, ``targets`` int32 and ``weights`` float32 ``[batch, length]``. No logits are
        kept for the backward, see :mod:`rrfp_jax.models.loss`.
        """
        return self.head_loss()(x, self.kernel[...], targets, weights)

    def head_loss(self) -> HeadLoss:
        """Returns the loss as a function of the matrix."""
        return HeadLoss(False, self.compute_dtype.name, self.z_loss, self.float8)


# -- shards of the vocabulary ------------------------------------------------------------------------------------------


class EmbeddingShard(Embedding):
    """The rows of :class:`Embedding` for the words of a shard."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs, *, shard: LayerShard) -> None:
        super().__init__(config, rngs)  # the whole table, so that the shard has its initial values
        self.bounds, self.num_words = shard.bounds(config.vocab_size), config.vocab_size
        self.table = nnx.Param(jax.lax.slice_in_dim(self.table[...], *self.bounds, axis=0))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps ``tokens`` as the whole table does where they are words of the shard, and to zeros elsewhere."""
        first, stop = self.bounds
        is_here, is_word = (first <= tokens) & (tokens < stop), (tokens >= 0) & (tokens < self.num_words)
        vectors = jnp.take(self.table[...], jnp.where(is_here, tokens - first, 0), axis=0)
        elsewhere = jnp.where(is_word, 0, jnp.nan)[..., None]
        return self._scaled(jnp.where(is_here[..., None], vectors, elsewhere).astype(self.compute_dtype))

    def numbers(self, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers of the tied head, as :meth:`LMHeadShard.numbers`."""
        numbers = HeadShard(True, self.compute_dtype.name, self.float8)
        return numbers(x, self.table[...], targets - self.bounds[0])


class LMHeadShard(LMHead):
    """The columns of :class:`LMHead` for the words of a shard."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs, *, shard: LayerShard) -> None:
        super().__init__(config, rngs)
        self.bounds = shard.bounds(config.vocab_size)
        self.kernel = nnx.Param(jax.lax.slice_in_dim(self.kernel[...], *self.bounds, axis=1))

    def numbers(self, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns what :class:`rrfp_jax.models.loss.HeadShard` does for ``x`` ``[batch, length, hidden]``."""
        numbers = HeadShard(False, self.compute_dtype.name, self.float8)
        return numbers(x, self.kernel[...], targets - self.bounds[0])


@cache
def vocabulary_layer(
    build: Callable[..., Any], shard: LayerShard
) -> Callable[[LanguageModelConfig, nnx.Rngs], nnx.Module]:
    """Returns the function that makes a shard of the embedding or of the head."""
    return partial(build, shard=shard)
