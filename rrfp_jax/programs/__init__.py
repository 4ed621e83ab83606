"""The compiled programs of one chunk: forward, backward (in one or split), gradient reduction and optimizer update."""

from rrfp_jax.programs.chunk import Chunk as Chunk
from rrfp_jax.programs.splitting import SplitBackward as SplitBackward
from rrfp_jax.programs.splitting import split_backward as split_backward
