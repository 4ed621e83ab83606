"""What sets the vision towers of LLaVA apart, as data, and the names that CLIP and SigLIP have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rrfp_jax.exchange.names import Table
from rrfp_jax.exchange.transforms import SAME, TURNED, Convolution

VISION_MODEL = "vision_tower.vision_model."
"""What stands before the names of CLIP and SigLIP towers in files of the hub."""
_LAYER, _OURS = VISION_MODEL + "encoder.layers.N.", "vision.layers.N."


@dataclass(frozen=True, kw_only=True)
class Tower:
    """One kind of tower."""

    model_type: str
    names: Callable[[Convolution], Table]
    """The table, given how patches lie in the kernel."""
    defaults: Mapping[str, Any]
    silent: tuple[str, ...]
    """Fields that say nothing about features."""
    class_token: bool
    pre_norm: bool
    patch_bias: bool
    unused: tuple[str, ...]
    """Patterns of tensors behind the features, without what stands before all names."""


def clip_names(patches: Convolution) -> Table:
    """Of CLIP and SigLIP; what one of them lacks has no array here."""
    linear = {"attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj"}
    linear |= {"attention.value": "self_attn.v_proj", "attention.output": "self_attn.out_proj"}
    linear |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    norms = {"attention_norm": "layer_norm1", "mlp_norm": "layer_norm2"}
    return {
        "vision.patches.projection.kernel": (patches, VISION_MODEL + "embeddings.patch_embedding.weight"),
        "vision.patches.projection.bias": (SAME, VISION_MODEL + "embeddings.patch_embedding.bias"),
        "vision.patches.class_token": (SAME, VISION_MODEL + "embeddings.class_embedding"),
        "vision.patches.positions": (SAME, VISION_MODEL + "embeddings.position_embedding.weight"),
        "vision.pre_norm.scale": (SAME, VISION_MODEL + "pre_layrnorm.weight"),  # their spelling
        "vision.pre_norm.bias": (SAME, VISION_MODEL + "pre_layrnorm.bias"),
        **layer_names(_OURS, _LAYER, linear, norms),
    }


def layer_names(
    ours: str, theirs: str, linear: Mapping[str, str], norms: Mapping[str, str]
) -> dict[str, tuple[Any, str]]:
    """Products with kernel and bias, and norms with scale and bias, by their names on both sides."""
    table: dict[str, tuple[Any, str]] = {}
    for own, name in linear.items():
        table[f"{ours}{own}.kernel"] = (TURNED, f"{theirs}{name}.weight")
        table[f"{ours}{own}.bias"] = (SAME, f"{theirs}{name}.bias")
    for own, name in norms.items():
        table[f"{ours}{own}.scale"] = (SAME, f"{theirs}{name}.weight")
        table[f"{ours}{own}.bias"] = (SAME, f"{theirs}{name}.bias")
    return table
