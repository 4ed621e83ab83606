"""Random keys of a run: a function of what is computed, never of the order in which it happens to run."""

import jax
import jax.numpy as jnp
import numpy as np


def microbatch_key(
    seed: jax.typing.ArrayLike, step: jax.typing.ArrayLike, microbatch: jax.typing.ArrayLike
) -> jax.Array:
    """The typed key of one microbatch of one step; all arguments are unsigned 32-bit scalars.

    ``microbatch`` counts over the whole step, not within a replica. Works inside and outside of jit, with equal bits.
    """
    counters = [jnp.asarray(value, jnp.uint32) for value in (seed, step, microbatch)]
    key = jax.random.key(counters[0])
    return jax.random.fold_in(jax.random.fold_in(key, counters[1]), counters[2])


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that does not fit 32 bits."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed} does not fit 32 bits: give a number from 0 to {2**32 - 1}")


def counters(seed: int, step: int, microbatch: int) -> np.ndarray:
    """The three numbers behind a key, as the ``uint32[3]`` array that programs take."""
    return np.array((seed, step, microbatch), np.uint32)
