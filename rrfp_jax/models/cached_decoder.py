"""A decoder that reads a text once and then goes on token by token, with the keys and values so far in a cache.

The parameters are those of the chunks, by layer name, whatever layout trained them. The cache has a fixed number of
places, so all programs have shapes that are known before they run. A text may be longer than its tokens: what padding
leaves in the cache lies behind the place of every token that reads it, and is written over by the tokens that follow.

Experts take all tokens that choose them: a capacity (``capacity_factor``) counts the tokens of whole rows, which a text
that is still growing does not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.decoder import DecoderLayer, KeysAndValues, SparseDecoderLayer
from rrfp_jax.models.layer_cut import plan_cut
from rrfp_jax.models.model import EMBEDDING, FINAL_NORM, HEAD, decoder_layers
from rrfp_jax.models.named_layers import NamedLayer, module_of

Cache = tuple[KeysAndValues, ...]
"""For every decoder layer what its attention has made of the tokens so far."""


@dataclass(frozen=True)
class CachedDecoder:
    """A decoder of a given shape; ``prefix`` is what the names of its layers begin with.

    Its methods are pure functions of parameters by layer name, to be traced.
    """

    config: LanguageModelConfig
    prefix: str = ""

    @cached_property
    def _layers(self) -> list[NamedLayer]:
        config = self.config
        if config.experts is not None:
            config = replace(config, experts=replace(config.experts, capacity_factor=None))
        (plan,) = plan_cut(config.num_layers, num_chunks=1)
        return decoder_layers(config, plan, self.prefix)

    @property
    def names(self) -> list[str]:
        """The names of its layers in the model."""
        return [layer.name for layer in self._layers]

    def _modules(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {layer.own: module_of(layer, params[layer.name]) for layer in self._layers}

    def empty(self, batch: int, num_places: int) -> Cache:
        """A cache for texts of up to ``num_places`` tokens."""
        config = self.config
        shape = (batch, num_places, config.num_key_value_heads, config.size_per_head)
        nothing = jnp.zeros(shape, config.compute_dtype)
        return (KeysAndValues(nothing, nothing),) * config.num_layers

    def embedded(self, params: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
        """Vectors ``[batch, tokens, hidden]`` of tokens, int32 ``[batch, tokens]``."""
        vectors: jax.Array = self._modules(params)[EMBEDDING](tokens)
        return vectors

    def extended(
        self, params: Mapping[str, Any], vectors: jax.Array, cache: Cache, start: jax.typing.ArrayLike
    ) -> tuple[jax.Array, Cache]:
        """The residual stream behind the last layer, shaped like ``vectors``, and the cache with these tokens.

        ``vectors`` are those of the tokens from position ``start`` on; earlier ones are in the cache.
        """
        modules = self._modules(params).values()
        layers = [module for module in modules if isinstance(module, DecoderLayer | SparseDecoderLayer)]
        held = []
        for layer, own in zip(layers, cache, strict=True):
            vectors, new = layer.extended(vectors, own, jnp.asarray(start, jnp.int32))
            held.append(new)
        return vectors, tuple(held)

    def logits(self, params: Mapping[str, Any], stream: jax.Array) -> jax.Array:
        """Of the next token, float32 ``[batch, tokens, vocab_size]``, from the residual stream."""
        modules = self._modules(params)
        head = modules[HEAD] if HEAD in modules else modules[EMBEDDING]
        logits: jax.Array = head.logits(modules[FINAL_NORM](stream))
        return logits
