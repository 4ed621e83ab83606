"""Families of decoders, as data, and their fields of ``config.json``. How to add a family of Hugging Face models:

1. Write a :class:`DecoderFamily` below and add it to ``DECODER_FAMILIES``. ``names`` maps our arrays to their tensors
   (``_tensor_names.py`` explains the table); ``defaults`` are the values that the family's configuration class in
   transformers gives to fields that are missing; ``off`` names switches that our models cannot express.
2. Where the family has a field that no other family has, read it in :func:`read_decoder` into
   :class:`LanguageModelConfig`, and write it in :func:`write_decoder` for the way back. Do not add a field to the
   silent ones of ``_config_fields.py`` unless it cannot change the logits: a field that nobody reads is refused, and
   that is the guarantee that an import computes the same numbers.
3. Where a tensor lies in another way than in the families here, add a transform to ``_tensor_names.py``.
4. Models that began here are exported as the family that ``_family_of`` in ``_model_config.py`` picks: extend it if
   the new family has something that none had.
5. A family with a vision tower goes to ``_vision_language.py``.
6. Add the family to ``TEXT`` in ``tests/hf/hub_models.py``, write its golden model with
   ``python -m tests.hf.make_golden`` (needs torch and transformers), and name it in ``docs/models.md``.
   The tests then compare logits and gradients with transformers, and the bits of a round trip.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rrfp_jax.field_rules import MOST
from rrfp_jax.hf._config_fields import ConfigFields
from rrfp_jax.hf._tensor_names import (
    PER_EXPERT,
    SAME,
    SAME_FLOAT32,
    TRANSPOSED,
    TRANSPOSED_FLOAT32,
    NameTable,
    every_second,
    linears_and_norms,
    part_of_joined,
)
from rrfp_jax.models.config import (
    LINEAR_ROPE,
    LLAMA3_ROPE,
    ROPE_KINDS,
    SIGMOID,
    YARN_ROPE,
    ExpertsConfig,
    GlobalLayers,
    LanguageModelConfig,
    LatentAttentionConfig,
    LayerVariant,
    RopeScaling,
)

_NO_WINDOW, _PLAIN_WINDOW, _LAYERED_WINDOW, _SWITCHED_WINDOW = "none", "plain", "layered", "switched"
_TYPED_WINDOW = "typed"
"""How a family limits how far tokens look back: not at all; by ``sliding_window`` alone; by ``use_sliding_window`` for
the layers from ``max_window_layers`` on, or for those that ``layer_types`` names; by ``use_sliding_window`` for all
layers; by ``sliding_window`` for the layers that ``layer_types`` names, or all but those at a distance."""


_OF_LLAMA = LayerVariant()


@dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """Names of the fields that describe a family's experts."""

    num_experts: tuple[str, ...]
    """The name that is written, and another name that is read."""
    mlp_dim: str | None
    """Width of an expert. None: experts are as wide as ``intermediate_size``."""
    renormalise: str | None
    """Whether the weights of the chosen experts sum to 1. None: they always do."""
    every: str | None = None
    """Distance between sparse layers. None: every layer is sparse."""
    dense_layers: str | None = None
    """Layers without experts. None: there are none."""
    shared_mlp_dim: str | None = None
    """Width of a shared expert whose result a gate weights. None: there is none."""
    first_dense: str | None = None
    """Number of first layers without experts; such a family scores, groups and shares experts as DeepSeek-V3 does."""


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """One family of decoders."""

    model_type: str
    architecture: str
    """The only entry of ``architectures``."""
    names: NameTable
    defaults: Mapping[str, Any]
    """Values of fields that are missing, by name."""
    qkv_bias: bool | str = False
    """Whether queries, keys and values have biases, or the field that says so."""
    qk_norm: bool = False
    window: str = _NO_WINDOW
    every: int = 1
    """Distance of the layers without a window, unless the file says otherwise."""
    variant: LayerVariant = _OF_LLAMA
    experts: ExpertFields | None = None
    is_packed: bool = False
    """Whether its files may have experts in MXFP4."""
    latent: bool = False
    """Whether attention is latent."""
    off: tuple[str, ...] = ()
    """Switches that must be off."""


