"""Models of the paper's evaluation, and some with experts, by name.

The paper (section 5) names decoder and encoder and gives their sizes, no dimensions. These were published elsewhere:

* Qwen3-1.7B, -4B and -32B (Qwen3 technical report, table 1, and the models' configurations);
* Llama 3 8B and 70B (Dubey et al. 2024, table 3);
* Gemma 3 27B, the text model (Gemma 3 technical report, table 1, and the model's configuration), not in the paper;
* ViT-H/14: 32 layers of 1280, MLP 5120, 16 heads (Dosovitskiy et al. 2021, table 1);
* "Big", 1.8B: ViT-G/14, known as bigG, 48 layers of 1664, MLP 8192, 16 heads (Zhai et al. 2022, table 2);
* InternViT-6B: 48 layers of 3200, MLP 12800, 25 heads, RMSNorm, normed queries and keys (Chen et al. 2024, table 1);
* ViT-22B: 48 layers of 6144, MLP 24576, 48 heads (Dehghani et al. 2023, table 1).

With experts, not in the paper:

* Mixtral 8x7B and 8x22B (Jiang et al. 2024, table 1, and the models' configurations): 8 experts, 2 for each token;
* GPT-OSS-120B (OpenAI 2025, and the model's configuration): 128 experts of 2880, 4 for each token;
* Qwen3-30B-A3B (Qwen3 technical report, table 2, and the model's configuration): 128 experts of 768, 8 for each token.
* DeepSeek-V3 (DeepSeek-AI 2024, section 4.2, and the model's configuration): 256 experts of 2048, 8 for each token and
  one for all, with latent attention.

The coefficients of their load-balancing losses are those of the configurations. No token is dropped; add a
``capacity_factor`` to train them on GPUs (:mod:`rrfp_jax.models.experts`).

Ours is ViT-5B, of which no dimensions are published: 64 layers of 2560, MLP 10240 and 20 heads. ViT-22B computes
attention and MLP side by side and norms queries and keys by head; here they follow each other, with norms over the
whole width. All images are equal, 224 pixels wide in patches of 14, of InternViT 448; four patches make one feature, as
in InternVL. Everything computes in bfloat16.

:func:`model_pair` gives the same models as the sizes that operations are counted from.
"""

import difflib
from dataclasses import dataclass
from typing import Any

from rrfp_jax.costs.flops import DecoderSizes, EncoderSizes, ProjectorSizes
from rrfp_jax.models.config import (
    ExpertsConfig,
    GlobalLayers,
    LanguageModelConfig,
    LatentAttentionConfig,
    LayerVariant,
    RopeScaling,
)
from rrfp_jax.models.vision_config import ProjectorConfig, VisionConfig, VisionLanguageConfig

_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "qk_norm": True,
    "compute_dtype": "bfloat16",
}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128_256,
    "num_kv_heads": 8,
    "rope_theta": 5e5,
    "compute_dtype": "bfloat16",
}
_MIXTRAL: dict[str, Any] = {"num_kv_heads": 8, "rope_theta": 1e6, "compute_dtype": "bfloat16"}
_VIT: dict[str, Any] = {"patch_dim": 14 * 14 * 3, "num_patches": 256, "compute_dtype": "bfloat16"}

DECODERS = {
    "qwen3-1.7b": LanguageModelConfig(
        **_QWEN3, hidden=2048, num_layers=28, num_heads=16, mlp_dim=6144, tie_embeddings=True
    ),
    "qwen3-4b": LanguageModelConfig(
        **_QWEN3, hidden=2560, num_layers=36, num_heads=32, mlp_dim=9728, tie_embeddings=True
    ),
    "qwen3-32b": LanguageModelConfig(**_QWEN3, hidden=5120, num_layers=64, num_heads=64, mlp_dim=25_600),
    "llama3-8b": LanguageModelConfig(**_LLAMA3, hidden=4096, num_layers=32, num_heads=32, mlp_dim=14_336),
    "llama3-70b": LanguageModelConfig(**_LLAMA3, hidden=8192, num_layers=80, num_heads=64, mlp_dim=28_672),
    "mixtral-8x7b": LanguageModelConfig(
        **_MIXTRAL,
        vocab_size=32_000,
        hidden=4096,
        num_layers=32,
        num_heads=32,
        mlp_dim=14_336,
        experts=ExpertsConfig(num_experts=8, experts_per_token=2, balance_coefficient=0.02),
    ),
    "mixtral-8x22b": LanguageModelConfig(
        **_MIXTRAL,
        vocab_size=32_768,
        hidden=6144,
        num_layers=56,
        num_heads=48,
        mlp_dim=16_384,
        experts=ExpertsConfig(num_experts=8, experts_per_token=2, balance_coefficient=0.001),
    ),
    "gemma3-27b": LanguageModelConfig(
        vocab_size=262_208,
        hidden=5376,
        num_layers=62,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        mlp_dim=21_504,
        qk_norm=True,
        sliding_window=1024,
        global_layers=GlobalLayers(every=6, rope_theta=1e6, rope_scaling=RopeScaling(kind="linear", factor=8.0)),
        variant=LayerVariant(
            activation="gelu_tanh", norm_offset=True, post_norms=True, scaled_embedding=True, query_scalar=168.0
        ),
        norm_eps=1e-6,
        tie_embeddings=True,
        compute_dtype="bfloat16",
    ),
    "gpt-oss-120b": LanguageModelConfig(
        vocab_size=201_088,
        hidden=2880,
        num_layers=36,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        mlp_dim=2880,
        rope_theta=150_000.0,
        rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_max_positions=4096, truncate=False),
        qkv_bias=True,
        sliding_window=128,
        global_layers=GlobalLayers(every=2),
        variant=LayerVariant(sinks=True, output_bias=True),
        experts=ExpertsConfig(num_experts=128, experts_per_token=4, biases=True, swiglu_limit=7.0),
        compute_dtype="bfloat16",
    ),
    "qwen3-30b-a3b": LanguageModelConfig(
        **(_QWEN3 | {"num_kv_heads": 4}),
        hidden=2048,
        num_layers=48,
        num_heads=32,
        mlp_dim=6144,
        experts=ExpertsConfig(num_experts=128, experts_per_token=8, mlp_dim=768, balance_coefficient=0.001),
    ),
    "deepseek-v3": LanguageModelConfig(
        vocab_size=129_280,
        hidden=7168,
        num_layers=61,
        num_heads=128,
        mlp_dim=18_432,
        norm_eps=1e-6,
        compute_dtype="bfloat16",
        rope_scaling=RopeScaling(kind="yarn", factor=40.0, original_max_positions=4096, attention_factor=1.0),
        latent_attention=LatentAttentionConfig(
            query_rank=1536, kv_rank=512, plain_dim=128, rotary_dim=64, value_dim=128, score_mscale=1.0
        ),
        experts=ExpertsConfig(
            num_experts=256,
            experts_per_token=8,
            mlp_dim=2048,
            scores="sigmoid",
            scale=2.5,
            num_groups=8,
            groups_per_token=4,
            bias_rate=0.001,
            shared_mlp_dim=2048,
            dense_layers=(0, 1, 2),
            balance_coefficient=0.0001,
        ),
    ),
}
"""Language models by name."""

