"""A language model as a list of chunks.

The model is a chain of named layers: ``embedding``, ``layers.0`` ..., ``final_norm``, ``head``. Each is a Flax NNX
module of its own, split once into a static graph definition and a plain nested dictionary of arrays; a chunk is some
consecutive names. A name is global: it says nothing of the chunk or stage that holds the layer. Parameters, checkpoints
and initial values go by it, so neither initial values nor the result depend on the cut.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.decoder import DecoderLayer, Embedding, Head, rms_norm, token_loss
from rrfp_jax.models.layer_cut import ChunkPlan, plan_cut
from rrfp_jax.models.tensor_cut import partition
from rrfp_jax.programs.chunk import Chunk, Params
from rrfp_jax.programs.layers import ApplyLayers, InitLayers

EMBEDDING = "embedding"
"""The token embedding; with tied embeddings also the copy in the head's chunk."""
FINAL_NORM = "final_norm"
"""The RMSNorm before the head; always in the head's chunk."""
HEAD = "head"
"""The output matrix; absent with tied embeddings."""

Build = Callable[[LanguageModelConfig, nnx.Rngs], nnx.Module]
Builders = tuple[tuple[str, Build], ...]
"""How to make every layer of a chunk, by its name there."""


@dataclass(frozen=True)
class LanguageModel:
    """A decoder of a given shape, to be cut into chunks; made by :func:`language_model`."""

    config: LanguageModelConfig
    """Its shape and dtypes."""

    def split(
        self,
        num_chunks: int | None = None,
        layers_per_chunk: Sequence[int] | None = None,
        embedding_in: int = 0,
        head_in: int = -1,
    ) -> list[Chunk]:
        """Cut the model into chunks, in order; every cut computes the same function of the same parameters.

        ``num_chunks`` alone cuts evenly; ``layers_per_chunk`` gives the number of decoder layers of every chunk, 0
        where a chunk holds only the embedding or the head. ``embedding_in`` and ``head_in`` say which chunk holds
        those (negative: counted from the last).

        The embedding's chunk reads the batch leaf ``tokens``, int32 ``[batch, length]``; the head's chunk reads
        ``targets``, int32, and ``weights``, float32, of the same shape, and returns ``(loss_sum, weight)``. Between
        chunks travels the residual stream, ``[batch, length, hidden]`` in the compute dtype. With tied embeddings in
        two chunks both hold ``embedding`` and list it in ``shared``.

        Raises ValueError, with the remedy, for a cut that does not add up.
        """
        plans = plan_cut(
            self.config.num_layers,
            num_chunks=num_chunks,
            layers_per_chunk=layers_per_chunk,
            embedding_in=embedding_in,
            head_in=head_in,
        )
        return [self._chunk(plan) for plan in plans]

    def _chunk(self, plan: ChunkPlan) -> Chunk:
        layers = _layers(self.config, plan)
        builders = tuple((own, build) for own, _, build in layers)
        names = {own: name for own, name, _ in layers}
        shared = self.config.tie_embeddings and plan.embedding != plan.head and EMBEDDING in names
        numbers = {own: np.uint32(layer_number(name)) for own, name in names.items()}
        return Chunk(
            name=plan.title,
            init=InitLayers(partial(_init, self.config, builders), names, numbers),
            apply=ApplyLayers(
                partial(_apply, config=self.config, builders=builders, embeds=plan.embedding, is_last=plan.head), names
            ),
            leaves=("tokens",) * plan.embedding + ("targets", "weights") * plan.head,
            shared=frozenset({EMBEDDING} if shared else ()),
            partition=partial(partition, self.config),
        )


def language_model(config: LanguageModelConfig) -> LanguageModel:
    """The model that ``config`` describes; nothing is allocated before a chunk's ``init``."""
    return LanguageModel(config)


def layer_name(layer: int) -> str:
    """The name of decoder layer ``layer``, counted from 0 over the whole model: ``layers.<layer>``."""
    return f"layers.{layer}"


def layer_number(name: str) -> int:
    """From which the random key of the layer called ``name`` derives.

    CRC-32 is used because it is the same in every process and Python version, which ``hash(str)`` is not.
    """
    return zlib.crc32(name.encode())


def _layers(config: LanguageModelConfig, plan: ChunkPlan) -> list[tuple[str, str, Build]]:
    """Of every layer of a chunk, in the order of the model: its name in the chunk, in the model, and how it is made.

    In the chunk decoder layers are counted from 0, so that chunks with as many of them are of one kind.
    """
    layers: list[tuple[str, str, Build]] = []
    if plan.embedding or (plan.head and config.tie_embeddings):
        layers.append((EMBEDDING, EMBEDDING, Embedding))
    layers += [(layer_name(own), layer_name(layer), DecoderLayer) for own, layer in enumerate(plan.layers)]
    if plan.head:
        layers.append((FINAL_NORM, FINAL_NORM, rms_norm))
        if not config.tie_embeddings:
            layers.append((HEAD, HEAD, Head))
    return layers


def _build(config: LanguageModelConfig, build: Build, key: jax.Array) -> nnx.Module:
    return build(config, nnx.Rngs(params=key))


def _init(config: LanguageModelConfig, builders: Builders, key: jax.Array, *, numbers: dict[str, Any]) -> Params:
    modules = {name: _build(config, build, jax.random.fold_in(key, numbers[name])) for name, build in builders}
    return {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()}


@cache
def _definition(config: LanguageModelConfig, build: Build) -> nnx.GraphDef[Any]:
    """The static part of a layer, found without arrays: a model may be cut before JAX knows its devices."""
    key = jax.eval_shape(jax.random.key, 0)
    return nnx.graphdef(nnx.eval_shape(partial(_build, config, build), key))


def _apply(
    params: Params,
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    config: LanguageModelConfig,
    builders: Builders,
    embeds: bool,
    is_last: bool,
    key: jax.Array | None = None,
    numbers: Any = (),
) -> Any:
    del key, numbers  # no layer is random
    modules: dict[str, Any] = {name: nnx.merge(_definition(config, build), params[name]) for name, build in builders}
    hidden = modules[EMBEDDING](leaves["tokens"]) if embeds else inputs
    for name, build in builders:
        hidden = modules[name](hidden) if build is DecoderLayer else hidden
    if not is_last:
        return hidden
    head = modules[HEAD] if HEAD in modules else modules[EMBEDDING]
    return token_loss(head.logits(modules[FINAL_NORM](hidden)), leaves["targets"], leaves["weights"])
