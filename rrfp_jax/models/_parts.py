"""The parts that decoder, encoders and projectors share, with the dtypes of a configuration filled in.

Parameters are stored in ``param_dtype`` and cast to ``compute_dtype`` where they are used.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from rrfp_jax.hardware import TPU
from rrfp_jax.models.config import AdaptersConfig, LanguageModelConfig
from rrfp_jax.models.float8 import joint_products
from rrfp_jax.models.vision_config import EncoderConfig, ProjectorConfig
from rrfp_jax.programs.target import current_target


@dataclass(frozen=True, kw_only=True)
class ProjectorShape:
    """A projector between an encoder and a decoder of known widths."""

    projector: ProjectorConfig
    in_dim: int
    """Width of the encoder's features."""
    out_dim: int
    """Width of the decoder."""
    norm_eps: float
    """Number that the norm before ``linear_1`` adds to the variance."""
    init_std: float
    """Standard deviation of the initial matrices: the decoder's, as the following three are."""
    num_layers: int
    param_dtype: str
    compute_dtype: str


_PartConfig = LanguageModelConfig | EncoderConfig | ProjectorShape
"""Configurations of which parts are made."""


class _LeanRMSNorm(nnx.RMSNorm):
    """Keeps only its input for the backward, where differentiation would keep float32 copies of it."""

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return jax.checkpoint(super().__call__, prevent_cse=False)(x)


class _OffsetRMSNorm(nnx.RMSNorm):
    """Multiplies by 1 plus its scale, in float32, and keeps only its input for the backward."""

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        assert self.scale is not None

        def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
            wide = x.astype(jnp.float32)
            root = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
            return (wide * root * (1 + scale.astype(jnp.float32))).astype(self.dtype)

        return jax.checkpoint(norm, prevent_cse=False)(x, self.scale[...])


class _LeanLayerNorm(nnx.LayerNorm):
    """Keeps only its input for the backward, as :class:`_LeanRMSNorm` does."""

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return jax.checkpoint(super().__call__, prevent_cse=False)(x)


