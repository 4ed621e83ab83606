"""What a trained model reads in pictures of words that it has never seen: greedy transcription, on one device.

A microbatch's pictures pass the encoder once; then the whole decoder runs again for every character, which is cheap
enough for models that learn within minutes and needs no cache. The pipeline is not asked: parameters go by layer name,
so those gathered from its stages do, and so do those of a checkpoint.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.rendered_text import HeldOut
from rrfp_jax.data.scores import character_error_rate, exact_match, lines_of
from rrfp_jax.models.vision_language import ChunkGraph, vision_language_model
from rrfp_jax.models.vision_language_config import VisionLanguageConfig
from rrfp_jax.programs.chunk import Chunk, Params, param_specs

_END_OF_WORD = ord("\n")


class ReadWord(NamedTuple):
    """A picture and what was made of it."""

    picture: NDArray[np.float32]
    """``[height, width]``, ink 1 on paper 0."""
    written: str
    """The word that was drawn."""
    read: str
    """The word that the model wrote down for it."""


class Scores(NamedTuple):
    """How well words were read."""

    num_words: int
    exact_match: float
    """The fraction of words without a fault."""
    character_error_rate: float
    """Edits per character that was drawn."""


def read_words(config: VisionLanguageConfig, params: Mapping[str, Any], batches: Sequence[HeldOut]) -> list[ReadWord]:
    """Every picture of ``batches`` with the line that the model writes for it, in order.

    ``params`` are all the model's by layer name, on any devices: they are copied to the first. In every place stands
    the likeliest token. A sample is done with as many lines as it has pictures, or at the end of its row. Compiled once
    for each shape of batches.

    Raises ValueError, with the remedy, where layers are missing or the model has another encoder besides.
    """
    graph = _reader(config)
    missing = [name for chunk in graph.chunks for name in param_specs(chunk) if name not in params]
    if missing:
        raise ValueError(f"parameters of {', '.join(missing)} are missing: gather those of all stages")
    held = jax.device_put({name: jax.tree.map(np.asarray, layer) for name, layer in params.items()}, jax.devices()[0])
    found: list[ReadWord] = []
    for batch in batches:
        num_lines = np.array([len(words) for words in batch.words], np.int32)
        tokens = np.asarray(_transcribed(config, held, batch.leaves, batch.starts, num_lines))
        for row, start, words, pictures in zip(tokens, batch.starts, batch.words, batch.pictures, strict=True):
            found += map(ReadWord, pictures, words, lines_of(row[start:], len(words)))
    return found


def scores_of(words: Sequence[ReadWord]) -> Scores:
    """Raises ValueError where there are none."""
    read, written = [word.read for word in words], [word.written for word in words]
    return Scores(len(words), exact_match(read, written), character_error_rate(read, written))


def _reader(config: VisionLanguageConfig) -> ChunkGraph:
    """Two chunks: the encoder of pictures with its projector, and the decoder up to its logits."""
    if config.audio is not None:
        raise ValueError("a model that listens cannot be read from pictures alone: give one without audio")
    return vision_language_model(config).split(packed=True, gives_logits=True)


@partial(jax.jit, static_argnames="config")
def _transcribed(
    config: VisionLanguageConfig,
    params: Params,
    leaves: Mapping[str, jax.Array],
    starts: jax.Array,
    num_lines: jax.Array,
) -> jax.Array:
    """The tokens ``[rows, length]`` with what the model writes from ``starts`` on, ``num_lines`` lines or more."""
    encoder, decoder = _reader(config).chunks
    features = _run(encoder, params, None, leaves)
    rows, length = jnp.arange(len(starts)), leaves["tokens"].shape[1]
    is_free = jnp.arange(length) >= starts[:, None]

    def goes_on(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        written, tokens = state
        lines = jnp.sum((tokens == _END_OF_WORD) & is_free, axis=1)
        return jnp.any((lines < num_lines) & (starts + written < length))

    def written_on(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        written, tokens = state
        at = starts + written
        logits = _run(decoder, params, features, {**leaves, "tokens": tokens})
        likeliest = jnp.argmax(logits[rows, at - 1], axis=-1).astype(tokens.dtype)
        return written + 1, tokens.at[rows, at].set(likeliest, mode="drop")  # beyond the row's end there is no place

    # Padding may hold any byte.
    tokens = jnp.where(is_free, 0, leaves["tokens"])
    return jax.lax.while_loop(goes_on, written_on, (jnp.int32(0), tokens))[1]


def _run(chunk: Chunk, params: Params, inputs: Any, leaves: Mapping[str, jax.Array]) -> Any:
    own = {name: params[name] for name in param_specs(chunk)}
    return chunk.apply(own, inputs, {name: leaves[name] for name in chunk.leaves}, key=None)
