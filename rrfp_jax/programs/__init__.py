"""The compiled programs of one chunk: forward, backward (in one or split), gradient reduction and optimizer update."""

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.split import FusedBackward, SplitBackward, fused_backward, split_backward

__all__ = ["Chunk", "FusedBackward", "SplitBackward", "fused_backward", "split_backward"]
