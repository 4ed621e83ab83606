"""Qwen 3: queries and keys normed by head, heads 128 wide."""

from rrfp_jax.exchange.families.decoder_names import DECODER, GATED_MLP, QK_NORM
from rrfp_jax.exchange.families.text_family import LAYERED_WINDOW, SIZES, TextFamily

QWEN3 = TextFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names={**DECODER, **GATED_MLP, **QK_NORM},
    defaults={
        **SIZES,
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    qk_norm=True,
    window=LAYERED_WINDOW,
    off=("attention_bias",),
)
