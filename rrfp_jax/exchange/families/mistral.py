"""Mistral 7B and its like: a window, unless it is null."""

from rrfp_jax.exchange.families.decoder_names import DECODER, GATED_MLP
from rrfp_jax.exchange.families.text_family import PLAIN_WINDOW, SIZES, TextFamily

MISTRAL = TextFamily(
    model_type="mistral",
    architecture="MistralForCausalLM",
    names={**DECODER, **GATED_MLP},
    defaults={
        **SIZES,
        "vocab_size": 32_000,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    window=PLAIN_WINDOW,
)
