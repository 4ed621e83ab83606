"""LLaVA and InternVL: their configuration in our sections, and the names of their tensors.

LLaVA has a tower of CLIP or SigLIP and a projector of two products. InternVL, in the form of transformers (``-hf``),
has InternViT, and pixel shuffle before a normed projector. Both take any decoder family.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rrfp_jax.hf._config_fields import ConfigFields
from rrfp_jax.hf._decoder_fields import read_decoder
from rrfp_jax.hf._tensor_names import NameTable, linears_and_norms, prefixed
from rrfp_jax.hf._vision_towers import (
    CLIP_TOWER,
    CLIP_TOWERS,
    HUB_ACTIVATIONS,
    INTERN_VIT,
    INTERN_VIT_DEFAULTS,
    TOWER,
    clip_names,
    intern_vit_names,
    read_clip_tower,
    read_intern_vit,
)
from rrfp_jax.hf.decoders import DECODER_FAMILIES, DecoderFamily
from rrfp_jax.hf.model_sections import ModelSections
from rrfp_jax.models.vision_config import ProjectorConfig, VisionConfig, VisionLanguageConfig

DECODER_PREFIX = "language_model."
"""The prefix of the decoder's names in files of the hub."""
INTERNVL = "internvl"
_STRATEGY, _FEATURE_LAYER, _TIED = "vision_feature_select_strategy", "vision_feature_layer", "tie_word_embeddings"
_LLAVA_DEFAULTS: dict[str, Any] = {
    "projector_hidden_act": "gelu",
    _STRATEGY: "default",
    _FEATURE_LAYER: -2,
    "multimodal_projector_bias": True,
    _TIED: False,
}
# The tower of a LLaVA file without vision_config.
_LLAVA_VISION_DEFAULTS: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "intermediate_size": 4096,
    "hidden_size": 1024,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
