"""Splits the backward of any JAX function into two programs: input gradient now, weight gradients later.

    split = split_backward(fn, params, inputs)
    outputs, stash = split.forward(params, inputs)
    input_grad, owed = split.backward(params, stash, output_grad)
    params_grad = split.weight_gradient(params, owed)

A pipeline stage's predecessor waits for `input_grad` alone, so weight gradients can fill what would be idle time (Zero
Bubble Pipeline Parallelism, arXiv 2401.10241). The split is exact: forward, backward and weight gradient together do
the work of the fused forward and backward, nothing twice, with the same arithmetic. It is made by partition of the
traced backward (`splitting.partition` has the rules), not by differentiating twice.

What is stored
--------------
`stash` and `owed` are tuples of arrays. Nothing in them is derived from parameters alone: each function takes the live
parameters, *which must be those of the forward*. An input or output that the backward needs is in the stash as it is,
and `owed` holds again those arrays of the stash, and of the gradients that come and go, that the weight gradient needs:
by reference if the functions run as they are. But `jax.jit` copies an array that it returns twice, or that it was given
and not allowed to donate. So jit the functions that return only what they made, and put the rest together outside:

    outputs, made = jax.jit(split.forward_made)(params, inputs)
    stash = split.stash_of(inputs, outputs, made)              # no copy: do not overwrite or donate these
    input_grad, made = jax.jit(split.backward_made)(params, stash, output_grad)
    owed = split.owed_of(stash, output_grad, input_grad, made) # dropping `stash` now frees what is not owed

`split.stash_places` and `split.owed_places` say which array comes from where, for those who keep arrays their own way.

`split.full_backward` is the backward in one piece, with the same lean stash. `split.report` counts the bytes.

Once per update
---------------
Some values are derived from parameters alone and cost work, such as weights cast to bfloat16. Each function computes
them where it needs them, or takes them from `split.prepare(params)`, to be computed once after every update:

    derived = split.prepare(params)
    outputs, stash = split.forward(params, inputs, derived=derived)

Limits: `cond`, `while` and opaque kernels stay whole in the input gradient where it needs any of their outputs; reverse
differentiation must be possible; the functions are meant for `jax.jit`, not for being differentiated again; `fn` must
not close over tracers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax

from rrfp_jax.programs.sameness import program_identity
from rrfp_jax.programs.splitting.fixed import hoisted
from rrfp_jax.programs.splitting.ir import Node, Operand, Value, evaluate, is_fixed, read
from rrfp_jax.programs.splitting.liveness import slice_nodes
from rrfp_jax.programs.splitting.operations import Barrier
from rrfp_jax.programs.splitting.partition import Halves, partition
from rrfp_jax.programs.splitting.report import SplitReport, make_report
from rrfp_jax.programs.splitting.rules import light_outputs
from rrfp_jax.programs.splitting.stash import Joined, join
from rrfp_jax.programs.splitting.tracing import Traced, trace

__all__ = ["Place", "SplitBackward", "SplitReport", "split_backward"]

Origin = Literal["input", "output", "stash", "output gradient", "input gradient", "made"]


class Place(NamedTuple):
    """Where an array of a stash, or of what is owed, comes from."""

    origin: Origin
    position: int
    """Among the flattened inputs or outputs, the gradients of their differentiable leaves, the stash, or what the
    program made beside its results."""


def split_backward(
    fn: Callable[[Any, Any], Any],
    params: Any,
    inputs: Any,
    *,
    param_gradients: Any = True,
    input_gradients: Any = True,
    widens: bool = False,
) -> SplitBackward:
    """Splits `fn(params, inputs) -> outputs` for arguments of these shapes.

    `params`, `inputs` and the outputs are any pytrees; arguments are arrays or `jax.ShapeDtypeStruct`s. Leaves that are
    not inexact (integers, booleans, random keys) have no gradient, nor have those that `param_gradients` and
    `input_gradients` deny: a boolean for all, or a tree of booleans that is a prefix of `params` or `inputs`. If no
    input has a gradient, all work is in the weight gradient; if no parameter has one, none is. With `widens` products
    that are gradients of parameters, cast to the parameters' dtype, are not rounded before. Raises what tracing `fn`
    raises.
    """
    traced = trace(fn, params, inputs, param_gradients, input_gradients)
    joined = join(traced, widens=widens)
    shared = hoisted(joined.all_nodes, joined.all_outputs, joined.params)
    return SplitBackward(_traced=traced, _joined=joined, _shared=tuple(shared))


def _divide(joined: Joined) -> Halves:
    prices = {value: value.num_bytes for value in (*joined.stash, *joined.cotangents)}
    if not joined.inputs_grad:
        live = slice_nodes(joined.backward, joined.params_grad)
        crossing = [value for value in prices if value in live.needed]
        return Halves(first=[], second=live.nodes, crossing=crossing, outputs=joined.params_grad)
    light = light_outputs(joined.backward, joined.inputs_grad, joined.params_grad)
    early = [gradient for gradient, is_light in zip(joined.params_grad, light, strict=True) if is_light]
    return partition(joined.backward, [*joined.inputs_grad, *early], joined.params_grad, prices=prices)


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitBackward:
    """The programs of one function. All are pure and can be jitted; `derived` is `prepare(params)` or None."""

    _traced: Traced = field(repr=False)
    _joined: Joined = field(repr=False)
    _shared: tuple[Value, ...] = field(repr=False)

    @cached_property
    def _halves(self) -> Halves:
        return _divide(self._joined)

    @cached_property
    def report(self) -> SplitReport:
        """The bytes of all that is handed on."""
        return make_report(self._joined, self._halves.crossing, self._shared)

    @cached_property
    def stash_places(self) -> tuple[Place, ...]:
        """Where each array of the stash comes from: input, output or made by the forward."""
        return _places(self._joined.stash, {"input": self._joined.inputs, "output": self._joined.outputs})

    @cached_property
    def owed_places(self) -> tuple[Place, ...]:
        """Where each array of what is owed comes from: the stash, a gradient, or made by the backward."""
        joined = self._joined
        gradients: dict[Origin, Sequence[Operand]] = {
            "output gradient": joined.cotangents,
            "input gradient": joined.inputs_grad,
        }
        return _places(self._halves.crossing, {"stash": joined.stash, **gradients})

    @cached_property
    def stash_specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the stash."""
        return tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in self._joined.stash)

    @cached_property
    def owed_specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of what is owed."""
        return tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in self._halves.crossing)

    @property
    def traced_forward(self) -> Any:
        """The jaxpr of the forward, with the values that it hands to the backward."""
        return self._traced.forward

    @cached_property
    def is_reached(self) -> Any:
        """A tree like the parameters that says whether a leaf's gradient depends on that of the outputs; None for
        leaves without a gradient. A gradient that does not depend on it is zero, since it is linear in that of the
        outputs."""
        return self._traced.params.unflatten_gradient([not is_fixed(grad) for grad in self._joined.params_grad])

    def prepare(self, params: Any) -> tuple[Any, ...]:
        """What is derived from parameters alone and costs work: valid until the parameters change. May be empty."""
        fixed = slice_nodes(self._joined.all_nodes, self._shared, keep_effects=False).nodes
        return tuple(evaluate(fixed, self._bind_params(params), self._shared))

    @property
    def num_derived(self) -> int:
        """How many values :meth:`prepare` returns."""
        return len(self._shared)

    @cached_property
    def derivations(self) -> tuple[Hashable, ...]:
        """For each value of :meth:`prepare` how it comes from the parameters; equal for values that are the same."""
        return tuple(self._derivation(value) for value in self._shared)

    def _derivation(self, value: Value) -> Hashable:
        nodes = slice_nodes(self._joined.all_nodes, [value], keep_effects=False).nodes

        def derive(*leaves: Any) -> list[Any]:
            return evaluate(nodes, dict(zip(self._joined.params, leaves, strict=True)), [value])

        specs = [jax.ShapeDtypeStruct(param.shape, param.dtype) for param in self._joined.params]
        return program_identity(jax.make_jaxpr(derive)(*specs))

    def forward(self, params: Any, inputs: Any, *, derived: Sequence[Any] | None = None) -> tuple[Any, tuple[Any, ...]]:
        """(outputs, stash)."""
        outputs, made = self.forward_made(params, inputs, derived=derived)
        return outputs, self.stash_of(inputs, outputs, made)

    def forward_made(
        self, params: Any, inputs: Any, *, derived: Sequence[Any] | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """(outputs, made): the stash without the inputs and outputs in it."""
        joined = self._joined
        environment = self._bind_params(params) | self._bind_inputs(inputs)
        made = _made(joined.stash, self.stash_places)
        results = self._run(joined.forward, environment, [*joined.outputs, *made], derived)
        count = len(joined.outputs)
        return self._traced.outputs.treedef.unflatten(results[:count]), tuple(results[count:])

    def stash_of(self, inputs: Any, outputs: Any, made: Sequence[Any]) -> tuple[Any, ...]:
        """The stash from the inputs and what `forward_made` returned; no array is touched."""
        traced = self._traced
        sources = {"input": traced.inputs.flatten(inputs), "output": traced.outputs.flatten(outputs), "made": made}
        return _gather(self.stash_places, sources)

    def backward(
        self, params: Any, stash: Sequence[Any], output_grad: Any, *, derived: Sequence[Any] | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """(input_grad, owed). `output_grad` is a tree like the outputs; leaves for outputs that are not inexact are
        ignored and may be None. Leaves of `input_grad` for inputs that are not inexact are None."""
        input_grad, made = self.backward_made(params, stash, output_grad, derived=derived)
        return input_grad, self.owed_of(stash, output_grad, input_grad, made)

    def backward_made(
        self, params: Any, stash: Sequence[Any], output_grad: Any, *, derived: Sequence[Any] | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """(input_grad, made): what is owed without the arrays of the stash and the gradients in it."""
        received = self._bind_backward(stash, output_grad)
        made = _made(self._halves.crossing, self.owed_places)
        wanted = [*self._joined.inputs_grad, *made]
        results = self._run(self._halves.first, self._bind_params(params) | received, wanted, derived)
        count = len(self._joined.inputs_grad)
        return self._traced.inputs.unflatten_gradient(results[:count]), tuple(results[count:])

    def owed_of(self, stash: Sequence[Any], output_grad: Any, input_grad: Any, made: Sequence[Any]) -> tuple[Any, ...]:
        """What is owed, from the stash, the output gradient and what `backward_made` returned; no array is touched."""
        traced = self._traced
        sources = {
            "stash": stash,
            "output gradient": traced.outputs.flatten_gradient(output_grad),
            "input gradient": traced.inputs.flatten_gradient(input_grad),
            "made": made,
        }
        return _gather(self.owed_places, sources)

    def weight_gradient(self, params: Any, owed: Sequence[Any], *, derived: Sequence[Any] | None = None) -> Any:
        """The gradient of the parameters, a tree like theirs with None for leaves that have none."""
        environment = self._bind_params(params)
        environment.update(zip(self._halves.crossing, owed, strict=True))
        gradients = self._run(self._halves.second, environment, self._halves.outputs, derived)
        return self._traced.params.unflatten_gradient(gradients)

    def full_backward(
        self,
        params: Any,
        stash: Sequence[Any],
        output_grad: Any,
        *,
        derived: Sequence[Any] | None = None,
        sums: Sequence[Any] | None = None,
    ) -> tuple[Any, Any]:
        """(input_grad, params_grad) in one program, from the same stash.

        With `sums`, arrays like the gradients of the parameters, each gradient is added to its own, and barriers wait
        for all sums that can be made before them: a compiler that sees enough memory would hold the gradients of all
        layers to the end.
        """
        joined = self._joined
        environment = self._bind_params(params) | self._bind_backward(stash, output_grad)
        totals = None if sums is None else Totals(joined.params_grad, sums)
        gradients = self._run(joined.backward, environment, [*joined.params_grad, *joined.inputs_grad], derived, totals)
        count = len(joined.params_grad)
        input_grad = self._traced.inputs.unflatten_gradient(gradients[count:])
        of_params = gradients[:count] if totals is None else totals.finished(environment)
        return input_grad, self._traced.params.unflatten_gradient(of_params)

    def _bind_params(self, params: Any) -> dict[Value, Any]:
        return dict(zip(self._joined.params, self._traced.params.flatten(params), strict=True))

    def _bind_inputs(self, inputs: Any) -> dict[Value, Any]:
        return dict(zip(self._joined.inputs, self._traced.inputs.flatten(inputs), strict=True))

    def _bind_backward(self, stash: Sequence[Any], output_grad: Any) -> dict[Value, Any]:
        cotangents = self._traced.outputs.flatten_gradient(output_grad)
        values = [*self._joined.stash, *self._joined.cotangents]
        return dict(zip(values, [*stash, *cotangents], strict=True))

    def _run(
        self,
        nodes: Sequence[Node],
        environment: dict[Value, Any],
        wanted: Sequence[Operand],
        derived: Any,
        totals: Totals | None = None,
    ) -> list[Any]:
        if derived is not None:
            environment.update(zip(self._shared, derived, strict=True))
        needed = slice_nodes(nodes, wanted, given=set(environment)).nodes
        return evaluate(needed, environment, wanted, None if totals is None else totals.held_back)


class Totals:
    """Sums to which gradients are added while the nodes run that make them."""

    def __init__(self, gradients: Sequence[Operand], sums: Sequence[Any]) -> None:
        self._gradients, self._sums = gradients, list(sums)
        self._is_added = [False] * len(self._sums)

    def held_back(self, node: Node, environment: dict[Value, Any], arrays: Sequence[Any]) -> Sequence[Any] | None:
        """What a barrier gives, which waits for new sums as well; None for any other node."""
        if not isinstance(node.operation, Barrier):
            return None
        waited = self._add(environment)
        results = node.operation.run(*arrays, *(self._sums[index] for index in waited))
        for index, total in zip(waited, results[len(arrays) :], strict=True):
            self._sums[index] = total
        return results[: len(arrays)]

    def finished(self, environment: dict[Value, Any]) -> list[Any]:
        """All sums, once all nodes have run."""
        self._add(environment)
        return self._sums

    def _add(self, environment: dict[Value, Any]) -> list[int]:
        added = []
        for index, gradient in enumerate(self._gradients):
            is_there = not isinstance(gradient, Value) or gradient in environment
            if is_there and not self._is_added[index]:
                total = self._sums[index]
                self._sums[index] = total + jax.numpy.asarray(read(environment, gradient)).astype(total.dtype)
                self._is_added[index] = True
                added.append(index)
        return added


def _places(values: Sequence[Value], sources: Mapping[Origin, Sequence[Operand]]) -> tuple[Place, ...]:
    known: dict[Operand, Place] = {}
    for origin, operands in sources.items():
        for index, operand in enumerate(operands):
            known.setdefault(operand, Place(origin, index))
    rest = itertools.count()
    return tuple(known[value] if value in known else Place("made", next(rest)) for value in values)


def _made(values: Sequence[Value], places: Sequence[Place]) -> list[Value]:
    return [value for value, place in zip(values, places, strict=True) if place.origin == "made"]


def _gather(places: Sequence[Place], sources: Mapping[str, Sequence[Any]]) -> tuple[Any, ...]:
    return tuple(sources[place.origin][place.position] for place in places)
