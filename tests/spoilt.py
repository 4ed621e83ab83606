"""Units that compute wrongly: programs of which a bit of the result is turned over."""

from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import numpy as np

from rrfp_jax.runtime.stage import ProgramStage


def flipped(tree: Any, leaf: int = 0) -> Any:
    """The tree with one bit of one array turned over."""
    leaves, structure = jax.tree.flatten(tree)
    values = np.array(leaves[leaf])
    values.reshape(-1).view(np.uint32)[-1:] ^= 1 << 3
    leaves[leaf] = jax.device_put(values, leaves[leaf].sharding)
    return jax.tree.unflatten(structure, leaves)


def of_outputs(results: Any) -> Any:
    return flipped(results[0]), results[1]


def of_sums(results: Any) -> Any:
    (sums, input_grads), token = results
    return (flipped(sums, 2), input_grads), token


def of_input_gradients(results: Any) -> Any:
    (sums, input_grads), token = results
    return (sums, flipped(input_grads)), token


def spoil(stage: ProgramStage, program: str, place: Callable[[Any], Any], *, from_call: int = 0) -> None:
    """Makes a program of a stage with one chunk return another bit, from some call on."""
    (compiled,) = stage._programs.values()
    for variant in compiled.variants:
        made, calls = variant._compiled[program], count()

        def run(*args: Any, made: Any = made, calls: Any = calls) -> Any:
            results = made(*args)
            return place(results) if next(calls) >= from_call else results

        variant._compiled = {**variant._compiled, program: run}
