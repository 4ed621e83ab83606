"""Encoders of pictures and sounds, from the stem that makes vectors to the projector behind them.

The names of the transformer's parameters are those of CLIP, SigLIP and InternViT, with ``attention`` and ``mlp`` as in
the decoder: query, key, value and output apart, ``fc1`` and ``fc2``, or ``gate``, ``up`` and ``down``.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from rrfp_jax.models._decoder import apply_rope, rope_tables
from rrfp_jax.models._parts import ProjectorShape, activate, layer_norm, learned, projection, rms_norm
from rrfp_jax.models.attention import full_attention
from rrfp_jax.models.vision_config import AudioConfig, EncoderConfig, VisionConfig

_LONGEST_WAVE = 10_000.0


# -- stems -------------------------------------------------------------------------------------------------------------


class PixelScale(NamedTuple):
    """Scales pixels of a file, 0 to 255, to the numbers that an encoder was made for.

    Pixels travel to the devices as bytes, a quarter of the size of floats.
    """

    mean: tuple[float, ...]
    """Numbers subtracted from pixels, which are 0 to 1 by then: one for all channels, or one for each."""
    std: tuple[float, ...]
    """Numbers by which pixels are divided then, as many or one."""

    def scaled(self, patches: jax.Array | np.ndarray) -> jax.Array:
        """Returns bytes ``[..., patch_dim]``, in which a channel's values are consecutive, as float32."""
        per_channel = patches.shape[-1] // max(len(self.mean), len(self.std))
        mean, std = (
            np.repeat(np.array(each, np.float32), patches.shape[-1] if len(each) == 1 else per_channel) for each in self
        )
        return (jnp.asarray(patches, jnp.float32) / 255 - mean) / std


class PatchStem(nnx.Module):
    """The first layer of a vision transformer: patches of pixels, projected, each with its position.

    Equal images: position ``i`` of the table belongs to patch ``i``, after the class token's if there is one. Packed
    rows: a patch gets the sum of its row's and its column's vector, unless positions are rotary.
    """

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs) -> None:
        self.patch_dim, self.num_patches = config.patch_dim, config.num_patches
        self.compute_dtype = jnp.dtype(config.compute_dtype)
        self.frames, self.is_rotary = config.patch_frames, config.rotary_theta is not None
        in_dim = config.patch_dim * self.frames
        self.projection = projection(config, in_dim, config.hidden, rngs, use_bias=config.patch_bias)
        self.class_token = learned(config, (config.hidden,), rngs) if config.class_token else None
        if config.num_patches is not None:
            self.positions = learned(config, (config.num_patches + config.class_token, config.hidden), rngs)
        elif not self.is_rotary:
            assert config.max_rows is not None
            assert config.max_columns is not None
            self.row_positions = learned(config, (config.max_rows, config.hidden), rngs)
            self.column_positions = learned(config, (config.max_columns, config.hidden), rngs)

    def __call__(self, leaves: dict[str, jax.Array]) -> jax.Array:
        """Maps ``patches`` float ``[images, patches, patch_dim]`` to ``[images, patches (+ class token), hidden]``.

        Packed rows with learned positions: reads also ``patch_rows`` and ``patch_columns``, int ``[images, patches]``.
        """
        patches = leaves["patches"]
        wanted = patches.shape[1] if self.num_patches is None else self.num_patches
        if patches.shape[1:] != (wanted, self.patch_dim):
            raise ValueError(
                f"patches have shape {patches.shape} but the encoder takes [images, {wanted}, {self.patch_dim}]: "
                "cut images as num_patches and patch_dim say"
            )
        x = self.projection(jnp.tile(patches, self.frames) if self.frames > 1 else patches)
        if self.is_rotary:
            return x
        if self.num_patches is None:
            # images of many sizes share these tables
            rows = jnp.take(self.row_positions[...], leaves["patch_rows"], axis=0)
            columns = jnp.take(self.column_positions[...], leaves["patch_columns"], axis=0)
            return x + (rows + columns).astype(self.compute_dtype)
        if self.class_token is not None:
            token = self.class_token[...].astype(self.compute_dtype)
            x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, len(token))), x], axis=1)
        return x + self.positions[...].astype(self.compute_dtype)


