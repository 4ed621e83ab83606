"""Operations of a pipeline that come with the library, built with its language as a user's own would be.

They load on first use, so that a schedule with operations can be made and simulated without JAX.
"""

from rrfp_jax.first_use import load_on_first_use

__getattr__, __all__ = load_on_first_use(__name__, __file__)
