"""The state that a chunk starts from; needs no batch, so a run can make or restore it before anything is compiled."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rrfp_jax.programs.chunk import Chunk, Params
from rrfp_jax.programs.shapes import holders, param_specs
from rrfp_jax.programs.specs import accumulator_spec


@dataclass
class ChunkState:
    """What one chunk carries from step to step, on its stage's devices."""

    params: Params
    optimizer_state: Any
    """One entry per part of the chunk (see :func:`parts_of`); empty for a chunk that does not train."""
    accumulators: Any
    """Gradients of the summed loss, float32; zeros between steps."""
    derived: tuple[Any, ...] | None = None
    """What the compiled programs derive from ``params``; None until they have prepared it. It is not part of a
    checkpoint, and stale once ``params`` change."""


def parts_of(chunk: Chunk, names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """A chunk's layer names, grouped as the entries of its optimizer state are: its own, then each shared one."""
    own = tuple(name for name in names if name not in chunk.shared)
    return tuple(part for part in (own, *((name,) for name in sorted(chunk.shared))) if part)


def pick(layers: Mapping[str, Any], part: tuple[str, ...]) -> dict[str, Any]:
    """Some layers of a chunk."""
    return {name: layers[name] for name in part}


def initial_state(
    chunks: tuple[Chunk, ...],
    index: int,
    key: jax.Array,
    optimizer: optax.GradientTransformation,
    sharding: jax.sharding.Sharding,
    *,
    trains: bool,
) -> ChunkState:
    """The state of chunk ``index`` from a typed key, the same key for all chunks.

    ``trains`` is False for a chunk that no gradient reaches.
    """
    params = _initializer(chunks, index, sharding)(jax.device_put(key, sharding))
    return state_of(chunks[index], params, optimizer, sharding, trains=trains)


def state_of(
    chunk: Chunk,
    params: Params,
    optimizer: optax.GradientTransformation,
    sharding: jax.sharding.Sharding,
    *,
    trains: bool,
) -> ChunkState:
    """The state of a chunk with these parameters that has not been trained yet."""
    trained = parts_of(chunk, params) if trains else ()
    init = jax.jit(optimizer.init, out_shardings=sharding)
    return ChunkState(
        params=params,
        optimizer_state=tuple(init(pick(params, part)) for part in trained),
        accumulators=zeros(accumulator_spec(params), sharding) if trains else {},
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
    programs = []
    for part in parts_of(chunk, param_specs(chunk)):
        owner = chunks[holders(chunks, part[0])[0]] if part[0] in chunk.shared else chunk

        def init(key: jax.Array, owner: Chunk = owner, part: tuple[str, ...] = part) -> Params:
            return pick(owner.init(key), part)

        programs.append(jax.jit(init, out_shardings=sharding))

    def params(key: jax.Array) -> Params:
        return {name: layer for program in programs for name, layer in program(key).items()}

    return params


def zeros(specs: Any, sharding: jax.sharding.Sharding) -> Any:
    """Zeros of these shapes and dtypes."""
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype, device=sharding), specs)
