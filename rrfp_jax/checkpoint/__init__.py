"""Checkpoints that are committed as a whole, named by layer, and restored into any layout.

:class:`ChunkLayers` takes the state of a chunk apart by layer, :class:`Checkpoints` saves and restores. A step is saved
in parts, one for each group of processes that share layers, and each part is an Orbax checkpoint.
"""

from rrfp_jax.checkpoint.checkpoints import Checkpoints as Checkpoints
from rrfp_jax.checkpoint.checkpoints import Saved as Saved
from rrfp_jax.checkpoint.chunk_layers import ChunkLayers as ChunkLayers
from rrfp_jax.checkpoint.coordinator import Alone as Alone
from rrfp_jax.checkpoint.coordinator import Coordinator as Coordinator
from rrfp_jax.checkpoint.coordinator import NotDone as NotDone
from rrfp_jax.checkpoint.ownership import Owner as Owner
from rrfp_jax.checkpoint.ownership import layer_owners as layer_owners
from rrfp_jax.checkpoint.reader import Found as Found
from rrfp_jax.checkpoint.record import Unusable as Unusable
from rrfp_jax.checkpoint.record import last_committed as last_committed
