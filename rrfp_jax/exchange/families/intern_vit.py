"""InternViT, the vision tower of InternVL: layer scales, biases and norms of queries and keys as switches."""

from typing import Any

from rrfp_jax.exchange.families.tower import layer_names
from rrfp_jax.exchange.names import Table
from rrfp_jax.exchange.transforms import SAME, Convolution, Kept

MODEL_TYPE = "internvl_vision"
DEFAULTS: dict[str, Any] = {
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
TOWER = "vision_tower."
_OURS, _LAYER = "vision.layers.N.", TOWER + "encoder.layer.N."
_LINEAR = {
    "attention.query": "attention.q_proj",
    "attention.key": "attention.k_proj",
    "attention.value": "attention.v_proj",
    "attention.output": "attention.projection_layer",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_NORMS = {
    "attention_norm": "layernorm_before",
    "mlp_norm": "layernorm_after",
    "attention.query_norm": "attention.q_norm",
    "attention.key_norm": "attention.k_norm",
}


def names(patches: Convolution) -> Table:
    """The table; what a configuration switches off has no array here."""
    return {
        "vision.patches.projection.kernel": (patches, TOWER + "embeddings.patch_embeddings.projection.weight"),
        "vision.patches.projection.bias": (SAME, TOWER + "embeddings.patch_embeddings.projection.bias"),
        "vision.patches.class_token": (Kept(2), TOWER + "embeddings.cls_token"),
        "vision.patches.positions": (Kept(1), TOWER + "embeddings.position_embeddings"),
        **layer_names(_OURS, _LAYER, _LINEAR, _NORMS),
        _OURS + "attention_scale": (SAME, _LAYER + "lambda_1"),
        _OURS + "mlp_scale": (SAME, _LAYER + "lambda_2"),
        "vision.norm.scale": (SAME, TOWER + "layernorm.weight"),
        "vision.norm.bias": (SAME, TOWER + "layernorm.bias"),
    }
