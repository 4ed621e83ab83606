"""How sounds become vectors: frames of a spectrogram, some at a time, projected, each with its position."""

import jax
import jax.numpy as jnp
from flax import nnx

from rrfp_jax.models.encoder_config import AudioConfig
from rrfp_jax.models.parts import projection

_LONGEST_WAVE = 10_000.0


class Frames(nnx.Module):
    """The first layer of an encoder of spectrograms; positions count from 0 in each clip."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs) -> None:
        self.bins, self.stacked, self.is_packed = config.bins, config.frames_per_position, config.is_packed
        self.compute_dtype = jnp.dtype(config.compute_dtype)
        self.projection = projection(config, config.bins * self.stacked, config.hidden, rngs, use_bias=True)

    def __call__(self, leaves: dict[str, jax.Array]) -> jax.Array:
        """``frames`` float ``[clips, frames, bins]`` to ``[clips, frames / frames_per_position, hidden]``.

        Packed rows: beside it ``frame_segments``, int ``[clips, frames]``.
        """
        frames = leaves["frames"]
        if frames.shape[2] != self.bins or frames.shape[1] % self.stacked:
            raise ValueError(
                f"frames have shape {frames.shape} but the encoder takes [clips, a multiple of {self.stacked}, "
                f"{self.bins}]: pad or cut them"
            )
        x = self.projection(frames.reshape(len(frames), -1, self.bins * self.stacked))
        at = jnp.arange(x.shape[1])
        if self.is_packed:
            at = positions_within(leaves["frame_segments"][:, :: self.stacked])
        return x + waves(at, x.shape[-1]).astype(self.compute_dtype)


def positions_within(segments: jax.Array) -> jax.Array:
    """The position of each element in its segment, from ids ``[rows, length]`` that stand together."""
    at = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    begins = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    return at - jax.lax.cummax(jnp.where(begins, at, 0), axis=1)


def waves(positions: jax.Array, dim: int) -> jax.Array:
    """Sines, then cosines, of ``positions`` in waves from 1 to 10,000 radians long, float32 ``[..., dim]``."""
    half = dim // 2
    wave_numbers = _LONGEST_WAVE ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angles = positions[..., None].astype(jnp.float32) * wave_numbers
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
