"""CLIP's vision tower: a class token, a norm before the first layer, patches without a bias."""

from rrfp_jax.exchange.families.tower import Tower, clip_names

CLIP = Tower(
    model_type="clip_vision_model",
    names=clip_names,
    defaults={
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
    },
    silent=("projection_dim", "vocab_size", "dropout"),
    class_token=True,
    pre_norm=True,
    patch_bias=False,
    unused=("post_layernorm.*",),
)
"""Its last norm is not used: features are those of a layer."""
