"""The state that a chunk starts from. It needs no batch, so a run can make or restore it before anything is compiled.

Initial values depend on the key alone, not on the devices that share a parameter. Nothing here needs another process:
arrays on several processes are made by programs that all of them run, from the same key.

An optimizer state is a tuple, one entry per *group* of the chunk's layers (:func:`layer_groups`). It lies on the
chunk's unit, or is cut over all replicas of its stage (ZeRO-1, Rajbhandari et al. 2020).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding

from rrfp_jax.field_rules import with_type
from rrfp_jax.programs.chunk import Chunk, OwnFunction, Params, param_specs, trained_specs
from rrfp_jax.programs.compiling import shared_program
from rrfp_jax.programs.sameness import ProgramStore
from rrfp_jax.programs.shapes import Specs, accumulator_spec, holders, pick, spec_of, spec_text
from rrfp_jax.programs.shardings import (
    axes_of,
    param_partition,
    place,
    shardings_of,
    shared_out,
    spread,
    state_partition,
    unit_shardings,
)
from rrfp_jax.programs.stage_devices import StageDevices


@dataclass
class ChunkState:
    """The arrays that one chunk carries from step to step, on its unit's devices."""

    params: Params
    optimizer_state: Any
    """One entry per group of the chunk's layers (see :func:`layer_groups`); empty for a chunk that does not train, or
    whose replicas share the state."""
    accumulators: Any
    """Gradients of the summed loss, float32, of the layers that train; zeros between steps."""
    derived: tuple[Any, ...] | None = None
    """Values that the compiled programs derive from ``params``; None until they have prepared them. They are not part
    of a checkpoint, and stale once ``params`` change."""


_PARTS = ("params", "optimizer_state", "accumulators")


def fitting_states(expected: Sequence[tuple[str, ChunkState]], given: Iterable[ChunkState]) -> list[ChunkState]:
    """Returns the given states, moved to where the specs lie; ``expected`` has the specs, each with a name.

    Raises ValueError, naming state and array, if number, names, shapes or dtypes differ, before anything is moved.
    """
    given_as: Any = given
    states = list(given_as) if isinstance(given_as, Iterable) else [given_as]
    if len(states) != len(expected):
        raise ValueError(
            f"{len(states)} states are given, and the pipeline has {len(expected)}: give one for each entry of "
            "state_specs"
        )
    for number, ((name, spec), state) in enumerate(zip(expected, states, strict=True)):
        where = f"states[{number}], for {name},"
        if not isinstance(state, ChunkState):
            raise ValueError(f"{where} is {with_type(state)}: give the ChunkState alone, without the chunk's number")
        for part in _PARTS:
            _check_part(where, part, getattr(spec, part), getattr(state, part))
    return [
        ChunkState(**{part: _placed(getattr(spec, part), getattr(state, part)) for part in _PARTS})
        for (_, spec), state in zip(expected, states, strict=True)
    ]


def _check_part(where: str, part: str, expected: Specs, given: Any) -> None:
    specs, leaves = ({jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(t)} for t in (expected, given))
    remedy = "give the states of a pipeline with the same chunks, placement and optimizer"
    for path in [*specs, *leaves]:
        spec, leaf = specs.get(path), leaves.get(path)
        if spec is None or leaf is None:
            raise ValueError(f"{where} has {'an unknown' if spec is None else 'no'} {path} in its {part}: {remedy}")
        here = f"in its {part} as {path}"
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(f"{where} has {with_type(leaf)} {here}: give an array")
        if (leaf.shape, leaf.dtype) != (spec.shape, spec.dtype):
            raise ValueError(f"{where} has {spec_text(leaf)} {here}, where {spec_text(spec)} is expected: {remedy}")
        if isinstance(leaf, jax.ShapeDtypeStruct) and part != "optimizer_state":
            raise ValueError(f"{where} has a shape alone {here}: give an array")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(f"{where} has a deleted array {here}: copy states before a step or a jit takes them over")


