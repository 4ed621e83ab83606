"""Splits the backward of any JAX function into two programs: input gradient now, weight gradients later.

    split = split_backward(fn, params, inputs)
    outputs, residuals = split.forward(params, inputs)
    input_grad, weight_residuals = split.backward(params, residuals, output_grad)
    params_grad = split.weight_gradient(params, weight_residuals)

A pipeline stage's predecessor waits for `input_grad` alone, so weight gradients can fill idle time (Zero Bubble
Pipeline Parallelism, arXiv 2401.10241). The split is exact: forward, backward and weight gradient together do the work
of the fused forward and backward, nothing twice, with the same arithmetic. It is made by partition of the traced
backward, not by differentiating twice. A function passes through this package in this order:

`lowering`   traces the function and its pullback, and turns both jaxprs into lists of nodes (`ir`), calls inlined
`joined`     joins the two: which values forward and backward share, which of them are stored, which are made of
             parameters alone and computed once per update
`partition`  cuts the backward in two, inside loops and shard maps too, so that the fewest bytes cross; `rules` says
             which operations are free, heavy or light

The arrays that are stored
--------------------------
`residuals` and `weight_residuals` are tuples of arrays. Nothing in them is derived from parameters alone: each function
takes the live parameters, *which must be those of the forward*. An input or output that the backward needs is among the
residuals as it is, and `weight_residuals` holds again those residuals, and those of the gradients that come and go,
that the weight gradient needs: by reference if the functions run as they are. But `jax.jit` copies an array that it
returns twice, or that it was given and not allowed to donate. So jit the functions that return only the arrays that
they made, and put the rest together outside:

    outputs, made = jax.jit(split.forward_made)(params, inputs)
    residuals = split.residuals_of(inputs, outputs, made)      # no copy: do not overwrite or donate these
    input_grad, made = jax.jit(split.backward_made)(params, residuals, output_grad)
    weight_residuals = split.weight_residuals_of(residuals, output_grad, input_grad, made)
    del residuals                                              # frees those that the weight gradient does not need

`split.residual_sources` and `split.weight_residual_sources` say which array comes from where, for callers that keep
arrays their own way. `split.full_backward` is the backward in one piece, with the same lean residuals. `split.report`
counts the bytes.

Once per update
---------------
Some values are derived from parameters alone and cost work, such as weights cast to bfloat16. Each function computes
them where it needs them, or takes them from `split.prepare(params)`, to be computed once after every update:

    derived = split.prepare(params)
    outputs, residuals = split.forward(params, inputs, derived=derived)

Limits: `cond`, `while` and opaque kernels stay whole in the input gradient where it needs any of their outputs; reverse
differentiation must be possible; the functions are meant for `jax.jit`, not for being differentiated again; `fn` must
not close over tracers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax

from rrfp_jax.programs.sameness import program_identity
from rrfp_jax.programs.splitting.ir import (
    Barrier,
    Node,
    Operand,
    Var,
    evaluate,
    is_fixed,
    read,
    slice_nodes,
    variables,
)
from rrfp_jax.programs.splitting.joined import Joined, join_programs
from rrfp_jax.programs.splitting.lowering import Traced, trace
from rrfp_jax.programs.splitting.partition import Halves, partition
from rrfp_jax.programs.splitting.rules import light_outputs

__all__ = ["ArraySource", "SplitBackward", "SplitReport", "split_backward"]

Origin = Literal["input", "output", "residual", "output gradient", "input gradient", "made"]


class ArraySource(NamedTuple):
    """The place from which an array of the residuals or weight-gradient residuals comes."""

    origin: Origin
    position: int
    """The position among the flattened inputs or outputs, the gradients of their differentiable leaves, the residuals,
    or the arrays that the program made beside its results."""


class Crossing(NamedTuple):
    """One array of the residuals or of the weight-gradient residuals."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    origin: str
    """`input`, `output`, `output gradient`, `input gradient`, `weight gradient`, `residual`, or the name of the
    operation that makes it."""


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """The bytes that a split hands on, of global arrays, for one microbatch unless said otherwise."""

    residuals: tuple[Crossing, ...]
    """The arrays from forward to backward."""
    weight_residuals: tuple[Crossing, ...]
    """The arrays from the backward to the weight gradient; entries of origin `residual` or `input` are not copies."""
    residual_bytes: int
    """Bytes of the residuals."""
    input_bytes: int
    """The part of `residual_bytes` that is inputs as they came: no memory beyond theirs."""
    output_bytes: int
    """The part of `residual_bytes` that is outputs as they go: no memory beyond theirs."""
    weight_residual_bytes: int
    """Bytes of the weight-gradient residuals."""
    aliased_bytes: int
    """The part of `weight_residual_bytes` that was among the residuals: deferring W keeps it alive, uncopied."""
    vjp_bytes: int
    """Bytes of the residuals that `jax.vjp` would keep, parameters and duplicates included."""
    fixed_vjp_bytes: int
    """The part of these that is derived from parameters and constants alone, parameters included."""
    derived_bytes: int
    """Bytes that `prepare` makes: one copy per update, whatever the number of microbatches."""

    def __str__(self) -> str:
        arrays = [
            [f"{each.num_bytes:>12,} B  {each.dtype}{list(each.shape)}  {each.origin}" for each in crossings]
            for crossings in (self.residuals, self.weight_residuals)
        ]
        lines = [
            f"jax.vjp keeps {self.vjp_bytes:,} B, {self.fixed_vjp_bytes:,} B of it from parameters alone",
            f"residuals {self.residual_bytes:,} B, as they are: {self.input_bytes:,} B in, {self.output_bytes:,} B out",
            *arrays[0],
            f"for weight gradients {self.weight_residual_bytes:,} B ({self.aliased_bytes:,} B are residuals)",
            *arrays[1],
            f"derived from parameters once per update: {self.derived_bytes:,} B",
        ]
        return "\n".join(lines)


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
    that are gradients of parameters, cast to the parameters' dtype, are not rounded before. Raises the error that
    tracing `fn` raises.
    """
    traced = trace(fn, params, inputs, param_gradients, input_gradients)
    return SplitBackward(traced, join_programs(traced, widens=widens))


class SplitBackward:
    """The programs of one function. All are pure and can be jitted; `derived` is `prepare(params)` or None."""

    def __init__(self, traced: Traced, joined: Joined) -> None:
        self._traced, self._joined = traced, joined
        self.traced_forward = traced.forward
        """The jaxpr of the forward, with the values that it hands to the backward."""
        self.residual_sources = _sources(joined.residuals, {"input": joined.inputs, "output": joined.outputs})
        """The source of each residual: input, output or made by the forward."""
        self.residual_specs = _specs(joined.residuals)
        """Shapes and dtypes of the residuals."""
        self.is_reached = traced.params.unflatten([not is_fixed(grad) for grad in joined.params_grad])
        """A tree like the parameters that says whether a leaf's gradient depends on that of the outputs; None for
        leaves without a gradient. A gradient that does not depend on it is zero, since it is linear in that of the
        outputs."""
        self.num_derived = len(joined.derived)
        """How many values :meth:`prepare` returns."""

    @cached_property
    def _halves(self) -> Halves:
        # cut when it is first needed: a backward in one piece needs no cut, which takes longest
        joined = self._joined
        prices = {value: value.num_bytes for value in (*joined.residuals, *joined.cotangents)}
        if not joined.inputs_grad:
            live = slice_nodes(joined.backward, joined.params_grad)
            crossing = [value for value in prices if value in live.needed]
            return Halves(first=[], second=live.nodes, crossing=crossing, outputs=joined.params_grad)
        light = light_outputs(joined.backward, joined.inputs_grad, joined.params_grad)
        early = [gradient for gradient, is_light in zip(joined.params_grad, light, strict=True) if is_light]
        return partition(joined.backward, [*joined.inputs_grad, *early], joined.params_grad, prices=prices)

    @cached_property
    def weight_residual_sources(self) -> tuple[ArraySource, ...]:
        """The source of each weight-gradient residual: residual, gradient or made by the backward."""
        joined = self._joined
        gradients: dict[Origin, Sequence[Operand]] = {
            "output gradient": joined.cotangents,
            "input gradient": joined.inputs_grad,
        }
        return _sources(self._halves.crossing, {"residual": joined.residuals, **gradients})

    @cached_property
    def weight_residual_specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the weight-gradient residuals."""
        return _specs(self._halves.crossing)

    @cached_property
    def report(self) -> SplitReport:
        """The bytes of all arrays that are handed on."""
        joined = self._joined
        makers = {output: node.operation.name for node in joined.forward for output in node.outputs}
        makers |= dict.fromkeys(variables(joined.outputs), "output") | dict.fromkeys(joined.inputs, "input")
        later = {output: node.operation.name for node in joined.backward for output in node.outputs}
        later |= dict.fromkeys(variables(joined.inputs_grad), "input gradient")
        later |= dict.fromkeys(joined.cotangents, "output gradient") | dict.fromkeys(joined.residuals, "residual")
        later |= dict.fromkeys(joined.inputs, "input")
        later |= dict.fromkeys(variables(joined.params_grad), "weight gradient")
        residuals, weight_residuals = (
            # a value that no node makes as it stands is a stack of a loop that was split
            tuple(Crossing(v.shape, str(v.dtype), v.num_bytes, origins.get(v, "scan")) for v in values)
            for values, origins in ((joined.residuals, makers), (self._halves.crossing, later))
        )
        vjp_residuals = variables(joined.vjp_residuals)
        return SplitReport(
            residuals=residuals,
            weight_residuals=weight_residuals,
            residual_bytes=sum(each.num_bytes for each in residuals),
            input_bytes=sum(each.num_bytes for each in residuals if each.origin == "input"),
            output_bytes=sum(each.num_bytes for each in residuals if each.origin == "output"),
            weight_residual_bytes=sum(each.num_bytes for each in weight_residuals),
            aliased_bytes=sum(each.num_bytes for each in weight_residuals if each.origin in ("residual", "input")),
            vjp_bytes=sum(value.num_bytes for value in vjp_residuals),
            fixed_vjp_bytes=sum(value.num_bytes for value in vjp_residuals if value.fixed),
            derived_bytes=sum(value.num_bytes for value in joined.derived),
        )

    def prepare(self, params: Any) -> tuple[Any, ...]:
        """Returns the values that are derived from parameters alone and cost work, maybe none.

        They are valid until the parameters change.
        """
        fixed = slice_nodes(self._joined.all_nodes, self._joined.derived, keep_effects=False).nodes
        return tuple(evaluate(fixed, self._bind(params), self._joined.derived))

    @cached_property
    def derivations(self) -> tuple[Hashable, ...]:
        """For each value of :meth:`prepare` how it comes from the parameters; equal for values that are the same."""
        params = self._joined.params
        specs, found = _specs(params), []
        for value in self._joined.derived:
            nodes = slice_nodes(self._joined.all_nodes, [value], keep_effects=False).nodes

            def derive(*leaves: Any, nodes: Any = nodes, value: Var = value) -> list[Any]:
                return evaluate(nodes, dict(zip(params, leaves, strict=True)), [value])

            found.append(program_identity(jax.make_jaxpr(derive)(*specs)))
        return tuple(found)

    def forward(self, params: Any, inputs: Any, *, derived: Sequence[Any] | None = None) -> tuple[Any, tuple[Any, ...]]:
        """Returns (outputs, residuals)."""
        outputs, made = self.forward_made(params, inputs, derived=derived)
        return outputs, self.residuals_of(inputs, outputs, made)

    def forward_made(
        self, params: Any, inputs: Any, *, derived: Sequence[Any] | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns (outputs, made): the residuals without the inputs and outputs among them."""
        joined = self._joined
        environment = self._bind(params, derived)
        environment.update(zip(joined.inputs, self._traced.inputs.flatten(inputs), strict=True))
        results = _run(joined.forward, environment, [*joined.outputs, *_made(joined.residuals, self.residual_sources)])
        count = len(joined.outputs)
        return self._traced.outputs.treedef.unflatten(results[:count]), tuple(results[count:])

    def residuals_of(self, inputs: Any, outputs: Any, made: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the residuals, from the inputs and the results of `forward_made`; no array is touched."""
        traced = self._traced
        arrays = {"input": traced.inputs.flatten(inputs), "output": traced.outputs.flatten(outputs), "made": made}
        return tuple(arrays[source.origin][source.position] for source in self.residual_sources)

    def backward(
        self, params: Any, residuals: Sequence[Any], output_grad: Any, *, derived: Sequence[Any] | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns (input_grad, weight_residuals).

        `output_grad` is a tree like the outputs; leaves for outputs that are not inexact are ignored and may be None.
        Leaves of `input_grad` for inputs that are not inexact are None.
        """
        input_grad, made = self.backward_made(params, residuals, output_grad, derived=derived)
        return input_grad, self.weight_residuals_of(residuals, output_grad, input_grad, made)

    def backward_made(
        self, params: Any, residuals: Sequence[Any], output_grad: Any, *, derived: Sequence[Any] | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns (input_grad, made): the weight-gradient residuals without residuals and gradients among them."""
        wanted = [*self._joined.inputs_grad, *_made(self._halves.crossing, self.weight_residual_sources)]
        results = _run(self._halves.first, self._bind_backward(params, residuals, output_grad, derived), wanted)
        count = len(self._joined.inputs_grad)
        return self._traced.inputs.unflatten(results[:count]), tuple(results[count:])

    def weight_residuals_of(
        self, residuals: Sequence[Any], output_grad: Any, input_grad: Any, made: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Returns the weight-gradient residuals, from the arguments and results of `backward_made`; no array is
        touched."""
        arrays = {
            "residual": residuals,
            "output gradient": self._traced.outputs.flatten_gradient(output_grad),
            "input gradient": self._traced.inputs.flatten_gradient(input_grad),
            "made": made,
        }
        return tuple(arrays[source.origin][source.position] for source in self.weight_residual_sources)

    def weight_gradient(
        self, params: Any, weight_residuals: Sequence[Any], *, derived: Sequence[Any] | None = None
    ) -> Any:
        """Returns the gradient of the parameters, a tree like theirs with None for leaves that have none."""
        environment = self._bind(params, derived)
        environment.update(zip(self._halves.crossing, weight_residuals, strict=True))
        return self._traced.params.unflatten(_run(self._halves.second, environment, self._halves.outputs))

    def full_backward(
        self,
        params: Any,
        residuals: Sequence[Any],
        output_grad: Any,
        *,
        derived: Sequence[Any] | None = None,
        sums: Sequence[Any] | None = None,
    ) -> tuple[Any, Any]:
        """Returns (input_grad, params_grad) from the same residuals, in one program.

        With `sums`, arrays like the gradients of the parameters, each gradient is added to its own, and barriers wait
        for all sums that can be made before them: a compiler that sees enough memory would hold the gradients of all
        layers to the end.
        """
        joined = self._joined
        environment = self._bind_backward(params, residuals, output_grad, derived)
        wanted, count = [*joined.params_grad, *joined.inputs_grad], len(joined.params_grad)
        if sums is None:
            results = _run(joined.backward, environment, wanted)
            return self._traced.inputs.unflatten(results[count:]), self._traced.params.unflatten(results[:count])
        totals, missing = list(sums), dict(enumerate(joined.params_grad))

        def add_new() -> list[int]:
            """Adds the gradients that are there and not added yet; returns their positions."""
            new = [index for index, grad in missing.items() if not isinstance(grad, Var) or grad in environment]
            for index in new:
                gradient = jax.numpy.asarray(read(environment, missing.pop(index)))
                totals[index] = totals[index] + gradient.astype(totals[index].dtype)
            return new

        def held_back(node: Node, arrays: Sequence[Any]) -> Sequence[Any] | None:
            """Returns the results of a barrier that waits for new sums as well; None for any other node."""
            if not isinstance(node.operation, Barrier):
                return None
            waited = add_new()
            results = node.operation.run(*arrays, *(totals[index] for index in waited))
            for index, total in zip(waited, results[len(arrays) :], strict=True):
                totals[index] = total
            return results[: len(arrays)]

        results = _run(joined.backward, environment, wanted, held_back)
        add_new()
        return self._traced.inputs.unflatten(results[count:]), self._traced.params.unflatten(totals)

    def _bind(self, params: Any, derived: Sequence[Any] | None = None) -> dict[Var, Any]:
        arrays = dict(zip(self._joined.params, self._traced.params.flatten(params), strict=True))
        return arrays if derived is None else arrays | dict(zip(self._joined.derived, derived, strict=True))

    def _bind_backward(self, params: Any, residuals: Sequence[Any], output_grad: Any, derived: Any) -> dict[Var, Any]:
        cotangents = self._traced.outputs.flatten_gradient(output_grad)
        values = [*self._joined.residuals, *self._joined.cotangents]
        return self._bind(params, derived) | dict(zip(values, [*residuals, *cotangents], strict=True))


def _run(nodes: Sequence[Node], environment: dict[Var, Any], wanted: Sequence[Operand], instead: Any = None) -> Any:
    """Runs those of the nodes that are needed beyond the arrays of ``environment``."""
    needed = slice_nodes(nodes, wanted, given=set(environment)).nodes
    return evaluate(needed, environment, wanted, instead)


def _specs(values: Sequence[Var]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values)


def _sources(values: Sequence[Var], places: Mapping[Origin, Sequence[Operand]]) -> tuple[ArraySource, ...]:
    known: dict[Operand, ArraySource] = {}
    for origin, operands in places.items():
        for index, operand in enumerate(operands):
            known.setdefault(operand, ArraySource(origin, index))
    rest = itertools.count()
    return tuple(known[value] if value in known else ArraySource("made", next(rest)) for value in values)


def _made(values: Sequence[Var], sources: Sequence[ArraySource]) -> list[Var]:
    return [value for value, source in zip(values, sources, strict=True) if source.origin == "made"]
