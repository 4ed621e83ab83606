"""Vision towers of CLIP, SigLIP and InternVL: names of their tensors, and their configuration in our record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rrfp_jax.hf._config_fields import ConfigFields
from rrfp_jax.hf._tensor_names import SAME, NameTable, PatchConvolution, Unchanged, linears_and_norms
from rrfp_jax.models.vision_config import NORMS, VisionConfig

TOWER, CLIP_TOWER = "vision_tower.", "vision_tower.vision_model."
"""Prefixes of the names of all towers in files of the hub, and of those of CLIP and SigLIP."""
HUB_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
INTERN_VIT = "internvl_vision"
INTERN_VIT_DEFAULTS: dict[str, Any] = {
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
class ClipTower:
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
_CLIP = ClipTower(
    model_type="clip_vision_model",
    defaults=_CLIP_DEFAULTS,
    silent=("projection_dim", "vocab_size", "dropout"),
    class_token=True,
    pre_norm=True,
    patch_bias=False,
    unused=("post_layernorm.*",),
)
_SIGLIP = ClipTower(
    model_type="siglip_vision_model",
    defaults={**_CLIP_DEFAULTS, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    silent=("projection_dim", "vocab_size", "vision_use_head"),
    class_token=False,
    pre_norm=False,
    patch_bias=True,
    unused=("post_layernorm.*", "head.*"),
)
CLIP_TOWERS: dict[str, ClipTower] = {tower.model_type: tower for tower in (_CLIP, _SIGLIP)}


def clip_names(patches: PatchConvolution) -> NameTable:
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
        "vision.patches.projection.kernel": (patches, CLIP_TOWER + "embeddings.patch_embedding.weight"),
        "vision.patches.projection.bias": (SAME, CLIP_TOWER + "embeddings.patch_embedding.bias"),
        "vision.patches.class_token": (SAME, CLIP_TOWER + "embeddings.class_embedding"),
        "vision.patches.positions": (SAME, CLIP_TOWER + "embeddings.position_embedding.weight"),
        "vision.pre_norm.scale": (SAME, CLIP_TOWER + "pre_layrnorm.weight"),  # their spelling
        "vision.pre_norm.bias": (SAME, CLIP_TOWER + "pre_layrnorm.bias"),
        **linears_and_norms(_OURS, CLIP_TOWER + "encoder.layers.N.", linears, norms),
    }


def intern_vit_names(patches: PatchConvolution) -> NameTable:
    """Returns the names of InternViT. Arrays that a configuration switches off do not occur in its model."""
    layer = TOWER + "encoder.layer.N."
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
        "vision.patches.projection.kernel": (patches, TOWER + "embeddings.patch_embeddings.projection.weight"),
        "vision.patches.projection.bias": (SAME, TOWER + "embeddings.patch_embeddings.projection.bias"),
        "vision.patches.class_token": (Unchanged(2), TOWER + "embeddings.cls_token"),
        "vision.patches.positions": (Unchanged(1), TOWER + "embeddings.position_embeddings"),
        **linears_and_norms(_OURS, layer, linears, norms),
        _OURS + "attention_scale": (SAME, layer + "lambda_1"),
        _OURS + "mlp_scale": (SAME, layer + "lambda_2"),
        "vision.norm.scale": (SAME, TOWER + "layernorm.weight"),
        "vision.norm.bias": (SAME, TOWER + "layernorm.bias"),
    }


def read_clip_tower(
    fields: ConfigFields, tower: ClipTower, *, feature_layer: Any, dtype: str
) -> tuple[VisionConfig, PatchConvolution]:
    """Returns the record of a CLIP or SigLIP tower and how patches lie in its kernel.

    Raises ValueError with the field's name.
    """
    sizes, patches = _read_sizes(fields)
    side = fields.whole("image_size") // patches.height
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


def read_intern_vit(fields: ConfigFields, *, feature_layer: Any, dtype: str) -> tuple[VisionConfig, PatchConvolution]:
    """Returns the record of an InternViT and how patches lie in its kernel; raises ValueError with the field's name."""
    sizes, patches = _read_sizes(fields)
    height, width = _pair(fields, "image_size")
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
        "num_patches": (height // patches.height) * (width // patches.width),
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


def _read_sizes(fields: ConfigFields) -> tuple[dict[str, Any], PatchConvolution]:
    patch_height, patch_width = _pair(fields, "patch_size")
    channels = fields.whole("num_channels")
    sizes = {
        "hidden": fields.whole("hidden_size"),
        "num_layers": fields.whole("num_hidden_layers"),
        "num_heads": fields.whole("num_attention_heads"),
        "mlp_dim": fields.whole("intermediate_size"),
        "activation": fields.choice("hidden_act", HUB_ACTIVATIONS),
        "norm_eps": fields.number("layer_norm_eps"),
        "patch_dim": channels * patch_height * patch_width,
    }
    return sizes, PatchConvolution(channels, patch_height, patch_width)


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