def rms_norm(config: _PartConfig, dim: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Returns an RMSNorm over the last ``dim`` numbers (Zhang and Sennrich 2019); its statistics are float32."""
    has_offset = isinstance(config, LanguageModelConfig) and config.layer_variant.norm_offset
    return (_OffsetRMSNorm if has_offset else _LeanRMSNorm)(
        dim,
        scale_init=nnx.initializers.zeros if has_offset else nnx.initializers.ones,
        epsilon=config.norm_eps,
        dtype=jnp.dtype(config.compute_dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def layer_norm(config: _PartConfig, dim: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Returns a LayerNorm over the last ``dim`` numbers (Ba et al. 2016), scale and bias; its statistics are
    float32."""
    return _LeanLayerNorm(
        dim,
        epsilon=config.norm_eps,
        dtype=jnp.dtype(config.compute_dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        use_fast_variance=False,  # E[x^2] - E[x]^2 cancels where the mean is large
        rngs=rngs,
    )


class Projection(nnx.Linear):
    """A matrix product, maybe in float8, beside which an adapter may stand (:mod:`rrfp_jax.models.adapters`)."""

    float8 = False
    adapters: AdaptersConfig | None = None
    """The settings of its adapter. None: it has none."""
    mask_key: jax.Array | None = None
    """The key of the adapter's dropout. None: nothing is dropped."""

    def adapt(self, adapters: AdaptersConfig) -> None:
        """Gives the product an adapter, whose factors are float32 whatever the dtype of the matrix."""
        self.adapters = adapters
        self.lora_a = nnx.Param(jnp.zeros((self.in_features, adapters.rank), jnp.float32))
        self.lora_b = nnx.Param(jnp.zeros((adapters.rank, self.out_features), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        """Maps ``[..., in_dim]`` to ``[..., out_dim]``."""
        return joined(x, self)[0] if self.float8 else self.with_adapter(super().__call__(x), x)

    def with_adapter(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Returns ``y``, the product of ``x`` with the matrix, in any shape, with that of the adapter added."""
        if self.adapters is None:
            return y
        if self.mask_key is not None:
            share = 1 - self.adapters.dropout
            x = jnp.where(jax.random.bernoulli(self.mask_key, share, x.shape), x / share, 0)
        x, down, up = self.promote_dtype((x, self.lora_a[...], self.lora_b[...]), dtype=self.dtype)
        return y + (x @ down * self.adapters.scale @ up).reshape(y.shape)


def projection(
    config: _PartConfig,
    in_dim: int,
    out_dim: int,
    rngs: nnx.Rngs,
    *,
    to_residual: bool = False,
    use_bias: bool = False,
    float8: bool = False,
) -> Projection:
    """Returns a matrix product, ``[..., in_dim] -> [..., out_dim]``.

    ``to_residual`` scales the initial values down so that the residual stream's variance does not grow with depth.
    """
    layer = Projection(
        in_dim,
        out_dim,
        use_bias=use_bias,
        dtype=jnp.dtype(config.compute_dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=_initializer(config, to_residual=to_residual),
        rngs=rngs,
    )
    layer.float8 = float8
    return layer


def joined(x: jax.Array, *layers: Projection) -> list[jax.Array]:
    """Returns the results of layers that read the same input; those in float8 are computed as one."""
    in_float8 = [layer for layer in layers if layer.float8]
    made = iter(joint_products(x, [layer.kernel[...] for layer in in_float8]) if in_float8 else ())
    return [layer.with_adapter(_biased(next(made), layer), x) if layer.float8 else layer(x) for layer in layers]


def _biased(x: jax.Array, layer: nnx.Linear) -> jax.Array:
    return x if layer.bias is None else x + layer.bias[...].astype(x.dtype)


def by_heads(x: jax.Array, head_dim: int, *layers: Projection) -> list[jax.Array]:
    """Returns the layers of ``x`` by head, ``[..., in_dim] -> [..., heads, head_dim]``.

    On TPUs the product itself makes the heads, so XLA writes them in the order in which splash attention reads them.
    After a reshape it copies them in float32: that is a quarter of all traffic of an attention layer. On GPUs a reshape
    costs nothing, and products by head would move the values once more.
    """
    if current_target().platform != TPU or any(layer.float8 for layer in layers):
        return [each.reshape(*x.shape[:-1], -1, head_dim) for each in joined(x, *layers)]
    return [_by_head(layer, x, head_dim) for layer in layers]


def _by_head(layer: Projection, x: jax.Array, head_dim: int) -> jax.Array:
    bias = None if layer.bias is None else layer.bias[...].reshape(-1, head_dim)
    heads = _product(layer, x, layer.kernel[...].reshape(x.shape[-1], -1, head_dim), bias, num_dims=1)
    return layer.with_adapter(heads, x)


def from_heads(layer: Projection, heads: jax.Array) -> jax.Array:
    """Returns ``layer`` of all heads joined, ``[..., heads, head_dim] -> [..., out_dim]``, as :func:`by_heads` does."""
    flat = heads.reshape(*heads.shape[:-2], -1)
    if current_target().platform != TPU or layer.float8:
        return layer(flat)
    bias = None if layer.bias is None else layer.bias[...]
    out = _product(layer, heads, layer.kernel[...].reshape(*heads.shape[-2:], -1), bias, num_dims=2)
    return layer.with_adapter(out, flat)


def _product(layer: Projection, x: jax.Array, kernel: jax.Array, bias: jax.Array | None, num_dims: int) -> jax.Array:
    """Returns the product over the last ``num_dims`` dims of ``x`` and the first of ``kernel``, in a layer's dtype."""
    x, kernel, bias = layer.promote_dtype((x, kernel, bias), dtype=layer.dtype)
    out = jnp.tensordot(x, kernel, num_dims)
    return out if bias is None else out + bias


def learned(config: _PartConfig, shape: tuple[int, ...], rngs: nnx.Rngs, *, to_residual: bool = False) -> nnx.Param:
    """Returns a table of learned vectors, such as positions, or a stack of matrices; ``to_residual`` as above."""
    init = _initializer(config, to_residual=to_residual)
    return nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))


def _initializer(config: _PartConfig, *, to_residual: bool) -> Callable[..., jax.Array]:
    # two branches of each layer add to the residual stream
    scale = math.sqrt(2 * config.num_layers) if to_residual else 1.0
    return nnx.initializers.normal(config.init_std / scale)


def activate(name: str, x: jax.Array) -> jax.Array:
    """Applies one of :data:`rrfp_jax.models.vision_config.ACTIVATIONS`, or of a decoder's."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "silu": nnx.silu,
        "gelu": partial(nnx.gelu, approximate=False),
        "gelu_tanh": partial(nnx.gelu, approximate=True),
        "quick_gelu": lambda x: x * nnx.sigmoid(1.702 * x),
    }
    return functions[name](x)
