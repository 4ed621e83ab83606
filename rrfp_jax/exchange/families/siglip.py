"""SigLIP's vision tower: no class token, patches with a bias."""

from rrfp_jax.exchange.families.tower import Tower, clip_names

SIGLIP = Tower(
    model_type="siglip_vision_model",
    names=clip_names,
    defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
    },
    silent=("projection_dim", "vocab_size", "vision_use_head"),
    class_token=False,
    pre_norm=False,
    patch_bias=True,
    unused=("post_layernorm.*", "head.*"),
)
"""Its last norm and the head that pools are not used: features are those of a layer."""
