"""Refuses optimizers that would train a model otherwise chunk by chunk than as a whole.

Every chunk is updated on its own, from its own gradients, and so is every shared layer. That equals one update of the
whole model only if the optimizer treats every parameter array by itself, as AdamW, Lion or Adafactor do, and treats it
alike whatever other arrays stand beside it. A clip by global norm inside the optax chain would clip each chunk by its
own norm instead. Learning rates by place in the tree, a division by the number of arrays, or noise whose keys are split
over the arrays would come out differently for a part of the tree.

So the optimizer's ``init`` and ``update`` are traced on the parameters of the whole model, and on every group of layers
that is updated by itself. All values of all traces are numbered, with the rule that two values get one number only
if they are computed by the same operations from values of the same numbers (*value numbering*); calls, conditionals and
loops are followed inside. Hence equal numbers mean equal values, whatever the numbers of the inputs are.

State is compared by bisimulation. At first two arrays of state count as equal if their initial values have one number.
An update keeps apart those whose next values differ, and the rounds end when no class is divided any more. Then arrays
of one class stay equal over any number of steps, and an update that has one number in the whole and in the group is the
same in every step. An optimizer that cannot be shown to do the same is refused.

Every number also carries the set of parameters on which the value depends, as the bits of an integer. So the same
rounds show an update that depends on two arrays. An unknown operation mixes everything: the answer may name too many
dependencies, never too few.
"""

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import reduce, wraps
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.core.replicas import SparseAveraging
from rrfp_jax.programs.chunk import parts_of, whole_layers
from rrfp_jax.programs.jaxprs import called_jaxpr, open_jaxpr, scan_shape
from rrfp_jax.programs.pieces import part_specs
from rrfp_jax.programs.sameness import Same, identity, parameter_identity
from rrfp_jax.programs.shapes import Specs, pick, spec_of, spec_text

REMEDY = (
    "each chunk is updated on its own, so an optimizer must treat every array by itself: use clip_norm=... in "
    "updates=UpdateRules(clip_norm=...) instead of optax.clip_by_global_norm, and skip_nonfinite there instead of "
    "optax.apply_if_finite"
)


