"""The state that a chunk starts from; needs no batch, so a run can make or restore it before anything is compiled."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    chunks: Sequence[Chunk],
    index: int,
    key: jax.Array,
    optimizer: optax.GradientTransformation,
    sharding: jax.sharding.Sharding,
) -> ChunkState:
    """The state of chunk ``index`` from a typed key, the same key for all chunks."""
    return state_of(initial_params(chunks, index, key, sharding), optimizer, sharding)


def state_of(params: Params, optimizer: optax.GradientTransformation, sharding: jax.sharding.Sharding) -> ChunkState:
    """The state of a chunk with these parameters that has not been trained yet."""
    trains = bool(jax.tree.leaves(params))
    return ChunkState(
        params=params,
        optimizer_state=jax.jit(optimizer.init, out_shardings=sharding)(params) if trains else (),
        accumulators=zeros(accumulator_spec(params), sharding),
    )


def initial_params(chunks: Sequence[Chunk], index: int, key: jax.Array, sharding: jax.sharding.Sharding) -> Params:
    """The parameters of chunk ``index``.

    A shared layer is initialised by its owner's ``init``, in a program that is the same for every holder, so that all
    copies start with equal bits.
    """
    chunk = chunks[index]
    key = jax.device_put(key, sharding)
    shared = sorted(chunk.shared)

    def own(key: jax.Array) -> Params:
        return {name: layer for name, layer in chunk.init(key).items() if name not in shared}

    params = jax.jit(own, out_shardings=sharding)(key)
    for name in shared:
        owner = chunks[holders(chunks, name)[0]]
        params[name] = jax.jit(lambda key, n=name, o=owner: o.init(key)[n], out_shardings=sharding)(key)
    return params


def zeros(specs: Any, sharding: jax.sharding.Sharding) -> Any:
    """Zeros of these shapes and dtypes."""
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype, device=sharding), specs)
