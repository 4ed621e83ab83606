"""The layers that have a name: embedding, decoder layer and head."""

import jax
import jax.numpy as jnp
from flax import nnx

from rrfp_jax.models.attention import Attention
from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.layers import GatedMLP, rms_norm


class Embedding(nnx.Module):
    """The table ``[vocab_size, hidden]`` of token vectors; a tied head reads the same table."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(config.init_std)
        shape = (config.vocab_size, config.hidden)
        self.table = nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        self.compute_dtype = jnp.dtype(config.compute_dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """``tokens`` int32 ``[batch, length]`` to vectors ``[batch, length, hidden]`` in the compute dtype."""
        return jnp.take(self.table[...], tokens, axis=0).astype(self.compute_dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """``x`` ``[batch, length, hidden]`` to float32 logits ``[batch, length, vocab_size]``."""
        return _float32_product("blh,vh->blv", x, self.table[...].astype(self.compute_dtype))


class DecoderLayer(nnx.Module):
    """Attention, then the gated MLP, each on a normalised input and added to the residual stream."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = rms_norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = rms_norm(config, rngs)
        self.mlp = GatedMLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[batch, length, hidden]`` to the same shape and dtype."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nnx.Module):
    """The output matrix ``[hidden, vocab_size]`` of a model whose embeddings are not tied."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(config.init_std)
        shape = (config.hidden, config.vocab_size)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        self.compute_dtype = jnp.dtype(config.compute_dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """``x`` ``[batch, length, hidden]`` to float32 logits ``[batch, length, vocab_size]``."""
        return _float32_product("blh,hv->blv", x, self.kernel[...].astype(self.compute_dtype))


def _float32_product(subscripts: str, x: jax.Array, matrix: jax.Array) -> jax.Array:
    # Logits rounded to bfloat16 would cost the loss about two decimal digits.
    return jnp.einsum(subscripts, x, matrix, preferred_element_type=jnp.float32)
