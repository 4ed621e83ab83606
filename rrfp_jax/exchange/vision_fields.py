"""From the configuration of a vision tower to the record of ours."""

from typing import Any

from rrfp_jax.exchange.config_fields import ConfigFields
from rrfp_jax.exchange.families.internvl import QK_NORM_EPS
from rrfp_jax.exchange.families.tower import Tower
from rrfp_jax.exchange.transforms import Convolution
from rrfp_jax.models.encoder_config import NORMS, VisionConfig

ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu"}
_NO_DROPOUT = "models here drop nothing"


def read_tower(
    fields: ConfigFields, tower: Tower, *, feature_layer: Any, dtype: str
) -> tuple[VisionConfig, Convolution]:
    """A CLIP or SigLIP tower, and how patches lie in its kernel; raises ValueError by the field's name."""
    sizes, patches = _sizes(fields)
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
    return _record(record, dtype), patches


def read_intern_vit(fields: ConfigFields, *, feature_layer: Any, dtype: str) -> tuple[VisionConfig, Convolution]:
    """InternViT, likewise."""
    sizes, patches = _sizes(fields)
    height, width = _pair(fields, "image_size")
    for name in ("attention_dropout", "hidden_dropout_prob", "projection_dropout"):
        fields.only(name, 0, why=_NO_DROPOUT)
    fields.only("use_mask_token", False, why="models here have no mask token")
    fields.only("use_absolute_position_embeddings", True, why="models here have learned positions")
    norm = fields.choice("norm_type", {name: name for name in NORMS})
    layer = _from_the_end(fields, feature_layer, sizes["num_layers"])
    final_norm = not fields.flag("use_mean_pooling") and layer == -1
    if final_norm and norm != "layer_norm":
        raise fields.refusal("use_mean_pooling", False, f"the last norm is a LayerNorm there, and with {norm} not here")
    qk_norm = fields.flag("use_qk_norm")
    if qk_norm and sizes["norm_eps"] != QK_NORM_EPS:
        why = f"with use_qk_norm norms of queries and keys add {QK_NORM_EPS} there, and here what all norms add"
        raise fields.refusal("layer_norm_eps", sizes["norm_eps"], why)
    scale = fields.number("layer_scale_init_value")
    record = {
        **sizes,
        "num_patches": (height // patches.height) * (width // patches.width),
        "qkv_bias": fields.flag("attention_bias"),
        "qk_norm": qk_norm,
        "norm": norm,
        "layer_scale": scale if scale > 0 else 1.0,  # where a scale begins; parameters say where it is
        "class_token": True,
        "final_norm": final_norm,
        "feature_layer": layer,
    }
    fields.finish()
    return _record(record, dtype), patches


def _sizes(fields: ConfigFields) -> tuple[dict[str, Any], Convolution]:
    patch_height, patch_width = _pair(fields, "patch_size")
    channels = fields.whole("num_channels")
    sizes = {
        "hidden": fields.whole("hidden_size"),
        "num_layers": fields.whole("num_hidden_layers"),
        "num_heads": fields.whole("num_attention_heads"),
        "mlp_dim": fields.whole("intermediate_size"),
        "activation": fields.choice("hidden_act", ACTIVATIONS),
        "norm_eps": fields.number("layer_norm_eps"),
        "patch_dim": channels * patch_height * patch_width,
    }
    return sizes, Convolution(channels, patch_height, patch_width)


def _pair(fields: ConfigFields, name: str) -> tuple[int, int]:
    """A size, or one for height and one for width."""
    value = fields.get(name)
    pair = tuple(value) if isinstance(value, list) else (value, value)
    if len(pair) != 2 or not all(type(each) is int and each > 0 for each in pair):
        raise fields.refusal(name, value, "one whole number is needed, or two")
    return pair


def _from_the_end(fields: ConfigFields, layer: Any, num_layers: int) -> int:
    """``vision_feature_layer`` counted from the last one; hidden state 0 is what the first layer reads."""
    if type(layer) is not int or not -num_layers <= (counted := layer if layer < 0 else layer - num_layers - 1) <= -1:
        raise fields.refusal("vision_feature_layer", layer, f"one of {num_layers} layers is needed, -1 for the last")
    return counted


def _record(values: dict[str, Any], dtype: str) -> VisionConfig:
    return VisionConfig(**values, param_dtype=dtype, compute_dtype=dtype)
