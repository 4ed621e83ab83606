"""The functions of R and U of a chunk: the sum of gradients with its norm, the optimizer's step, and its faults.

Nothing is compiled here.

R adds up the copies of a shared layer over the chunks that hold it, and every gradient over the replicas of the stage
where there are several. On several devices each looks at its own share, in the manner of ``shard_map``. So the
gradients of the replicas, which differ, may come in as one array that is replicated in name only.

Order of sums
-------------
The copies of a shared layer must end with equal bits on different stages, and a deterministic run must not depend on
the algorithm of a collective nor on which process holds which device. There the terms are added in ascending order,
first chunk by chunk within a replica, then replica by replica: every replica collects all terms of its share of the
elements, adds them up and hands the sums round, so that no device holds a large gradient more than a few times. All
holders of a shared layer add: sums from one of them would be as many bytes as terms to all, and would leave only when
the terms had come and the replicas had met.
Elsewhere the collective adds, and gives all replicas the same bits, since each element is added up once. The norm is
always added in order.
Replicas that add up by messages (:mod:`rrfp_jax.programs.pieces`) add in the same order, always. So their sums depend
neither on who adds up a piece nor on when it came.

Faults of an update
-------------------
A learning rate that is not a number, or a schedule that divides by zero at some step, spoils finite gradients. All
stages have to leave such a step out together, so the fault must be known when they agree on a step, before the clip
factor is known and without memory for a second copy of the parameters. Hence the update is not computed but followed:
values that come from the scalars of the optimizer's state alone, such as a count and a schedule's rate at this count,
are computed, and of every other value it is known at most that none of its elements is finite. Sums and products
keep that, and a division by zero makes it; operations that are not listed forget it. So no update that may be finite is
called a fault. An update that overflows because of its gradients is not seen.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from rrfp_jax.programs.chunk import Chunk, whole_layers
from rrfp_jax.programs.jaxprs import called_jaxpr, open_jaxpr
from rrfp_jax.programs.optimizers import DelayedState
from rrfp_jax.programs.pieces import GradientPiece, PieceLayout, in_rows
from rrfp_jax.programs.shapes import Specs, accumulator_spec, holders, pick, spec_of
from rrfp_jax.programs.shardings import DATA, WHOLE, axes_at, axes_of_spec
from rrfp_jax.programs.splitting.ir import Apply

_SMALL_BYTES = 64 << 10
"""Bytes up to which one collective that brings more costs less than two."""


@dataclass(frozen=True)
class Tie:
    """The layers that a chunk shares, and the chunks with which it shares them."""

    names: tuple[str, ...]
    """The shared layers that train."""
    sharing: tuple[int, ...]
    """The chunks that it shares with, ascending and with itself."""
    own_position: int
    """The position of the chunk among them."""
    uncounted: frozenset[str]
    """Layers that are counted in their owner's norm."""

    def of_others(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the entries of the other chunks, given one entry per chunk of ``sharing``."""
        return (*entries[: self.own_position], *entries[self.own_position + 1 :])

    def sums(self, accumulators: Any, others: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the shared layers' gradients, added up.

        ``others`` has the shared accumulators of the other chunks. Every holder adds up the same copies in the same
        order (ascending chunk), so all get identical bits.
        """
        copies = [*others[: self.own_position], accumulators, *others[self.own_position :]]
        return {name: _ordered_sum([copy[name] for copy in copies if name in copy]) for name in self.names}


def tie_of(chunks: Sequence[Chunk], index: int, sharing: Sequence[int]) -> Tie:
    """Returns the tie of chunk ``index``; ``sharing`` are the chunks that it shares with, ascending and with itself."""
    names = tuple(sorted(chunks[index].tied))
    uncounted = frozenset(name for name in names if holders(chunks, name)[0] != index)
    return Tie(names, tuple(sharing), tuple(sharing).index(index), uncounted)


def reduce_function(
    tie: Tie,
    mesh: Mesh | None,
    partition: dict[str, Any],
    partitions_of_others: tuple[Any, ...],
    *,
    shares: dict[str, Any] | None = None,
    ordered: bool = False,
) -> Callable[[Any, tuple[Any, ...]], tuple[dict[str, Any], jax.Array]]:
    """Returns ``reduce(accumulators, others) -> (reduced, squared_norm)`` for one chunk.

    Args:
        mesh: of a unit, or of a stage (with the axis ``data`` too), whose replicas are added up;
            None for a unit of one device.
        partition: how the accumulators are cut, a ``PartitionSpec`` for each.
        partitions_of_others: the same for the shared accumulators of each of the other chunks of the tie.
        shares: how the reduced gradients are cut; None: as the accumulators.
        ordered: add up replicas in order.
    """
    at = partition if shares is None else shares

    def reduce(accumulators: Any, others: tuple[Any, ...]) -> tuple[dict[str, Any], jax.Array]:
        sums = tie.sums(accumulators, others)
        layers = accumulators | sums
        if mesh is not None and DATA in mesh.axis_names:
            layers = {
                name: jax.tree.map(functools.partial(_over_replicas, ordered=ordered or name in sums), layer, at[name])
                for name, layer in layers.items()
            }
        counted = [name for name in layers if name not in tie.uncounted]
        return layers, _squared_norm(pick(layers, counted), pick(at, counted))

    if mesh is None:
        return reduce
    in_specs, out_specs = (partition, partitions_of_others), (at, WHOLE)
    return jax.shard_map(reduce, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def sum_function(
    tie: Tie, layout: PieceLayout, replica: int, mesh: Mesh | None, names_of_others: Sequence[tuple[str, ...]]
) -> Callable[..., tuple[GradientPiece, jax.Array]]:
    """Returns ``add(own, rest, lives) -> (sum, squared_norm)`` for one piece of a chunk's gradients.

    ``own`` is the part of this replica's piece with the chunk's own layers. ``rest`` is (shared, tied, others): the
    part with shared layers, those that each other chunk of the tie holds in this replica (``names_of_others``), and
    the piece and ``tied`` of every other replica, ascending. ``lives[replica, place]`` is a truth value for each
    replica and chunk of the tie: where it is False the term is left out.
    """

    def add(own: Any, rest: Any, lives: jax.Array) -> tuple[GradientPiece, jax.Array]:
        shared, tied, others = rest
        parts = [*others[:replica], (GradientPiece(own, shared), tied), *others[replica:]]
        replicas = range(layout.num_pieces)
        owned = _sum_of_living([(parts[r][0].own, lives[r, tie.own_position]) for r in replicas])[0]
        sums = {}
        for name in tie.names:
            within = []
            for r, (piece, own_tied) in enumerate(parts):
                held = [*own_tied[: tie.own_position], piece.shared, *own_tied[tie.own_position :]]
                within.append(
                    _sum_of_living([(each[name], lives[r, place]) for place, each in enumerate(held) if name in each])
                )
            sums[name] = _sum_of_living(within)[0]
        total = GradientPiece(owned, sums)
        counted = [name for name in tie.names if name not in tie.uncounted]
        rows = jax.tree.map(in_rows, (total.own, pick(total.shared, counted)))
        return total, _squared_norm(rows, (layout.partition.own, pick(layout.partition.shared, counted)))

    if mesh is None:
        return add
    at = layout.partition
    tied = tuple(pick(at.shared, names) for names in names_of_others)
    in_specs = (at.own, (at.shared, tied, ((at, tied),) * (layout.num_pieces - 1)), WHOLE)
    return jax.shard_map(add, mesh=mesh, in_specs=in_specs, out_specs=(at, WHOLE), check_vma=False)


def _sum_of_living(terms: Sequence[tuple[Any, jax.Array]]) -> tuple[Any, jax.Array]:
    """Returns the sum of those trees whose truth value holds, from the first to the last, and whether one does."""
    total, has_begun = terms[0]
    for term, is_alive in terms[1:]:

        def more(total: Any, term: Any, is_alive: Any = is_alive, has_begun: Any = has_begun) -> Any:
            return jnp.where(is_alive, jnp.where(has_begun, total + term, term), total)

        total, has_begun = jax.tree.map(more, total, term), has_begun | is_alive
    return total, has_begun


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("inner", "count", "parameter_average"), meta_fields=("decay",)
)
@dataclass(frozen=True)
class AveragedState:
    """The state of an optimizer that :func:`averaged` returns."""

    inner: Any
    """The state of the optimizer given."""
    count: Any
    """The number of updates."""
    parameter_average: Any
    """The average of the parameters, in the dtype of accumulators; their initial values before the first update."""
    decay: float
    """The weight of an update's parameters over that of the next one's."""

    def after(self, params: Any) -> "AveragedState":
        """Returns the state after an update that led to ``params``, but for the optimizer's own."""
        count = self.count + 1
        # 1 - decay ** count without its cancellation; the weight of the first update's parameters is 1.
        weight = (1 - self.decay) / -jnp.expm1(count.astype(jnp.float32) * math.log(self.decay))

        def follow(old: jax.Array, new: jax.Array) -> jax.Array:
            return old + (new.astype(old.dtype) - old) * weight.astype(old.dtype)

        return replace(self, count=count, parameter_average=jax.tree.map(follow, self.parameter_average, params))


def averaged(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Returns the optimizer with an exponential moving average of the parameters in its state.

    After ``t`` updates the average of ``p[1]`` to ``p[t]`` is ``sum(decay ** (t - k) * p[k]) * (1 - decay) / (1 - decay
    ** t)``, as ``optax.ema(decay)`` gives it: its weights add up to 1, so that initial values have no part in it. A
    step that is left out does not count. To be found by a pipeline, it must be the outermost part of its optimizer.
    """
    if not 0 < decay < 1:
        raise ValueError(f"decay is {decay}: give a number between 0 and 1, such as 0.999")

    def init(params: Any) -> AveragedState:
        average = jax.tree.map(lambda p, spec: jnp.array(p, spec.dtype), params, accumulator_spec(spec_of(params)))
        return AveragedState(optimizer.init(params), jnp.zeros((), jnp.int32), average, decay)

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        updates, inner = optimizer.update(gradients, state.inner, params)
        return updates, replace(state.after(optax.apply_updates(params, updates)), inner=inner)

    return optax.GradientTransformation(init, update)


class OptimizerOnHost(optax.GradientTransformation):
    """An optimizer whose state lies in host memory, but for scalars; see :func:`on_host`."""


def on_host(optimizer: optax.GradientTransformation) -> OptimizerOnHost:
    """Returns the optimizer with its state in pinned host memory.

    Each layer is updated by itself, so that at any time the devices hold about the state of one layer. To be found by a
    pipeline, it must be the outermost part of its optimizer.
    """
    return OptimizerOnHost(optimizer.init, optimizer.update)


def moved_state(optimizer: optax.GradientTransformation, state: Any, space: Any) -> Any:
    """Returns the arrays of an optimizer's state, in a traced program, in another ``jax.memory.Space`` where it lies on
    the host."""
    if not isinstance(optimizer, OptimizerOnHost):
        return state
    return jax.tree.map(lambda leaf: jax.device_put(leaf, space) if leaf.ndim else leaf, state)


def update_function(
    optimizer: optax.GradientTransformation, sign_rates: Mapping[str, float]
) -> Callable[..., tuple[Any, Any, Any]]:
    """Returns ``update(params, optimizer_state, accumulators, scale, apply)``, which returns the first three anew.

    Gradients are ``accumulators * scale`` in the dtype of the parameters; accumulators come back as zeros. Where
    ``apply`` is False, parameters and state come back bit for bit, whatever the accumulators hold, but for the older
    parameters of a :class:`DelayedState`, which are those given. ``sign_rates`` are
    those of the chunk: the optimizer sees zeros for the gradients of these parameters, and its updates of them are
    left out.
    """

    def rate_of(path: Any) -> float | None:
        return sign_rates.get(str(getattr(path[-1], "key", "")))

    def by_sign(path: Any, new: jax.Array, old: jax.Array, sums: jax.Array) -> jax.Array:
        rate = rate_of(path)
        return new if rate is None else old - rate * jnp.sign(sums).astype(old.dtype)

    def update(params: Any, state: Any, accumulators: Any, scale: jax.Array, apply: jax.Array) -> tuple[Any, Any, Any]:
        state = moved_state(optimizer, state, jax.memory.Space.Device)
        grads = jax.tree.map(lambda a, p: (a * scale.astype(a.dtype)).astype(p.dtype), accumulators, params)
        if sign_rates:
            grads = jax.tree.map_with_path(lambda at, g: g if rate_of(at) is None else jnp.zeros_like(g), grads)
        updates, new_state = optimizer.update(grads, state, params)
        new_params, before = optax.apply_updates(params, updates), params
        if sign_rates:
            new_params = jax.tree.map_with_path(by_sign, new_params, params, accumulators)
            if isinstance(new_state, AveragedState):  # It has averaged what the optimizer alone would have made.
                new_state = replace(state.after(whole_layers(new_params)), inner=new_state.inner)
        params, state = jax.tree.map(
            lambda new, old: jax.lax.select(apply, new, old), (new_params, new_state), (params, state)
        )
        if isinstance(state, DelayedState):  # The next step has one update less than this, also one that is left out.
            state = state._replace(older=before)
        state = moved_state(optimizer, state, jax.memory.Space.Host)
        return params, state, jax.tree.map(jnp.zeros_like, accumulators)

    return update


def _over_replicas(gradient: jax.Array, share: PartitionSpec, *, ordered: bool) -> jax.Array:
    """Returns the sum over all replicas, or this replica's share of it."""
    cut = next((dim for dim in range(len(share)) if DATA in axes_at(share, dim)), None)
    if ordered:
        return _ordered_over_replicas(gradient) if cut is None else _ordered_sum(list(_own_terms(gradient, cut)))
    if cut is None:
        return jax.lax.psum(gradient, DATA)
    return jax.lax.psum_scatter(gradient, DATA, scatter_dimension=cut, tiled=True)


def _ordered_over_replicas(gradient: jax.Array) -> jax.Array:
    """Returns the sum over all replicas, in order.

    Each replica adds up all terms of a small gradient, and of a large one the terms of its share.
    """
    if gradient.nbytes <= _SMALL_BYTES:
        return _ordered_sum(list(jax.lax.all_gather(gradient, DATA)))
    elements = gradient.reshape(-1)
    padded = jnp.pad(elements, (0, -elements.size % jax.lax.axis_size(DATA)))
    sums = _ordered_sum(list(_own_terms(padded, 0)))
    return jax.lax.all_gather(sums, DATA, tiled=True)[: elements.size].reshape(gradient.shape)


def _own_terms(gradient: jax.Array, cut: int) -> jax.Array:
    """Returns ``[replicas, ...]``: for every replica the slice of its gradient that is part of this replica's share."""
    num_replicas = jax.lax.axis_size(DATA)
    shape = gradient.shape
    slices = gradient.reshape(*shape[:cut], num_replicas, shape[cut] // num_replicas, *shape[cut + 1 :])
    return jax.lax.all_to_all(slices, DATA, split_axis=cut, concat_axis=0)


def _squared_norm(layers: Any, partition: Any) -> jax.Array:
    """Returns the float32 sum of the squares of all leaves, the same on all devices; not finite if any leaf is not."""
    # leaves that are cut over the same axes are summed first, so that each set of axes needs one collective
    totals: dict[tuple[str, ...], jax.Array] = {}
    for leaf, spec in zip(jax.tree.leaves(layers), jax.tree.leaves(partition), strict=True):
        axes = axes_of_spec(spec)
        is_complex = jnp.iscomplexobj(leaf)
        squares = jnp.square(leaf.real) + jnp.square(leaf.imag) if is_complex else jnp.square(leaf)
        totals[axes] = totals.get(axes, jnp.float32(0)) + jnp.sum(squares).astype(jnp.float32)
    for axes in sorted(totals):
        for axis in axes:
            totals[axes] = _ordered_sum(list(jax.lax.all_gather(totals[axes], axis)))
    return _ordered_sum([totals[axes] for axes in sorted(totals)] or [jnp.float32(0)])


def _ordered_sum(trees: Sequence[Any]) -> Any:
    """Returns the sum of some trees, added from the first to the last."""
    total = trees[0]
    for tree in trees[1:]:
        total = jax.tree.map(jnp.add, total, tree)
    return total


# -- faults of an update -----------------------------------------------------------------------------------------------

_LARGEST = 64
"""Number of elements of the largest array that is computed."""
_ANY = {"add", "sub", "mul", "add_any", "dot_general"}
"""Operations whose result has no finite element if any operand has none."""
_SAME = {"neg", "abs", "sqrt", "copy", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose"}
_SAME |= {"reduce_sum", "expand_dims", "stop_gradient"}

Flag = Any
"""A flag: False, or a traced truth value that says whether surely no element of an array is finite."""


@dataclass(frozen=True, eq=False)
class _Unknown:
    """An array that is not computed."""

    is_spoilt: Flag


def scalars_of(state: Any) -> list[Any]:
    """Returns the scalars of an optimizer's state."""
    return [leaf for leaf in jax.tree.leaves(state) if not leaf.shape]


def update_fault(optimizer: optax.GradientTransformation, params: Specs) -> Callable[[Sequence[Any]], Flag]:
    """Returns ``fault(scalars)``, which tells from the scalars of an optimizer's state whether its next update of some
    of ``params`` cannot be finite."""
    state = jax.eval_shape(optimizer.init, params)
    update = jax.make_jaxpr(optimizer.update)(params, state, params)
    num_params = len(jax.tree.leaves(params))

    def fault(scalars: Sequence[Any]) -> Flag:
        rest = iter(scalars)
        known = [_Unknown(False) if leaf.shape else next(rest) for leaf in jax.tree.leaves(state)]
        unknown = [_Unknown(False)] * num_params
        updates = _run(update, [*unknown, *known, *unknown])[:num_params]
        sizes = [var.aval.size for var in open_jaxpr(update).outvars[:num_params]]
        return _any_flag(*(_flag(each) for each, size in zip(updates, sizes, strict=True) if size))

    return fault


def _run(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    parts = open_jaxpr(jaxpr)
    known: dict[Any, Any] = dict(zip(parts.invars, inputs, strict=True))
    consts = (const if jnp.size(const) <= _LARGEST else _Unknown(_flag(const)) for const in parts.consts)
    known.update(zip(parts.constvars, consts, strict=True))

    def read(atom: Any) -> Any:
        return jnp.asarray(atom.val) if isinstance(atom, jex.Literal) else known[atom]

    for eqn in parts.equations:
        known.update(zip(eqn.outvars, _equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in parts.outvars]


def _equation(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
    is_small = all(getattr(var.aval, "size", 1) <= _LARGEST for var in eqn.outvars)
    if is_small and not eqn.effects and not any(isinstance(each, _Unknown) for each in inputs):
        return Apply(primitive=eqn.primitive, params=eqn.params, context=eqn.ctx, effectful=False).run(*inputs)
    if (called := called_jaxpr(eqn)) is not None:
        return _run(called, inputs)
    if eqn.primitive.name == "cond":
        branches = zip(*(_run(branch, inputs[1:]) for branch in eqn.params["branches"]), strict=True)
        return [_Unknown(_chosen(inputs[0], choices)) for choices in branches]
    name, flags = eqn.primitive.name, [_flag(each) for each in inputs]
    if name in _ANY:
        flag = _any_flag(*flags)
    elif name == "select_n":
        flag = _chosen(inputs[0], inputs[1:])
    elif name == "div" and not isinstance(divisor := inputs[1], _Unknown):
        flag = _any_flag(flags[0], _all(jnp.isnan(divisor) | (divisor == 0)))
    else:
        flag = flags[0] if name in _SAME or name == "div" else False
    return [_Unknown(flag)] * len(eqn.outvars)


def _chosen(which: Any, choices: Sequence[Any]) -> Flag:
    """Returns the flag of the value that an index or a truth value chooses."""
    flags = [_flag(each) for each in choices]
    if all(flag is False for flag in flags):
        return False
    if isinstance(which, _Unknown) or jnp.size(which) != 1:
        return False if any(flag is False for flag in flags) else functools.reduce(jax.lax.bitwise_and, flags)
    index = jnp.clip(jnp.asarray(which).reshape(()).astype(jnp.int32), 0, len(flags) - 1)
    return jnp.stack([jnp.asarray(flag) for flag in flags])[index]


def _flag(value: Any) -> Flag:
    if isinstance(value, _Unknown):
        return value.is_spoilt
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return False
    return _all(jax.lax.bitwise_not(jnp.isfinite(value)))


def _all(truths: Any) -> Flag:
    return jnp.all(truths) if jnp.ndim(truths) else truths


def _any_flag(*flags: Flag) -> Flag:
    """Returns False if all flags are False, else a traced truth value that says whether any flag is true."""
    found = [flag for flag in flags if flag is not False]
    # Not by `jnp.any`: each call would cost a trace of its own, and every layer makes some.
    return functools.reduce(jax.lax.bitwise_or, found) if found else False


def signed_norm(
    optimizer: optax.GradientTransformation, groups: Sequence[Specs], *, may_lack: bool = False
) -> tuple[Callable[[Any, Any], Any] | None, Specs]:
    """Returns ``signed(squared_norm, scalars)`` and the shapes of the scalars.

    The result of ``signed`` is negative if the next update of some group of parameters cannot be finite. The scalars
    are those of the optimizer's state, a list for each group. There are neither if no fault can be. With ``may_lack`` a
    truth value stands beside each list; where it is False the state is not here, and the group is not looked at.
    """
    scalars = spec_of([scalars_of(jax.eval_shape(optimizer.init, params)) for params in groups])
    if may_lack:
        scalars = [(own, jax.ShapeDtypeStruct((), np.bool_)) for own in scalars]
    faults = [update_fault(optimizer, params) for params in groups]
    found: list[Flag] = []

    def is_spoilt(scalars: Any) -> Flag:
        flags = []
        for fault, own in zip(faults, scalars, strict=True):
            flag = fault(own[0] if may_lack else own)
            flags.append(flag & own[1] if may_lack and flag is not False else flag)
        found.append(_any_flag(*flags))
        return found[0]

    traced = jax.make_jaxpr(is_spoilt)(scalars)
    if found[0] is False:
        return None, ()

    def signed(squared_norm: Any, scalars: Any) -> Any:
        (flag,) = jex.jaxpr_as_fun(traced)(*jax.tree.leaves(scalars))
        return jnp.where(flag, -squared_norm, squared_norm)

    return signed, scalars
