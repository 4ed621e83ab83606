"""LLaVA and InternVL: from their configuration to our sections, and what their tensors are called."""

from collections.abc import Callable, Mapping
from typing import Any

from rrfp_jax.exchange.config_fields import ConfigFields
from rrfp_jax.exchange.families import intern_vit, internvl, llava
from rrfp_jax.exchange.families.text_family import TextFamily
from rrfp_jax.exchange.model_sections import ModelSections
from rrfp_jax.exchange.names import Table, prefixed
from rrfp_jax.exchange.text_fields import read_text
from rrfp_jax.exchange.vision_fields import ACTIVATIONS, read_intern_vit, read_tower
from rrfp_jax.models.encoder_config import ProjectorConfig, VisionConfig
from rrfp_jax.models.vision_language_config import VisionLanguageConfig

_OURS = "decoder."
_SILENT = ("image_token_id", "image_token_index", "ignore_index", "vocab_size")
"""Of old files, but for the first: the text's own size of the vocabulary counts."""
_STRATEGY, _LAYER, _TIED = "vision_feature_select_strategy", "vision_feature_layer", "tie_word_embeddings"


def read_llava(
    config: Mapping[str, Any], where: str, families: Mapping[str, TextFamily], *, has_head: bool | None, dtype: str
) -> tuple[ModelSections, Table, tuple[str, ...]]:
    """Sections, names, and patterns of tensors that are not used; raises ValueError by the field's name."""
    fields = ConfigFields(config, where, llava.DEFAULTS)
    vision_fields = fields.part("vision_config", llava.VISION_DEFAULTS if not fields.has("vision_config") else {})
    kind = vision_fields.get("model_type") or "clip_vision_model"
    if kind not in llava.TOWERS:
        raise vision_fields.refusal("model_type", kind, f"models here see by {', '.join(llava.TOWERS)}")
    tower = llava.TOWERS[kind]
    vision_fields = fields.part("vision_config", {**tower.defaults, **_missing(fields)})
    layer = fields.get(_LAYER)
    vision, patches = read_tower(vision_fields, tower, feature_layer=layer, dtype=dtype)
    wanted = "default" if tower.class_token else "full"
    fields.only(_STRATEGY, wanted, why=f"of this tower models here take {wanted}: all patches, and no class token")
    projector = ProjectorConfig(
        activation=fields.choice("projector_hidden_act", ACTIVATIONS), bias=fields.flag("multimodal_projector_bias")
    )
    text = _text_fields(fields, families, llava.TEXT_TYPE)
    tied = fields.flag(_TIED) or text[0].flag(_TIED)
    sections = _sections(fields, text, vision, projector, tied=tied and not has_head, dtype=dtype)
    names = {**tower.names(patches), **llava.PROJECTOR, **_decoder(text[1])}
    before = "vision_tower.vision_model."
    unused = [before + pattern for pattern in tower.unused]
    return sections, names, (*unused, *_layers_behind(vision, before + "encoder.layers."))


def read_internvl(
    config: Mapping[str, Any], where: str, families: Mapping[str, TextFamily], *, has_head: bool | None, dtype: str
) -> tuple[ModelSections, Table, tuple[str, ...]]:
    """Likewise."""
    fields = ConfigFields(config, where, internvl.DEFAULTS)
    vision_fields = fields.part("vision_config", intern_vit.DEFAULTS)
    kind = vision_fields.get("model_type")
    if kind not in (None, intern_vit.MODEL_TYPE):
        raise vision_fields.refusal("model_type", kind, f"models here see by {intern_vit.MODEL_TYPE}")
    vision, patches = read_intern_vit(vision_fields, feature_layer=fields.get(_LAYER), dtype=dtype)
    fields.only(_STRATEGY, "default", why="models here take no class token")
    ratio = fields.number("downsample_ratio")
    side = round(1 / ratio) if ratio > 0 else 0
    if not side or 1 / side != ratio:
        raise fields.refusal("downsample_ratio", ratio, "1 by a whole number is needed, as 0.5")
    projector = ProjectorConfig(
        activation=fields.choice("projector_hidden_act", ACTIVATIONS),
        patches_per_feature=side**2,
        row_order=True,
        norm=True,
    )
    text = _text_fields(fields, families, internvl.TEXT_TYPE)
    sections = _sections(fields, text, vision, projector, tied=fields.flag(_TIED) and not has_head, dtype=dtype)
    names = {**intern_vit.names(patches), **llava.PROJECTOR, **_decoder(text[1])}
    norm = () if vision.final_norm else (intern_vit.TOWER + "layernorm.*",)
    return sections, names, (*norm, *_layers_behind(vision, intern_vit.TOWER + "encoder.layer."))


READERS: dict[str, tuple[str, Callable[..., tuple[ModelSections, Table, tuple[str, ...]]], tuple[Any, ...]]] = {
    llava.MODEL_TYPE: (llava.ARCHITECTURE, read_llava, (*llava.NEWER_TOWER, *llava.NEWER)),
    internvl.MODEL_TYPE: (internvl.ARCHITECTURE, read_internvl, llava.NEWER),
}
"""By ``model_type``: the class, what reads the configuration, and the beginnings of newer names."""


def _missing(fields: ConfigFields) -> Mapping[str, Any]:
    return {} if fields.has("vision_config") else llava.VISION_DEFAULTS


def _text_fields(
    fields: ConfigFields, families: Mapping[str, TextFamily], default: str
) -> tuple[ConfigFields, TextFamily]:
    kind = fields.part("text_config").get("model_type") or default
    if kind not in families:
        raise ValueError(f"{fields.where}: text_config: model_type is {kind!r}: models here are {', '.join(families)}")
    return fields.part("text_config", families[kind].defaults), families[kind]


def _sections(
    fields: ConfigFields,
    text: tuple[ConfigFields, TextFamily],
    vision: VisionConfig,
    projector: ProjectorConfig,
    *,
    tied: bool,
    dtype: str,
) -> ModelSections:
    for name in (_TIED, *_SILENT):
        fields.get(name)
    fields.finish()
    model = read_text(*text, tied=tied, dtype=dtype)
    VisionLanguageConfig(vision=vision, projector=projector, decoder=model)  # refuses what does not go together
    return ModelSections(model=model, vision=vision, projector=projector)


def _decoder(family: TextFamily) -> Table:
    return prefixed(family.names, _OURS, llava.DECODER)


def _layers_behind(vision: VisionConfig, before: str) -> list[str]:
    """Layers behind those whose features are taken."""
    return [f"{before}{layer}.*" for layer in range(vision.num_layers_run, vision.num_layers)]
