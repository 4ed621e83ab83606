"""The transformer of encoders: attention in all directions, then an MLP, on normalised inputs.

The names of its parameters are those of CLIP, SigLIP and InternViT, with ``attention`` and ``mlp`` as in the decoder:
query, key, value and output apart, ``fc1`` and ``fc2``.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from rrfp_jax.models.attention import full_attention
from rrfp_jax.models.encoder_config import EncoderConfig
from rrfp_jax.models.parts import activate, layer_norm, projection, rms_norm


def encoder_norm(config: EncoderConfig, rngs: nnx.Rngs) -> nnx.Module:
    """A norm over the residual stream, of the encoder's kind."""
    make = layer_norm if config.norm == "layer_norm" else rms_norm
    return make(config, config.hidden, rngs)


class EncoderAttention(nnx.Module):
    """Every position looks at every other of its segment, ``[rows, length, hidden]`` to the same."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        self.num_heads = config.num_heads
        self.query, self.key, self.value = (
            projection(config, config.hidden, config.hidden, rngs, use_bias=config.qkv_bias) for _ in range(3)
        )
        self.output = projection(config, config.hidden, config.hidden, rngs, to_residual=True, use_bias=True)
        self.query_norm = rms_norm(config, config.hidden, rngs) if config.qk_norm else None
        self.key_norm = rms_norm(config, config.hidden, rngs) if config.qk_norm else None

    def __call__(self, x: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """``[rows, length, hidden]`` to the same shape and dtype; ``segments`` are those of packed rows."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        heads = (part.reshape(*x.shape[:-1], self.num_heads, -1) for part in (query, key, value))
        return self.output(checkpoint_name(full_attention(*heads, segments=segments).reshape(x.shape), "attention"))


class EncoderMLP(nnx.Module):
    """``fc2(activation(fc1(x)))``, ``[..., hidden] -> [..., hidden]``."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        self.activation = config.activation
        self.fc1 = projection(config, config.hidden, config.mlp_dim, rngs, use_bias=True)
        self.fc2 = projection(config, config.mlp_dim, config.hidden, rngs, to_residual=True, use_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., hidden]`` to the same shape, in the compute dtype."""
        return self.fc2(activate(self.activation, self.fc1(x)))


class EncoderLayer(nnx.Module):
    """Attention, then the MLP, each on a normalised input, scaled by channel where asked, and added to the stream."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = encoder_norm(config, rngs)
        self.attention = EncoderAttention(config, rngs)
        self.mlp_norm = encoder_norm(config, rngs)
        self.mlp = EncoderMLP(config, rngs)
        self.attention_scale, self.mlp_scale = (_layer_scale(config) for _ in range(2))

    def __call__(self, x: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """``[rows, length, hidden]`` to the same shape and dtype."""
        x = x + _scaled(self.attention(self.attention_norm(x), segments), self.attention_scale)
        return x + _scaled(self.mlp(self.mlp_norm(x)), self.mlp_scale)


def _layer_scale(config: EncoderConfig) -> nnx.Param | None:
    if config.layer_scale is None:
        return None
    return nnx.Param(jnp.full(config.hidden, config.layer_scale, jnp.dtype(config.param_dtype)))


def _scaled(x: jax.Array, scale: nnx.Param | None) -> jax.Array:
    return x if scale is None else x * scale[...].astype(x.dtype)
