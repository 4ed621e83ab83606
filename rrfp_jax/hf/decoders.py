"""Families of decoders, as data. How to add a family of Hugging Face models:

1. Write a :class:`DecoderFamily` below and add it to ``DECODER_FAMILIES``. ``names`` maps our arrays to their tensors
   (``_tensor_names.py`` explains the table); ``defaults`` are the values that the family's configuration class in
   transformers gives to fields that are missing; ``off`` names switches that our models cannot express.
2. Where the family has a field that no other family has, read it in ``_decoder_fields.py`` into
   :class:`LanguageModelConfig`, and write it there for the way back. Do not add a field to the silent ones of
   ``_config_fields.py`` unless it cannot change the logits: a field that nobody reads is refused, and that is the
   guarantee that an import computes the same numbers.
3. Where a tensor lies in another way than in the families here, add a transform to ``_tensor_names.py``.
4. Models that began here are exported as the family that ``_family_of`` in ``_model_config.py`` picks: extend it if
   the new family has something that none had.
5. A family with a vision tower goes to ``_vision_language.py``, its tower to ``_vision_towers.py``.
6. Add the family to ``TEXT`` in ``tests/hf/hub_models.py``, write its golden model with
   ``python -m tests.hf.make_golden`` (needs torch and transformers), and name it in ``docs/models.md``.
   The tests then compare logits and gradients with transformers, and the bits of a round trip.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rrfp_jax.hf._tensor_names import PER_EXPERT, SAME, TRANSPOSED, NameTable

NO_WINDOW, PLAIN_WINDOW, LAYERED_WINDOW, SWITCHED_WINDOW = "none", "plain", "layered", "switched"
"""How a family limits how far tokens look back: not at all; by ``sliding_window`` alone; by ``use_sliding_window`` for
the layers from ``max_window_layers`` on, or for those that ``layer_types`` names; by ``use_sliding_window`` for all
layers."""


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


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """One family of decoders."""

    model_type: str
    architecture: str
    """The only entry of ``architectures``."""
    names: NameTable
    defaults: Mapping[str, Any]
    """Values of fields that are missing, by name."""
    qkv_bias: bool = False
    qk_norm: bool = False
    window: str = NO_WINDOW
    experts: ExpertFields | None = None
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
    window=PLAIN_WINDOW,
)
_QWEN2 = DecoderFamily(  # Qwen 2 and 2.5
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names={**_DECODER, **_GATED_MLP, **_QKV_BIAS},
    defaults={**_QWEN_DEFAULTS, "max_window_layers": 28},
    qkv_bias=True,
    window=LAYERED_WINDOW,
)
_QWEN3 = DecoderFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names={**_DECODER, **_GATED_MLP, **_QK_NORM},
    defaults={**_QWEN_DEFAULTS, "head_dim": 128, "max_window_layers": 28},
    qk_norm=True,
    window=LAYERED_WINDOW,
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
    window=PLAIN_WINDOW,
    experts=ExpertFields(num_experts=("num_local_experts", "num_experts"), mlp_dim=None, renormalise=None),
    off=("output_router_logits",),
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
    window=SWITCHED_WINDOW,
    experts=ExpertFields(
        num_experts=("num_experts", "num_local_experts"),
        mlp_dim="moe_intermediate_size",
        renormalise="norm_topk_prob",
        every="decoder_sparse_step",
        dense_layers="mlp_only_layers",
    ),
    off=("attention_bias", "output_router_logits"),
)
DECODER_FAMILIES: dict[str, DecoderFamily] = {
    family.model_type: family for family in (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _MIXTRAL, _QWEN3_MOE)
}
"""All families by ``model_type``."""
