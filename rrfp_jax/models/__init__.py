"""Flax models cut into chunks. The models know nothing of pipelines, stages or schedules.

The model itself loads on first use, so that its configuration can be checked before JAX is loaded.
"""

from rrfp_jax.first_use import load_on_first_use

__getattr__, __all__ = load_on_first_use(__name__, __file__, shows_fields=True)
