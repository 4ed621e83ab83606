"""Joins a traced forward and its backward, and picks the arrays that one hands to the other.

The forward and the backward are lowered into one list of nodes; the residuals of `jax.vjp` are values of the former
that the latter reads. Then

* a residual that is fixed (a parameter, or made of parameters and constants) is not stored: the backward takes it from
  the live parameters;
* a residual that is another array reshaped, transposed, broadcast or widened is not stored: that array is, if it is not
  larger, and the backward redoes the free operation;
* each array that is left is stored once, however many residuals show it.

Fixed values are written once and computed once
-----------------------------------------------
Written once: under rematerialisation the backward casts the weights again that the forward has cast. Two fixed nodes
are merged if they apply the same primitive, with the same parameters and in the same context, to the same operands;
loops, if their bodies do so line by line. A node that cannot be compared stays as it is. The rest of a program is left
to the compiler.

Computed once: casts of weights to a narrower type, merged or normalised matrices cost work, and one copy serves all
microbatches between two updates. Free nodes are not worth a copy. The *derived* values, worth one, are made by a node
that is not free and read by one that is not both fixed and unfree, that is, where the fixed part of a program meets the
rest. Values made of constants alone (masks, position tables) are left to the compiler, which folds them into each
program.

Weight gradients are not rounded before they are added up
---------------------------------------------------------
The gradient of a float32 parameter that is cast to bfloat16 for a product is a product in bfloat16, then a cast back to
float32. Products add up in float32 anyway. So the rounding in between is left out: the product makes float32, and the
compiler can add it to the accumulator in the same kernel, where it would write the rounded gradient and read it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import get_abstract_mesh

from rrfp_jax.layout import other_axes
from rrfp_jax.programs.splitting.ir import Apply, Loop, Node, Operand, Var, is_fixed, slice_nodes, variables
from rrfp_jax.programs.splitting.lowering import Traced, lower, new_var
from rrfp_jax.programs.splitting.rules import is_free
from rrfp_jax.programs.target import current_target


@dataclass(frozen=True, eq=False, kw_only=True)
class Joined:
    """Forward and backward of one function over shared variables."""

    params: list[Var]
    inputs: list[Var]
    outputs: list[Operand]
    vjp_residuals: list[Operand]
    """The residuals as `jax.vjp` keeps them."""
    residuals: list[Var]
    """The residuals that are stored: some are inputs as they are, the others are values that the forward makes."""
    cotangents: list[Var]
    params_grad: list[Operand]
    inputs_grad: list[Operand]
    forward: list[Node]
    backward: list[Node]
    """The nodes from parameters, residuals and cotangents to the gradients; shares its fixed nodes with `forward`."""

    @cached_property
    def all_nodes(self) -> list[Node]:
        """The nodes of forward and backward, each once."""
        made = {output for node in self.forward for output in node.outputs}
        return [*self.forward, *(node for node in self.backward if not made.intersection(node.outputs))]

    @cached_property
    def derived(self) -> tuple[Var, ...]:
        """The values that are made of parameters alone and are worth a copy between two updates."""
        reached = set(self.params)
        for node in self.all_nodes:
            if reached.intersection(variables(node.inputs)):
                reached.update(output for output in node.outputs if output.fixed)
        costly = [node for node in self.all_nodes if _is_fixed_node(node) and not is_free(node)]
        inner = set(costly)
        read = {operand for node in self.all_nodes if node not in inner for operand in variables(node.inputs)}
        read |= set(variables([*self.outputs, *self.residuals, *self.params_grad, *self.inputs_grad]))
        wanted = read & reached
        return tuple(dict.fromkeys(output for node in costly for output in node.outputs if output in wanted))


def join_programs(traced: Traced, *, widens: bool = False) -> Joined:
    """Lowers forward and backward, and picks the residuals that are stored."""
    params = [new_var(spec, True) for spec in traced.params.specs]
    inputs = [new_var(spec, False) for spec in traced.inputs.specs]
    forward: list[Node] = []
    results = lower(traced.forward, [*params, *inputs], forward)
    known: dict[Hashable, Node] = {}
    twins: _Twins = {}
    forward = _merge_fixed(forward, known, twins)
    results = [twins.get(result, result) for result in results]
    outputs, residuals = results[: len(traced.outputs.specs)], results[len(traced.outputs.specs) :]

    pairs = zip(traced.outputs.specs, traced.outputs.differentiable, strict=True)
    cotangents = [new_var(spec, False) for spec, wanted in pairs if wanted]
    backward: list[Node] = []
    gradients = lower(traced.backward, [*residuals, *cotangents], backward)
    backward = _merge_fixed(backward, known, twins)
    gradients = [twins.get(gradient, gradient) for gradient in gradients]
    num_params = sum(traced.params.differentiable)
    if widens:
        backward, of_params = _widen_products(backward, gradients[:num_params])
        gradients = [*of_params, *gradients[num_params:]]

    live = slice_nodes([*_redone(forward, residuals), *backward], gradients)
    made = {output for node in live.nodes for output in node.outputs}
    candidates = [*inputs, *(output for node in forward for output in node.outputs)]
    return Joined(
        params=params, inputs=inputs, outputs=outputs, vjp_residuals=residuals, cotangents=cotangents,
        residuals=[v for v in candidates if v in live.needed and v not in made and not v.fixed],
        forward=forward, backward=live.nodes,
        params_grad=gradients[:num_params], inputs_grad=gradients[num_params:],
    )  # fmt: skip


def _redone(forward: list[Node], residuals: list[Operand]) -> list[Node]:
    """Returns the nodes of the forward that the backward does again: fixed ones, and free ones from a stored array."""
    makers = {output: node for node in forward for output in node.outputs}
    redone: set[Node] = set()
    for residual in variables(residuals):
        shown = residual
        while (maker := makers.get(shown)) is not None:
            # a free node is done again where it shows one array that is no larger than its output
            sources = [operand for operand in variables(maker.inputs) if not operand.fixed]
            if len(sources) != 1 or not isinstance(maker.operation, Apply) or not is_free(maker):
                break
            if sources[0].num_bytes > maker.outputs[0].num_bytes:
                break
            redone.add(maker)
            (shown,) = sources
    return [node for node in forward if node in redone or _is_fixed_node(node)]


def _is_fixed_node(node: Node) -> bool:
    return bool(node.outputs) and all(map(is_fixed, node.outputs))


# -- fixed nodes -------------------------------------------------------------------------------------------------------

_Twins = dict[Operand, Var]
"""For each value that was merged away the one that stands for it."""
_Names = Mapping[Operand, Hashable]


def _merge_fixed(nodes: Iterable[Node], known: dict[Hashable, Node], twins: _Twins) -> list[Node]:
    """Returns the nodes without those that repeat a fixed node of `known` or of their own; extends both maps."""
    kept = []
    for original in nodes:
        node = replace(original, inputs=tuple([twins.get(operand, operand) for operand in original.inputs]))
        signature = _signature(node, {}) if _is_fixed_node(node) else None
        if signature is None:
            kept.append(node)
        elif signature in known:
            twins.update(zip(node.outputs, known[signature].outputs, strict=True))
        else:
            known[signature] = node
            kept.append(node)
    return kept


def _signature(node: Node, names: _Names) -> Hashable | None:
    """Returns a key that is equal for nodes that do the same, None for a node that cannot be compared."""
    operation = node.operation
    key: Hashable
    if operation.effectful:
        return None
    if isinstance(operation, Loop):
        inner: dict[Operand, Hashable] = {value: number for number, value in enumerate(operation.body.inputs)}
        lines = []
        for each in operation.body.nodes:
            lines.append(_signature(each, inner))
            for output in each.outputs:
                inner[output] = len(inner)
        if None in lines:
            return None
        kind = (operation.num_constants, operation.num_carries, operation.length, operation.reverse, operation.unroll)
        outputs = tuple(_name(operand, inner) for operand in operation.body.outputs)
        key = ("loop", kind, operation.batched, tuple(lines), outputs)
    elif isinstance(operation, Apply):
        try:
            key = (operation.name, tuple(sorted(operation.params.items())), repr(operation.context))
            hash(key)
        except TypeError:  # a parameter that can neither be ordered nor hashed
            return None
    else:
        return None
    return key, tuple(_name(operand, names) for operand in node.inputs)


def _name(operand: Operand, names: _Names) -> Hashable:
    if isinstance(operand, Var):
        return ("inner", names[operand]) if operand in names else ("outer", id(operand))
    array = operand.array
    # reading a device array would block until it is there, and a large array is not worth the comparison
    if isinstance(array, jax.Array) or np.size(array) != 1:
        return "constant", id(array)
    return "literal", str(getattr(array, "dtype", type(array))), np.asarray(array).tobytes()


# -- weight gradients in the dtype in which they are added up ----------------------------------------------------------

_MOVES = frozenset({"reshape", "squeeze", "expand_dims", "transpose"})
"""The operations that may stand between a product and the cast: they move elements, of any dtype."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _LoneProduct(Apply):
    """A product that is not joined with others that read the same operand.

    XLA joins such products on GPUs (those of queries, keys and values, say), and then adds their parts to the
    accumulators in kernels of their own.
    """

    def run(self, *arrays: Any) -> Sequence[Any]:
        return super().run(*jax.lax.optimization_barrier(arrays))


