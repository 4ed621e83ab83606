"""Qwen 3 with experts in some layers or all."""

from rrfp_jax.exchange.families.decoder_names import DECODER, GATED_MLP, QK_NORM
from rrfp_jax.exchange.families.text_family import SIZES, SWITCHED_WINDOW, ExpertFields, TextFamily
from rrfp_jax.exchange.transforms import PER_EXPERT, TURNED

_MLP = "model.layers.N.mlp."
QWEN3_MOE = TextFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names={
        **DECODER,
        **GATED_MLP,
        **QK_NORM,
        "layers.N.mlp.router": (TURNED, _MLP + "gate.weight"),
        "layers.N.mlp.experts.gate": (PER_EXPERT, _MLP + "experts.E.gate_proj.weight"),
        "layers.N.mlp.experts.up": (PER_EXPERT, _MLP + "experts.E.up_proj.weight"),
        "layers.N.mlp.experts.down": (PER_EXPERT, _MLP + "experts.E.down_proj.weight"),
    },
    defaults={
        **SIZES,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "vocab_size": 151_936,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
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
