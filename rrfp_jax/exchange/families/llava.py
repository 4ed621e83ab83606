"""LLaVA: a CLIP or SigLIP tower, a projector of two products, any text family."""

from typing import Any

from rrfp_jax.exchange.families.clip import CLIP
from rrfp_jax.exchange.families.siglip import SIGLIP
from rrfp_jax.exchange.families.tower import Tower, layer_names

MODEL_TYPE, ARCHITECTURE = "llava", "LlavaForConditionalGeneration"
TOWERS: dict[str, Tower] = {tower.model_type: tower for tower in (CLIP, SIGLIP)}
DEFAULTS: dict[str, Any] = {
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
    "multimodal_projector_bias": True,
    "tie_word_embeddings": False,
}
VISION_DEFAULTS: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "intermediate_size": 4096,
    "hidden_size": 1024,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
"""Of a file without ``vision_config``."""
TEXT_TYPE = "llama"
PROJECTOR = layer_names(
    "projector.", "multi_modal_projector.", {"linear_1": "linear_1", "linear_2": "linear_2"}, {"norm": "layer_norm"}
)
"""Of LLaVA and InternVL; LLaVA has no norm."""
DECODER = "language_model."
"""What stands before the names of the decoder in files of the hub."""
NEWER = (
    ("model.language_model.", DECODER + "model."),
    ("lm_head.", DECODER + "lm_head."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.vision_tower.vision_model.", "vision_tower.vision_model."),
    ("model.vision_tower.", "vision_tower."),
)
"""The names in memory since transformers 4.52, which some files have, and the older ones."""
NEWER_TOWER = tuple(
    (f"{before}vision_tower.{part}.", f"vision_tower.vision_model.{part}.")
    for before in ("", "model.")
    for part in ("embeddings", "pre_layrnorm", "encoder", "post_layernorm", "head")
)
"""CLIP and SigLIP towers since transformers 5."""
