"""The names that all text families have in common."""

from rrfp_jax.exchange.names import Table
from rrfp_jax.exchange.transforms import SAME, TURNED

_LAYER = "model.layers.N."
DECODER: Table = {
    "embedding.table": (SAME, "model.embed_tokens.weight"),
    "layers.N.attention_norm.scale": (SAME, _LAYER + "input_layernorm.weight"),
    "layers.N.attention.query.kernel": (TURNED, _LAYER + "self_attn.q_proj.weight"),
    "layers.N.attention.key.kernel": (TURNED, _LAYER + "self_attn.k_proj.weight"),
    "layers.N.attention.value.kernel": (TURNED, _LAYER + "self_attn.v_proj.weight"),
    "layers.N.attention.output.kernel": (TURNED, _LAYER + "self_attn.o_proj.weight"),
    "layers.N.mlp_norm.scale": (SAME, _LAYER + "post_attention_layernorm.weight"),
    "final_norm.scale": (SAME, "model.norm.weight"),
    "head.kernel": (TURNED, "lm_head.weight"),
}
"""Of every decoder."""
GATED_MLP: Table = {
    "layers.N.mlp.gate.kernel": (TURNED, _LAYER + "mlp.gate_proj.weight"),
    "layers.N.mlp.up.kernel": (TURNED, _LAYER + "mlp.up_proj.weight"),
    "layers.N.mlp.down.kernel": (TURNED, _LAYER + "mlp.down_proj.weight"),
}
"""Of layers without experts."""
QKV_BIAS: Table = {
    "layers.N.attention.query.bias": (SAME, _LAYER + "self_attn.q_proj.bias"),
    "layers.N.attention.key.bias": (SAME, _LAYER + "self_attn.k_proj.bias"),
    "layers.N.attention.value.bias": (SAME, _LAYER + "self_attn.v_proj.bias"),
}
"""With biases."""
QK_NORM: Table = {
    "layers.N.attention.query_norm.scale": (SAME, _LAYER + "self_attn.q_norm.weight"),
    "layers.N.attention.key_norm.scale": (SAME, _LAYER + "self_attn.k_norm.weight"),
}
"""With queries and keys normed."""
