"""Makes the small models of ``golden/``, with what transformers computes from them.

Run where torch and transformers are: ``python -m tests.hf.make_golden``. The fast tests read the files.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.hf import hub_models, hub_qwen_vl

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = "expected.safetensors"
SEED = 7
_SMALL: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "initializer_range": 0.4,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TEXT: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _LLAMA3},
    "mistral": {"sliding_window": 3},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 6},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5,
        "shared_expert_intermediate_size": 7,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "gemma3_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        "query_pre_attn_scalar": 5,
        "sliding_window": 3,
        "sliding_window_pattern": 2,
        "pad_token_id": None,
    },
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
        "sliding_window": 3,
    },
    "glm": {"pad_token_id": None},
    "glm4": {
        "head_dim": 6,
        "attention_bias": False,
        "rope_parameters": {**_LLAMA3, "partial_rotary_factor": 0.7},
        "pad_token_id": None,
    },
    "deepseek_v3": {
        "num_key_value_heads": 2,
        "head_dim": 2,
        "q_lora_rank": 5,
        "kv_lora_rank": 3,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
    },
}
"""What each family adds to the small sizes."""
_TOWER: dict[str, Any] = {
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 4,
    "patch_size": 2,
    "num_channels": 1,
}
_FULL = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llava_clip": ("llava clip", _TOWER, {"tie_word_embeddings": False}),
    "llava_siglip": ("llava siglip", _TOWER, {"tie_word_embeddings": False, **_FULL}),
    "internvl": ("internvl", {**_TOWER, "use_qk_norm": True, "norm_type": "rms_norm"}, {"tie_word_embeddings": False}),
}
"""Kind, tower, and what else the model's configuration has."""
_QWEN_VL: dict[str, Any] = {
    "image_token_id": hub_qwen_vl.IMAGE,
    "text_config": {
        **{name: value for name, value in _SMALL.items() if name != "head_dim"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [1, 0, 1]},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 8,
        "num_heads": 2,
        "intermediate_size": 5,
        "in_channels": 1,
        "patch_size": 2,
        "window_size": 8,
        "out_hidden_size": 8,
        "fullatt_block_indexes": [1],
    },
}


def main() -> None:
    """Make all of them anew."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for family, more in TEXT.items():
        model = hub_models.made(family, {**_SMALL, **more}, SEED)
        tokens = hub_models.random_tokens(_SMALL["vocab_size"], SEED, (2, 9))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(tokens).long()).logits
        _write(model, GOLDEN / family, tokens=tokens, logits=logits.numpy())
    for name, (kind, vision, more) in SEEING.items():
        text = transformers.AutoConfig.for_model("llama", **_SMALL)
        model = hub_models.made_seeing(kind, vision, {**more, "text_config": text}, SEED)
        pixels, tokens, leaves = hub_models.seen(model.config, SEED, length=17)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(tokens).long(), pixel_values=torch.tensor(pixels)).logits
        _write(model, GOLDEN / name, **leaves, logits=logits.numpy())
    model = hub_qwen_vl.model_of(transformers.Qwen2_5_VLConfig(**_QWEN_VL), SEED)
    given, leaves = hub_qwen_vl.seen(model, SEED)
    with torch.no_grad():
        logits = model(**given).logits
    _write(model, GOLDEN / "qwen2_5_vl", **leaves, logits=logits.numpy())


def _write(model: Any, folder: Path, **expected: Any) -> None:
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if model.config.model_type == "llava":
        tensors = {hub_models.hub_name(name): tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file(expected, folder / EXPECTED)


if __name__ == "__main__":
    main()