def _placed(expected: Specs, given: Any) -> Any:
    def place_one(spec: jax.ShapeDtypeStruct, leaf: Any) -> Any:
        lies_there = isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(spec.sharding, leaf.ndim)
        return leaf if lies_there or isinstance(leaf, jax.ShapeDtypeStruct) else jax.device_put(leaf, spec.sharding)

    leaves = map(place_one, jax.tree.leaves(expected), jax.tree.leaves(given))
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)


def layer_groups(chunk: Chunk, names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Returns layer names of a chunk, grouped as the entries of its optimizer state: its own, then each shared one."""
    names = tuple(names)
    own = tuple(name for name in names if name not in chunk.shared)
    return tuple(group for group in (own, *((name,) for name in sorted(chunk.shared) if name in names)) if group)


def initial_state(
    chunks: tuple[Chunk, ...],
    index: int,
    optimizer: optax.GradientTransformation,
    *,
    key: jax.Array,
    sharding: Sharding,
    trains: bool,
    shard_optimizer: bool = False,
    store: ProgramStore | None = None,
) -> ChunkState:
    """Returns the state of chunk ``index`` from a typed key, the same key for all chunks.

    ``sharding`` is the boundary of the chunk's unit, see :mod:`rrfp_jax.programs.shardings`. ``trains`` is False for a
    chunk whose parameters do not change. With ``shard_optimizer`` the optimizer state is left out, because the replicas
    share it: see :func:`initial_shared_state`. ``store`` has the programs that are compiled already for other chunks.
    """
    # raw numbers, because a typed key cannot be put onto devices of other processes
    numbers = np.asarray(jax.random.key_data(key))
    store = store or ProgramStore()
    impl = str(jax.random.key_impl(key))
    params = _initial_params(chunks, index, sharding, key=numbers, impl=impl, store=store)
    state = state_specs(chunks, index, optimizer, sharding=sharding, trains=trains, shard_optimizer=shard_optimizer)
    groups = layer_groups(chunks[index], trained_specs(chunks[index]))
    state.params, at_sums = params, shardings_of(state.accumulators)
    state.optimizer_state = _initial_optimizer_state(optimizer, params, groups, state.optimizer_state, store)
    state.accumulators = zeros(state.accumulators, at_sums)
    return state


def state_specs(
    chunks: tuple[Chunk, ...],
    index: int,
    optimizer: optax.GradientTransformation,
    *,
    sharding: Sharding,
    trains: bool,
    shard_optimizer: bool = False,
) -> ChunkState:
    """Returns the state of ``initial_state`` as specs with shardings; nothing is computed."""
    params = spread(spec_of(param_specs(chunks[index])), unit_shardings(chunks, index, sharding).params)
    return ChunkState(
        params=params,
        optimizer_state=optimizer_specs(chunks, index, optimizer, sharding) if trains and not shard_optimizer else (),
        accumulators=accumulator_spec(pick(params, trained_specs(chunks[index]))) if trains else {},
    )


def optimizer_specs(
    chunks: Sequence[Chunk], index: int, optimizer: optax.GradientTransformation, devices: Sharding | StageDevices
) -> tuple[Specs, ...]:
    """Returns the optimizer state of chunk ``index``, one entry per group of layers, as specs with shardings.

    ``devices`` is the boundary of a unit, or the stage over whose replicas the state is cut. Only for a chunk that
    trains; nothing is computed.
    """
    params = spec_of(trained_specs(chunks[index]))
    replicas: int | None = None
    if isinstance(devices, StageDevices):
        partition, replicas = param_partition(chunks, index, axes_of(devices.mesh)), devices.data
        devices = devices.sharding()
    else:
        partition = unit_shardings(chunks, index, devices).partition
    states = []
    for group in layer_groups(chunks[index], params):
        own = pick(params, group)
        state = spec_of(jax.eval_shape(optimizer.init, own))
        cut = state_partition(state, own, pick(partition, group))
        states.append(spread(state, place(cut if replicas is None else shared_out(cut, state, replicas), devices)))
    return tuple(states)


def initial_optimizer_state(
    chunks: Sequence[Chunk],
    index: int,
    optimizer: optax.GradientTransformation,
    sharding: Sharding,
    params: Params,
    *,
    store: ProgramStore | None = None,
) -> tuple[Any, ...]:
    """Returns the optimizer state of chunk ``index`` for these parameters, on its unit with boundary ``sharding``."""
    groups = layer_groups(chunks[index], trained_specs(chunks[index]))
    specs = optimizer_specs(chunks, index, optimizer, sharding)
    return _initial_optimizer_state(optimizer, params, groups, specs, store or ProgramStore())


def initial_shared_state(
    chunks: Sequence[Chunk],
    index: int,
    optimizer: optax.GradientTransformation,
    devices: StageDevices,
    params: Mapping[int, Params],
    *,
    store: ProgramStore | None = None,
) -> tuple[Any, ...]:
    """Returns the optimizer state that replicas share, from the parameters of every local replica.

    All processes of the stage call it, in the same order for the chunks of a stage.
    """
    trained = trained_specs(chunks[index])
    changing = {replica: pick(layers, trained) for replica, layers in params.items()}
    joined = devices.join(changing, pick(param_partition(chunks, index, axes_of(devices.mesh)), trained))
    specs = optimizer_specs(chunks, index, optimizer, devices)
    groups = layer_groups(chunks[index], joined)
    return _initial_optimizer_state(optimizer, joined, groups, specs, store or ProgramStore())


def _initial_optimizer_state(
    optimizer: optax.GradientTransformation,
    params: Params,
    groups: Sequence[tuple[str, ...]],
    specs: tuple[Specs, ...],
    store: ProgramStore,
) -> tuple[Any, ...]:
    states = []
    for group, state in zip(groups if specs else (), specs, strict=True):
        own = pick(params, group)
        init = shared_program(
            store,
            "init_optimizer",
            optimizer.init,
            spec_of(own),
            in_shardings=(shardings_of(own),),
            out_shardings=shardings_of(state),
        )
        states.append(init(own))
    return tuple(states)


def _initial_params(
    chunks: tuple[Chunk, ...], index: int, sharding: Sharding, *, key: np.ndarray, impl: str, store: ProgramStore
) -> Params:
    """Returns the parameters of a chunk from a key.

    A shared layer is initialised by its owner's ``init``, in a program that is the same for every holder, so that all
    copies start with equal bits.
    """
    chunk, at_params = chunks[index], unit_shardings(chunks, index, sharding).params
    params: Params = {}
    for group in layer_groups(chunk, param_specs(chunk)):
        owner = chunks[holders(chunks, group[0])[0]] if group[0] in chunk.shared else chunk
        own = OwnFunction(owner.init)
        at = own.to_own(pick(at_params, group))
        place = (tuple(jax.tree.leaves(at)), jax.tree.structure(at))

        def init(key: jax.Array, numbers: Any, own: OwnFunction = own, names: Any = tuple(at)) -> Params:
            return pick(own(jax.random.wrap_key_data(key, impl=impl), numbers=numbers), names)

        program, _ = store.get(
            ("init", own.kind, impl, sharding, place),
            partial(jax.jit, init, in_shardings=sharding, out_shardings=at),
        )
        params |= own.to_model(program(key, own.numbers))
    return params


def zeros(specs: Any, shardings: Any) -> Any:
    """Returns zeros of these shapes and dtypes; ``shardings`` is one for all, or a tree of them."""
    return full(specs, shardings, 0)


def full(specs: Any, shardings: Any, value: int) -> Any:
    """Returns arrays of these shapes and dtypes that hold one number."""
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, specs)
    return jax.tree.map(lambda s, place: jnp.full(s.shape, value, s.dtype, device=place), specs, shardings)
