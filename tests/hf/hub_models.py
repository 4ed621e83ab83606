"""Random models of transformers, small, of every text family; needs torch."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from rrfp_jax.data.packing import patches_of

TEXT = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"),
    *("gemma3_text", "gpt_oss", "glm", "glm4", "deepseek_v3"),
)


def text_config(family: str, seed: int) -> Any:
    """A configuration with odd sizes, grouped queries, heads of their own width, tied or not, as chance has it."""
    chance = random.Random(f"{family} {seed}")
    heads, per_head = chance.choice([(4, 2), (4, 4), (6, 3), (3, 1)]), chance.choice([6, 8, 10])
    own_head_dim = family not in ("qwen2", "deepseek_v3") and chance.random() < 0.5
    values: dict[str, Any] = {
        "vocab_size": chance.choice([61, 97, 130]),
        "hidden_size": heads[0] * per_head,
        "intermediate_size": chance.choice([17, 29, 40]),
        "num_hidden_layers": chance.choice([1, 2, 3]),
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "rms_norm_eps": chance.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": chance.random() < 0.5,
        "max_position_embeddings": 64,
        "rope_parameters": rope(chance),
        "initializer_range": 0.3,
    }
    if own_head_dim or family in ("qwen3", "glm", "glm4"):
        values["head_dim"] = chance.choice([4, 8, 14])
    if family in ("glm", "glm4"):
        turned = chance.choice(range(2, values["head_dim"] + 1, 2))
        values["rope_parameters"]["partial_rotary_factor"] = turned / values["head_dim"]
        values |= {"attention_bias": chance.random() < 0.5, "pad_token_id": None}
    values |= _window(family, chance, values["num_hidden_layers"])
    if family == "mixtral":
        values |= {"num_local_experts": chance.choice([2, 5]), "num_experts_per_tok": chance.choice([1, 2])}
    if family == "qwen2_moe":
        values |= {"shared_expert_intermediate_size": chance.choice([5, 12]), "qkv_bias": chance.random() < 0.8}
    if family in ("qwen2_moe", "qwen3_moe"):
        values |= {
            "num_experts": 5,
            "num_experts_per_tok": chance.choice([1, 3]),
            "moe_intermediate_size": 11,
            "norm_topk_prob": chance.random() < 0.5,
            "num_hidden_layers": 3,
            "decoder_sparse_step": chance.choice([1, 2]),
            "mlp_only_layers": chance.choice([[], [0]]),
        }
    if family == "gemma3_text":
        values |= {
            "head_dim": chance.choice([4, 8, 14]),
            "query_pre_attn_scalar": chance.choice([3, 8, 24]),
            "pad_token_id": None,  # torch gives no gradient to the vector of a padding token
            "rope_parameters": {kind: rope(chance) for kind in ("sliding_attention", "full_attention")},
        }
    if family == "gpt_oss":
        values |= {"num_local_experts": chance.choice([2, 5]), "num_experts_per_tok": chance.choice([1, 2])}
        values |= {"swiglu_limit": chance.choice([0.3, 1.5, 7.0])}
    if family == "deepseek_v3":
        groups, open_groups = chance.choice([(1, 1), (2, 1), (4, 2), (3, 3)])
        values |= {
            "num_key_value_heads": heads[0],
            "q_lora_rank": chance.choice([None, 9, 14]),
            "kv_lora_rank": chance.choice([5, 12]),
            "qk_nope_head_dim": chance.choice([3, 6, 8]),
            "qk_rope_head_dim": chance.choice([2, 4, 8]),
            "v_head_dim": chance.choice([4, 7, 12, 20]),
            "rope_interleave": chance.random() < 0.8,
            "num_hidden_layers": 3,
            "first_k_dense_replace": chance.choice([0, 1, 2, 3]),
            "n_routed_experts": groups * chance.choice([2, 4]),
            "n_group": groups,
            "topk_group": open_groups,
            "num_experts_per_tok": chance.choice([1, 2]),
            "moe_intermediate_size": 11,
            "n_shared_experts": chance.choice([1, 2]),
            "norm_topk_prob": chance.random() < 0.7,
            "routed_scaling_factor": chance.choice([1.0, 2.5]),
        }
    return transformers.AutoConfig.for_model(family, **values)


def rope(chance: random.Random) -> dict[str, Any]:
    """As it is, or stretched in one of the ways that models here know."""
    kind = chance.choice(["default", "llama3", "linear", "yarn"])
    values = {"rope_type": kind, "rope_theta": chance.choice([1e4, 5e5])}
    if kind != "default":
        values["factor"] = chance.choice([2.5, 4.0, 8.0])
    if kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = chance.choice([16, 32])
    if kind == "llama3":
        values |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        more = [{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.2}]
        values |= chance.choice([{}, {"beta_fast": 4.0, "beta_slow": 0.5}]) | chance.choice(more)
        values |= chance.choice([{}, {"truncate": False}])
    return values


def _window(family: str, chance: random.Random, num_layers: int) -> dict[str, Any]:
    size = chance.choice([None, 3, 7])
    types = ["full_attention", "sliding_attention"]
    if family in ("gemma3_text", "gpt_oss"):
        more = {"layer_types": chance.choices(types, k=num_layers)} if chance.random() < 0.5 else {}
        pattern = {"sliding_window_pattern": chance.choice([2, 3, 6])} if family == "gemma3_text" else {}
        return {"sliding_window": size or 5, **pattern, **more}
    if family in ("mistral", "mixtral"):
        return {"sliding_window": size}
    if family in ("qwen2", "qwen3", "qwen3_moe") and size is not None:
        mixed = {"layer_types": chance.choices(types, k=num_layers)} if family != "qwen3_moe" else {}
        first = chance.choice([0, num_layers])
        return {"use_sliding_window": True, "sliding_window": size, "max_window_layers": first, **mixed}
    return {}


def text_model(family: str, seed: int) -> Any:
    """A model with random parameters, norms and biases among them."""
    return _model_of(text_config(family, seed), seed)


def made(family: str, values: Mapping[str, Any], seed: int) -> Any:
    """Likewise, of a configuration that is given."""
    return _model_of(transformers.AutoConfig.for_model(family, **values), seed)


SEEING = ("llava clip", "llava siglip", "internvl")


def seeing_config(kind: str, seed: int) -> Any:
    """A vision-language configuration: a tower of chance with a text model of chance."""
    chance = random.Random(f"{kind} {seed}")
    family = chance.choice(["llama", "qwen3", "qwen2", "mistral"])
    text = text_config(family, seed)
    heads = chance.choice([1, 2, 3])
    layers, patch, side = chance.choice([2, 3]), chance.choice([2, 3]), 4
    values: dict[str, Any] = {
        "hidden_size": heads * chance.choice([4, 6]),
        "intermediate_size": chance.choice([9, 20]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": patch * side + (1 if kind != "internvl" and chance.random() < 0.3 else 0),
        "patch_size": patch,
        "num_channels": chance.choice([1, 3]),
        "layer_norm_eps": chance.choice([1e-6, 1e-5]),
        "hidden_act": chance.choice(["gelu", "quick_gelu", "gelu_pytorch_tanh"]),
    }
    more: dict[str, Any] = {
        "projector_hidden_act": chance.choice(["gelu", "gelu_pytorch_tanh"]),
        "tie_word_embeddings": text.tie_word_embeddings,
    }
    if kind == "internvl":
        qk_norm = chance.random() < 0.5
        values |= {
            "use_qk_norm": qk_norm,
            "layer_norm_eps": 1e-6 if qk_norm else values["layer_norm_eps"],
            "attention_bias": chance.random() < 0.5,
            "norm_type": chance.choice(["layer_norm", "rms_norm"]),
            "initializer_range": 0.2,
        }
        values["use_mean_pooling"] = values["norm_type"] == "rms_norm" or chance.random() < 0.5
        more |= {"vision_feature_layer": chance.choice([-1, -1, -2]), "downsample_ratio": chance.choice([0.5, 0.25])}
    else:
        more |= {
            "vision_feature_select_strategy": "default" if kind == "llava clip" else "full",
            "vision_feature_layer": chance.choice([-1, -2, layers]),
            "multimodal_projector_bias": chance.random() < 0.5,
        }
    return _seeing(kind, values, {"text_config": text, **more})


def made_seeing(kind: str, vision: Mapping[str, Any], more: Mapping[str, Any], seed: int) -> Any:
    """A model of a configuration that is given."""
    return _seeing_model_of(kind, _seeing(kind, vision, more), seed)


def _seeing(kind: str, vision: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    if kind == "internvl":
        tower = transformers.InternVLVisionConfig(**vision)
        return transformers.InternVLConfig(vision_config=tower, image_token_id=1, **more)
    make = transformers.CLIPVisionConfig if kind == "llava clip" else transformers.SiglipVisionConfig
    return transformers.LlavaConfig(vision_config=make(**vision), image_token_index=1, **more)


def seeing_model(kind: str, seed: int) -> Any:
    """A model with random parameters."""
    return _seeing_model_of(kind, seeing_config(kind, seed), seed)


def _seeing_model_of(kind: str, config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    family = "InternVL" if kind == "internvl" else "Llava"
    return randomised(getattr(transformers, f"{family}ForConditionalGeneration")(config), seed)


def seen(config: Any, seed: int, *, length: int = 31) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Pixels ``[images, channels, side, side]`` and tokens ``[2, length]`` as transformers reads them, and our leaves.

    One image is in the first row, and two are in the second, each at some distance from the last.
    """
    chance = np.random.default_rng(seed)
    vision = config.vision_config
    size, patch = (value if isinstance(value, int) else value[0] for value in (vision.image_size, vision.patch_size))
    side = size // patch
    ratio = getattr(config, "downsample_ratio", 1.0)
    per_image = int((side * ratio) ** 2)
    pixels = chance.standard_normal((3, vision.num_channels, size, size), np.float32)
    length = max(length, 2 * per_image + 7)
    tokens = chance.integers(2, config.text_config.vocab_size, (2, length)).astype(np.int32)
    index = np.full((2, length), -1, np.int32)
    for image, (row, start) in enumerate([(0, 3), (1, 1), (1, per_image + 4)]):
        tokens[row, start : start + per_image] = 1
        index[row, start : start + per_image] = np.arange(per_image) + image * per_image
    cut = pixels[:, :, : side * patch, : side * patch].transpose(0, 2, 3, 1)
    patches = np.stack([patches_of(image, patch, 1) for image in cut])
    return pixels, tokens, {"tokens": tokens, "image_index": index, "patches": patches}


