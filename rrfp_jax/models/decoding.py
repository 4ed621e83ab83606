"""Decoding token by token: the keys and values so far lie in a cache, and the next token is drawn from the logits.

The parameters are those of the chunks, by layer name, whatever layout trained them. The cache has a fixed number of
places, so all programs have shapes that are known before they run. A text may be longer than its tokens: keys of
padding lie in the cache behind the place of every token that reads it, and the tokens that follow overwrite them.

Experts take all tokens that choose them: a capacity (``capacity_factor``) counts the tokens of whole rows, which a text
that is still growing does not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.models._decoder import DecoderLayer, KVCache
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.cuts import plan_cut
from rrfp_jax.models.flax_modules import NamedLayer, layer_module
from rrfp_jax.models.model import EMBEDDING, FINAL_NORM, HEAD, named_decoder_layers

LayerCaches = tuple[KVCache, ...]
"""The cache of every decoder layer, in order."""


@dataclass(frozen=True)
class CachedDecoder:
    """A decoder of a given shape; the names of its layers begin with ``prefix``.

    Its methods are pure functions of parameters by layer name, to be traced.
    """

    config: LanguageModelConfig
    prefix: str = ""

    @cached_property
    def _layers(self) -> list[NamedLayer]:
        config = replace(self.config, predict_ahead=None)
        if config.experts is not None:
            # a growing text has no row whose tokens a capacity could count
            config = replace(config, experts=replace(config.experts, capacity_factor=None))
        (plan,) = plan_cut(config.num_layers, num_chunks=1)
        return named_decoder_layers(config, plan, self.prefix)

    @property
    def names(self) -> list[str]:
        """Names of its layers in the model."""
        return [layer.name for layer in self._layers]

    def _modules(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {layer.own: layer_module(layer, params[layer.name]) for layer in self._layers}

    def empty_cache(self, batch: int, num_places: int) -> LayerCaches:
        """Returns a cache for texts of up to ``num_places`` tokens."""
        config = self.config
        shape, latent = (batch, num_places, config.num_key_value_heads), config.latent_attention
        keys, values = (
            jnp.zeros((*shape, width), config.compute_dtype)
            for width in (config.size_per_head, config.size_per_head if latent is None else latent.value_dim)
        )
        return (KVCache(keys, values),) * config.num_layers

    def embed(self, params: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
        """Returns the vectors ``[batch, tokens, hidden]`` of tokens, int32 ``[batch, tokens]``."""
        vectors: jax.Array = self._modules(params)[EMBEDDING](tokens)
        return vectors

    def decode_step(
        self, params: Mapping[str, Any], vectors: jax.Array, cache: LayerCaches, start: jax.typing.ArrayLike
    ) -> tuple[jax.Array, LayerCaches]:
        """Returns the residual stream behind the last layer, shaped like ``vectors``, and the updated cache.

        ``vectors`` are those of the tokens at positions from ``start`` on; earlier ones are in the cache.
        """
        modules = self._modules(params).values()
        layers = [module for module in modules if isinstance(module, DecoderLayer)]
        updated = []
        for layer, own in zip(layers, cache, strict=True):
            vectors, new = layer.decode_step(vectors, own, jnp.asarray(start, jnp.int32))
            updated.append(new)
        return vectors, tuple(updated)

    def logits(self, params: Mapping[str, Any], stream: jax.Array) -> jax.Array:
        """Maps the residual stream to the logits of the next token, float32 ``[batch, tokens, vocab_size]``."""
        modules = self._modules(params)
        head = modules[HEAD] if HEAD in modules else modules[EMBEDDING]
        logits: jax.Array = head.logits(modules[FINAL_NORM](stream))
        return logits


def nucleus(logits: jax.Array, top_p: jax.typing.ArrayLike) -> jax.Array:
    """Returns ``logits`` ``[..., vocab_size]`` with minus infinity outside of the nucleus (Holtzman et al. 2020).

    The nucleus are the fewest likeliest tokens, at least one, whose probabilities sum to at least ``top_p``; of equally
    likely tokens the first ones count as likelier.
    """
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ordered = jnp.take_along_axis(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), order, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    is_in = (before < top_p).at[..., 0].set(True)
    places = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(is_in, places, axis=-1), logits, -jnp.inf)


def next_token(
    logits: jax.Array, key: jax.Array, *, temperature: jax.typing.ArrayLike, top_p: jax.typing.ArrayLike
) -> jax.Array:
    """Returns an int32 token drawn by ``logits`` ``[vocab_size]``; the likeliest one if the temperature is 0."""
    is_greedy = jnp.asarray(temperature) == 0
    tempered = logits / jnp.where(is_greedy, 1.0, temperature)  # both branches run, so this must not divide by 0
    drawn = jax.random.categorical(key, nucleus(tempered, top_p))
    return jnp.where(is_greedy, jnp.argmax(logits), drawn).astype(jnp.int32)
