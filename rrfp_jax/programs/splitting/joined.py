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
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np

from rrfp_jax.programs.splitting.ir import Apply, Block, Loop, Node, Operand, Var, is_fixed, variables
from rrfp_jax.programs.splitting.liveness import slice_nodes
from rrfp_jax.programs.splitting.lowering import Traced, lower, new_var
from rrfp_jax.programs.splitting.rules import is_free
from rrfp_jax.programs.splitting.widening import widen_products


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
    results = _renamed(results, twins)
    outputs, residuals = results[: len(traced.outputs.specs)], results[len(traced.outputs.specs) :]

    pairs = zip(traced.outputs.specs, traced.outputs.differentiable, strict=True)
    cotangents = [new_var(spec, False) for spec, wanted in pairs if wanted]
    backward: list[Node] = []
    gradients = lower(traced.backward, [*residuals, *cotangents], backward)
    backward = _merge_fixed(backward, known, twins)
    gradients = _renamed(gradients, twins)
    num_params = sum(traced.params.differentiable)
    if widens:
        backward, of_params = widen_products(backward, gradients[:num_params])
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
        while (maker := makers.get(shown)) is not None and (source := _free_source(maker)) is not None:
            redone.add(maker)
            shown = source
    return [node for node in forward if node in redone or _is_fixed_node(node)]


def _free_source(node: Node) -> Var | None:
    """Returns the one array that a free node shows, if it is no larger than the node's output."""
    sources = [operand for operand in variables(node.inputs) if not operand.fixed]
    if len(sources) != 1 or not isinstance(node.operation, Apply) or not is_free(node):
        return None
    return sources[0] if sources[0].num_bytes <= node.outputs[0].num_bytes else None


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
        node = replace(original, inputs=tuple(_renamed(original.inputs, twins)))
        signature = _signature(node, {}) if _is_fixed_node(node) else None
        if signature is None:
            kept.append(node)
        elif signature in known:
            twins.update(zip(node.outputs, known[signature].outputs, strict=True))
        else:
            known[signature] = node
            kept.append(node)
    return kept


def _renamed(operands: Sequence[Operand], twins: _Twins) -> list[Operand]:
    return [twins.get(operand, operand) for operand in operands]


def _signature(node: Node, names: _Names) -> Hashable | None:
    """Returns a key that is equal for nodes that do the same, None for a node that cannot be compared."""
    operation = _operation_key(node)
    return None if operation is None else (operation, tuple(_name(operand, names) for operand in node.inputs))


def _operation_key(node: Node) -> Hashable | None:
    operation = node.operation
    if operation.effectful:
        return None
    if isinstance(operation, Loop):
        body = _body_key(operation.body)
        kind = (operation.num_constants, operation.num_carries, operation.length, operation.reverse, operation.unroll)
        return None if body is None else ("loop", kind, operation.batched, body)
    if not isinstance(operation, Apply):
        return None
    try:
        params = tuple(sorted(operation.params.items()))
        hash(params)
    except TypeError:
        return None
    return operation.name, params, repr(operation.context)


def _body_key(block: Block) -> Hashable | None:
    names: dict[Operand, Hashable] = {value: number for number, value in enumerate(block.inputs)}
    lines = []
    for node in block.nodes:
        lines.append(_signature(node, names))
        for output in node.outputs:
            names[output] = len(names)
    outputs = [_name(operand, names) for operand in block.outputs]
    return None if None in lines else (tuple(lines), tuple(outputs))


def _name(operand: Operand, names: _Names) -> Hashable:
    if isinstance(operand, Var):
        return ("inner", names[operand]) if operand in names else ("outer", id(operand))
    array = operand.array
    # reading a device array would block until it is there, and a large array is not worth the comparison
    if isinstance(array, jax.Array) or np.size(array) != 1:
        return "constant", id(array)
    return "literal", str(getattr(array, "dtype", type(array))), np.asarray(array).tobytes()
