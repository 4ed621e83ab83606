"""The state that a chunk starts from; needs no batch, so a run can make or restore it before anything is compiled.

Initial values depend on the key alone, not on the devices that share a parameter. Nothing here needs another process:
what lies on several is made by programs that all of them run, from the same key.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding

from rrfp_jax.programs.chunk import Chunk, Params
from rrfp_jax.programs.shapes import holders, param_specs
from rrfp_jax.programs.shardings import UnitShardings, place, spread, state_partition, unit_shardings
from rrfp_jax.programs.specs import Specs, accumulator_spec, spec_of


@dataclass
class ChunkState:
    """What one chunk carries from step to step, on its unit's devices."""

    params: Params
    optimizer_state: Any
    """One entry per part of the chunk (see :func:`parts_of`); empty for a chunk that does not train, or whose replicas
    share the state."""
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
    sharding: Sharding,
    *,
    trains: bool,
    shard_optimizer: bool = False,
) -> ChunkState:
    """The state of chunk ``index`` from a typed key, the same key for all chunks.

    ``sharding`` is the boundary of the chunk's unit, see :mod:`rrfp_jax.programs.shardings`. ``trains`` is False for a
    chunk that no gradient reaches. With ``shard_optimizer`` the optimizer state is left out, because the replicas share
    it: see :func:`rrfp_jax.programs.replica_programs.initial_shared_state`.
    """
    shardings = unit_shardings(chunks, index, sharding)
    impl = str(jax.random.key_impl(key))
    # raw numbers, because a typed key cannot be put onto devices of other processes
    params = _initializer(chunks, index, sharding, impl)(np.asarray(jax.random.key_data(key)))
    specs = param_specs(chunks[index])
    parts = parts_of(chunks[index], specs) if trains and not shard_optimizer else ()
    return ChunkState(
        params=params,
        optimizer_state=tuple(_optimizer_state(pick(params, part), part, optimizer, shardings) for part in parts),
        accumulators=zeros(accumulator_spec(specs), shardings.params) if trains else {},
    )


def state_specs(
    chunks: tuple[Chunk, ...],
    index: int,
    optimizer: optax.GradientTransformation,
    sharding: Sharding,
    *,
    trains: bool,
    shard_optimizer: bool = False,
) -> ChunkState:
    """What ``initial_state`` returns, as specs with shardings; nothing is computed."""
    shardings, params = unit_shardings(chunks, index, sharding), spec_of(param_specs(chunks[index]))
    parts = parts_of(chunks[index], params) if trains and not shard_optimizer else ()
    return ChunkState(
        params=spread(params, shardings.params),
        optimizer_state=tuple(optimizer_specs(pick(params, part), part, optimizer, shardings) for part in parts),
        accumulators=spread(accumulator_spec(params), shardings.params) if trains else {},
    )


def optimizer_specs(
    params: Specs, part: tuple[str, ...], optimizer: optax.GradientTransformation, shardings: UnitShardings
) -> Specs:
    """The optimizer state of one part on its unit, as specs with shardings."""
    state = spec_of(jax.eval_shape(optimizer.init, params))
    partition = state_partition(state, params, pick(shardings.partition, part))
    return spread(state, place(partition, shardings.boundary))


def _optimizer_state(
    params: Params, part: tuple[str, ...], optimizer: optax.GradientTransformation, shardings: UnitShardings
) -> Any:
    specs = optimizer_specs(spec_of(params), part, optimizer, shardings)
    return jax.jit(optimizer.init, out_shardings=jax.tree.map(lambda spec: spec.sharding, specs))(params)


@lru_cache(maxsize=512)
def _initializer(
    chunks: tuple[Chunk, ...], index: int, sharding: Sharding, impl: str
) -> Callable[[np.ndarray], Params]:
    """The parameters of a chunk from a key; kept, so that another pipeline of the same chunks need not compile it.

    A shared layer is initialised by its owner's ``init``, in a program that is the same for every holder, so that all
    copies start with equal bits.
    """
    chunk, at_params = chunks[index], unit_shardings(chunks, index, sharding).params
    programs = []
    for part in parts_of(chunk, param_specs(chunk)):
        owner = chunks[holders(chunks, part[0])[0]] if part[0] in chunk.shared else chunk

        def init(key: jax.Array, owner: Chunk = owner, part: tuple[str, ...] = part) -> Params:
            return pick(owner.init(jax.random.wrap_key_data(key, impl=impl)), part)

        programs.append(jax.jit(init, in_shardings=sharding, out_shardings=pick(at_params, part)))

    def params(key: np.ndarray) -> Params:
        return {name: layer for program in programs for name, layer in program(key).items()}

    return params


def zeros(specs: Any, shardings: Any) -> Any:
    """Zeros of these shapes and dtypes; ``shardings`` is one for all, or a tree of them."""
    return full(specs, shardings, 0)


def full(specs: Any, shardings: Any, value: int) -> Any:
    """Arrays of these shapes and dtypes that hold one number."""
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, specs)
    return jax.tree.map(lambda s, place: jnp.full(s.shape, value, s.dtype, device=place), specs, shardings)
