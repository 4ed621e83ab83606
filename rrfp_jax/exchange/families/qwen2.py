"""Qwen 2 and 2.5: queries, keys and values with biases."""

from rrfp_jax.exchange.families.decoder_names import DECODER, GATED_MLP, QKV_BIAS
from rrfp_jax.exchange.families.text_family import LAYERED_WINDOW, SIZES, TextFamily

QWEN2 = TextFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names={**DECODER, **GATED_MLP, **QKV_BIAS},
    defaults={
        **SIZES,
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    qkv_bias=True,
    window=LAYERED_WINDOW,
)
