"""A small model with every type of layer that a run's model has, cut so that types and numbers of layers come apart.

The costs of a layer do not depend on how many the model has. So a few are enough: one chunk for each end of the model,
one of a single inner layer, and one of several.

The larger chunk has as many layers as a chunk of the run, where memory suffices for them. Layers of a long chunk take
less time, or more, than those of a short one: caches hold less of it, and the fixed time of a program is shared out to
more of them. So the chunk that is measured is about as long as those that are planned."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import jax
import psutil

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.model_parts import context_cut, pixel_scale, vision_language_config
from rrfp_jax.hardware import memory_limit
from rrfp_jax.models import language_model, vision_language_model
from rrfp_jax.models.cuts import ChunkContents, plan_cut
from rrfp_jax.models.vision_config import VisionConfig
from rrfp_jax.planner.model_layers import ModelLayers
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.runtime.process import Process
from rrfp_jax.schedules import Edge

EMBEDDING, LAYER, HEAD = "embedding", "layer", "head"
PATCHES, VISION, PROJECTOR = "patches", "vision", "projector"
_FEW, MANY = 1, 3
"""Layers of the two chunks by whose difference a layer's costs are known; the larger one may have more."""


@dataclass(frozen=True, kw_only=True)
class SmallCut:
    """A model in chunks of layers of one type each."""

    chunks: Sequence[Chunk]
    edges: tuple[Edge, ...] | None
    layers: tuple[tuple[str, ...], ...]
    """The types of each chunk's layers."""


def type_of_kind(kind: str, names: Collection[str]) -> str:
    """Returns the name of a kind of layer among those of a model's types, in which frozen ones have names of their own.

    Raises ValueError where only some layers of the kind are frozen, or those elsewhere: a few layers stand for all.
    """
    found = [name for name in names if name.partition(" ")[0] == kind]
    if len(found) != 1:
        raise ValueError(
            f"layers of type {kind!r} are of several kinds ({', '.join(found)}): freeze all of them or none"
        )
    return found[0]


def small_cut(config: TrainConfig, num_stages: int, *, many: int = MANY) -> SmallCut:
    """Returns the chunks, at least one for each stage, the larger one of ``many`` layers of the decoder.

    Raises ValueError for a model of which no few layers stand for all.
    """
    _check_alike(config)
    more = max(0, num_stages - 4)
    counts = [0, *(_FEW,) * (1 + more), many, 0]
    inner = [(LAYER,) * count for count in counts[1:-1]]
    model = replace(config.model, num_layers=sum(counts))
    if config.vision is None:
        chunks = language_model(model).split(
            layers_per_chunk=counts, packed=config.has_segments, context=context_cut(config.pipeline)
        )
        layers = ((EMBEDDING,), *inner, (HEAD,))
        return SmallCut(chunks=_frozen(config, chunks), edges=None, layers=layers)
    small = replace(config, model=model, vision=_few_layers(config))
    graph = vision_language_model(vision_language_config(small)).split(
        encoder_layers_per_chunk=[0, _FEW, MANY, 0],
        decoder_layers_per_chunk=counts,
        packed=True,
        context=context_cut(config.pipeline),
        pixels=pixel_scale(config),
    )
    seen = ((PATCHES,), (VISION,) * _FEW, (VISION,) * MANY, (PROJECTOR,))
    return SmallCut(
        chunks=_frozen(config, graph.chunks), edges=graph.edges, layers=(*seen, (EMBEDDING,), *inner, (HEAD,))
    )


def _check_alike(config: TrainConfig) -> None:
    if 0 < config.model.num_sparse_layers < config.model.num_layers:
        raise ValueError(
            "some layers have experts and others have none, and no few layers stand for all: profile the model with "
            "experts.every 1 and no dense_layers"
        )


def types_of_plans(plans: Sequence[ChunkContents]) -> tuple[tuple[str, ...], ...]:
    """Returns the types of the layers of each chunk of a language model."""
    return tuple((EMBEDDING,) * plan.embedding + (LAYER,) * len(plan.layers) + (HEAD,) * plan.head for plan in plans)


def cut_of_run(config: TrainConfig, num_chunks: int) -> tuple[tuple[str, ...], ...]:
    """Returns the types of the layers of each chunk of a run, which is that of a language model; raises ValueError
    else."""
    if config.vision is not None:
        raise ValueError("the timeline is of a model with an encoder, whose chunks are no chain: profile its programs")
    _check_alike(config)
    cut = config.pipeline.cut
    return types_of_plans(
        plan_cut(
            config.model.num_layers,
            num_chunks=None if cut.layers else num_chunks,
            layers_per_chunk=cut.layers,
            embedding_in=cut.embedding_chunk,
            head_in=cut.head_chunk,
        )
    )


def _few_layers(config: TrainConfig) -> VisionConfig:
    assert config.vision is not None
    vision = config.vision
    return replace(vision, num_layers=_FEW + MANY + vision.num_layers - vision.num_layers_run)


def _frozen(config: TrainConfig, chunks: Sequence[Chunk]) -> list[Chunk]:
    try:
        return freeze(chunks, config.optimizer.freeze)
    except ValueError as error:
        raise ValueError(
            f"freeze names single layers, and a profile runs a few layers in place of all: freeze whole parts, or none "
            f"({error})"
        ) from None


_MOST = 8
"""More layers tell little more, and take longer to compile."""
_SHARE = 0.5
"""Share of the free memory for the layers of all chunks: the rest is for both ends of the model and temporaries."""


def larger_chunk(config: TrainConfig, layers: ModelLayers, process: Process, *, num_microbatches: int) -> int:
    """Returns the layers of the larger chunk, for this number of microbatches in flight; the same in all processes."""
    fit = _number_that_fits(layers, _free_bytes(process) * _SHARE, num_microbatches)
    least = min(process.gather("layers that fit", fit).values())
    return max(MANY, min(_layers_of_a_chunk(config), _MOST, least))


def _layers_of_a_chunk(config: TrainConfig) -> int:
    """Returns the layers of a chunk as the configuration cuts the model, or evenly where that is still to be found."""
    layout, number = config.pipeline, config.model.num_layers
    if layout.layout is not None and not layout.is_auto:
        return max(layout.cut.layers or ())
    return -(-number // (layout.num_stages * (layout.chunks_per_stage or 1)))


def _number_that_fits(layers: ModelLayers, num_bytes: float, num_microbatches: int) -> int:
    one = layers.types[type_of_kind(LAYER, layers.types)]
    in_flight = one.sizes.stash_bytes + one.sizes.owed_bytes
    each = one.fixed_bytes + num_microbatches * in_flight + one.sizes.more_temporaries_bytes
    return int(num_bytes // each) - 1


def _free_bytes(process: Process) -> int:
    """Returns the free bytes of the device, or of the host where devices are cores of it, which the processes of a run
    share."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    free, limit = int(psutil.virtual_memory().available), memory_limit()
    return (free if limit is None else min(free, limit)) // process.layout.num_stages