_LAYER = "model.layers.N."
_DECODER: NameTable = {
    "embedding.table": (SAME, "model.embed_tokens.weight"),
    "layers.N.attention_norm.scale": (SAME, _LAYER + "input_layernorm.weight"),
    "layers.N.attention.query.kernel": (TRANSPOSED, _LAYER + "self_attn.q_proj.weight"),
    "layers.N.attention.key.kernel": (TRANSPOSED, _LAYER + "self_attn.k_proj.weight"),
    "layers.N.attention.value.kernel": (TRANSPOSED, _LAYER + "self_attn.v_proj.weight"),
    "layers.N.attention.output.kernel": (TRANSPOSED, _LAYER + "self_attn.o_proj.weight"),
    "layers.N.mlp_norm.scale": (SAME, _LAYER + "post_attention_layernorm.weight"),
    "final_norm.scale": (SAME, "model.norm.weight"),
    "head.kernel": (TRANSPOSED, "lm_head.weight"),
}
_GATED_MLP: NameTable = {
    "layers.N.mlp.gate.kernel": (TRANSPOSED, _LAYER + "mlp.gate_proj.weight"),
    "layers.N.mlp.up.kernel": (TRANSPOSED, _LAYER + "mlp.up_proj.weight"),
    "layers.N.mlp.down.kernel": (TRANSPOSED, _LAYER + "mlp.down_proj.weight"),
}
_SHARED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_QKV_BIAS: NameTable = {
    "layers.N.attention.query.bias": (SAME, _LAYER + "self_attn.q_proj.bias"),
    "layers.N.attention.key.bias": (SAME, _LAYER + "self_attn.k_proj.bias"),
    "layers.N.attention.value.bias": (SAME, _LAYER + "self_attn.v_proj.bias"),
}
_QK_NORM: NameTable = {
    "layers.N.attention.query_norm.scale": (SAME, _LAYER + "self_attn.q_norm.weight"),
    "layers.N.attention.key_norm.scale": (SAME, _LAYER + "self_attn.k_norm.weight"),
}


def _expert_names(block: str, gate: str, up: str, down: str) -> NameTable:
    """Returns the names of a router and its experts, which stand in ``block`` of every layer."""
    return {
        "layers.N.mlp.router": (TRANSPOSED, f"{_LAYER}{block}.gate.weight"),
        "layers.N.mlp.experts.gate": (PER_EXPERT, f"{_LAYER}{block}.experts.E.{gate}.weight"),
        "layers.N.mlp.experts.up": (PER_EXPERT, f"{_LAYER}{block}.experts.E.{up}.weight"),
        "layers.N.mlp.experts.down": (PER_EXPERT, f"{_LAYER}{block}.experts.E.{down}.weight"),
    }


_COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_MISTRAL_DEFAULTS: dict[str, Any] = {
    **_COMMON_DEFAULTS,
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_QWEN_DEFAULTS: dict[str, Any] = {
    **_COMMON_DEFAULTS,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
}

_LLAMA = DecoderFamily(  # Llama 2 and 3, and whatever is published as one of them
    model_type="llama",
    architecture="LlamaForCausalLM",
    names={**_DECODER, **_GATED_MLP},
    defaults={**_COMMON_DEFAULTS, "vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    off=("attention_bias", "mlp_bias"),
)
_MISTRAL = DecoderFamily(
    model_type="mistral",
    architecture="MistralForCausalLM",
    names={**_DECODER, **_GATED_MLP},
    defaults={**_MISTRAL_DEFAULTS, "sliding_window": 4096},
    window=_PLAIN_WINDOW,
)
_QWEN2 = DecoderFamily(  # Qwen 2 and 2.5
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names={**_DECODER, **_GATED_MLP, **_QKV_BIAS},
    defaults={**_QWEN_DEFAULTS, "max_window_layers": 28},
    qkv_bias=True,
    window=_LAYERED_WINDOW,
)
_QWEN3 = DecoderFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names={**_DECODER, **_GATED_MLP, **_QK_NORM},
    defaults={**_QWEN_DEFAULTS, "head_dim": 128, "max_window_layers": 28},
    qk_norm=True,
    window=_LAYERED_WINDOW,
    off=("attention_bias",),
)
_MIXTRAL = DecoderFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names={**_DECODER, **_expert_names("block_sparse_moe", gate="w1", up="w3", down="w2")},
    defaults={
        **_MISTRAL_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    window=_PLAIN_WINDOW,
    experts=ExpertFields(num_experts=("num_local_experts", "num_experts"), mlp_dim=None, renormalise=None),
    off=("output_router_logits",),
)
_QWEN_EXPERTS = ExpertFields(
    num_experts=("num_experts", "num_local_experts"),
    mlp_dim="moe_intermediate_size",
    renormalise="norm_topk_prob",
    every="decoder_sparse_step",
    dense_layers="mlp_only_layers",
)
_QWEN3_MOE = DecoderFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names={**_DECODER, **_GATED_MLP, **_QK_NORM, **_expert_names("mlp", "gate_proj", "up_proj", "down_proj")},
    defaults={
        **_QWEN_DEFAULTS,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    qk_norm=True,
    window=_SWITCHED_WINDOW,
    experts=_QWEN_EXPERTS,
    off=("attention_bias", "output_router_logits"),
)
_QWEN2_MOE = DecoderFamily(  # Qwen 1.5 MoE and Qwen 2 57B-A14B
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    names={
        **_DECODER,
        **_GATED_MLP,
        **_QKV_BIAS,
        **_expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
        **linears_and_norms("layers.N.mlp.shared.", _LAYER + "mlp.shared_expert.", _SHARED, {}),
        "layers.N.mlp.shared.weight.kernel": (TRANSPOSED, _LAYER + "mlp.shared_expert_gate.weight"),
    },
    defaults={
        **_QWEN3_MOE.defaults,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_window_layers": 28,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    qkv_bias="qkv_bias",
    window=_LAYERED_WINDOW,
    experts=replace(_QWEN_EXPERTS, shared_mlp_dim="shared_expert_intermediate_size"),
    off=("use_sliding_window", "output_router_logits"),
)
_GEMMA3 = DecoderFamily(  # the text model alone
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names={
        **_DECODER,
        **_GATED_MLP,
        **_QK_NORM,
        "layers.N.attention_post_norm.scale": (SAME, _LAYER + "post_attention_layernorm.weight"),
        "layers.N.mlp_norm.scale": (SAME, _LAYER + "pre_feedforward_layernorm.weight"),
        "layers.N.mlp_post_norm.scale": (SAME, _LAYER + "post_feedforward_layernorm.weight"),
    },
    defaults={
        **_COMMON_DEFAULTS,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    qk_norm=True,
    window=_TYPED_WINDOW,
    every=6,
    variant=LayerVariant(activation="gelu_tanh", norm_offset=True, post_norms=True, scaled_embedding=True),
    off=("attention_bias", "use_bidirectional_attention"),
)
_GPT_OSS = DecoderFamily(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    names={
        **_DECODER,
        **_QKV_BIAS,
        "layers.N.attention.output.bias": (SAME, _LAYER + "self_attn.o_proj.bias"),
        "layers.N.attention.sinks": (SAME, _LAYER + "self_attn.sinks"),
        "layers.N.mlp.router": (TRANSPOSED, _LAYER + "mlp.router.weight"),
        "layers.N.mlp.router_bias": (SAME, _LAYER + "mlp.router.bias"),
        "layers.N.mlp.experts.gate": (every_second(0), _LAYER + "mlp.experts.gate_up_proj"),
        "layers.N.mlp.experts.up": (every_second(1), _LAYER + "mlp.experts.gate_up_proj"),
        "layers.N.mlp.experts.down": (SAME, _LAYER + "mlp.experts.down_proj"),
        "layers.N.mlp.experts.gate_bias": (every_second(0), _LAYER + "mlp.experts.gate_up_proj_bias"),
        "layers.N.mlp.experts.up_bias": (every_second(1), _LAYER + "mlp.experts.gate_up_proj_bias"),
        "layers.N.mlp.experts.down_bias": (SAME, _LAYER + "mlp.experts.down_proj_bias"),
    },
    defaults={
        **_COMMON_DEFAULTS,
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
    qkv_bias=True,
    window=_TYPED_WINDOW,
    every=2,
    variant=LayerVariant(sinks=True, output_bias=True),
    experts=ExpertFields(num_experts=("num_local_experts", "num_experts"), mlp_dim=None, renormalise=None),
    is_packed=True,
    off=("output_router_logits",),
)
_GLM = DecoderFamily(
    model_type="glm",
    architecture="GlmForCausalLM",
    names={
        **_DECODER,
        **_QKV_BIAS,
        "layers.N.mlp.gate.kernel": (part_of_joined(0, (0, 1)), _LAYER + "mlp.gate_up_proj.weight"),
        "layers.N.mlp.up.kernel": (part_of_joined(1, (0, 1)), _LAYER + "mlp.gate_up_proj.weight"),
        "layers.N.mlp.down.kernel": (TRANSPOSED, _LAYER + "mlp.down_proj.weight"),
    },
    defaults={
        **_COMMON_DEFAULTS,
        "vocab_size": 151_552,
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    qkv_bias="attention_bias",
    variant=LayerVariant(interleaved=True),
)
_GLM4 = replace(
    _GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    names={
        **_GLM.names,
        "layers.N.attention_post_norm.scale": (SAME, _LAYER + "post_self_attn_layernorm.weight"),
        "layers.N.mlp_post_norm.scale": (SAME, _LAYER + "post_mlp_layernorm.weight"),
    },
    variant=LayerVariant(interleaved=True, post_norms=True),
)
_LATENT = {
    "query_down": "q_a_proj",
    "query_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_up": "kv_b_proj",
}
_DEEPSEEK_V3 = DecoderFamily(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    names={
        **{ours: theirs for ours, theirs in _DECODER.items() if ".key." not in ours and ".value." not in ours},
        **_GATED_MLP,
        **_expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
        **linears_and_norms(
            "layers.N.attention.",
            _LAYER + "self_attn.",
            _LATENT,
            {"query_norm": "q_a_layernorm", "kv_norm": "kv_a_layernorm"},
        ),
        **linears_and_norms(
            "layers.N.mlp.shared.",
            _LAYER + "mlp.shared_experts.",
            _SHARED,
            {},
        ),
        "layers.N.token_norm.scale": (SAME, _LAYER + "enorm.weight"),
        "layers.N.stream_norm.scale": (SAME, _LAYER + "hnorm.weight"),
        "layers.N.join.kernel": (TRANSPOSED, _LAYER + "eh_proj.weight"),
        "layers.N.output_norm.scale": (SAME, _LAYER + "shared_head.norm.weight"),
        "layers.N.mlp.router": (TRANSPOSED_FLOAT32, _LAYER + "mlp.gate.weight"),
        "layers.N.mlp.balance_bias": (SAME_FLOAT32, _LAYER + "mlp.gate.e_score_correction_bias"),
    },
    defaults={
        **_COMMON_DEFAULTS,
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    experts=ExpertFields(
        num_experts=("n_routed_experts", "num_local_experts"),
        mlp_dim="moe_intermediate_size",
        renormalise="norm_topk_prob",
        first_dense="first_k_dense_replace",
    ),
    latent=True,
    off=("attention_bias", "output_router_logits"),
)
DECODER_FAMILIES: dict[str, DecoderFamily] = {
    family.model_type: family
    for family in (
        *(_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _MIXTRAL, _QWEN2_MOE, _QWEN3_MOE),
        *(_GEMMA3, _GPT_OSS, _GLM, _GLM4, _DEEPSEEK_V3),
    )
}
"""All families by ``model_type``."""


# -------------------------------------------------------------------------------------------- fields of config.json


_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROTARY_SHARE = "partial_rotary_factor"
_DEFAULT_ROPE = "default"
_ORIGINAL_LENGTH = "original_max_position_embeddings"


def read_decoder(fields: ConfigFields, family: DecoderFamily, *, tied: bool, dtype: str) -> LanguageModelConfig:
    """Returns the record of a decoder. ``fields`` have the family's defaults; all of them must have been read after.

    ``tied`` says whether the head is the embedding's table, which depends on the tensors too; ``dtype`` is the dtype
    of the parameters.

    Raises ValueError, with the field's name, for fields that our models cannot express.
    """
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if family.variant.activation == "silu":
        fields.choice("hidden_act", {"silu": None, "swish": None})
    else:
        fields.choice("hidden_activation", {"gelu_pytorch_tanh": None})
    fields.only("attention_dropout", 0, why="models here drop nothing")
    for name in family.off:
        fields.only(name, False, why="models here have no such thing: give false, if the model does without it")
    fields.get("tie_word_embeddings")
    num_layers = fields.whole("num_hidden_layers")
    window, no_window = _read_window(fields, family, num_layers)
    turns_all = not family.variant.interleaved
    rope, rope_without = _read_ropes(fields) if family is _GEMMA3 else (_read_rope(fields, turns_all=turns_all),) * 2
    kv_heads, head_dim = fields.get("num_key_value_heads"), fields.get("head_dim")
    latent = _read_latent(fields) if family.latent else None
    if latent is not None:
        head_dim = latent.query_dim
    else:
        head_dim = hidden // heads if head_dim is None else fields.whole("head_dim")
    variant = family.variant
    if family is _GEMMA3:
        fields.get("cache_implementation")  # the cache of transformers' own generation
    if family is _GEMMA3 and (scalar := fields.number("query_pre_attn_scalar")) != head_dim:
        variant = replace(variant, query_scalar=scalar)
    if variant.interleaved:
        variant = replace(variant, rotary_dim=_read_rotary_dim(fields, head_dim))
    experts = _read_experts(fields, family, num_layers)
    if family is _GPT_OSS:
        fields.only("attention_bias", True, why="models of this family have biases in attention")
        fields.only("swiglu_alpha", 1.702, why="models here have this number in the SwiGLU of experts")
        assert experts is not None
        experts = replace(experts, biases=True, swiglu_limit=fields.number("swiglu_limit"))
    theta, scaling = rope if window is not None else rope_without
    # The record is built last: it checks how its numbers go together, which only makes sense once each has been read.
    record: dict[str, Any] = dict(  # noqa: C408 - the names are those of the record
        vocab_size=fields.whole("vocab_size"),
        hidden=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else fields.whole("num_key_value_heads"),
        head_dim=None if latent else head_dim,
        mlp_dim=fields.whole("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=fields.flag(family.qkv_bias) if isinstance(family.qkv_bias, str) else family.qkv_bias,
        qk_norm=family.qk_norm,
        sliding_window=window,
        global_layers=_global_layers(no_window, num_layers, None if rope == rope_without else rope_without),
        variant=variant,
        latent_attention=latent,
        experts=experts,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=tied,
        param_dtype=dtype,
        compute_dtype=dtype,
    )
    fields.finish()
    return LanguageModelConfig(**record)


def write_decoder(config: LanguageModelConfig, family: DecoderFamily) -> dict[str, Any]:
    """Returns the fields of ``config.json`` that describe a decoder of this family."""
    theta, scaling = config.rope(is_global=True)
    values: dict[str, Any] = {
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.size_per_head,
        "intermediate_size": config.mlp_dim,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": theta,
        "rope_scaling": None,
    }
    if scaling is not None:
        # The two fields that every version of transformers reads, not the newer single object.
        numbers = {"factor": scaling.factor, **scaling.settings}
        if "original_max_positions" in numbers:
            numbers[_ORIGINAL_LENGTH] = numbers.pop("original_max_positions")
        if numbers.get("truncate"):  # the default, which not every version of transformers knows
            del numbers["truncate"]
        values["rope_scaling"] = {"rope_type": scaling.kind, **numbers}
    if family.window != _NO_WINDOW:
        values["sliding_window"] = config.sliding_window
    if family.window in (_LAYERED_WINDOW, _SWITCHED_WINDOW):
        values |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    if family.window == _TYPED_WINDOW or config.global_layers is not None:
        windows = (config.window(is_global=config.is_global(layer)) for layer in range(config.num_layers))
        values["layer_types"] = [_FULL if window is None else _SLIDING for window in windows]
    values |= _written_variant(config, family)
    if isinstance(family.qkv_bias, str):
        values[family.qkv_bias] = config.qkv_bias
    if (latent := config.latent_attention) is not None:
        values |= _written_latent(latent, config.num_layers)
        values["num_nextn_predict_layers"] = config.num_layers_ahead
        if latent.score_mscale:
            values["rope_scaling"]["mscale_all_dim"] = latent.score_mscale
    experts, names = config.experts, family.experts
    if experts is not None and names is not None:
        written: dict[str | None, Any] = {
            names.num_experts[0]: experts.num_experts,
            "num_experts_per_tok": experts.experts_per_token,
            names.mlp_dim: config.expert_dim,
            names.shared_mlp_dim: experts.shared_mlp_dim,
            names.renormalise: experts.renormalise,
            names.every: experts.every,
            names.dense_layers: list(experts.dense_layers),
        }
        values |= {name: value for name, value in written.items() if name is not None}
        if family is _GPT_OSS:
            values |= {"attention_bias": True, "swiglu_limit": experts.swiglu_limit}
        if names.first_dense is not None:
            values |= {
                "n_shared_experts": (experts.shared_mlp_dim or 0) // config.expert_dim,
                "n_group": experts.num_groups,
                "topk_group": experts.groups_per_token,
                "routed_scaling_factor": experts.scale,
                names.first_dense: len(experts.dense_layers),
            }
    return values


def _written_variant(config: LanguageModelConfig, family: DecoderFamily) -> dict[str, Any]:
    if family is _GEMMA3:
        scalar = config.layer_variant.query_scalar
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": config.size_per_head if scalar is None else _plain(scalar),
            "rope_local_base_freq": config.rope_theta,
        }
    if family.variant.interleaved:
        share = config.rotary_dim / config.size_per_head
        if int(config.size_per_head * share) < config.rotary_dim:  # readers round down
            share = math.nextafter(share, 1.0)
        return {"hidden_act": "silu", _ROTARY_SHARE: share}
    return {"hidden_act": "silu"}


def _plain(number: float) -> float:
    """Returns a number as files have it: ``256`` for 256.0."""
    return int(number) if number == int(number) else number


def _read_rotary_dim(fields: ConfigFields, head_dim: int) -> int | None:
    """Returns how many dims of a head are turned, or None for all, as transformers computes the number."""
    outer, name = fields.number(_ROTARY_SHARE), _rope_field(fields)
    share = fields.part(name, {_ROTARY_SHARE: outer}).number(_ROTARY_SHARE)
    if fields.has(_ROTARY_SHARE) and share != outer:
        raise fields.refusal(
            _ROTARY_SHARE, outer, f"{name} says {share:g}: give the one that the model was trained with"
        )
    dim = int(head_dim * share) if 0 <= share <= 1 else 0
    if dim == 0 or dim % 2:
        raise fields.refusal(_ROTARY_SHARE, share, f"an even number of the {head_dim} dims of a head is needed")
    return dim if dim < head_dim else None


def _rope_field(fields: ConfigFields) -> str:
    """Returns the field that describes rotary embeddings: the one of transformers 5, or that before it."""
    return "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"


def _written_latent(latent: LatentAttentionConfig, num_layers: int) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "head_dim": latent.rotary_dim,  # of the rotary embedding, in this family
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.interleaved,
        "first_k_dense_replace": num_layers,  # unless some have experts
    }


def _read_latent(fields: ConfigFields) -> LatentAttentionConfig:
    heads, rank = fields.whole("num_attention_heads"), fields.get("q_lora_rank")
    fields.only("num_key_value_heads", heads, why="in latent attention every head has a key of its own")
    latent = LatentAttentionConfig(
        query_rank=None if rank is None else fields.whole("q_lora_rank"),
        kv_rank=fields.whole("kv_lora_rank"),
        plain_dim=fields.whole("qk_nope_head_dim"),
        rotary_dim=fields.whole("qk_rope_head_dim"),
        value_dim=fields.whole("v_head_dim"),
        interleaved=fields.flag("rope_interleave"),
        score_mscale=_read_score_mscale(fields),
    )
    fields.only("qk_head_dim", latent.query_dim, why="it is the sum of qk_nope_head_dim and qk_rope_head_dim")
    fields.only("head_dim", latent.rotary_dim, why="in this family it is qk_rope_head_dim")
    fields.get("num_nextn_predict_layers")  # whether they are there, only the tensors tell
    fields.get("auto_map")  # code for versions of transformers that did not know the family; it is not run
    return latent


def _read_score_mscale(fields: ConfigFields) -> float:
    rope = fields.part(_rope_field(fields))
    is_yarn = rope.get("rope_type", "type") == YARN_ROPE
    return rope.number("mscale_all_dim") if is_yarn and rope.has("mscale_all_dim") else 0.0


def _read_window(fields: ConfigFields, family: DecoderFamily, num_layers: int) -> tuple[int | None, Sequence[int]]:
    """Returns the window of the layers that have one, or None, and the numbers of the layers that have none."""
    kind, all_layers = family.window, range(num_layers)
    if kind == _NO_WINDOW:
        return None, all_layers
    is_on = kind in (_PLAIN_WINDOW, _TYPED_WINDOW) or fields.flag("use_sliding_window")
    size = fields.get("sliding_window")
    first = fields.get("max_window_layers") if kind in (_LAYERED_WINDOW, _SWITCHED_WINDOW) else 0
    types = fields.get("layer_types") if kind in (_LAYERED_WINDOW, _TYPED_WINDOW) else None
    if num_layers > MOST:
        all_layers = range(0)  # the record refuses the number, which a file may have forged
    if kind == _TYPED_WINDOW:
        names = "sliding_window_pattern", "_sliding_window_pattern"
        every = family.every if fields.get(*names) is None else fields.whole(*names)
        types = types or [_SLIDING if (layer + 1) % every else _FULL for layer in all_layers]
    if not is_on or size is None:
        if types is not None and set(types) != {_FULL}:
            remedy = "give sliding_window" if kind == _TYPED_WINDOW else "give use_sliding_window true"
            raise fields.refusal("layer_types", types, f"there is no window for them: {remedy}")
        return None, all_layers
    size = fields.whole("sliding_window")
    if kind in (_PLAIN_WINDOW, _SWITCHED_WINDOW):
        return size, []
    name, given = ("layer_types", types) if types is not None else ("max_window_layers", first)
    if types is None:
        types = [_FULL if layer < (first or 0) else _SLIDING for layer in all_layers]
    if len(types) != len(all_layers) or not set(types) <= {_FULL, _SLIDING}:
        raise fields.refusal(name, given, f"{_FULL} or {_SLIDING} is needed for each of {num_layers} layers")
    no_window = [layer for layer in all_layers if types[layer] == _FULL]
    return (size if len(no_window) < num_layers else None), no_window


_Rope = tuple[float, RopeScaling | None]
"""Base of rotary embeddings, and how their wavelengths are stretched."""


def _global_layers(numbers: Sequence[int], num_layers: int, rope: _Rope | None) -> GlobalLayers | None:
    """Returns the record of the layers without a window, where others have one; ``rope`` is theirs if it differs."""
    if not 0 < len(numbers) < num_layers:
        return None
    every = numbers[0] + 1
    theta, scaling = rope or (None, None)
    if numbers == list(range(every - 1, num_layers, every)):
        return GlobalLayers(every=every, rope_theta=theta, rope_scaling=scaling)
    return GlobalLayers(layers=tuple(numbers), rope_theta=theta, rope_scaling=scaling)


def _read_experts(fields: ConfigFields, family: DecoderFamily, num_layers: int) -> ExpertsConfig | None:
    names = family.experts
    if names is None:
        return None
    # The coefficient counts only where output_router_logits is true, which is refused.
    fields.get("router_aux_loss_coef")
    fields.only("router_jitter_noise", 0, why="routers here have no noise")
    dense = fields.get(names.dense_layers) if names.dense_layers else []
    if not isinstance(dense or [], list) or not all(isinstance(layer, int) for layer in dense or []):
        raise fields.refusal(str(names.dense_layers), dense, "a list of layers is needed")
    routing: dict[str, Any] = {}
    if names.shared_mlp_dim is not None:
        routing = {"shared_mlp_dim": fields.whole(names.shared_mlp_dim), "shared_gate": True}
    if names.first_dense is not None:
        dense = list(range(min(num_layers, fields.whole(names.first_dense) if fields.get(names.first_dense) else 0)))
        routing = _read_routing(fields)
        if len(dense) == num_layers:
            for name in (*names.num_experts, "num_experts_per_tok", names.mlp_dim, names.renormalise):
                fields.get(str(name))
            return None
    return ExpertsConfig(
        num_experts=fields.whole(*names.num_experts),
        experts_per_token=fields.whole("num_experts_per_tok"),
        mlp_dim=fields.whole(names.mlp_dim) if names.mlp_dim else None,
        renormalise=fields.flag(names.renormalise) if names.renormalise else True,
        every=fields.whole(names.every) if names.every else 1,
        dense_layers=tuple(dense or ()),
        **routing,
    )


def _read_ropes(fields: ConfigFields) -> tuple[_Rope, _Rope]:
    """Returns the rotary embeddings of Gemma's layers with a window, and of those without.

    Reads ``rope_parameters`` with an object for each, as since transformers 5, or the fields before it.
    """
    both = fields.get("rope_parameters")
    if isinstance(both, dict) and {*both} & {_SLIDING, _FULL}:
        parts, length, ropes = fields.part("rope_parameters"), fields.get("max_position_embeddings"), list[_Rope]()
        for kind, name in ((_SLIDING, "rope_local_base_freq"), (_FULL, "rope_theta")):
            outer = fields.number(name)
            ropes.append(_truncated(_rope_of(parts.part(kind, {"rope_theta": outer, _ORIGINAL_LENGTH: length}))))
            _check_theta(fields, name, outer, f"{kind} of rope_parameters", ropes[-1][0])
        parts.finish()
        fields.only("rope_scaling", why="rope_parameters says how each kind of layer is scaled")
        return ropes[0], ropes[1]
    return (fields.number("rope_local_base_freq"), None), _truncated(_read_rope(fields))


def _truncated(rope: _Rope) -> _Rope:
    """Returns the rotary embedding of a kind of layers as transformers computes it, for which ``truncate`` has no
    effect: it is read beside the objects of the kinds, where no file has it."""
    theta, scaling = rope
    return theta, replace(scaling, truncate=True) if scaling is not None and scaling.kind == YARN_ROPE else scaling


def _check_theta(fields: ConfigFields, field: str, outer: float, name: str, theta: float) -> None:
    """Raises ValueError for two different bases: versions of transformers take one or the other."""
    if fields.has(field) and theta != outer:
        raise fields.refusal(field, outer, f"{name} says {theta:g}: give the one that the model was trained with")


def _read_routing(fields: ConfigFields) -> dict[str, Any]:
    """Returns how a family chooses experts that does it as DeepSeek-V3: by sigmoids, in groups, with a bias."""
    fields.only("scoring_func", SIGMOID, why=f"in this family scores are {SIGMOID}s")
    fields.only("topk_method", "noaux_tc", why="in this family experts are chosen with a bias, in groups")
    fields.only("moe_layer_freq", 1, why="every layer behind the first ones has experts")
    for name in ("ep_size", "aux_loss_alpha", "seq_aux"):  # of training, or of how devices share experts
        fields.get(name)
    return {
        "scores": SIGMOID,
        "scale": fields.number("routed_scaling_factor"),
        "num_groups": fields.whole("n_group"),
        "groups_per_token": fields.whole("topk_group"),
        "bias_rate": 0.0,  # an imported bias stays, unless a run says otherwise
        "shared_mlp_dim": fields.whole("n_shared_experts") * fields.whole("moe_intermediate_size"),
    }


def _read_rope(fields: ConfigFields, *, turns_all: bool = True) -> _Rope:
    """Returns the base of rotary embeddings and how their frequencies are scaled.

    Reads ``rope_parameters``, the one object since transformers 5, or ``rope_theta`` and ``rope_scaling``. Raises
    ValueError for all kinds but ``default``, ``llama3``, ``linear`` and ``yarn``.
    """
    outer, length = fields.number("rope_theta"), fields.get("max_position_embeddings")
    _check_share(fields, turns_all=turns_all)
    name = _rope_field(fields)
    both = fields.has("rope_parameters") and fields.has("rope_scaling")
    if both and fields.get("rope_scaling") != fields.get("rope_parameters"):
        raise fields.refusal("rope_scaling", fields.get("rope_scaling"), "rope_parameters says something else")
    for each in ("rope_parameters", "rope_scaling"):
        fields.get(each)
    rope = fields.part(name, {"rope_theta": outer, _ORIGINAL_LENGTH: length})
    _check_theta(fields, "rope_theta", outer, name, rope.number("rope_theta"))
    return _rope_of(rope, turns_all=turns_all)


def _check_share(fields: ConfigFields, *, turns_all: bool) -> None:
    if fields.get(_ROTARY_SHARE) not in (None, 1) and turns_all:
        raise fields.refusal(_ROTARY_SHARE, fields.get(_ROTARY_SHARE), "models of this family turn whole heads")


def _rope_of(rope: ConfigFields, *, turns_all: bool = True) -> _Rope:
    """Returns the rotary embedding that one object describes."""
    kind, theta = rope.get("rope_type", "type") or _DEFAULT_ROPE, rope.number("rope_theta")
    _check_share(rope, turns_all=turns_all)
    if kind not in (_DEFAULT_ROPE, *ROPE_KINDS):
        raise rope.refusal("rope_type", kind, f"models here know {', '.join((_DEFAULT_ROPE, *ROPE_KINDS))}")
    scaling = None if kind == _DEFAULT_ROPE else RopeScaling(kind=kind, **_read_scaling(rope, kind))
    rope.finish()
    return theta, scaling


def _read_scaling(rope: ConfigFields, kind: str) -> dict[str, Any]:
    """Returns the numbers of :class:`RopeScaling` for this kind."""
    numbers: dict[str, Any] = {"factor": rope.number("factor")}
    if kind == LINEAR_ROPE:
        rope.get(_ORIGINAL_LENGTH)  # linear scaling does not depend on it
        return numbers
    numbers["original_max_positions"] = int(rope.number(_ORIGINAL_LENGTH))
    if kind == LLAMA3_ROPE:
        return numbers | {name: rope.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    given = {name: rope.number(name) for name in ("beta_fast", "beta_slow") if rope.get(name) is not None}
    factors = {name: rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
    attention_factor = None  # the record's own rule
    if factors["attention_factor"] is not None:
        attention_factor = rope.number("attention_factor")
    elif factors["mscale"] and factors["mscale_all_dim"]:  # DeepSeek's two fields
        growth = 0.1 * math.log(max(numbers["factor"], 1.0))
        attention_factor = (growth * rope.number("mscale") + 1) / (growth * rope.number("mscale_all_dim") + 1)
    truncate = True if rope.get("truncate") is None else rope.flag("truncate")
    return numbers | given | {"attention_factor": attention_factor, "truncate": truncate}
