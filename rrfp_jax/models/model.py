"""A language model as a list of chunks.

The model is a chain of named layers: ``embedding``, ``layers.0`` ..., ``final_norm``, ``head``. Each is a Flax NNX
module of its own, split once into a static graph definition and a plain nested dictionary of arrays; a chunk is some
consecutive names. A name is global: it says nothing of the chunk or stage that holds the layer. Parameters, checkpoints
and initial values go by it, so neither initial values nor the result depend on the cut.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.decoder import DecoderLayer, Embedding, Head, rms_norm, token_loss
from rrfp_jax.models.layer_cut import ChunkPlan, plan_cut
from rrfp_jax.models.tensor_cut import partition
from rrfp_jax.programs.chunk import Chunk, Params

EMBEDDING = "embedding"
"""The token embedding; with tied embeddings also the copy in the head's chunk."""
FINAL_NORM = "final_norm"
"""The RMSNorm before the head; always in the head's chunk."""
HEAD = "head"
"""The output matrix; absent with tied embeddings."""

Build = Callable[[LanguageModelConfig, nnx.Rngs], nnx.Module]


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
        builders = _builders(self.config, plan)
        shared = self.config.tie_embeddings and plan.embedding != plan.head and EMBEDDING in builders
        return Chunk(
            name=plan.title,
            init=partial(_init, self.config, builders),
            apply=partial(_apply, plan, _definitions(self.config, builders)),
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


def layer_key(key: jax.Array, name: str) -> jax.Array:
    """The typed key of the layer called ``name``.

    CRC-32 is used because it is the same in every process and Python version, which ``hash(str)`` is not.
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _builders(config: LanguageModelConfig, plan: ChunkPlan) -> dict[str, Build]:
    """How to make every layer of a chunk, by name, in the order of the model."""
    builders: dict[str, Build] = {}
    if plan.embedding or (plan.head and config.tie_embeddings):
        builders[EMBEDDING] = Embedding
    builders |= {layer_name(layer): DecoderLayer for layer in plan.layers}
    if plan.head:
        builders[FINAL_NORM] = rms_norm
        if not config.tie_embeddings:
            builders[HEAD] = Head
    return builders


def _build(config: LanguageModelConfig, build: Build, key: jax.Array) -> nnx.Module:
    return build(config, nnx.Rngs(params=key))


def _init(config: LanguageModelConfig, builders: dict[str, Build], key: jax.Array) -> Params:
    modules = {name: _build(config, build, layer_key(key, name)) for name, build in builders.items()}
    return {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()}


def _definitions(config: LanguageModelConfig, builders: dict[str, Build]) -> dict[str, nnx.GraphDef[Any]]:
    """The static part of every layer, found without arrays: a model may be cut before JAX knows its devices."""
    key = jax.eval_shape(jax.random.key, 0)
    definition_of = {
        build: nnx.graphdef(nnx.eval_shape(partial(_build, config, build), key)) for build in set(builders.values())
    }
    return {name: definition_of[build] for name, build in builders.items()}


def _apply(
    plan: ChunkPlan,
    definitions: dict[str, nnx.GraphDef[Any]],
    params: Params,
    inputs: Any,
    leaves: dict[str, jax.Array],
    *,
    key: jax.Array | None = None,
) -> Any:
    del key  # no layer is random
    modules: dict[str, Any] = {name: nnx.merge(definitions[name], params[name]) for name in definitions}
    hidden = modules[EMBEDDING](leaves["tokens"]) if plan.embedding else inputs
    for layer in plan.layers:
        hidden = modules[layer_name(layer)](hidden)
    if not plan.head:
        return hidden
    head = modules[HEAD] if HEAD in modules else modules[EMBEDDING]
    return token_loss(head.logits(modules[FINAL_NORM](hidden)), leaves["targets"], leaves["weights"])
