"""The parts of a decoder: attention and gated MLP; of these the layers that have a name; and the loss.

Each is a Flax NNX class with the dtypes of the configuration filled in: parameters are stored in ``param_dtype`` and
cast to ``compute_dtype`` where they are used.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from rrfp_jax.models.attention import cached_attention, causal_attention
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.context_attention import context_attention
from rrfp_jax.models.context_cut import ContextCut, SequenceOrder
from rrfp_jax.models.experts import MixtureOfExperts
from rrfp_jax.models.head_loss import HeadLoss
from rrfp_jax.models.parts import learned, projection, rms_norm
from rrfp_jax.models.rotary import rotate, turned, turns


class PackedRows(NamedTuple):
    """What every layer needs to know of rows that hold several samples, made once for a chunk."""

    sin: jax.Array
    """Of the rotary angles, float32 ``[batch, length, 1, head_dim / 2]``."""
    cos: jax.Array
    """Likewise."""
    segments: jax.Array
    """Ids of the segments, int32 ``[batch, length]``; a token looks at those of its own."""


def packed_rows(config: LanguageModelConfig, positions: jax.Array, segments: jax.Array) -> PackedRows:
    """From the position of every token in its segment and the segment's id, both int ``[batch, length]``."""
    return PackedRows(*turns(positions, config.size_per_head // 2, config.rope_theta, config.rope_scaling), segments)


class CutRows(NamedTuple):
    """The same of rows, packed or not, whose positions are dealt out over devices."""

    sin: jax.Array
    """Of the rotary angles, float32 ``[batch or 1, length, 1, head_dim / 2]``."""
    cos: jax.Array
    """Likewise."""
    segments: jax.Array | None
    """Of packed rows, int ``[batch, length]``."""
    cut: ContextCut
    """How they are dealt out."""


def cut_rows(
    config: LanguageModelConfig, cut: ContextCut, length: int, positions: Any = None, segments: Any = None
) -> CutRows:
    """For rows of so many places in the order of ``cut``, as ``positions`` and ``segments`` of packed rows are."""
    if positions is None:
        positions = jnp.asarray(SequenceOrder(cut.devices, config.sliding_window)(length))[None]
    return CutRows(*turns(positions, config.size_per_head // 2, config.rope_theta, config.rope_scaling), segments, cut)


Rows = PackedRows | CutRows | None
"""None: of one sample each, whole on every device."""


class KeysAndValues(NamedTuple):
    """What attention has made of the tokens so far, place by place; both ``[batch, places, kv_heads, head_dim]``."""

    keys: jax.Array
    values: jax.Array


class Attention(nnx.Module):
    """Every token looks at itself and at earlier ones, ``[batch, length, hidden] -> [batch, length, hidden]``.

    Query head ``h`` reads key and value head ``h // (num_heads / num_kv_heads)`` (Ainslie et al. 2023). Scores and
    softmax are float32.
    """

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        self.head_dim = config.size_per_head
        self.rope_theta = config.rope_theta
        self.rope_scaling = config.rope_scaling
        self.window = config.sliding_window
        query_dim = config.num_heads * self.head_dim
        key_dim = config.num_key_value_heads * self.head_dim
        self.query = projection(config, config.hidden, query_dim, rngs, use_bias=config.qkv_bias)
        self.key = projection(config, config.hidden, key_dim, rngs, use_bias=config.qkv_bias)
        self.value = projection(config, config.hidden, key_dim, rngs, use_bias=config.qkv_bias)
        self.output = projection(config, query_dim, config.hidden, rngs, to_residual=True)
        self.query_norm = rms_norm(config, self.head_dim, rngs) if config.qk_norm else None
        self.key_norm = rms_norm(config, self.head_dim, rngs) if config.qk_norm else None

    def __call__(self, x: jax.Array, rows: Rows = None) -> jax.Array:
        """``[batch, length, hidden]`` to the same shape and dtype."""
        query, key, value = self._projected(x)
        query, key = (self._rotated(heads, rows) for heads in (query, key))
        if isinstance(rows, CutRows):
            options: dict[str, Any] = {"cut": rows.cut, "segments": rows.segments}
            mixed = context_attention(query, key, value, window=self.window, **options)
        else:
            segments = None if rows is None else rows.segments
            mixed = causal_attention(query, key, value, window=self.window, segments=segments)
        return self.output(checkpoint_name(mixed.reshape(*x.shape[:-1], -1), "attention"))

    def extended(self, x: jax.Array, cache: KeysAndValues, start: jax.Array) -> tuple[jax.Array, KeysAndValues]:
        """The same for the tokens from position ``start`` on, what was before them being in the cache.

        Returns the result, shaped like ``x``, and the cache with these tokens in it.
        """
        query, key, value = self._projected(x)
        positions = start + jnp.arange(x.shape[1])
        angles = turns(positions, self.head_dim // 2, self.rope_theta, self.rope_scaling)
        new = turned(key, *angles), value
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(held, part.astype(held.dtype), start, axis=1)
            for held, part in zip(cache, new, strict=True)
        )
        mixed = cached_attention(turned(query, *angles), keys, values, positions, window=self.window)
        return self.output(mixed.reshape(*x.shape[:-1], -1)), KeysAndValues(keys, values)

    def _projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value

    def _rotated(self, heads: jax.Array, rows: Rows) -> jax.Array:
        if rows is None:
            return rotate(heads, self.rope_theta, self.rope_scaling)
        return turned(heads, rows.sin, rows.cos)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


class GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020): ``down(silu(gate(x)) * up(x))``, ``[..., hidden] -> [..., hidden]``."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        self.gate = projection(config, config.hidden, config.mlp_dim, rngs)
        self.up = projection(config, config.hidden, config.mlp_dim, rngs)
        self.down = projection(config, config.mlp_dim, config.hidden, rngs, to_residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., hidden]`` to the same shape, in the compute dtype."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Embedding(nnx.Module):
    """The table ``[vocab_size, hidden]`` of token vectors; a tied head reads the same table."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        self.table = learned(config, (config.vocab_size, config.hidden), rngs)
        self.compute_dtype = jnp.dtype(config.compute_dtype)
        self.z_loss = config.z_loss

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """``tokens`` int32 ``[batch, length]`` to vectors ``[batch, length, hidden]`` in the compute dtype."""
        return jnp.take(self.table[...], tokens, axis=0).astype(self.compute_dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """``x`` ``[batch, length, hidden]`` to float32 logits ``[batch, length, vocab_size]``."""
        return _float32_product("blh,vh->blv", x, self.table[...].astype(self.compute_dtype))

    def loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As :meth:`Head.loss`."""
        how = HeadLoss(words_first=True, compute_dtype=self.compute_dtype.name, z_loss=self.z_loss)
        return how(x, self.table[...], targets, weights)


def residual_norm(config: LanguageModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """RMSNorm over the residual stream."""
    return rms_norm(config, config.hidden, rngs)


class DecoderLayer(nnx.Module):
    """Attention, then the gated MLP, each on a normalised input and added to the residual stream."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention_norm = residual_norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = residual_norm(config, rngs)
        self.mlp = GatedMLP(config, rngs)

    def __call__(self, x: jax.Array, rows: Rows = None) -> jax.Array:
        """``[batch, length, hidden]`` to the same shape and dtype."""
        x = x + self.attention(self.attention_norm(x), rows)
        return x + self.mlp(self.mlp_norm(x))

    def extended(self, x: jax.Array, cache: KeysAndValues, start: jax.Array) -> tuple[jax.Array, KeysAndValues]:
        """As :meth:`Attention.extended`."""
        mixed, cache = self.attention.extended(self.attention_norm(x), cache, start)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class SparseDecoderLayer(nnx.Module):
    """Attention, then the mixture of experts, likewise."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention_norm = residual_norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = residual_norm(config, rngs)
        self.mlp = MixtureOfExperts(config, rngs)

    def __call__(
        self, x: jax.Array, rows: Rows = None, *, is_token: Any = None, counts: Any = None
    ) -> tuple[jax.Array, Any]:
        """The stream, and what the router adds to the loss; see :class:`rrfp_jax.models.experts.MixtureOfExperts`."""
        x = x + self.attention(self.attention_norm(x), rows)
        order = None
        if isinstance(rows, CutRows):
            order = SequenceOrder(rows.cut.devices, self.config.sliding_window)(x.shape[1])
        y, loss = self.mlp(self.mlp_norm(x), is_token=is_token, counts=counts, order=order)
        return x + y, loss

    def extended(self, x: jax.Array, cache: KeysAndValues, start: jax.Array) -> tuple[jax.Array, KeysAndValues]:
        """As :meth:`Attention.extended`."""
        mixed, cache = self.attention.extended(self.attention_norm(x), cache, start)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x))[0], cache


class Head(nnx.Module):
    """The output matrix ``[hidden, vocab_size]`` of a model whose embeddings are not tied."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        self.kernel = learned(config, (config.hidden, config.vocab_size), rngs)
        self.compute_dtype = jnp.dtype(config.compute_dtype)
        self.z_loss = config.z_loss

    def logits(self, x: jax.Array) -> jax.Array:
        """``x`` ``[batch, length, hidden]`` to float32 logits ``[batch, length, vocab_size]``."""
        return _float32_product("blh,hv->blv", x, self.kernel[...].astype(self.compute_dtype))

    def loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The loss with its z-loss, summed over tokens by weight, and the z-loss alone; both float32 scalars.

        ``x`` ``[batch, length, hidden]``, ``targets`` int32 and ``weights`` float32 ``[batch, length]``. It keeps no
        logits, see :mod:`rrfp_jax.models.head_loss`.
        """
        how = HeadLoss(words_first=False, compute_dtype=self.compute_dtype.name, z_loss=self.z_loss)
        return how(x, self.kernel[...], targets, weights)


def _float32_product(subscripts: str, x: jax.Array, matrix: jax.Array) -> jax.Array:
    # Logits rounded to bfloat16 would cost the loss about two decimal digits.
    return jnp.einsum(subscripts, x, matrix, preferred_element_type=jnp.float32)


def token_loss(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross entropy in nats, summed over tokens, and the sum of the weights; both float32 scalars.

    ``logits`` float32 ``[batch, length, vocab_size]``, ``targets`` int32 and ``weights`` float32 ``[batch, length]``.
    The mean over a step is the sum of the first divided by the sum of the second over all microbatches.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    weights = weights.astype(jnp.float32)
    return jnp.sum(losses * weights), jnp.sum(weights)


def normaliser_loss(logits: jax.Array, weights: jax.Array) -> jax.Array:
    """The squares of the logarithms of the softmax's normalisers, summed over tokens by weight; a float32 scalar."""
    squares = jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))
    return jnp.sum(squares * weights.astype(jnp.float32))
