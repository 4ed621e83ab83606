"""How many layers the larger chunk of a profile has: as many as a chunk of the run, where memory has room for them.

Layers of a long chunk take less time, or more, than those of a short one: caches hold less of it, and what a program
has once is shared out to more of them. So the chunk that is measured is about as long as those that are planned.
"""

import jax
import psutil

from rrfp_jax.commands.diagnosis.host import memory_limit
from rrfp_jax.commands.planning.model_layers import ModelLayers
from rrfp_jax.commands.planning.small_cut import LAYER, MANY, named
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.runtime.process import Process

_MOST = 8
"""More layers tell little more, and take longer to compile."""
_SHARE = 0.5
"""Of the memory that is free, for the layers of all chunks: the rest is for both ends of the model and temporaries."""


def larger_chunk(config: TrainConfig, layers: ModelLayers, process: Process, *, num_microbatches: int) -> int:
    """Layers of the larger chunk, where so many microbatches are in flight; the same in all processes."""
    fit = _number_that_fits(layers, _free_bytes(process) * _SHARE, num_microbatches)
    least = min(process.gather("layers that fit", fit).values())
    return max(MANY, min(_layers_of_a_chunk(config), _MOST, least))


def _layers_of_a_chunk(config: TrainConfig) -> int:
    """As the configuration cuts the model, or evenly where that is still to be found."""
    layout, number = config.pipeline, config.model.num_layers
    if isinstance(layout.layers_per_chunk, tuple):
        return max(layout.layers_per_chunk)
    return -(-number // (layout.num_stages * (layout.chunks_per_stage or 1)))


def _number_that_fits(layers: ModelLayers, num_bytes: float, num_microbatches: int) -> int:
    one = layers.types[named(LAYER, layers.types)]
    in_flight = one.sizes.stash_bytes + one.sizes.owed_bytes
    each = one.fixed_bytes + num_microbatches * in_flight + one.sizes.more_temporaries_bytes
    return int(num_bytes // each) - 1


def _free_bytes(process: Process) -> int:
    """Of the device, or of the host where devices are cores of it, which the processes of a run share."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    free, limit = int(psutil.virtual_memory().available), memory_limit()
    return (free if limit is None else min(free, limit)) // process.layout.num_stages
