"""Encoders and decoders by name, as the sizes that operations are counted from: the presets, for workloads."""

import difflib
from dataclasses import dataclass

from rrfp_jax.costs.flops import DecoderSizes, EncoderSizes, ProjectorSizes
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.presets import MODELS
from rrfp_jax.models.vision_language_config import VisionLanguageConfig

MODEL_PAIRS = tuple(MODELS)


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """An encoder of images, and the decoder that reads their features."""

    encoder: EncoderSizes
    projector: ProjectorSizes
    """From merged patches to the decoder's width; it belongs to the decoder's first chunk."""
    decoder: DecoderSizes


def model_pair(name: str) -> ModelPair:
    """The pair of a name; raises ValueError with the names there are."""
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no model pair {name!r}: {meant}the pairs are {', '.join(MODELS)}")
    return sizes_of(MODELS[name])


def sizes_of(config: VisionLanguageConfig) -> ModelPair:
    """The sizes of a model's vision part and its decoder."""
    vision, projector, decoder = config.vision, config.projector, config.decoder
    return ModelPair(
        encoder=EncoderSizes(
            hidden=vision.hidden,
            num_layers=vision.num_layers_run,
            num_heads=vision.num_heads,
            mlp_dim=vision.mlp_dim,
            patch_dim=vision.patch_dim,
        ),
        projector=ProjectorSizes(
            in_dim=projector.patches_per_feature * vision.hidden,
            inner_dim=projector.mlp_dim or decoder.hidden,
            out_dim=decoder.hidden,
        ),
        decoder=decoder_sizes(decoder),
    )


def decoder_sizes(config: LanguageModelConfig) -> DecoderSizes:
    """The sizes of a decoder alone; of experts those count that compute a token."""
    experts = config.experts
    chosen = 0 if experts is None else experts.experts_per_token * config.expert_dim + (experts.shared_mlp_dim or 0)
    return DecoderSizes(
        hidden=config.hidden,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.size_per_head,
        mlp_dim=config.mlp_dim,
        vocab_size=config.vocab_size,
        num_sparse_layers=config.num_sparse_layers,
        num_experts=0 if experts is None else experts.num_experts,
        expert_dims=chosen,
    )