def _model_of(config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    config._attn_implementation = config._experts_implementation = "eager"
    return randomised(transformers.AutoModelForCausalLM.from_config(config), seed)


def randomised(model: Any, seed: int) -> Any:
    """The model with all that usually begins at 0 or 1 moved away from there."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    return model.eval()


def save(model: Any, folder: Path, *, shard_size: str = "5GB") -> Path:
    """What ``save_pretrained`` writes."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def load(folder: Path) -> Any:
    """What ``from_pretrained`` reads, in the files' dtype; fails where a key is missing or left over."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model, info = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager", dtype="auto")
    model.config._experts_implementation = "eager"
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    assert not info["mismatched_keys"], info["mismatched_keys"]
    return model.eval()


def random_tokens(vocab_size: int, seed: int, shape: tuple[int, int] = (2, 19)) -> np.ndarray:
    """Tokens ``shape``."""
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)


def hub_name(name: str) -> str:
    """The name that a tensor of a CLIP or SigLIP tower has in the files of the hub, which we write."""
    for part in ("embeddings", "pre_layrnorm", "encoder.layers", "post_layernorm", "head"):
        name = name.replace(f"vision_tower.{part}.", f"vision_tower.vision_model.{part}.")
    return name


def gradients_by_file_name(model: Any) -> dict[str, np.ndarray]:
    """The gradients of a model's parameters under the names that its files have: it is saved with them in place."""
    import tempfile

    from safetensors.numpy import load_file

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for buffer in model.buffers():
            buffer.zero_()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")
