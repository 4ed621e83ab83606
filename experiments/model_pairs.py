"""Encoders and decoders by name, as sizes: the pairs that the RRFP paper trains, for workloads.

The paper names its models and not their dimensions. Decoders and the encoders H, InternViT-6B and 22B have published
ones. "Big" is taken as ViT-bigG/14 (1.8 billion parameters); those of the 5B encoder are ours, in usual proportions.
"""

import difflib
from dataclasses import dataclass

from rrfp_jax.planning.flops import DecoderSizes, EncoderSizes, ProjectorSizes

_RGB_PATCH = 3 * 14 * 14
_MERGED = 4


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """An encoder of images, and the decoder that reads their features."""

    encoder: EncoderSizes
    decoder: DecoderSizes

    @property
    def projector(self) -> ProjectorSizes:
        """From 2 x 2 merged patches to the decoder's width; it belongs to the decoder's first chunk."""
        hidden = self.decoder.hidden
        return ProjectorSizes(in_dim=_MERGED * self.encoder.hidden, inner_dim=hidden, out_dim=hidden)


def _vit(hidden: int, num_layers: int, num_heads: int, mlp_dim: int) -> EncoderSizes:
    return EncoderSizes(
        hidden=hidden, num_layers=num_layers, num_heads=num_heads, mlp_dim=mlp_dim, patch_dim=_RGB_PATCH
    )


def _decoder(hidden: int, num_layers: int, num_heads: int, mlp_dim: int, vocab_size: int) -> DecoderSizes:
    """All of them have 8 key and value heads, and heads of 128."""
    return DecoderSizes(
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=mlp_dim,
        vocab_size=vocab_size,
    )


MODEL_PAIRS = {
    "qwen3-1.7b+vit-h": ModelPair(encoder=_vit(1280, 32, 16, 5120), decoder=_decoder(2048, 28, 16, 6144, 151_936)),
    "qwen3-4b+vit-big": ModelPair(encoder=_vit(1664, 48, 16, 8192), decoder=_decoder(2560, 36, 32, 9728, 151_936)),
    "llama3-8b+vit-5b": ModelPair(encoder=_vit(3072, 44, 24, 12_288), decoder=_decoder(4096, 32, 32, 14_336, 128_256)),
    "qwen3-32b+internvit-6b": ModelPair(
        encoder=_vit(3200, 45, 25, 12_800), decoder=_decoder(5120, 64, 64, 25_600, 151_936)
    ),
    "llama3-70b+vit-22b": ModelPair(
        encoder=_vit(6144, 48, 48, 24_576), decoder=_decoder(8192, 80, 64, 28_672, 128_256)
    ),
}


def model_pair(name: str) -> ModelPair:
    """The pair of a name; raises ValueError with the names there are."""
    if name not in MODEL_PAIRS:
        near = difflib.get_close_matches(name, MODEL_PAIRS, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no model pair {name!r}: {meant}the pairs are {', '.join(MODEL_PAIRS)}")
    return MODEL_PAIRS[name]
