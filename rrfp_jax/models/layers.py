"""The building blocks that embedding, decoder layers and head share: norm, projection and gated MLP.

Each is a Flax NNX class with the dtypes of the configuration filled in: parameters are stored in ``param_dtype`` and
cast to ``compute_dtype`` where they are used.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from rrfp_jax.models.config import LanguageModelConfig


def rms_norm(config: LanguageModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """RMSNorm over the residual stream (Zhang and Sennrich 2019); its statistics are float32."""
    return nnx.RMSNorm(
        config.hidden,
        epsilon=config.norm_eps,
        dtype=jnp.dtype(config.compute_dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def projection(
    config: LanguageModelConfig, in_dim: int, out_dim: int, rngs: nnx.Rngs, *, to_residual: bool = False
) -> nnx.Linear:
    """A matrix product without bias, ``[..., in_dim] -> [..., out_dim]``.

    ``to_residual`` scales the initial values down so that the residual stream's variance does not grow with depth.
    """
    std = config.init_std / math.sqrt(2 * config.num_layers) if to_residual else config.init_std
    return nnx.Linear(
        in_dim,
        out_dim,
        use_bias=False,
        dtype=jnp.dtype(config.compute_dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=nnx.initializers.normal(std),
        rngs=rngs,
    )


class GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020): ``down(silu(gate(x)) * up(x))``, ``[..., hidden] -> [..., hidden]``."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs) -> None:
        self.gate = projection(config, config.hidden, config.mlp_dim, rngs)
        self.up = projection(config, config.hidden, config.mlp_dim, rngs)
        self.down = projection(config, config.mlp_dim, config.hidden, rngs, to_residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., hidden]`` to the same shape, in the compute dtype."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))