ENCODERS = {
    "vit-h": VisionConfig(**_VIT, hidden=1280, num_layers=32, num_heads=16, mlp_dim=5120),
    "vit-big": VisionConfig(**_VIT, hidden=1664, num_layers=48, num_heads=16, mlp_dim=8192),
    "vit-5b": VisionConfig(**_VIT, hidden=2560, num_layers=64, num_heads=20, mlp_dim=10_240),
    "internvit-6b": VisionConfig(
        **(_VIT | {"num_patches": 1024}),
        hidden=3200,
        num_layers=48,
        num_heads=25,
        mlp_dim=12_800,
        norm="rms_norm",
        qkv_bias=False,
        qk_norm=True,
        layer_scale=0.1,
        class_token=True,
        final_norm=False,
    ),
    "vit-22b": VisionConfig(
        **_VIT, hidden=6144, num_layers=48, num_heads=48, mlp_dim=24_576, qkv_bias=False, qk_norm=True
    ),
}
"""Vision transformers by name."""


MODELS = {
    f"{decoder}+{encoder}": VisionLanguageConfig(
        vision=ENCODERS[encoder],
        projector=ProjectorConfig(patches_per_feature=4, row_order=True, norm=True),
        decoder=DECODERS[decoder],
    )
    for decoder, encoder in (
        ("qwen3-1.7b", "vit-h"),
        ("qwen3-4b", "vit-big"),
        ("llama3-8b", "vit-5b"),
        ("qwen3-32b", "internvit-6b"),
        ("llama3-70b", "vit-22b"),
    )
}
"""Pairs of the paper by name, ``decoder+encoder``."""


MODEL_PAIRS = tuple(MODELS)


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """An encoder of images, and the decoder that reads their features."""

    encoder: EncoderSizes
    projector: ProjectorSizes
    """From merged patches to the decoder's width; it belongs to the decoder's first chunk."""
    decoder: DecoderSizes


def model_pair(name: str) -> ModelPair:
    """The pair of a name; raises ValueError with the names there are."""
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no model pair {name!r}: {meant}the pairs are {', '.join(MODELS)}")
    return sizes_of(MODELS[name])


def sizes_of(config: VisionLanguageConfig) -> ModelPair:
    """The sizes of a model's vision part and its decoder."""
    vision, projector, decoder = config.vision, config.projector, config.decoder
    return ModelPair(
        encoder=EncoderSizes(
            hidden=vision.hidden,
            num_layers=vision.num_layers_run,
            num_heads=vision.num_heads,
            mlp_dim=vision.mlp_dim,
            patch_dim=vision.patch_dim * vision.patch_frames,
            is_gated=vision.gated_mlp,
        ),
        projector=ProjectorSizes(
            in_dim=projector.patches_per_feature * vision.hidden,
            inner_dim=projector.mlp_dim or decoder.hidden,
            out_dim=decoder.hidden,
        ),
        decoder=decoder_sizes(decoder),
    )


def decoder_sizes(config: LanguageModelConfig) -> DecoderSizes:
    """The sizes of a decoder alone; of experts those count that compute a token."""
    experts, latent = config.experts, config.latent_attention
    chosen = 0 if experts is None else experts.experts_per_token * config.expert_dim + (experts.shared_mlp_dim or 0)
    return DecoderSizes(
        hidden=config.hidden,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.size_per_head,
        mlp_dim=config.mlp_dim,
        vocab_size=config.vocab_size,
        num_sparse_layers=config.num_sparse_layers,
        num_experts=0 if experts is None else experts.num_experts,
        expert_dims=chosen,
        latent_params=None if latent is None else latent.num_product_params(config.hidden, config.num_heads),
        value_dim=None if latent is None else latent.value_dim,
    )