def with_standard_promotion(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer with JAX's standard promotion: strict promotion is for a user's own code, and optax is not
    written for it."""
    config: Any = jax.config
    if (config.jax_numpy_dtype_promotion, config.jax_numpy_rank_promotion) == ("standard", "allow"):
        return optimizer

    def relaxed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return function(*args, **kwargs)

        return call

    return optimizer._replace(init=relaxed(optimizer.init), update=relaxed(optimizer.update))


def of_whole_layers(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer for parameters among which parts of layers may be: it sees these by the layers' names, as
    masks, labels and decays go by them, and so does its state."""

    def init(params: Any) -> Any:
        return optimizer.init(whole_layers(params))

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        updates, state = optimizer.update(
            whole_layers(gradients), state, None if params is None else whole_layers(params)
        )
        return parts_of(updates, gradients), state

    return optimizer._replace(init=init, update=update)  # of the same class, which tells where the state lies


class DelayedState(NamedTuple):
    """The state of an optimizer whose gradients are taken at the parameters before its last update."""

    inner: Any
    """State of the optimizer itself."""
    older: Any
    """The parameters as they were before the last update, at which the next step takes its gradients."""


def delayed(optimizer: optax.GradientTransformation, undelayed: Collection[str] = ()) -> optax.GradientTransformation:
    """Returns the optimizer with a state that also holds the parameters before the last update, but for groups of
    ``undelayed`` layers, whose gradients are taken at the newest ones.

    The update itself is the optimizer's own, applied to the newest parameters. The older ones are part of the state, so
    that checkpoints, shardings and forecasts of memory know them like any moment of the gradients.
    """

    def init(params: Any) -> Any:
        if undelayed and all(name in undelayed for name in params):
            return optimizer.init(params)
        return DelayedState(optimizer.init(params), jax.tree.map(jnp.copy, params))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not isinstance(state, DelayedState):
            return optimizer.update(gradients, state, params)
        updates, inner = optimizer.update(gradients, state.inner, params)
        return updates, DelayedState(inner, params)

    return optax.GradientTransformation(init, update)


class AveragingState(NamedTuple):
    """The state of an optimizer whose replicas average parameters late."""

    inner: Any
    """State of the optimizer itself."""
    late: Any
    """Differences that later updates will add, the next one's first: for each parameter an array [tau, elements]."""


def averaging(optimizer: optax.GradientTransformation, sparse: SparseAveraging) -> optax.GradientTransformation:
    """Returns the optimizer with a state that also holds the averages under way; the update itself is its own.

    They are part of the state for the reasons of :func:`delayed`.
    """

    def init(params: Any) -> AveragingState:
        specs = part_specs(spec_of(params), sparse.num_parts)
        late = jax.tree.map(lambda spec: jnp.zeros((sparse.tau, *spec.shape), spec.dtype), specs)
        return AveragingState(optimizer.init(params), late if sparse.tau else ())

    def update(gradients: Any, state: AveragingState, params: Any = None) -> tuple[Any, AveragingState]:
        updates, inner = optimizer.update(gradients, state.inner, params)
        return updates, state._replace(inner=inner)

    return optax.GradientTransformation(init, update)


class _Trace(NamedTuple):
    """An optimizer as two jaxprs over flat leaves, with the shapes of its state before and after an update."""

    init: Any
    update: Any
    state: Specs
    new_state: Specs
    names: tuple[str, ...]
    """The paths of the parameters, in the order of the leaves."""


def check_leafwise(
    optimizer: optax.GradientTransformation,
    params: Specs,
    groups: Iterable[Sequence[str]] = (),
    shares: Iterable[Specs] = (),
) -> None:
    """Raises ValueError if ``optimizer`` couples leaves of ``params``, or updates one otherwise in its group alone.

    ``params`` holds the shapes of the whole model, as a dictionary from layer name to parameters: in a part of it a
    coupling can go unseen. ``groups`` name the layers that are updated together. ``shares`` are parts of ``params``
    that are, with None in place of all other arrays.
    """
    whole = _trace(optimizer, params)
    # a group that has all layers is the whole model
    parts = [_trace_of_group(optimizer, pick(params, group)) for group in groups if len(group) < len(params)]
    parts += [_trace_of_group(optimizer, share) for share in shares]
    traces = [whole, *parts]
    if len(jax.tree.leaves(whole.state)) == len(jax.tree.leaves(whole.new_state)):
        updates = _compared(traces)
        for trace, own in zip(parts, updates[1:], strict=True):
            _check_alike(whole.names, updates[0], trace.names, own)
    for trace in traces:
        _check_state(trace)


_ELEMENTWISE = frozenset({
    *("abs", "add", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "div", "eq"),
    *("erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic"),
    *("lt", "max", "min", "mul", "ne", "neg", "not", "optimization_barrier", "or", "pow", "reduce_precision", "rem"),
    *("round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
})  # fmt: skip
"""Operations that treat every element of an array by itself."""


def check_elementwise(optimizer: optax.GradientTransformation, shards: Specs) -> None:
    """Raises ValueError if the update of an array of these layers, which are shards, does not treat every element by
    itself: it would then depend on how the layer is cut."""
    for name, layer in shards.items():
        trace = _trace_of_group(optimizer, {name: layer})
        mixing = next(filter(None, map(_mixing, (trace.init, trace.update))), None)
        if mixing is not None:
            raise ValueError(
                f"the optimizer updates {name}, a shard of a layer, otherwise than it would in the whole layer, as "
                f"its {mixing} goes over an array: use one that treats every element by itself, such as adamw or lion, "
                "or do not cut the layer into shards"
            )


def _mixing(jaxpr: Any) -> str | None:
    """Returns the name of an operation that may mix elements of an array, or makes one that has a place in it."""
    for eqn in open_jaxpr(jaxpr).equations:
        name, called = eqn.primitive.name, called_jaxpr(eqn)
        inner = [called] if called is not None else eqn.params["branches"] if name == "cond" else []
        if inner:
            found = next(filter(None, map(_mixing, inner)), None)
        elif name == "broadcast_in_dim":
            found = name if eqn.invars[0].aval.shape else None
        else:
            has_arrays = any(getattr(var.aval, "shape", ()) for var in [*eqn.invars, *eqn.outvars])
            found = name if has_arrays and name not in _ELEMENTWISE else None
        if found is not None:
            return found
    return None


def _trace(optimizer: optax.GradientTransformation, params: Specs) -> _Trace:
    try:
        init, state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
        update, shapes = jax.make_jaxpr(optimizer.update, return_shape=True)(params, state, params)
    except Exception as error:  # a schedule of learning rates is a user's own function
        raise ValueError(
            f"the optimizer cannot be called as update(gradients, state, params), as the pipeline does: {error}"
        ) from error
    updates, new_state = shapes
    if len(jax.tree.leaves(updates)) != len(jax.tree.leaves(params)):
        raise ValueError("the optimizer's update returns another number of arrays than there are parameters")
    names = tuple(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))
    return _Trace(init, update, spec_of(state), spec_of(new_state), names)


def _trace_of_group(optimizer: optax.GradientTransformation, params: Specs) -> _Trace:
    try:
        return _trace(optimizer, params)
    except ValueError as error:
        raise ValueError(
            f"the optimizer takes the whole model, but not the layers {', '.join(params)} alone, as the pipeline "
            "updates them: give masks and labels as functions of the parameters, not as trees "
            f"({error.__cause__ or error})"
        ) from error


def _check_state(trace: _Trace) -> None:
    before = jax.tree_util.tree_leaves_with_path(trace.state)
    after = jax.tree.leaves(trace.new_state)
    if len(before) != len(after):
        raise ValueError(f"the optimizer's state grows from {len(before)} to {len(after)} arrays in one update")
    for (path, old), new in zip(before, after, strict=True):
        if old != new:
            raise ValueError(
                f"the optimizer turns its state {jax.tree_util.keystr(path)} from {spec_text(old)} into "
                f"{spec_text(new)} in one update: shapes and dtypes must stay the same from step to step"
            )


def _compared(traces: Sequence[_Trace]) -> list[list[int]]:
    """Returns the number of every parameter's update, by trace.

    The first trace is of the whole model. Raises ValueError if one of its updates, or its state, depends on two
    parameters.
    """
    names = traces[0].names
    bits = {name: 1 << index for index, name in enumerate(names)}
    values = _Values(len(names))

    def inputs(role: str, trace: _Trace) -> list[int]:
        return [values.symbol((role, name), bits[name]) for name in trace.names]

    state = [values.outputs(trace.init, inputs("initial", trace)) for trace in traces]
    classes, labels = _classes(state, [[values.labels[v] for v in own] for own in state])
    while True:
        values = _Values(len(names))
        updates: list[list[int]] = []
        new_state: list[list[int]] = []
        for trace, own in zip(traces, classes, strict=True):
            held = [values.symbol(("state", number), labels[number]) for number in own]
            results = values.outputs(trace.update, inputs("gradient", trace) + held + inputs("parameter", trace))
            updates.append(results[: len(trace.names)])
            new_state.append(results[len(trace.names) :])
        pairs = [list(zip(*own, strict=True)) for own in zip(classes, new_state, strict=True)]
        grown = [[labels[number] | values.labels[value] for number, value in own] for own in pairs]
        for index, update in enumerate(updates[0]):
            _refuse_mixture(f"its update of {names[index]}", values.labels[update] | 1 << index, names)
        for each in grown[0]:
            _refuse_mixture("its state", each, names)
        before, (classes, labels) = labels, _classes(pairs, grown)
        # an update only divides classes, so equally many classes are the same classes
        if len(labels) == len(before) and sum(labels.values()) == sum(before.values()):
            return updates


def _classes(
    values: Sequence[Sequence[Hashable]], labels: Sequence[Sequence[int]]
) -> tuple[list[list[int]], dict[int, int]]:
    """Returns equal values as equal numbers from 0, and by number the labels that any of them carries."""
    numbers: dict[Hashable, int] = {}
    classes = [[numbers.setdefault(value, len(numbers)) for value in own] for own in values]
    union = dict.fromkeys(range(len(numbers)), 0)
    for own, carried in zip(classes, labels, strict=True):
        for number, each in zip(own, carried, strict=True):
            union[number] |= each
    return classes, union


def _check_alike(names: Sequence[str], whole: Sequence[int], own_names: Sequence[str], own: Sequence[int]) -> None:
    in_whole = dict(zip(names, whole, strict=True))
    for name, update in zip(own_names, own, strict=True):
        if update != in_whole[name]:
            raise ValueError(
                f"the optimizer updates {name} otherwise in a part of the model, {own_names[0]} to {own_names[-1]}, "
                "which the pipeline updates by itself, than in the whole: an array's learning rate, label, scale or "
                "noise may depend on its path, its shape and its values, but not on its place among the arrays, on "
                "their number, or on a random key that is split over them"
            )


def _refuse_mixture(name: str, labels: int, names: Sequence[str]) -> None:
    mixed = [name for index, name in enumerate(names) if labels >> index & 1]
    if len(mixed) > 1:
        raise ValueError(f"the optimizer couples leaves: {name} depends on {mixed[0]} and {mixed[1]}; {REMEDY}")


class _Values:
    """Values of traced programs, numbered so that equal numbers mean equal values, with their labels."""

    def __init__(self, num_labels: int) -> None:
        self.labels: list[int] = []
        """The labels of every value, by its number."""
        self._numbers: dict[Hashable, int] = {}
        self._num_bits = num_labels
        """Number of bits in use: the lowest are the labels of inputs, and loops take further ones."""

    def symbol(self, name: Hashable, labels: int) -> int:
        """Returns the number of an input of this name."""
        return self._number(("symbol", name), labels)

    def outputs(self, jaxpr: Any, inputs: Sequence[int], depth: int = 0) -> list[int]:
        """Returns the numbers of the outputs of ``jaxpr`` for inputs of these numbers, within ``depth`` loops."""
        parts = open_jaxpr(jaxpr)
        known: dict[Any, int] = dict(zip(parts.invars, inputs, strict=True))
        known |= {
            var: self._number(("constant", _constant(const)), 0)
            for var, const in zip(parts.constvars, parts.consts, strict=True)
        }

        def read(atom: Any) -> int:
            if not isinstance(atom, jex.Literal):
                return known[atom]
            weak = getattr(atom.aval, "weak_type", False)
            return self._number(("literal", str(atom.aval), weak, identity(np.asarray(atom.val))), 0)

        for eqn in parts.equations:
            results = self._equation(eqn, [read(atom) for atom in eqn.invars], depth)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in parts.outvars]

    def _number(self, key: Hashable, labels: int) -> int:
        number = self._numbers.setdefault(key, len(self.labels))
        if number == len(self.labels):
            self.labels.append(labels)
        return number

    def _union(self, values: Iterable[int]) -> int:
        return reduce(or_, (self.labels[value] for value in values), 0)

    def _equation(self, eqn: Any, inputs: list[int], depth: int) -> list[int]:
        match eqn.primitive.name:
            case "cond":
                return self._cond(eqn.params, inputs, depth)
            case "while":
                return self._while(eqn.params, inputs, depth)
            case "scan":
                return self._scan(eqn, inputs, depth)
        called = called_jaxpr(eqn)
        if called is not None:
            return self.outputs(called, inputs, depth)
        # an operation with an effect is the same as itself alone
        operation = Same(eqn) if eqn.effects else (Same(eqn.primitive), parameter_identity(eqn.params))
        labels = self._union(inputs)
        return [self._number((operation, tuple(inputs), place), labels) for place in range(len(eqn.outvars))]

    def _cond(self, params: dict[str, Any], inputs: list[int], depth: int) -> list[int]:
        predicate, operands = inputs[0], inputs[1:]
        branches = [self.outputs(branch, operands, depth) for branch in params["branches"]]
        return [
            self._number(("cond", predicate, choices), self.labels[predicate] | self._union(choices))
            for choices in zip(*branches, strict=True)
        ]

    def _while(self, params: dict[str, Any], inputs: list[int], depth: int) -> list[int]:
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts = inputs[:num_cond], inputs[num_cond : num_cond + num_body]

        def body(carry: list[int]) -> list[int]:
            again = self.outputs(params["cond_jaxpr"], cond_consts + carry, depth + 1)
            return again + self.outputs(params["body_jaxpr"], body_consts + carry, depth + 1)

        results = self._loop("while", body, inputs[num_cond + num_body :], depth, decides=True)
        return results[1:]

    def _scan(self, eqn: Any, inputs: list[int], depth: int) -> list[int]:
        num_consts, num_carry = scan_shape(eqn)
        consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
        whole = inputs[num_consts + num_carry :]
        sliced = [self._number(("slice", depth, value), self.labels[value]) for value in whole]

        def body(carry: list[int]) -> list[int]:
            outputs = self.outputs(eqn.params["jaxpr"], consts + carry + sliced, depth + 1)
            return outputs[num_carry:] + outputs[:num_carry]

        kind = ("scan", eqn.params["length"], eqn.params["reverse"])
        results = self._loop(kind, body, carry, depth)
        num_stacked = len(results) - num_carry
        return results[num_stacked:] + results[:num_stacked]

    def _loop(self, kind: Hashable, body: Any, start: list[int], depth: int, *, decides: bool = False) -> list[int]:
        """Returns the numbers of all results of a loop.

        ``body`` gives, for the carry's numbers, those of its further results, and then those of the next carry. If
        ``decides`` is set, the first result says whether the loop goes on. A result's number speaks of no more of the
        carry than the result depends on: so it is the same in a loop over the whole model and in one over a part.
        """
        carry = [self._carried(depth, place) for place in range(len(start))]
        bits = [self.labels[value] for value in carry]
        results = body(carry)
        num_further = len(results) - len(start)
        numbered: dict[tuple[int, ...], tuple[list[int], tuple[tuple[int, int], ...]]] = {}
        numbers = []
        for place, result in enumerate(results):
            needed = self.labels[result] | (self.labels[results[0]] if decides else 0)
            needed |= 0 if place < num_further else bits[place - num_further]
            while True:
                places = tuple(p for p, bit in enumerate(bits) if needed & bit)
                grown = needed | self._union(results[num_further + p] for p in places)
                if grown == needed:
                    break
                needed = grown
            if places not in numbered:
                numbered[places] = self._numbered(body, start, places, depth, num_further)
            own, key = numbered[places]
            rank = places.index(place - num_further) if place >= num_further else ("further", own[place])
            labels = (needed | self._union(start[p] for p in places)) & ~reduce(or_, bits, 0)
            deciding = own[0] if decides else None
            numbers.append(self._number((kind, deciding, key, rank), labels))
        return numbers

    def _numbered(
        self, body: Any, start: list[int], places: tuple[int, ...], depth: int, num_further: int
    ) -> tuple[list[int], tuple[tuple[int, int], ...]]:
        """Returns the loop's results if the carry at ``places`` is counted from 0, and a key that tells how that carry
        evolves."""
        rank = {place: number for number, place in enumerate(places)}
        carry = [
            self._carried(depth, rank[place]) if place in rank else self._number(("unneeded", depth), 0)
            for place in range(len(start))
        ]
        results = body(carry)
        return results, tuple((start[place], results[num_further + place]) for place in places)

    def _carried(self, depth: int, place: int) -> int:
        """Returns the symbol of a part of the carry of a loop within ``depth`` others; it has a bit of its own."""
        key = ("carried", depth, place)
        if key not in self._numbers:
            self._number(key, 1 << self._num_bits)
            self._num_bits += 1
        return self._numbers[key]


def _constant(const: Any) -> Hashable:
    """Returns a key that is equal for constants of equal values, of any size."""
    if isinstance(const, jax.Array) and jnp.issubdtype(const.dtype, jax.dtypes.extended):
        const = jax.random.key_data(const)
    array = np.asarray(const)
    if array.dtype.hasobject:
        return Same(const)
    return str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).digest()
