"""What is fixed for a step, since it is derived from parameters and constants alone: written once, computed once.

Written once: under rematerialisation the backward casts the weights again that the forward has cast. Two fixed nodes
are merged if they apply the same primitive, with the same parameters and in the same context, to the same operands;
loops, if their bodies do so line by line. Whatever cannot be compared stays as it is. The rest of a program is left to
the compiler.

Computed once: casts of weights to a narrower type, merged or normalised matrices cost work, and one copy serves all
microbatches between two updates. Free nodes are not worth a copy; the values that `hoisted` picks are those made by a
node that is not free and read by one that is not both fixed and unfree, that is, where the fixed part of a program
meets the rest. What is made of constants alone (masks, position tables) is left to the compiler, which folds it into
each program.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from rrfp_jax.programs.splitting.ir import Block, Node, Operand, Value, is_fixed, values
from rrfp_jax.programs.splitting.operations import Apply, Loop
from rrfp_jax.programs.splitting.rules import is_free

Names = Mapping[Operand, Hashable]
Twins = dict[Operand, Value]
"""For each value that was merged away the one that stands for it."""


def merge_fixed(nodes: Iterable[Node], known: dict[Hashable, Node], twins: Twins) -> list[Node]:
    """The nodes without those that repeat a fixed node of `known` or of their own; extends both maps."""
    kept = []
    for original in nodes:
        node = replace(original, inputs=tuple(renamed(original.inputs, twins)))
        signature = _signature(node, {}) if node.outputs and all(map(is_fixed, node.outputs)) else None
        if signature is None:
            kept.append(node)
        elif signature in known:
            twins.update(zip(node.outputs, known[signature].outputs, strict=True))
        else:
            known[signature] = node
            kept.append(node)
    return kept


def renamed(operands: Sequence[Operand], twins: Twins) -> list[Operand]:
    return [twins.get(operand, operand) for operand in operands]


def _signature(node: Node, names: Names) -> Hashable | None:
    """Equal for nodes that do the same; None for one that cannot be compared."""
    operation = _operation(node)
    return None if operation is None else (operation, tuple(_name(operand, names) for operand in node.inputs))


def _operation(node: Node) -> Hashable | None:
    operation = node.operation
    if operation.effectful:
        return None
    if isinstance(operation, Loop):
        body = _body(operation.body)
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


def _body(block: Block) -> Hashable | None:
    names: dict[Operand, Hashable] = {value: number for number, value in enumerate(block.inputs)}
    lines = []
    for node in block.nodes:
        lines.append(_signature(node, names))
        for output in node.outputs:
            names[output] = len(names)
    outputs = [_name(operand, names) for operand in block.outputs]
    return None if None in lines else (tuple(lines), tuple(outputs))


def _name(operand: Operand, names: Names) -> Hashable:
    if isinstance(operand, Value):
        return ("inner", names[operand]) if operand in names else ("outer", id(operand))
    array = operand.array
    if isinstance(array, jax.Array) or np.size(array) != 1:
        return "constant", id(array)
    return "literal", str(getattr(array, "dtype", type(array))), np.asarray(array).tobytes()


def hoisted(nodes: Sequence[Node], outputs: Iterable[Operand], params: Iterable[Value]) -> list[Value]:
    """The values worth a copy, of `nodes` in order that lead from `params` (and inputs) to `outputs`."""
    reached = set(params)
    for node in nodes:
        if reached.intersection(values(node.inputs)):
            reached.update(output for output in node.outputs if output.fixed)
    costly = [node for node in nodes if node.outputs and all(map(is_fixed, node.outputs)) and not is_free(node)]
    inner = set(costly)
    read = {operand for node in nodes if node not in inner for operand in values(node.inputs)} | set(values(outputs))
    wanted = read & reached
    return list(dict.fromkeys(output for node in costly for output in node.outputs if output in wanted))