def widens() -> bool:
    """Whether products that are gradients of parameters make float32 in what is being traced.

    Where devices hold other rows each, they add up their gradients for every microbatch: rounded ones are half the
    bytes. XLA has no products of bfloat16 that make float32 for some shapes on CPUs.
    """
    return current_target().platform != "cpu" and not other_axes(get_abstract_mesh().shape)


def _widen_products(nodes: Sequence[Node], gradients: Sequence[Operand]) -> tuple[list[Node], list[Operand]]:
    """Returns nodes and ``gradients`` in which products have the wider dtype to which they would be cast.

    A value that is read elsewhere too stays as it is, and so do the products of a loop's passes. Those of float8 make
    float32 already.
    """
    makers: dict[Operand, Node] = {output: node for node in nodes for output in node.outputs}
    readers: Counter[Operand] = Counter(operand for node in nodes for operand in variables(node.inputs))
    readers.update(variables(gradients))
    renewed: dict[Node, Node | None] = {
        node: replace(node, operation=_LoneProduct(**vars(node.operation))) for node in nodes if _is_of_float8(node)
    }
    results: list[Operand] = []
    for gradient in gradients:
        shown = gradient
        for node in _chain(gradient, makers, readers):
            operation, made = node.operation, node.outputs[0]
            assert isinstance(operation, Apply)
            assert isinstance(gradient, Var)
            if operation.name == "convert_element_type":
                renewed[node] = None
                continue
            wide = Var(made.shape, gradient.dtype, made.fixed, made.varying)
            if operation.name == "dot_general":
                params = {**operation.params, "preferred_element_type": np.dtype(gradient.dtype)}
                product = _LoneProduct(**vars(operation) | {"params": params})
                renewed[node] = Node(product, node.inputs, (wide,))
            else:
                renewed[node] = Node(operation, (shown,), (wide,))
            shown = wide
        results.append(shown)
    return [new for node in nodes if (new := renewed.get(node, node)) is not None], results


def _is_of_float8(node: Node) -> bool:
    operation, operands = node.operation, variables(node.inputs)
    is_product = isinstance(operation, Apply) and operation.name == "dot_general"
    return is_product and str(node.outputs[0].dtype) == "float32" and {each.dtype.itemsize for each in operands} == {1}


def _chain(gradient: Operand, makers: Mapping[Operand, Node], readers: Mapping[Operand, int]) -> list[Node]:
    """Returns the nodes from a product to the gradient, with one cast to its dtype among them; none without such."""
    chain: list[Node] = []
    shown, casts = gradient, 0
    while (node := makers.get(shown)) is not None and readers[shown] == 1 and isinstance(node.operation, Apply):
        chain.append(node)
        if node.operation.name == "dot_general":
            dtypes = {operand.dtype for operand in variables(node.inputs)}
            return chain[::-1] if casts == 1 and dtypes == {node.outputs[0].dtype} else []
        if node.operation.name == "convert_element_type":
            source = str(getattr(node.inputs[0], "dtype", None))
            casts += source in ("bfloat16", "float16") and str(node.outputs[0].dtype) == "float32"
        elif node.operation.name not in _MOVES:
            return []
        (shown,) = node.inputs
    return []
