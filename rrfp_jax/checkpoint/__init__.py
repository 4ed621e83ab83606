"""Checkpoints that are committed as a whole, named by layer, and restored into any layout.

:class:`ChunkLayers` takes the state of a chunk apart by layer, :class:`Checkpoints` saves and restores. A step is saved
in parts, one for each group of processes that share layers, and each part is an Orbax checkpoint.
"""

from rrfp_jax.checkpoint.checkpoints import Checkpoints, Saved
from rrfp_jax.checkpoint.coordinator import Alone, Coordinator
from rrfp_jax.checkpoint.layers import ChunkLayers
from rrfp_jax.checkpoint.owners import Owner, layer_owners
from rrfp_jax.checkpoint.reader import Found
from rrfp_jax.checkpoint.record import Unusable

__all__ = [
    "Alone",
    "Checkpoints",
    "ChunkLayers",
    "Coordinator",
    "Found",
    "Owner",
    "Saved",
    "Unusable",
    "layer_owners",
]
