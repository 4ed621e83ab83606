"""The compiled programs of one chunk: forward, backward (in one or split), gradient reduction and optimizer update."""

from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.split import SplitBackward, split_backward

__all__ = ["Chunk", "SplitBackward", "split_backward"]
