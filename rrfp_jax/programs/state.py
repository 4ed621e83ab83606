"""The state that a chunk starts from. It needs no batch, so a run can make or restore it before anything is compiled.

Initial values depend on the key alone, not on the devices that share a parameter. Nothing here needs another process:
arrays on several processes are made by programs that all of them run, from the same key.

An optimizer state is a tuple, one entry per *part* of the chunk's parameters (:func:`state_parts`). It lies on the
chunk's unit, or is cut over all replicas of its stage (ZeRO-1, Rajbhandari et al. 2020): every array of it, where a
collective updates all replicas, and else by whole arrays, of which a replica holds the shares that it updates.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    sharding_on_host,
    shardings_of,
    shared_out,
    spread,
    state_partition,
    unit_shardings,
)
from rrfp_jax.programs.stage_devices import StageDevices
from rrfp_jax.programs.update_functions import OptimizerOnHost


@dataclass
class ChunkState:
    """The arrays that one chunk carries from step to step, on its unit's devices."""

    params: Params
    optimizer_state: Any
    """One entry per part of the chunk's parameters (see :func:`state_parts`), None for a share that is not held here;
    empty for a chunk that does not train, or whose replicas share the state."""
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


def layer_groups(chunk: Chunk, names: Iterable[str], *, apart: bool = False) -> tuple[tuple[str, ...], ...]:
    """Returns layer names of a chunk in groups, of which programs of their own take care: its own, together or each
    ``apart``, then each shared one."""
    names = tuple(names)
    own = tuple(name for name in names if name not in chunk.shared)
    groups = [(name,) for name in sorted(own)] if apart else [own]  # mappings have their layers in any order
    return tuple(group for group in (*groups, *((name,) for name in sorted(chunk.shared) if name in names)) if group)


@dataclass(frozen=True)
class Shares:
    """The shares into which the replicas of a stage cut an optimizer state."""

    number: int
    """How many there are."""
    held: Collection[int]
    """The shares that the unit in question holds."""


