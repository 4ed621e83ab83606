"""Dead code: the nodes that some outputs need, loops and shard maps cut down to the outputs that are read.

`slice_nodes` walks backwards from the wanted values. A loop's carry is needed when its final value is, or when a needed
output of the body reads what it was before the pass: a least fixed point, reached in at most one round per carry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from rrfp_jax.programs.splitting.ir import Node, Operand, Value, values
from rrfp_jax.programs.splitting.nests import LoopParts, loop_parts, sharded_parts
from rrfp_jax.programs.splitting.operations import Barrier, Loop, Sharded


class Slice(NamedTuple):
    """The live nodes in order, and every value that they or the outputs read."""

    nodes: list[Node]
    needed: set[Value]


def slice_nodes(
    nodes: Sequence[Node],
    wanted: Iterable[Operand],
    *,
    given: Collection[Value] = frozenset(),
    keep_effects: bool = True,
) -> Slice:
    """The nodes that `wanted` needs when the values `given` are there already.

    Nodes with effects are kept too, whether or not somebody reads them, if `keep_effects`.
    """
    needed = set(values(wanted)) - set(given)
    kept = []
    for node in reversed(nodes):
        keep = [output in needed for output in node.outputs]
        if any(keep) or (keep_effects and node.operation.effectful):
            live = restrict(node, keep, keep_effects=keep_effects)
            needed.update(value for value in values(live.inputs) if value not in given)
            kept.append(live)
    return Slice(kept[::-1], needed)


def restrict(node: Node, keep: Sequence[bool], *, keep_effects: bool = True) -> Node:
    """The node without the outputs that nobody reads, where it can do without."""
    operation = node.operation
    if all(keep):
        return node
    if isinstance(operation, Barrier):
        pairs = [(i, o) for i, o, wanted in zip(node.inputs, node.outputs, keep, strict=True) if wanted]
        return replace(node, inputs=tuple(i for i, _ in pairs), outputs=tuple(o for _, o in pairs))
    if isinstance(operation, Loop):
        return _restrict_loop(node, operation, keep, keep_effects)
    if isinstance(operation, Sharded):
        parts = sharded_parts(node, operation)
        outlets = [outlet for outlet, wanted in zip(parts.outlets, keep, strict=True) if wanted]
        body = slice_nodes(operation.body.nodes, [outlet.inner for outlet in outlets], keep_effects=keep_effects)
        return replace(parts, outlets=outlets).node(operation, body.nodes)
    return node


def _restrict_loop(node: Node, loop: Loop, keep: Sequence[bool], keep_effects: bool) -> Node:
    parts = loop_parts(node, loop)
    closed, body = close_over_carries(parts, loop, keep, keep_effects=keep_effects)
    carries = [carry for carry, wanted in zip(parts.carries, closed, strict=False) if wanted]
    stacks = [stack for stack, wanted in zip(parts.stacks, keep[len(parts.carries) :], strict=True) if wanted]
    return replace(parts, carries=carries, stacks=stacks).node(loop, body.nodes, batched=loop.batched)


def close_over_carries(
    parts: LoopParts, loop: Loop, keep: Sequence[bool], *, keep_effects: bool = True
) -> tuple[list[bool], Slice]:
    """Adds to the kept outputs of a loop the carries that they need; also the live part of the body."""
    closed = list(keep)
    while True:
        wanted = [operand for operand, kept in zip(loop.body.outputs, closed, strict=True) if kept]
        body = slice_nodes(loop.body.nodes, wanted, keep_effects=keep_effects)
        missing = [i for i, carry in enumerate(parts.carries) if carry.before in body.needed and not closed[i]]
        if not missing:
            return closed, body
        for index in missing:
            closed[index] = True
