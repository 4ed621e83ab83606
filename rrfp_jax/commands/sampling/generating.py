"""Tokens of a trained model, one after the other, on one device.

A prompt is read in one pass, which leaves keys and values in a cache; then a loop, compiled as a whole, makes a token
per turn. Both are compiled once for prompts, and for texts, up to the same power of two: a prompt is padded to it, and
the cache has as many places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, FieldRule, check_fields
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.decoding import CachedDecoder, LayerCaches, next_token
from rrfp_jax.models.model import merge_features
from rrfp_jax.models.vision_config import VisionLanguageConfig
from rrfp_jax.models.vision_language import vision_language_model
from rrfp_jax.programs.chunk import Chunk, param_specs

_SHORTEST = 16
"""The smallest bucket."""
_SHARE = FieldRule("a number above 0, at most 1", lambda value: 0 < value <= 1)
_SEED = FieldRule(f"a number from 0 to {2**32 - 1}", lambda value: 0 <= value < 2**32)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How tokens are chosen; raises ValueError for numbers that say nothing."""

    max_tokens: int = 128
    """Tokens after the prompt, at most."""
    temperature: float = 0.0
    """Divisor of the logits; 0: always the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are drawn."""
    seed: int = 0
    """Seed of the random choices."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "max_tokens")
        check_fields(self, NOT_NEGATIVE, "temperature")
        check_fields(self, _SHARE, "top_p")
        check_fields(self, _SEED, "seed")


@dataclass(frozen=True, kw_only=True)
class TokenPrompt:
    """The tokens and images that the model reads before it makes the first token."""

    tokens: NDArray[np.int32]
    """Token numbers, int32 ``[length]``."""
    image_leaves: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arrays of the prompt's images, as in a microbatch: ``patches`` and so on; ``image_index`` is ``[1, length]``."""


class _Rules(NamedTuple):
    """How tokens are chosen, as arrays; ``stops`` are those that end the text."""

    key: Any
    temperature: Any
    top_p: Any
    stops: Any
    max_tokens: Any


class Generator:
    """A model with its parameters on JAX's first device.

    Args:
        model: its shape.
        params: all its parameters by layer name.

    Raises ValueError where layers are missing, or the model also listens.
    """

    def __init__(self, model: LanguageModelConfig | VisionLanguageConfig, params: Mapping[str, Any]) -> None:
        self._encoder: Chunk | None = None
        if isinstance(model, LanguageModelConfig):
            self._decoder = CachedDecoder(model)
        else:
            if model.audio is not None:
                raise ValueError("a model that listens cannot be sampled: give one without audio")
            self._decoder = CachedDecoder(model.decoder, "decoder.")
            self._encoder = vision_language_model(model).split().chunks[0]
        names = [*self._decoder.names, *(() if self._encoder is None else param_specs(self._encoder))]
        missing = [name for name in names if name not in params]
        if missing:
            raise ValueError(f"parameters of {', '.join(missing)} are missing: give a checkpoint of this model")
        self._params = {name: params[name] for name in names}

    def tokens(self, prompt: TokenPrompt, drawing: Drawing, *, stops: Sequence[int] = ()) -> NDArray[np.int32]:
        """Returns the tokens that the model makes after a prompt, int32 ``[at most max_tokens]``, without the token
        that has stopped it."""
        length = len(prompt.tokens)
        padded = np.zeros((1, bucket(length)), np.int32)
        padded[0, :length] = prompt.tokens
        places = bucket(max(padded.size, length + drawing.max_tokens))
        logits, cache = self._read(self._params, padded, length, self._images(prompt, padded.shape), num_places=places)
        rules = _Rules(
            key=jax.random.key(drawing.seed),
            temperature=np.float32(drawing.temperature),
            top_p=np.float32(drawing.top_p),
            stops=np.array(sorted({-1, *stops}), np.int32),
            max_tokens=np.int32(drawing.max_tokens),
        )
        made, count = self._go_on(self._params, cache, logits, np.int32(length), rules)
        return np.asarray(made)[: int(count)]

    def _images(self, prompt: TokenPrompt, shape: tuple[int, int]) -> dict[str, NDArray[Any]]:
        """Returns the leaves of images, with ``image_index`` as long as the padded prompt."""
        leaves = dict(prompt.image_leaves)
        if leaves:
            index = np.full(shape, -1, np.int32)
            index[:, : leaves["image_index"].shape[1]] = leaves["image_index"]
            leaves["image_index"] = index
        return leaves

    @cached_property
    def _read(self) -> Any:
        return jax.jit(self._prefill, static_argnames="num_places")

    @cached_property
    def _go_on(self) -> Any:
        return jax.jit(self._loop)

    def _prefill(
        self, params: Any, tokens: jax.Array, length: jax.Array, leaves: dict[str, jax.Array], *, num_places: int
    ) -> tuple[jax.Array, LayerCaches]:
        """Returns the logits behind the last token of the prompt, ``[vocab_size]``, and the cache."""
        vectors = self._decoder.embed(params, tokens)
        if leaves:
            assert self._encoder is not None
            own = {name: params[name] for name in param_specs(self._encoder)}
            features = self._encoder.apply(own, None, {name: leaves[name] for name in self._encoder.leaves}, key=None)
            vectors = merge_features(vectors, features, leaves, "image_index")
        stream, cache = self._decoder.decode_step(params, vectors, self._decoder.empty_cache(1, num_places), 0)
        last = jax.lax.dynamic_slice_in_dim(stream, length - 1, 1, axis=1)
        return self._decoder.logits(params, last)[0, 0], cache

    def _loop(
        self, params: Any, cache: LayerCaches, logits: jax.Array, length: jax.Array, rules: "_Rules"
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens, int32 ``[num_places]``, and how many of them are valid."""
        num_places = cache[0].keys.shape[1]

        def chosen(logits: jax.Array, count: jax.Array) -> jax.Array:
            key = jax.random.fold_in(rules.key, count)
            return next_token(logits, key, temperature=rules.temperature, top_p=rules.top_p)

        def goes_on(state: Any) -> jax.Array:
            count, token = state[:2]
            return (count < rules.max_tokens) & ~jnp.any(token == rules.stops)

        def turned(state: Any) -> Any:
            count, token, made, cache = state
            made = made.at[count].set(token)
            vectors = self._decoder.embed(params, token[None, None])
            stream, cache = self._decoder.decode_step(params, vectors, cache, length + count)
            return count + 1, chosen(self._decoder.logits(params, stream)[0, 0], count + 1), made, cache

        start = jnp.int32(0), chosen(logits, jnp.int32(0)), jnp.zeros(num_places, jnp.int32), cache
        count, _, made, _ = jax.lax.while_loop(goes_on, turned, start)
        return made, count


def bucket(length: int) -> int:
    """Returns the power of two up to which texts of this length share their programs."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())
