"""LLaVA, InternVL and Qwen2.5-VL: their configuration in our sections, and the names of their tensors.

LLaVA has a tower of CLIP or SigLIP and a projector of two products. InternVL, in the form of transformers (``-hf``),
has InternViT, and pixel shuffle before a normed projector. Both take any decoder family. Qwen2.5-VL has a tower and a
Qwen2 decoder of its own, with rotary positions by time, row and column; of videos only their images can be seen here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rrfp_jax.hf._config_fields import ConfigFields
from rrfp_jax.hf._tensor_names import (
    SAME,
    NameTable,
    Transform,
    linears_and_norms,
    part_of_joined,
    patch_kernel,
    prefixed,
    video_kernel,
    with_leading_axes,
)
from rrfp_jax.hf.decoders import DECODER_FAMILIES, DecoderFamily, read_decoder
from rrfp_jax.hf.model_folder import ModelSections
from rrfp_jax.models.config import LayerVariant
from rrfp_jax.models.vision_config import NORMS, ProjectorConfig, VisionConfig, VisionLanguageConfig
from rrfp_jax.readable import shown

# -------------------------------------------------------------------------------------------------------------- towers

_TOWER, _CLIP_TOWER = "vision_tower.", "vision_tower.vision_model."
"""Prefixes of the names of all towers in files of the hub, and of those of CLIP and SigLIP."""
_HUB_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_INTERN_VIT = "internvl_vision"
_INTERN_VIT_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": False,
    "use_qk_norm": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "projection_dropout": 0.0,
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "image_size": 448,
    "patch_size": 14,
    "num_channels": 3,
    "use_mask_token": False,
    "use_absolute_position_embeddings": True,
    "layer_scale_init_value": 0.1,
    "use_mean_pooling": True,
}
_QK_NORM_EPS = 1e-6  # of InternViT's norms of queries and keys, whatever layer_norm_eps says
_NO_DROPOUT = "models here drop nothing"
_OURS = "vision.layers.N."


@dataclass(frozen=True, kw_only=True)
class _ClipTower:
    """A kind of tower that LLaVA takes. Features are hidden states, so the last norm is not used."""

    model_type: str
    defaults: Mapping[str, Any]
    silent: tuple[str, ...]
    """Fields that features do not depend on."""
    class_token: bool
    pre_norm: bool
    patch_bias: bool
    unused: tuple[str, ...]
    """Patterns of tensors behind the features, without the prefix of all names."""


_CLIP_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "attention_dropout": 0.0,
}
_CLIP = _ClipTower(
    model_type="clip_vision_model",
    defaults=_CLIP_DEFAULTS,
    silent=("projection_dim", "vocab_size", "dropout"),
    class_token=True,
    pre_norm=True,
    patch_bias=False,
    unused=("post_layernorm.*",),
)
_SIGLIP = _ClipTower(
    model_type="siglip_vision_model",
    defaults={**_CLIP_DEFAULTS, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    silent=("projection_dim", "vocab_size", "vision_use_head"),
    class_token=False,
    pre_norm=False,
    patch_bias=True,
    unused=("post_layernorm.*", "head.*"),
)
_CLIP_TOWERS: dict[str, _ClipTower] = {tower.model_type: tower for tower in (_CLIP, _SIGLIP)}


def _clip_names(patches: Transform) -> NameTable:
    """Returns the names of CLIP and SigLIP towers. Arrays that one of the two lacks do not occur in its model."""
    linears = {
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.out_proj",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    }
    norms = {"attention_norm": "layer_norm1", "mlp_norm": "layer_norm2"}
    return {
        "vision.patches.projection.kernel": (patches, _CLIP_TOWER + "embeddings.patch_embedding.weight"),
        "vision.patches.projection.bias": (SAME, _CLIP_TOWER + "embeddings.patch_embedding.bias"),
        "vision.patches.class_token": (SAME, _CLIP_TOWER + "embeddings.class_embedding"),
        "vision.patches.positions": (SAME, _CLIP_TOWER + "embeddings.position_embedding.weight"),
        "vision.pre_norm.scale": (SAME, _CLIP_TOWER + "pre_layrnorm.weight"),  # their spelling
        "vision.pre_norm.bias": (SAME, _CLIP_TOWER + "pre_layrnorm.bias"),
        **linears_and_norms(_OURS, _CLIP_TOWER + "encoder.layers.N.", linears, norms),
    }


def _intern_vit_names(patches: Transform) -> NameTable:
    """Returns the names of InternViT. Arrays that a configuration switches off do not occur in its model."""
    layer = _TOWER + "encoder.layer.N."
    linears = {
        "attention.query": "attention.q_proj",
        "attention.key": "attention.k_proj",
        "attention.value": "attention.v_proj",
        "attention.output": "attention.projection_layer",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    }
    norms = {
        "attention_norm": "layernorm_before",
        "mlp_norm": "layernorm_after",
        "attention.query_norm": "attention.q_norm",
        "attention.key_norm": "attention.k_norm",
    }
    return {
        "vision.patches.projection.kernel": (patches, _TOWER + "embeddings.patch_embeddings.projection.weight"),
        "vision.patches.projection.bias": (SAME, _TOWER + "embeddings.patch_embeddings.projection.bias"),
        "vision.patches.class_token": (with_leading_axes(2), _TOWER + "embeddings.cls_token"),
        "vision.patches.positions": (with_leading_axes(1), _TOWER + "embeddings.position_embeddings"),
        **linears_and_norms(_OURS, layer, linears, norms),
        _OURS + "attention_scale": (SAME, layer + "lambda_1"),
        _OURS + "mlp_scale": (SAME, layer + "lambda_2"),
        "vision.norm.scale": (SAME, _TOWER + "layernorm.weight"),
        "vision.norm.bias": (SAME, _TOWER + "layernorm.bias"),
    }


def _read_clip_tower(
    fields: ConfigFields, tower: _ClipTower, *, feature_layer: Any, dtype: str
) -> tuple[VisionConfig, Transform]:
    """Returns the record of a CLIP or SigLIP tower and how patches lie in its kernel.

    Raises ValueError with the field's name.
    """
    sizes, patches = _read_sizes(fields)
    side = fields.whole("image_size") // _pair(fields, "patch_size")[0]
    for name in tower.silent:
        fields.get(name)
    fields.only("attention_dropout", 0, why=_NO_DROPOUT)
    record = {
        **sizes,
        "num_patches": side**2,
        "qkv_bias": True,
        "patch_bias": tower.patch_bias,
        "class_token": tower.class_token,
        "pre_norm": tower.pre_norm,
        "final_norm": False,  # hidden states are taken before it
        "feature_layer": _from_the_end(fields, feature_layer, sizes["num_layers"]),
    }
    fields.finish()
    return VisionConfig(**record, param_dtype=dtype, compute_dtype=dtype), patches


def _read_intern_vit(fields: ConfigFields, *, feature_layer: Any, dtype: str) -> tuple[VisionConfig, Transform]:
    """Returns the record of an InternViT and how patches lie in its kernel; raises ValueError with the field's name."""
    sizes, patches = _read_sizes(fields)
    (height, width), (patch_height, patch_width) = _pair(fields, "image_size"), _pair(fields, "patch_size")
    for name in ("attention_dropout", "hidden_dropout_prob", "projection_dropout"):
        fields.only(name, 0, why=_NO_DROPOUT)
    fields.only("use_mask_token", False, why="models here have no mask token")
    fields.only("use_absolute_position_embeddings", True, why="models here have learned positions")
    norm = fields.choice("norm_type", {name: name for name in NORMS})
    layer = _from_the_end(fields, feature_layer, sizes["num_layers"])
    # transformers applies the last norm to the last hidden state only, and only where it does not pool by the mean.
    final_norm = not fields.flag("use_mean_pooling") and layer == -1
    if final_norm and norm != "layer_norm":
        raise fields.refusal("use_mean_pooling", False, f"the last norm is a LayerNorm there, and with {norm} not here")
    qk_norm = fields.flag("use_qk_norm")
    if qk_norm and sizes["norm_eps"] != _QK_NORM_EPS:
        why = f"with use_qk_norm norms of queries and keys add {_QK_NORM_EPS} there, and here what all norms add"
        raise fields.refusal("layer_norm_eps", sizes["norm_eps"], why)
    scale = fields.number("layer_scale_init_value")
    record = {
        **sizes,
        "num_patches": (height // patch_height) * (width // patch_width),
        "qkv_bias": fields.flag("attention_bias"),
        "qk_norm": qk_norm,
        "norm": norm,
        "layer_scale": scale if scale > 0 else 1.0,  # only where training begins; an import has its scales as tensors
        "class_token": True,
        "final_norm": final_norm,
        "feature_layer": layer,
    }
    fields.finish()
    return VisionConfig(**record, param_dtype=dtype, compute_dtype=dtype), patches


def _qwen_names(patches: Transform) -> NameTable:
    """Returns the names of Qwen2.5-VL's tower, whose last norm counts as the merger's in their files."""
    block, qkv = "visual.blocks.N.", "visual.blocks.N.attn.qkv."
    places = 1, 0, 2  # of query, key and value among their names
    parts = {name: part_of_joined(number, places) for number, name in enumerate(("query", "key", "value"))}
    linears = {name: f"mlp.{name.removeprefix('mlp.')}_proj" for name in ("mlp.gate", "mlp.up", "mlp.down")}
    return {
        "vision.patches.projection.kernel": (patches, "visual.patch_embed.proj.weight"),
        **{f"{_OURS}attention.{name}.kernel": (part, qkv + "weight") for name, part in parts.items()},
        **{f"{_OURS}attention.{name}.bias": (part, qkv + "bias") for name, part in parts.items()},
        **linears_and_norms(
            _OURS,
            block,
            {"attention.output": "attn.proj", **linears},
            {"attention_norm": "norm1", "mlp_norm": "norm2"},
        ),
        "vision.norm.scale": (SAME, "visual.merger.ln_q.weight"),
        **linears_and_norms("projector.", "visual.merger.", {"linear_1": "mlp.0", "linear_2": "mlp.2"}, {}),
    }


def _read_qwen_tower(
    fields: ConfigFields, *, decoder_dim: int, dtype: str
) -> tuple[VisionConfig, ProjectorConfig, Transform]:
    """Returns the records of a Qwen2.5-VL's tower and merger, and how patches lie in its kernel.

    Raises ValueError with the field's name.
    """
    hidden, layers, merge = (fields.whole(name) for name in ("hidden_size", "depth", "spatial_merge_size"))
    patch, frames = fields.whole("patch_size"), fields.whole("temporal_patch_size")
    channels, window = fields.whole("in_channels", "in_chans"), fields.whole("window_size")
    fields.only("spatial_patch_size", patch, why="it is patch_size by another name")
    fields.get("tokens_per_second")  # of videos
    fields.only("out_hidden_size", decoder_dim, why="it is the hidden_size of the decoder")
    if (features := window // merge // patch) < 1:
        raise fields.refusal("window_size", window, f"at least {merge * patch} pixels are needed, one feature")
    numbers = fields.get("fullatt_block_indexes")
    if not isinstance(numbers, list) or not all(type(each) is int and each >= 0 for each in numbers):
        raise fields.refusal("fullatt_block_indexes", numbers, "a list of layers is needed")
    rope = fields.part("rope_parameters", {"rope_type": "axial", "rope_theta": 10_000.0})
    rope.only("rope_type", "axial", why="patches turn by their rows and columns")
    vision = VisionConfig(
        hidden=hidden,
        num_layers=layers,
        num_heads=fields.whole("num_heads"),
        mlp_dim=fields.whole("intermediate_size"),
        activation=fields.choice("hidden_act", {**_HUB_ACTIVATIONS, "silu": "silu"}),
        gated_mlp=True,
        norm="rms_norm",
        norm_eps=1e-6,  # whatever the decoder's norms add
        patch_dim=channels * patch**2,
        patch_frames=frames,
        patch_bias=False,
        rotary_theta=rope.number("rope_theta"),
        window=features * merge,
        global_layers=tuple(sorted({number for number in numbers if number < layers})),
        param_dtype=dtype,
        compute_dtype=dtype,
    )
    rope.finish()
    fields.finish()
    return (
        vision,
        ProjectorConfig(patches_per_feature=merge**2, mlp_dim=hidden * merge**2),
        video_kernel(channels, frames, patch),
    )


def _read_sizes(fields: ConfigFields) -> tuple[dict[str, Any], Transform]:
    patch_height, patch_width = _pair(fields, "patch_size")
    channels = fields.whole("num_channels")
    sizes = {
        "hidden": fields.whole("hidden_size"),
        "num_layers": fields.whole("num_hidden_layers"),
        "num_heads": fields.whole("num_attention_heads"),
        "mlp_dim": fields.whole("intermediate_size"),
        "activation": fields.choice("hidden_act", _HUB_ACTIVATIONS),
        "norm_eps": fields.number("layer_norm_eps"),
        "patch_dim": channels * patch_height * patch_width,
    }
    return sizes, patch_kernel(channels, patch_height, patch_width)


def _pair(fields: ConfigFields, name: str) -> tuple[int, int]:
    """Returns height and width, which one number may give together."""
    value = fields.get(name)
    pair = tuple(value) if isinstance(value, list) else (value, value)
    if len(pair) != 2 or not all(type(each) is int and each > 0 for each in pair):
        raise fields.refusal(name, value, "one whole number is needed, or two")
    return pair


def _from_the_end(fields: ConfigFields, layer: Any, num_layers: int) -> int:
    """Returns ``vision_feature_layer`` counted from the last layer; hidden state 0 is the first layer's input."""
    if type(layer) is not int or not -num_layers <= (counted := layer if layer < 0 else layer - num_layers - 1) <= -1:
        raise fields.refusal("vision_feature_layer", layer, f"one of {num_layers} layers is needed, -1 for the last")
    return counted


# ------------------------------------------------------------------------------------------------------------ families

DECODER_PREFIX = "language_model."
"""The prefix of the decoder's names in files of the hub."""
INTERNVL, QWEN_VL = "internvl", "qwen2_5_vl"
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
    ("model.vision_tower.vision_model.", _CLIP_TOWER),
    ("model.vision_tower.", _TOWER),
)
# CLIP and SigLIP towers have lost a level of their names in transformers 5.
_NEWER_CLIP = tuple(
    (f"{before}{_TOWER}{part}.", f"{_CLIP_TOWER}{part}.")
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
    if not isinstance(kind, str) or kind not in _CLIP_TOWERS:
        raise vision_fields.refusal("model_type", kind, f"models here see by {', '.join(_CLIP_TOWERS)}")
    tower = _CLIP_TOWERS[kind]
    # Read again: the kind decides which defaults the other fields have.
    vision_fields = fields.part("vision_config", {**tower.defaults, **missing})
    layer = fields.get(_FEATURE_LAYER)
    vision, patches = _read_clip_tower(vision_fields, tower, feature_layer=layer, dtype=dtype)
    wanted = "default" if tower.class_token else "full"
    fields.only(_STRATEGY, wanted, why=f"of this tower models here take {wanted}: all patches, and no class token")
    projector = ProjectorConfig(
        activation=fields.choice("projector_hidden_act", _HUB_ACTIVATIONS),
        bias=fields.flag("multimodal_projector_bias"),
    )
    text_fields, family = _text_fields(fields, default="llama")
    tied = (fields.flag(_TIED) or text_fields.flag(_TIED)) and not has_head
    sections = _sections(fields, (text_fields, family), vision, projector, tied=tied, dtype=dtype)
    names = {**_clip_names(patches), **_PROJECTOR, **prefixed(family.names, "decoder.", DECODER_PREFIX)}
    unused = [_CLIP_TOWER + pattern for pattern in tower.unused]
    return sections, names, (*unused, *_layers_behind(vision, _CLIP_TOWER + "encoder.layers."))


def _read_internvl(config: Mapping[str, Any], where: str, *, has_head: bool | None, dtype: str) -> ReadModel:
    fields = ConfigFields(config, where, _INTERNVL_DEFAULTS)
    vision_fields = fields.part("vision_config", _INTERN_VIT_DEFAULTS)
    kind = vision_fields.get("model_type")
    if kind not in (None, _INTERN_VIT):
        raise vision_fields.refusal("model_type", kind, f"models here see by {_INTERN_VIT}")
    vision, patches = _read_intern_vit(vision_fields, feature_layer=fields.get(_FEATURE_LAYER), dtype=dtype)
    fields.only(_STRATEGY, "default", why="models here take no class token")
    ratio = fields.number("downsample_ratio")
    side = round(1 / ratio) if ratio > 0 else 0
    if not side or 1 / side != ratio:
        raise fields.refusal("downsample_ratio", ratio, "1 by a whole number is needed, as 0.5")
    projector = ProjectorConfig(
        activation=fields.choice("projector_hidden_act", _HUB_ACTIVATIONS),
        patches_per_feature=side**2,
        row_order=True,
        norm=True,
    )
    text_fields, family = _text_fields(fields, default="qwen2")
    tied = fields.flag(_TIED) and not has_head
    sections = _sections(fields, (text_fields, family), vision, projector, tied=tied, dtype=dtype)
    names = {**_intern_vit_names(patches), **_PROJECTOR, **prefixed(family.names, "decoder.", DECODER_PREFIX)}
    norm = () if vision.final_norm else (_TOWER + "layernorm.*",)
    return sections, names, (*norm, *_layers_behind(vision, _TOWER + "encoder.layer."))


_QWEN_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN_DECODER = replace(
    DECODER_FAMILIES["qwen2"],
    defaults={
        **DECODER_FAMILIES["qwen2"].defaults,
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_window_layers": 80,
    },
)
_QWEN_SECTIONS = [16, 24, 24]
_QWEN_TOKENS = ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")


def _read_qwen_vl(config: Mapping[str, Any], where: str, *, has_head: bool | None, dtype: str) -> ReadModel:
    whole = ConfigFields(config, where, {})
    parts = ("vision_config", *_QWEN_TOKENS, "image_token_id", _TIED)
    text, inside = config.get("text_config"), f"{where}: text_config"
    if text is None:  # older files have the decoder's fields beside these
        text, inside = {name: value for name, value in config.items() if name not in parts}, where
        for name in text:
            whole.get(name)
    elif isinstance(text, dict):  # some files have them in both places
        for name in (name for name, value in config.items() if name in text and text[name] == value):
            whole.get(name)
    whole.part("text_config")  # refused if it is no object
    for name in parts:
        whole.get(name)
    vision_fields = whole.part("vision_config", _QWEN_VISION_DEFAULTS)
    vision_fields.only("model_type", QWEN_VL, f"{QWEN_VL}_vision", why="models of this family see by their own tower")
    whole.finish()
    text, sections = _without_sections(text, inside)
    fields = ConfigFields(text, inside, _QWEN_DECODER.defaults)
    fields.only("model_type", QWEN_VL, f"{QWEN_VL}_text", why="models of this family have their own decoder")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    fields.only("head_dim", hidden // heads, why="in this family it is hidden_size / num_attention_heads")
    tied = (whole.flag(_TIED) or fields.flag(_TIED)) and not has_head
    decoder = read_decoder(fields, _QWEN_DECODER, tied=tied, dtype=dtype)
    decoder = replace(decoder, variant=LayerVariant(rope_sections=sections))
    vision, projector, patches = _read_qwen_tower(vision_fields, decoder_dim=hidden, dtype=dtype)
    names = {**_qwen_names(patches), **prefixed(_QWEN_DECODER.names, "decoder.", "")}
    return ModelSections(model=decoder, vision=vision, projector=projector), names, ()


def _without_sections(text: Mapping[str, Any], where: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Returns the fields of a decoder as Qwen2 has them, and the sections of its rotary wavelengths."""
    values, sections = dict(text), list[Any]()
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := values.get(name), dict):
            rope = values[name] = dict(rope)
            sections.append(rope.pop("mrope_section", _QWEN_SECTIONS))
            for key in ("rope_type", "type"):
                if rope.get(key) == "mrope":
                    rope[key] = "default"
    found = sections[0] if sections else _QWEN_SECTIONS
    is_known = isinstance(found, list) and len(found) == 3 and all(type(each) is int and each >= 0 for each in found)
    if not is_known or any(other != found for other in sections):
        raise ValueError(f"{where}: mrope_section is {shown(found)}: three numbers of rotary wavelengths are needed")
    return values, tuple(found)


VISION_LANGUAGE_FAMILIES: dict[str, tuple[str, Callable[..., ReadModel], tuple[tuple[str, str], ...]]] = {
    "llava": ("LlavaForConditionalGeneration", _read_llava, (*_NEWER_CLIP, *_NEWER)),
    INTERNVL: ("InternVLForConditionalGeneration", _read_internvl, _NEWER),
    QWEN_VL: (
        "Qwen2_5_VLForConditionalGeneration",
        _read_qwen_vl,
        (("model.visual.", "visual."), ("model.language_model.", "model.")),
    ),
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