class FrameStem(nnx.Module):
    """The first layer of an encoder of spectrograms: frames, some at a time, projected, each with its position.

    Positions count from 0 in each clip. Their vectors are sines, then cosines, of waves from 1 to 10,000 radians long.
    """

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs) -> None:
        self.bins, self.stacked, self.is_packed = config.bins, config.frames_per_position, config.is_packed
        self.compute_dtype = jnp.dtype(config.compute_dtype)
        self.projection = projection(config, config.bins * self.stacked, config.hidden, rngs, use_bias=True)

    def __call__(self, leaves: dict[str, jax.Array]) -> jax.Array:
        """Maps ``frames`` float ``[clips, frames, bins]`` to ``[clips, frames / frames_per_position, hidden]``.

        Packed rows: reads also ``frame_segments``, int ``[clips, frames]``.
        """
        frames = leaves["frames"]
        if frames.shape[2] != self.bins or frames.shape[1] % self.stacked:
            raise ValueError(
                f"frames have shape {frames.shape} but the encoder takes [clips, a multiple of {self.stacked}, "
                f"{self.bins}]: pad or cut them"
            )
        x = self.projection(frames.reshape(len(frames), -1, self.bins * self.stacked))
        positions = jnp.arange(x.shape[1])
        if self.is_packed:
            # equal ids stand together, so a position in its segment is the distance to where the id last changed
            segments = leaves["frame_segments"][:, :: self.stacked]
            at = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
            begins = jnp.concatenate(
                [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1
            )
            positions = at - jax.lax.cummax(jnp.where(begins, at, 0), axis=1)
        half = x.shape[-1] // 2
        frequencies = _LONGEST_WAVE ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
        angles = positions[..., None].astype(jnp.float32) * frequencies
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return x + waves.astype(self.compute_dtype)


# -- the transformer ---------------------------------------------------------------------------------------------------


def encoder_norm(config: EncoderConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Returns a norm over the residual stream, of the encoder's kind."""
    make = layer_norm if config.norm == "layer_norm" else rms_norm
    return make(config, config.hidden, rngs)


class PatchPlaces(NamedTuple):
    """Segments and positions of packed rows, made once for all layers of a chunk."""

    segments: jax.Array | None = None
    """Segment ids, int32 ``[rows, length]``. None: a row is one segment."""
    windows: jax.Array | None = None
    """Ids of the squares of patches within which layers with a window attend, int32 ``[rows, length]``."""
    tables: tuple[jax.Array, jax.Array] | None = None
    """Sine and cosine of the rotary angles, float32 ``[rows, length, 1, head_dim / 2]``; None: none turns anything."""


_ONE_SEGMENT = PatchPlaces()


def patch_places(config: VisionConfig, segments: jax.Array, rows: jax.Array, columns: jax.Array) -> PatchPlaces:
    """Returns the places of packed patches by their images and their rows and columns in these, all int32 ``[rows,
    length]``."""
    windows = tables = None
    if config.window is not None:
        windows = _window_ids(segments, rows // config.window, columns // config.window)
    if config.rotary_theta is not None:
        quarter = config.hidden // config.num_heads // 4
        of_both = (rope_tables(places, quarter, config.rotary_theta) for places in (rows, columns))
        sin, cos = (jnp.concatenate(pair, axis=-1) for pair in zip(*of_both, strict=True))
        tables = sin, cos
    return PatchPlaces(segments, windows, tables)


def _window_ids(segments: jax.Array, down: jax.Array, across: jax.Array) -> jax.Array:
    """Returns an id for each window of each image in a row, 0 for padding.

    Ids are the number of the image's first patch, plus that of the window in the image. An image has no more windows
    than patches, so no two windows get one id, and ids stay as small as rows are long.
    """
    length = segments.shape[1]
    at = jnp.broadcast_to(jnp.arange(length), segments.shape)
    begins = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    first = jax.lax.cummax(jnp.where(begins, at, 0), axis=1)
    widest = jax.vmap(partial(jax.ops.segment_max, num_segments=length))(across + 1, first)
    number = down * jnp.take_along_axis(widest, first, axis=1) + across
    return jnp.where(segments == 0, 0, 1 + first + number)


class _EncoderAttention(nnx.Module):
    """Every position attends to every other of its segment or window, ``[rows, length, hidden]`` to the same."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs, *, is_global: bool) -> None:
        self.num_heads, self.is_global = config.num_heads, is_global
        self.query, self.key, self.value = (
            projection(config, config.hidden, config.hidden, rngs, use_bias=config.qkv_bias) for _ in range(3)
        )
        self.output = projection(config, config.hidden, config.hidden, rngs, to_residual=True, use_bias=True)
        self.query_norm = rms_norm(config, config.hidden, rngs) if config.qk_norm else None
        self.key_norm = rms_norm(config, config.hidden, rngs) if config.qk_norm else None

    def __call__(self, x: jax.Array, places: PatchPlaces) -> jax.Array:
        """Maps ``[rows, length, hidden]`` to the same shape and dtype."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (part.reshape(*x.shape[:-1], self.num_heads, -1) for part in (query, key, value))
        if places.tables is not None:
            query, key = (apply_rope(part, *places.tables) for part in (query, key))
        segments = places.segments if self.is_global else places.windows
        mixed = full_attention(query, key, value, segments=segments)
        return self.output(checkpoint_name(mixed.reshape(x.shape), "attention"))


class _EncoderMLP(nnx.Module):
    """The MLP of an encoder: ``fc2(activation(fc1(x)))``, ``[..., hidden] -> [..., hidden]``."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        self.activation = config.activation
        self.fc1 = projection(config, config.hidden, config.mlp_dim, rngs, use_bias=True)
        self.fc2 = projection(config, config.mlp_dim, config.hidden, rngs, to_residual=True, use_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., hidden]`` to the same shape, in the compute dtype."""
        return self.fc2(activate(self.activation, self.fc1(x)))


class _GatedEncoderMLP(nnx.Module):
    """The MLP of an encoder as ``down(activation(gate(x)) * up(x))``, ``[..., hidden] -> [..., hidden]``."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs) -> None:
        self.activation = config.activation
        self.gate, self.up = (projection(config, config.hidden, config.mlp_dim, rngs, use_bias=True) for _ in range(2))
        self.down = projection(config, config.mlp_dim, config.hidden, rngs, to_residual=True, use_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., hidden]`` to the same shape, in the compute dtype."""
        return self.down(activate(self.activation, self.gate(x)) * self.up(x))


class EncoderLayer(nnx.Module):
    """Attention, then the MLP, each on a normalised input, scaled by channel where asked, and added to the stream."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs, *, is_global: bool = True) -> None:
        self.attention_norm = encoder_norm(config, rngs)
        self.attention = _EncoderAttention(config, rngs, is_global=is_global)
        self.mlp_norm = encoder_norm(config, rngs)
        self.mlp = (_GatedEncoderMLP if config.gated_mlp else _EncoderMLP)(config, rngs)
        self.attention_scale, self.mlp_scale = (
            None
            if config.layer_scale is None
            else nnx.Param(jnp.full(config.hidden, config.layer_scale, jnp.dtype(config.param_dtype)))
            for _ in range(2)
        )

    def __call__(self, x: jax.Array, places: PatchPlaces = _ONE_SEGMENT) -> jax.Array:
        """Maps ``[rows, length, hidden]`` to the same shape and dtype; ``places`` are those of packed rows."""
        x = x + _scaled(self.attention(self.attention_norm(x), places), self.attention_scale)
        return x + _scaled(self.mlp(self.mlp_norm(x)), self.mlp_scale)


@cache
def encoder_layer(*, is_global: bool) -> Callable[[EncoderConfig, nnx.Rngs], EncoderLayer]:
    """Returns the function that makes a layer of an encoder, with a window or without."""
    return partial(EncoderLayer, is_global=is_global)


def _scaled(x: jax.Array, scale: nnx.Param | None) -> jax.Array:
    return x if scale is None else x * scale[...].astype(x.dtype)


# -- the projector -----------------------------------------------------------------------------------------------------


class Projector(nnx.Module):
    """Merges patches, normalises them where asked, and maps them to the decoder's width by two products."""

    def __init__(self, config: ProjectorShape, rngs: nnx.Rngs) -> None:
        projector, out_dim = config.projector, config.out_dim
        in_dim = config.in_dim * projector.patches_per_feature
        inner = out_dim if projector.mlp_dim is None else projector.mlp_dim
        self.block, self.row_order = projector.patches_per_feature, projector.row_order
        self.activation = projector.activation
        self.norm = layer_norm(config, in_dim, rngs) if projector.norm else None
        self.linear_1 = projection(config, in_dim, inner, rngs, use_bias=projector.bias)
        self.linear_2 = projection(config, inner, out_dim, rngs, use_bias=projector.bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[images, patches, in_dim]`` to ``[images, patches / patches_per_feature, decoder's hidden]``."""
        if x.shape[1] % self.block:
            raise ValueError(
                f"rows of {x.shape[1]} patches do not divide into features of {self.block}: pad them to a multiple"
            )
        x = merged_squares(x, math.isqrt(self.block)) if self.row_order else x
        x = x.reshape(len(x), -1, self.linear_1.in_features)
        x = x if self.norm is None else self.norm(x)
        return self.linear_2(activate(self.activation, self.linear_1(x)))


def merged_squares(x: jax.Array, side: int) -> jax.Array:
    """Orders patches that come row by row from a square image so that squares of them are consecutive.

    InternVL calls this pixel shuffle: squares row by row, and within a square its patches row by row, ``[images,
    patches, dim]``.
    """
    images, patches, dim = x.shape
    squares = math.isqrt(patches) // side
    grid = x.reshape(images, squares, side, squares, side, dim)
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(images, patches, dim)
