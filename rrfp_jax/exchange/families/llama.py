"""Llama 2 and 3, and whatever is published as one of them."""

from rrfp_jax.exchange.families.decoder_names import DECODER, GATED_MLP
from rrfp_jax.exchange.families.text_family import SIZES, TextFamily

LLAMA = TextFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names={**DECODER, **GATED_MLP},
    defaults={**SIZES, "vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    off=("attention_bias", "mlp_bias"),
)
