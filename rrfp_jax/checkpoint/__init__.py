"""Checkpoints that are committed as a whole, named by layer, and restored into any layout.

:class:`ChunkLayers` takes the state of a chunk apart by layer, :class:`Checkpoints` saves and restores. A step is saved
in parts, one for each group of processes that share layers, and each part is an Orbax checkpoint.
"""

from rrfp_jax.checkpoint.checkpoints import Checkpoints, Saved
from rrfp_jax.checkpoint.coordinator import Alone, Coordinator, NotDone
from rrfp_jax.checkpoint.layers import ChunkLayers
from rrfp_jax.checkpoint.ownership import Owner, layer_owners
from rrfp_jax.checkpoint.reader import Found
from rrfp_jax.checkpoint.record import Unusable, last_committed

__all__ = [
    "Alone",
    "Checkpoints",
    "ChunkLayers",
    "Coordinator",
    "Found",
    "NotDone",
    "Owner",
    "Saved",
    "Unusable",
    "last_committed",
    "layer_owners",
]
