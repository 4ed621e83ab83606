"""The state that a chunk starts from; needs no batch, so a run can make or restore it before anything is compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rrfp_jax.programs.backward import accumulator_spec
from rrfp_jax.programs.chunk import Chunk, Params
from rrfp_jax.programs.shapes import holders


@dataclass
class ChunkState:
    """What one chunk carries from step to step, on its stage's devices."""

    params: Params
    optimizer_state: Any
    """An empty tuple for a chunk without parameters."""
    accumulators: Any
    """Gradients of the summed loss, float32; zeros between steps."""


def initial_state(
    chunks: tuple[Chunk, ...],
    index: int,
    key: jax.Array,
    optimizer: optax.GradientTransformation,
    sharding: jax.sharding.Sharding,
) -> ChunkState:
    """The state of chunk ``index`` from a typed key, the same key for all chunks."""
    params = _initializer(chunks, index, sharding)(jax.device_put(key, sharding))
    return state_of(params, optimizer, sharding)


def state_of(params: Params, optimizer: optax.GradientTransformation, sharding: jax.sharding.Sharding) -> ChunkState:
    """The state of a chunk with these parameters that has not been trained yet."""
    trains = bool(jax.tree.leaves(params))
    return ChunkState(
        params=params,
        optimizer_state=jax.jit(optimizer.init, out_shardings=sharding)(params) if trains else (),
        accumulators=zeros(accumulator_spec(params), sharding),
    )


@lru_cache(maxsize=512)
def _initializer(
    chunks: tuple[Chunk, ...], index: int, sharding: jax.sharding.Sharding
) -> Callable[[jax.Array], Params]:
    """The parameters of a chunk from a key; kept, so that another pipeline of the same chunks need not compile it.

    A shared layer is initialised by its owner's ``init``, in a program that is the same for every holder, so that all
    copies start with equal bits.
    """
    chunk = chunks[index]
    shared = sorted(chunk.shared)

    def own(key: jax.Array) -> Params:
        return {name: layer for name, layer in chunk.init(key).items() if name not in shared}

    programs = [jax.jit(own, out_shardings=sharding)]
    for name in shared:
        owner = chunks[holders(chunks, name)[0]]
        programs.append(jax.jit(lambda key, n=name, o=owner: {n: o.init(key)[n]}, out_shardings=sharding))

    def params(key: jax.Array) -> Params:
        return {name: layer for program in programs for name, layer in program(key).items()}

    return params


def zeros(specs: Any, sharding: jax.sharding.Sharding) -> Any:
    """Zeros of these shapes and dtypes."""
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype, device=sharding), specs)
