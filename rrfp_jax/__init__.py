"""Readiness-driven pipeline-parallel training for JAX: schedules rank the tasks that are ready.

The public names load on first use, so that importing a pure package (``rrfp_jax.schedules``, ``rrfp_jax.simulation``)
loads no JAX.
"""

from rrfp_jax.first_use import load_on_first_use

__getattr__, __all__ = load_on_first_use(__name__, __file__, shows_fields=True)
