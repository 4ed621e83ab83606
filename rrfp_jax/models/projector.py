"""From an encoder's features to vectors among the decoder's tokens."""

import math
from dataclasses import dataclass

import jax
from flax import nnx

from rrfp_jax.models.config import LanguageModelConfig
from rrfp_jax.models.encoder_config import ProjectorConfig
from rrfp_jax.models.parts import activate, layer_norm, projection


@dataclass(frozen=True, kw_only=True)
class ProjectorShape:
    """A projector between an encoder and a decoder of known widths; its dtypes are the decoder's."""

    projector: ProjectorConfig
    in_dim: int
    decoder: LanguageModelConfig

    @property
    def init_std(self) -> float:
        """As in the decoder."""
        return self.decoder.init_std

    @property
    def num_layers(self) -> int:
        """Those of the decoder."""
        return self.decoder.num_layers

    @property
    def norm_eps(self) -> float:
        """Of the norm before ``linear_1``."""
        return self.projector.norm_eps

    @property
    def param_dtype(self) -> str:
        """As in the decoder."""
        return self.decoder.param_dtype

    @property
    def compute_dtype(self) -> str:
        """As in the decoder."""
        return self.decoder.compute_dtype


class Projector(nnx.Module):
    """Merges patches, normalises them where asked, and maps them to the decoder's width by two products."""

    def __init__(self, config: ProjectorShape, rngs: nnx.Rngs) -> None:
        projector, out_dim = config.projector, config.decoder.hidden
        in_dim = config.in_dim * projector.patches_per_feature
        inner = out_dim if projector.mlp_dim is None else projector.mlp_dim
        self.block, self.row_order = projector.patches_per_feature, projector.row_order
        self.activation = projector.activation
        self.norm = layer_norm(config, in_dim, rngs) if projector.norm else None
        self.linear_1 = projection(config, in_dim, inner, rngs, use_bias=projector.bias)
        self.linear_2 = projection(config, inner, out_dim, rngs, use_bias=projector.bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[images, patches, in_dim]`` to ``[images, patches / patches_per_feature, decoder's hidden]``."""
        if x.shape[1] % self.block:
            raise ValueError(
                f"rows of {x.shape[1]} patches do not divide into features of {self.block}: pad them to a multiple"
            )
        x = merged_squares(x, math.isqrt(self.block)) if self.row_order else x
        x = x.reshape(len(x), -1, self.linear_1.in_features)
        x = x if self.norm is None else self.norm(x)
        return self.linear_2(activate(self.activation, self.linear_1(x)))


def merged_squares(x: jax.Array, side: int) -> jax.Array:
    """Patches row by row from a square image, ``[images, patches, dim]``, so ordered that squares are consecutive.

    What InternVL calls pixel shuffle: squares row by row, and within a square its patches row by row.
    """
    images, patches, dim = x.shape
    squares = math.isqrt(patches) // side
    grid = x.reshape(images, squares, side, squares, side, dim)
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(images, patches, dim)