@dataclass(frozen=True)
class StatePart:
    """The parameters of one entry of an optimizer state: some layers of a chunk, or the arrays of a share in them."""

    layers: tuple[str, ...]
    share: int = 0
    arrays: tuple[frozenset[int], ...] = ()
    """For each layer the arrays of the share, by their number in it; empty: all arrays."""

    @property
    def name(self) -> str:
        """The name for programs, unique in a chunk."""
        return f"{', '.join(self.layers)}{f' (share {self.share})' if self.arrays else ''}"

    def pick(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what these layers have for the parameters of the part, and None for all others in the layers."""
        picked = pick(layers, self.layers)
        for name, numbers in zip(self.layers, self.arrays, strict=False):
            leaves, structure = jax.tree.flatten(picked[name])
            own = [leaf if n in numbers else None for n, leaf in enumerate(leaves)]
            picked[name] = jax.tree.unflatten(structure, own)
        return picked


def state_parts(
    chunk: Chunk, params: Mapping[str, Specs], optimizer: optax.GradientTransformation, num_shares: int = 1
) -> tuple[StatePart, ...]:
    """Returns the parts of a chunk's parameters, given those that train: each group of layers, cut into shares.

    Where the optimizer's state lies in host memory, each layer is a group, for it comes to the devices part by part.
    A share has whole arrays, since an optimizer may go by their shapes. The largest array first, each goes to the share
    that has the fewest bytes. A shared layer is cut in the same way in every chunk that holds it.
    """
    groups = layer_groups(chunk, params, apart=isinstance(optimizer, OptimizerOnHost))
    if num_shares == 1:
        return tuple(map(StatePart, groups))
    parts: list[StatePart] = []
    loads = [0] * num_shares
    # The chunk's own layers last: they even out the others. Sorted, since mappings have their layers in any order.
    for group in map(sorted, reversed(groups)):
        added = [0] * num_shares
        before = [0] * num_shares if group[0] in chunk.shared else loads
        sizes = [
            (leaf.size * leaf.dtype.itemsize, name, n)
            for name in group
            for n, leaf in enumerate(jax.tree.leaves(params[name]))
        ]
        taken: list[dict[str, set[int]]] = [{} for _ in range(num_shares)]
        for size, name, n in sorted(sizes, key=lambda array: -array[0]):  # of equal sizes, by name
            share = min(range(num_shares), key=[sum(each) for each in zip(before, added, strict=True)].__getitem__)
            added[share] += size
            taken[share].setdefault(name, set()).add(n)
        loads = [load + more for load, more in zip(loads, added, strict=True)]
        own = [(share, {name: of[name] for name in group if name in of}) for share, of in enumerate(taken) if of]
        parts = [StatePart(tuple(of), share, tuple(map(frozenset, of.values()))) for share, of in own] + parts
    return tuple(parts)


def share_of(parts: Iterable[StatePart], share: int, layers: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns what these layers have for the parameters of one share, one entry per part of it."""
    return tuple(part.pick(layers) for part in parts if part.share == share)


def overlaid(layers: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the layers, with the arrays of others in the place of theirs, as far as those have any."""
    result = dict(layers)
    for other in others:
        for name, layer in other.items():
            own = result.setdefault(name, layer)
            result[name] = jax.tree.map(
                lambda new, old: old if new is None else new, layer, own, is_leaf=lambda leaf: leaf is None
            )
    return result


def initial_state(
    chunks: tuple[Chunk, ...],
    index: int,
    optimizer: optax.GradientTransformation,
    *,
    key: jax.Array,
    sharding: Sharding,
    trains: bool,
    shard_optimizer: bool = False,
    shares: Shares | None = None,
    store: ProgramStore | None = None,
) -> ChunkState:
    """Returns the state of chunk ``index`` from a typed key, the same key for all chunks.

    ``sharding`` is the boundary of the chunk's unit, see :mod:`rrfp_jax.programs.shardings`. ``trains`` is False for a
    chunk whose parameters do not change. With ``shard_optimizer`` the optimizer state is left out, because the replicas
    share it: see :func:`initial_shared_state`. ``shares`` are those of which the unit holds some; None: the state is
    not cut. ``store`` has the programs that are compiled already for other chunks.
    """
    # raw numbers, because a typed key cannot be put onto devices of other processes
    numbers = np.asarray(jax.random.key_data(key))
    store = store or ProgramStore()
    impl = str(jax.random.key_impl(key))
    params = _initial_params(chunks, index, sharding, key=numbers, impl=impl, store=store)
    options: dict[str, Any] = {"sharding": sharding, "trains": trains, "shard_optimizer": shard_optimizer}
    state = state_specs(chunks, index, optimizer, **options, shares=shares)
    parts = _parts(chunks[index], optimizer, shares)
    state.params, at_sums = params, shardings_of(state.accumulators)
    state.optimizer_state = _initial_optimizer_state(optimizer, params, parts, state.optimizer_state, store)
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
    shares: Shares | None = None,
) -> ChunkState:
    """Returns the state of ``initial_state`` as specs with shardings; nothing is computed."""
    params = spread(spec_of(param_specs(chunks[index])), unit_shardings(chunks, index, sharding).params)
    has_own = trains and not shard_optimizer
    return ChunkState(
        params=params,
        optimizer_state=optimizer_specs(chunks, index, optimizer, sharding, shares) if has_own else (),
        accumulators=accumulator_spec(pick(params, trained_specs(chunks[index]))) if trains else {},
    )


def _parts(chunk: Chunk, optimizer: optax.GradientTransformation, shares: Shares | None) -> tuple[StatePart, ...]:
    return state_parts(chunk, trained_specs(chunk), optimizer, 1 if shares is None else shares.number)


def optimizer_specs(
    chunks: Sequence[Chunk],
    index: int,
    optimizer: optax.GradientTransformation,
    devices: Sharding | StageDevices,
    shares: Shares | None = None,
) -> tuple[Specs, ...]:
    """Returns the optimizer state of chunk ``index``, one entry per part of its parameters, as specs with shardings.

    ``devices`` is the boundary of a unit, or the stage over whose replicas the state is cut. Shares that are not held
    are None. Only for a chunk that trains; nothing is computed.
    """
    params = spec_of(trained_specs(chunks[index]))
    replicas: int | None = None
    if isinstance(devices, StageDevices):
        partition, replicas = param_partition(chunks, index, axes_of(devices.mesh)), devices.data
        devices = devices.sharding()
    else:
        partition = unit_shardings(chunks, index, devices).partition
    states: list[Specs | None] = []
    for part in _parts(chunks[index], optimizer, shares):
        if shares is not None and part.share not in shares.held:
            states.append(None)
            continue
        own = part.pick(params)
        state = spec_of(jax.eval_shape(optimizer.init, own))
        cut = state_partition(state, own, part.pick(partition))
        at = place(cut if replicas is None else shared_out(cut, state, replicas), devices)
        if isinstance(optimizer, OptimizerOnHost):
            at = jax.tree.map(lambda leaf, sharding: sharding_on_host(sharding) if leaf.shape else sharding, state, at)
        states.append(spread(state, at))
    return tuple(states)


def initial_optimizer_state(
    chunks: Sequence[Chunk],
    index: int,
    optimizer: optax.GradientTransformation,
    sharding: Sharding,
    params: Params,
    *,
    shares: Shares | None = None,
    store: ProgramStore | None = None,
) -> tuple[Any, ...]:
    """Returns the optimizer state of chunk ``index`` for these parameters, on its unit with boundary ``sharding``."""
    specs = optimizer_specs(chunks, index, optimizer, sharding, shares)
    parts = _parts(chunks[index], optimizer, shares)
    return _initial_optimizer_state(optimizer, params, parts, specs, store or ProgramStore())


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
    parts = _parts(chunks[index], optimizer, None)
    return _initial_optimizer_state(optimizer, joined, parts, specs, store or ProgramStore())


def _initial_optimizer_state(
    optimizer: optax.GradientTransformation,
    params: Params,
    parts: Sequence[StatePart],
    specs: tuple[Specs, ...],
    store: ProgramStore,
) -> tuple[Any, ...]:
    states: list[Any] = []
    for part, state in zip(parts if specs else (), specs, strict=True):
        if state is None:
            states.append(None)
            continue
        own = part.pick(params)
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
        made: Params = {}
        for maker in own.makers(tuple(at)):
            places = [at[name] for name in maker.names]

            def init(key: jax.Array, numbers: Any, make: Callable[..., Any] = maker.make) -> Any:
                return make(jax.random.wrap_key_data(key, impl=impl), numbers)

            program, _ = store.get(
                ("init", maker.kind, impl, sharding, tuple(jax.tree.leaves(places)), jax.tree.structure(places)),
                partial(jax.jit, init, in_shardings=sharding, out_shardings=places),
            )
            made |= zip(maker.names, program(key, maker.numbers), strict=True)
        params |= own.to_model(made)
    return params


def zeros(specs: Any, shardings: Any) -> Any:
    """Returns zeros of these shapes and dtypes; ``shardings`` is one for all, or a tree of them."""
    return full(specs, shardings, 0)


def full(specs: Any, shardings: Any, value: int) -> Any:
    """Returns arrays of these shapes and dtypes that hold one number."""
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, specs)
    return jax.tree.map(lambda s, place: jnp.full(s.shape, value, s.dtype, device=place), specs, shardings)
