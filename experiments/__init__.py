"""Commands as modules of the checkout, ``python -m experiments.train`` and its neighbours, and the benches."""

import rrfp_jax.commands  # noqa: F401 - moves the current folder behind all other places of modules
