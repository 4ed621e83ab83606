"""The parts that decoder, encoders and projectors share, with the dtypes of a configuration filled in.

Parameters are stored in ``param_dtype`` and cast to ``compute_dtype`` where they are used.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx


class Initial(Protocol):
    """What a part reads of a configuration."""

    @property
    def init_std(self) -> float: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def param_dtype(self) -> str: ...
    @property
    def compute_dtype(self) -> str: ...


class _LeanRMSNorm(nnx.RMSNorm):
    """Keeps its input alone for the backward, where differentiation wants float32 copies of it."""

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return jax.checkpoint(super().__call__, prevent_cse=False)(x)


class _LeanLayerNorm(nnx.LayerNorm):
    """Keeps its input alone, as :class:`_LeanRMSNorm` does."""

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return jax.checkpoint(super().__call__, prevent_cse=False)(x)


def rms_norm(config: Initial, dim: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """RMSNorm over the last ``dim`` numbers (Zhang and Sennrich 2019); its statistics are float32."""
    return _LeanRMSNorm(
        dim,
        epsilon=config.norm_eps,
        dtype=jnp.dtype(config.compute_dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def layer_norm(config: Initial, dim: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm over the last ``dim`` numbers (Ba et al. 2016), with scale and bias; its statistics are float32."""
    return _LeanLayerNorm(
        dim,
        epsilon=config.norm_eps,
        dtype=jnp.dtype(config.compute_dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        use_fast_variance=False,
        rngs=rngs,
    )


def projection(
    config: Initial,
    in_dim: int,
    out_dim: int,
    rngs: nnx.Rngs,
    *,
    to_residual: bool = False,
    use_bias: bool = False,
) -> nnx.Linear:
    """A matrix product, ``[..., in_dim] -> [..., out_dim]``.

    ``to_residual`` scales the initial values down so that the residual stream's variance does not grow with depth.
    """
    return nnx.Linear(
        in_dim,
        out_dim,
        use_bias=use_bias,
        dtype=jnp.dtype(config.compute_dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=_initial(config, to_residual=to_residual),
        rngs=rngs,
    )


def learned(config: Initial, shape: tuple[int, ...], rngs: nnx.Rngs, *, to_residual: bool = False) -> nnx.Param:
    """A table of learned vectors, such as positions, or matrices side by side; ``to_residual`` as above."""
    init = _initial(config, to_residual=to_residual)
    return nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))


def _initial(config: Initial, *, to_residual: bool) -> Callable[..., jax.Array]:
    return nnx.initializers.normal(config.init_std / math.sqrt(2 * config.num_layers) ** to_residual)


def activate(name: str, x: jax.Array) -> jax.Array:
    """One of :data:`rrfp_jax.models.encoder_config.ACTIVATIONS`."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "gelu": partial(nnx.gelu, approximate=False),
        "gelu_tanh": partial(nnx.gelu, approximate=True),
        "quick_gelu": lambda x: x * nnx.sigmoid(1.702 * x),
    }
    return functions[name](x)
