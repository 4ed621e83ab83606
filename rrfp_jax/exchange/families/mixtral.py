"""Mixtral: experts in every layer, called w1 (gate), w3 (up) and w2 (down)."""

from rrfp_jax.exchange.families.decoder_names import DECODER
from rrfp_jax.exchange.families.text_family import PLAIN_WINDOW, SIZES, ExpertFields, TextFamily
from rrfp_jax.exchange.transforms import PER_EXPERT, TURNED

_BLOCK = "model.layers.N.block_sparse_moe."
MIXTRAL = TextFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names={
        **DECODER,
        "layers.N.mlp.router": (TURNED, _BLOCK + "gate.weight"),
        "layers.N.mlp.experts.gate": (PER_EXPERT, _BLOCK + "experts.E.w1.weight"),
        "layers.N.mlp.experts.up": (PER_EXPERT, _BLOCK + "experts.E.w3.weight"),
        "layers.N.mlp.experts.down": (PER_EXPERT, _BLOCK + "experts.E.w2.weight"),
    },
    defaults={
        **SIZES,
        "vocab_size": 32_000,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131_072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    window=PLAIN_WINDOW,
    experts=ExpertFields(num_experts=("num_local_experts", "num_experts"), mlp_dim=None, renormalise=None),
    off=("output_router_logits",),
)
