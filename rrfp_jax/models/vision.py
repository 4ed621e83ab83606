"""How pictures become vectors: patches, projected, each with its position.

The pixels of a file are bytes and travel to the devices as bytes, a quarter of what they take as numbers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rrfp_jax.models.encoder_config import VisionConfig
from rrfp_jax.models.parts import learned, projection


class PixelScale(NamedTuple):
    """How pixels of a file, 0 to 255, become the numbers that an encoder was made for."""

    mean: tuple[float, ...]
    """Subtracted from pixels, which are 0 to 1 by then: one number for all channels, or one for each."""
    std: tuple[float, ...]
    """What they are divided by, likewise."""

    def scaled(self, patches: jax.Array | np.ndarray) -> jax.Array:
        """Bytes ``[..., patch_dim]``, in which a channel's values are consecutive, as float32."""
        per_channel = patches.shape[-1] // max(len(self.mean), len(self.std))
        mean, std = (
            np.repeat(np.array(each, np.float32), patches.shape[-1] if len(each) == 1 else per_channel) for each in self
        )
        return (jnp.asarray(patches, jnp.float32) / 255 - mean) / std


class Patches(nnx.Module):
    """The first layer of a vision transformer.

    Equal images: position ``i`` of the table belongs to patch ``i``, after the class token's if there is one. Packed
    rows: a patch gets the sum of its row's and its column's vector.
    """

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs) -> None:
        self.patch_dim, self.num_patches = config.patch_dim, config.num_patches
        self.compute_dtype = jnp.dtype(config.compute_dtype)
        self.projection = projection(config, config.patch_dim, config.hidden, rngs, use_bias=config.patch_bias)
        self.class_token = learned(config, (config.hidden,), rngs) if config.class_token else None
        if config.num_patches is not None:
            self.positions = learned(config, (config.num_patches + config.class_token, config.hidden), rngs)
        else:
            assert config.max_rows is not None
            assert config.max_columns is not None
            self.row_positions = learned(config, (config.max_rows, config.hidden), rngs)
            self.column_positions = learned(config, (config.max_columns, config.hidden), rngs)

    def __call__(self, leaves: dict[str, jax.Array]) -> jax.Array:
        """``patches`` float ``[images, patches, patch_dim]`` to ``[images, patches (+ class token), hidden]``.

        Packed rows: beside it ``patch_rows`` and ``patch_columns``, int ``[images, patches]``.
        """
        patches = leaves["patches"]
        wanted = patches.shape[1] if self.num_patches is None else self.num_patches
        if patches.shape[1:] != (wanted, self.patch_dim):
            raise ValueError(
                f"patches have shape {patches.shape} but the encoder takes [images, {wanted}, {self.patch_dim}]: "
                "cut images as num_patches and patch_dim say"
            )
        x = self.projection(patches)
        if self.num_patches is None:
            rows = jnp.take(self.row_positions[...], leaves["patch_rows"], axis=0)
            columns = jnp.take(self.column_positions[...], leaves["patch_columns"], axis=0)
            return x + (rows + columns).astype(self.compute_dtype)
        if self.class_token is not None:
            token = self.class_token[...].astype(self.compute_dtype)
            x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, len(token))), x], axis=1)
        return x + self.positions[...].astype(self.compute_dtype)
