"""The model of a run as its configuration describes it: shape, cut into chunks, where these lie, what is frozen."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.costs.flops import pairs
from rrfp_jax.layout import CONTEXT
from rrfp_jax.models import language_model, vision_language_model
from rrfp_jax.models.cuts import ContextCut, balanced_counts
from rrfp_jax.models.encoder import PixelScale
from rrfp_jax.models.encoder_config import OWN_CHUNK, ProjectorConfig
from rrfp_jax.models.flop_sizes import decoder_sizes, sizes_of
from rrfp_jax.models.vision_language_config import VisionLanguageConfig
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.model_graph import freeze
from rrfp_jax.schedules import Edge, Placement
from rrfp_jax.training.run_config import PipelineConfig


class CutModel(NamedTuple):
    """A model's chunks, and which of them feed which."""

    chunks: list[Chunk]
    edges: tuple[Edge, ...]
    placement: Placement


def cut_language_model(config: TrainConfig, num_chunks: int) -> list[Chunk]:
    """A decoder alone, in so many chunks."""
    layout = config.pipeline
    chunks = language_model(config.model).split(
        None if layout.layer_counts else num_chunks,
        layers_per_chunk=layout.layer_counts,
        embedding_in=layout.embedding_chunk,
        head_in=layout.head_chunk,
        packed=config.has_segments,
        context=context_cut(layout),
        counts_answers=config.counts_answers,
    )
    return freeze(chunks, layout.freeze)


def context_cut(layout: PipelineConfig) -> ContextCut | None:
    """How the decoder's sequences are cut; its stages all have one mesh."""
    devices = (layout.mesh or {}).get(CONTEXT, 1)
    return ContextCut(devices=devices, attention=layout.context_attention) if devices > 1 else None


def pixel_scale(config: TrainConfig) -> PixelScale | None:
    """How the encoder scales the pixels of image files; None where pictures do not come as bytes."""
    return None if config.image_text is None else PixelScale(config.image_text.mean, config.image_text.std)


def vision_language_config(config: TrainConfig) -> VisionLanguageConfig:
    """The shape of a model with an encoder."""
    assert config.vision is not None
    return VisionLanguageConfig(
        vision=config.vision, projector=config.projector or ProjectorConfig(), decoder=config.model
    )


def cut_vision_language_model(config: TrainConfig) -> CutModel:
    """Encoder and decoder on the stages that the configuration gives them.

    Raises ValueError, with the remedy, for a cut or a placement that does not add up.
    """
    assert config.vision is not None
    layout = config.pipeline
    if layout.embedding_chunk:
        raise ValueError("embedding_chunk says where a language model embeds: leave it out for one with an encoder")
    placement, num_encoder_chunks = placement_of(layout)
    has_own = layout.projector_in == OWN_CHUNK
    num_decoder_chunks = placement.num_chunks - num_encoder_chunks - has_own
    if num_decoder_chunks < 1:
        raise ValueError(
            f"{placement.num_chunks} chunks leave the decoder none beside the encoder's {num_encoder_chunks}: give "
            "more stages, or fewer of them to the encoder"
        )
    try:
        graph = vision_language_model(vision_language_config(config)).split(
            encoder_layers_per_chunk=layout.encoder_layers_per_chunk
            or balanced_counts(config.vision.num_layers_run, num_encoder_chunks),
            decoder_layers_per_chunk=layout.layer_counts
            or balanced_counts(config.model.num_layers, num_decoder_chunks),
            projector_in=layout.projector_in,
            head_in=layout.head_chunk,
            packed=True,
            context=context_cut(layout),
            counts_answers=config.counts_answers,
            pixels=pixel_scale(config),
        )
    except ValueError as error:
        words = {"decoder_layers_per_chunk": "layers_per_chunk", "head_in": "head_chunk"}
        raise ValueError(reduce(lambda text, word: text.replace(*word), words.items(), str(error))) from None
    if len(graph.chunks) != placement.num_chunks:
        raise ValueError(
            f"layers_per_chunk cuts the model into {len(graph.chunks)} chunks, and the stages take "
            f"{placement.num_chunks}: give {num_decoder_chunks} numbers to layers_per_chunk, or another stage_of_chunk"
        )
    return CutModel(freeze(graph.chunks, layout.freeze), graph.edges, placement)


def placement_of(layout: PipelineConfig) -> tuple[Placement, int]:
    """Where the chunks lie, and how many of them are the encoder's, without a projector of its own."""
    num_counts = None if layout.encoder_layers_per_chunk is None else len(layout.encoder_layers_per_chunk)
    if layout.stage_of_chunk is not None:
        return Placement(layout.stage_of_chunk), num_counts or layout.encoder_stages or 1
    encoder_stages = layout.encoder_stages or num_counts or 1
    decoder_stages = layout.num_stages - encoder_stages
    if decoder_stages < 1:
        raise ValueError(
            f"the encoder takes {encoder_stages} of {layout.num_stages} stages and leaves the decoder none: give more "
            "stages, or a stage_of_chunk by which they share some"
        )
    num_encoder_chunks = num_counts or encoder_stages
    num_decoder_chunks = len(layout.layer_counts or ()) or decoder_stages * (layout.chunks_per_stage or 1)
    for key, num_chunks, num_stages, part in (
        ("encoder_layers_per_chunk", num_encoder_chunks, encoder_stages, "encoder"),
        ("layers_per_chunk", num_decoder_chunks, decoder_stages, "decoder"),
    ):
        if num_chunks + (part == "encoder" and layout.projector_in == OWN_CHUNK) < num_stages:
            raise ValueError(
                f"{key} has {num_chunks} numbers, and the {part} {num_stages} stages: give one for each stage or more, "
                "or other numbers of stages"
            )
    stages = [chunk % encoder_stages for chunk in range(num_encoder_chunks)]
    stages += [encoder_stages - 1] * (layout.projector_in == OWN_CHUNK)
    stages += [encoder_stages + chunk % decoder_stages for chunk in range(num_decoder_chunks)]
    return Placement(tuple(stages)), num_encoder_chunks


def sample_cost(config: TrainConfig) -> Callable[[int, Sequence[int]], float]:
    """What a sample costs, for balancing: forward operations for its tokens, and for the patches of each image."""
    if config.vision is None:
        decoder = decoder_sizes(config.model)
        return lambda tokens, patches: decoder.whole(tokens, pairs([tokens])).forward
    sizes, merged = (
        sizes_of(vision_language_config(config)),
        (config.projector or ProjectorConfig()).patches_per_feature,
    )

    def cost(tokens: int, patches: Sequence[int]) -> float:
        seen = sizes.encoder.whole(sum(patches), pairs(patches)) + sizes.projector.whole(sum(patches) / merged)
        return (sizes.decoder.whole(tokens, pairs([tokens])) + seen).forward

    return cost
