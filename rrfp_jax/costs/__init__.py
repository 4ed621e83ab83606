"""The costs of a model's layers, in milliseconds and bytes, and of its cuts into chunks; the memory of every stage.

The names load on first use: a run needs the memory of its stages, and no simulator.
"""

from rrfp_jax.first_use import load_on_first_use

__getattr__, __all__ = load_on_first_use(__name__, __file__)