_INTERNVL_DEFAULTS: dict[str, Any] = {
    "projector_hidden_act": "gelu",
    _STRATEGY: "default",
    _FEATURE_LAYER: -1,
    "downsample_ratio": 0.5,
    _TIED: True,
}
# LLaVA has no norm, so its models have no array for it.
_PROJECTOR = linears_and_norms(
    "projector.", "multi_modal_projector.", {"linear_1": "linear_1", "linear_2": "linear_2"}, {"norm": "layer_norm"}
)
# Some files have the names that models have in memory since transformers 4.52, in place of the older ones.
_NEWER = (
    ("model.language_model.", DECODER_PREFIX + "model."),
    ("lm_head.", DECODER_PREFIX + "lm_head."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.vision_tower.vision_model.", CLIP_TOWER),
    ("model.vision_tower.", TOWER),
)
# CLIP and SigLIP towers have lost a level of their names in transformers 5.
_NEWER_CLIP = tuple(
    (f"{before}{TOWER}{part}.", f"{CLIP_TOWER}{part}.")
    for before in ("", "model.")
    for part in ("embeddings", "pre_layrnorm", "encoder", "post_layernorm", "head")
)
# Fields of old files; of vocab_size the decoder's own counts.
_SILENT = ("image_token_id", "image_token_index", "ignore_index", "vocab_size")
ReadModel = tuple[ModelSections, NameTable, tuple[str, ...]]
"""The sections of a model, the names of its tensors, and patterns of tensors that it does not use."""


def _read_llava(config: Mapping[str, Any], where: str, *, has_head: bool | None, dtype: str) -> ReadModel:
    fields = ConfigFields(config, where, _LLAVA_DEFAULTS)
    missing = {} if fields.has("vision_config") else _LLAVA_VISION_DEFAULTS
    vision_fields = fields.part("vision_config", missing)
    kind = vision_fields.get("model_type") or "clip_vision_model"
    if not isinstance(kind, str) or kind not in CLIP_TOWERS:
        raise vision_fields.refusal("model_type", kind, f"models here see by {', '.join(CLIP_TOWERS)}")
    tower = CLIP_TOWERS[kind]
    # Read again: the kind decides which defaults the other fields have.
    vision_fields = fields.part("vision_config", {**tower.defaults, **missing})
    layer = fields.get(_FEATURE_LAYER)
    vision, patches = read_clip_tower(vision_fields, tower, feature_layer=layer, dtype=dtype)
    wanted = "default" if tower.class_token else "full"
    fields.only(_STRATEGY, wanted, why=f"of this tower models here take {wanted}: all patches, and no class token")
    projector = ProjectorConfig(
        activation=fields.choice("projector_hidden_act", HUB_ACTIVATIONS), bias=fields.flag("multimodal_projector_bias")
    )
    text_fields, family = _text_fields(fields, default="llama")
    tied = (fields.flag(_TIED) or text_fields.flag(_TIED)) and not has_head
    sections = _sections(fields, (text_fields, family), vision, projector, tied=tied, dtype=dtype)
    names = {**clip_names(patches), **_PROJECTOR, **prefixed(family.names, "decoder.", DECODER_PREFIX)}
    unused = [CLIP_TOWER + pattern for pattern in tower.unused]
    return sections, names, (*unused, *_layers_behind(vision, CLIP_TOWER + "encoder.layers."))


def _read_internvl(config: Mapping[str, Any], where: str, *, has_head: bool | None, dtype: str) -> ReadModel:
    fields = ConfigFields(config, where, _INTERNVL_DEFAULTS)
    vision_fields = fields.part("vision_config", INTERN_VIT_DEFAULTS)
    kind = vision_fields.get("model_type")
    if kind not in (None, INTERN_VIT):
        raise vision_fields.refusal("model_type", kind, f"models here see by {INTERN_VIT}")
    vision, patches = read_intern_vit(vision_fields, feature_layer=fields.get(_FEATURE_LAYER), dtype=dtype)
    fields.only(_STRATEGY, "default", why="models here take no class token")
    ratio = fields.number("downsample_ratio")
    side = round(1 / ratio) if ratio > 0 else 0
    if not side or 1 / side != ratio:
        raise fields.refusal("downsample_ratio", ratio, "1 by a whole number is needed, as 0.5")
    projector = ProjectorConfig(
        activation=fields.choice("projector_hidden_act", HUB_ACTIVATIONS),
        patches_per_feature=side**2,
        row_order=True,
        norm=True,
    )
    text_fields, family = _text_fields(fields, default="qwen2")
    tied = fields.flag(_TIED) and not has_head
    sections = _sections(fields, (text_fields, family), vision, projector, tied=tied, dtype=dtype)
    names = {**intern_vit_names(patches), **_PROJECTOR, **prefixed(family.names, "decoder.", DECODER_PREFIX)}
    norm = () if vision.final_norm else (TOWER + "layernorm.*",)
    return sections, names, (*norm, *_layers_behind(vision, TOWER + "encoder.layer."))


VISION_LANGUAGE_FAMILIES: dict[str, tuple[str, Callable[..., ReadModel], tuple[tuple[str, str], ...]]] = {
    "llava": ("LlavaForConditionalGeneration", _read_llava, (*_NEWER_CLIP, *_NEWER)),
    INTERNVL: ("InternVLForConditionalGeneration", _read_internvl, _NEWER),
}
"""All families by ``model_type``: the architecture, the function that reads the configuration (raising ValueError with
the field's name), and prefixes of newer names of tensors with the older ones."""


def _text_fields(fields: ConfigFields, default: str) -> tuple[ConfigFields, DecoderFamily]:
    """Returns the fields of the decoder and its family, which is ``default`` where the file does not say."""
    kind = fields.part("text_config").get("model_type") or default
    family = DECODER_FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        known = ", ".join(DECODER_FAMILIES)
        raise ValueError(f"{fields.where}: text_config: model_type is {kind!r}: models here are {known}")
    return fields.part("text_config", family.defaults), family


def _sections(
    fields: ConfigFields,
    text: tuple[ConfigFields, DecoderFamily],
    vision: VisionConfig,
    projector: ProjectorConfig,
    *,
    tied: bool,
    dtype: str,
) -> ModelSections:
    for name in (_TIED, *_SILENT):
        fields.get(name)
    fields.finish()
    model = read_decoder(*text, tied=tied, dtype=dtype)
    VisionLanguageConfig(vision=vision, projector=projector, decoder=model)  # refuses parts that do not go together
    return ModelSections(model=model, vision=vision, projector=projector)


def _layers_behind(vision: VisionConfig, before: str) -> list[str]:
    """Returns patterns of the layers behind the one whose output is taken."""
    return [f"{before}{layer}.*" for layer in range(vision.num_layers_run, vision.num_layers)]
