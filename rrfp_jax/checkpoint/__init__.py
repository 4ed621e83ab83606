"""Checkpoints that are committed as a whole, named by layer, and restored into any layout.

:class:`ChunkLayers` takes the state of a chunk apart by layer, :class:`Checkpoints` saves and restores. A step is saved
in parts, one for each group of processes that share layers, and each part is an Orbax checkpoint. ``_records.py`` shows
the files of a step and says when old steps are removed.
"""

from rrfp_jax.checkpoint._arrays import named_leaves as named_leaves
from rrfp_jax.checkpoint._checkpoints import Checkpoints as Checkpoints
from rrfp_jax.checkpoint._checkpoints import Coordinator as Coordinator
from rrfp_jax.checkpoint._checkpoints import NotDone as NotDone
from rrfp_jax.checkpoint._checkpoints import SaveOutcome as SaveOutcome
from rrfp_jax.checkpoint._chunk_layers import ChunkLayers as ChunkLayers
from rrfp_jax.checkpoint._part_writer import LayerWriter as LayerWriter
from rrfp_jax.checkpoint._part_writer import Owner as Owner
from rrfp_jax.checkpoint._part_writer import ReadLater as ReadLater
from rrfp_jax.checkpoint._part_writer import layer_owners as layer_owners
from rrfp_jax.checkpoint._reader import APART as APART
from rrfp_jax.checkpoint._reader import BASE as BASE
from rrfp_jax.checkpoint._reader import StoredStep as StoredStep
from rrfp_jax.checkpoint._reader import base_of as base_of
from rrfp_jax.checkpoint._reader import newest_step as newest_step
from rrfp_jax.checkpoint._reader import open_step as open_step
from rrfp_jax.checkpoint._reader import read_layer_params as read_layer_params
from rrfp_jax.checkpoint._reader import read_params as read_params
from rrfp_jax.checkpoint._reader import stored_param_specs as stored_param_specs
from rrfp_jax.checkpoint._records import Unusable as Unusable
from rrfp_jax.checkpoint._records import last_committed as last_committed
