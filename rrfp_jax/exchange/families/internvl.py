"""InternVL in the form of transformers (``-hf``): InternViT, pixel shuffle with a normed projector, any text family."""

from typing import Any

MODEL_TYPE, ARCHITECTURE = "internvl", "InternVLForConditionalGeneration"
DEFAULTS: dict[str, Any] = {
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -1,
    "downsample_ratio": 0.5,
    "tie_word_embeddings": True,
}
TEXT_TYPE = "qwen2"
AROUND_IMAGES = {"start_image_token": "<img>", "end_image_token": "</img>"}
"""What stands before the features of an image and behind, by the fields of the tokenizer that say so otherwise."""
QK_NORM_EPS = 1e-6
"""What norms of queries and keys add, whatever ``layer_norm_eps`` says."""
