"""The names of this package and where they live; see :mod:`rrfp_jax.first_use`."""

from rrfp_jax.runtime.operations.offloading import device_slots as device_slots
from rrfp_jax.runtime.operations.offloading import offload as offload
from rrfp_jax.runtime.operations.recomputing import part_made as part_made
from rrfp_jax.runtime.operations.recomputing import recompute as recompute
from rrfp_jax.runtime.operations.recomputing import recomputed as recomputed
