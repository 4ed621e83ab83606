"""The asyncio runtime: stage actors that drive compiled programs as their inputs arrive (RRFP paper, section 4).

The names load on first use, so that a rank's way in (:mod:`rrfp_jax.runtime.cluster`) runs before JAX is loaded.
"""

from rrfp_jax.first_use import load_on_first_use

__getattr__, __all__ = load_on_first_use(__name__, __file__)
