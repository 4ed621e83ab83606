"""Which weight gradients are too light to defer: biases, norm scales, sums.

Deferring a gradient pays only if its own part of the backward, the nodes that the input gradient does not need, holds
a matrix product, convolution or scatter-add. Otherwise W would have to be handed an activation or cotangent merely to
sum it. Such gradients are made in I and cross as they are.

The rest is heavy downstream of a heavy node that I does not need: a forward walk that marks values, through loops to a
fixed point of their carries.
"""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.programs.splitting.ir import Node, Operand, Value
from rrfp_jax.programs.splitting.liveness import close_over_carries, slice_nodes
from rrfp_jax.programs.splitting.nests import loop_parts, sharded_parts
from rrfp_jax.programs.splitting.operations import Loop, Sharded
from rrfp_jax.programs.splitting.rules import is_heavy


def light_outputs(nodes: Sequence[Node], first: Sequence[Operand], second: Sequence[Operand]) -> list[bool]:
    """Which of the outputs `second` need no heavy node beyond what the outputs `first` need."""
    needed = slice_nodes(nodes, first).needed
    marked: set[Operand] = set()
    _mark(nodes, needed, marked)
    return [operand not in marked for operand in second]


def _mark(nodes: Sequence[Node], needed: set[Value], marked: set[Operand]) -> None:
    """Adds to `marked` the values that have a heavy node outside the slice `needed` above them."""
    for node in nodes:
        keep = [output in needed for output in node.outputs]
        operation = node.operation
        if isinstance(operation, Loop):
            _mark_loop(node, operation, keep, marked)
        elif isinstance(operation, Sharded):
            _mark_sharded(node, operation, keep, marked)
        elif not any(keep) and (is_heavy(node) or any(operand in marked for operand in node.inputs)):
            marked.update(node.outputs)


def _mark_loop(node: Node, loop: Loop, keep: Sequence[bool], marked: set[Operand]) -> None:
    parts = loop_parts(node, loop)
    needed = close_over_carries(parts, loop, keep)[1].needed if any(keep) else set[Value]()
    inner: set[Operand] = {e.inner for e in (*parts.constants, *parts.slices) if e.outer in marked}
    inner |= {carry.before for carry in parts.carries if carry.start in marked}
    while True:
        _mark(loop.body.nodes, needed, inner)
        more = {carry.before for carry in parts.carries if carry.after in inner} - inner
        if not more:
            break
        inner |= more
    marked.update(outer for after, outer in zip(loop.body.outputs, node.outputs, strict=True) if after in inner)


def _mark_sharded(node: Node, sharded: Sharded, keep: Sequence[bool], marked: set[Operand]) -> None:
    parts = sharded_parts(node, sharded)
    wanted = [outlet.inner for outlet, kept in zip(parts.outlets, keep, strict=True) if kept]
    needed = slice_nodes(sharded.body.nodes, wanted).needed if wanted else set[Value]()
    inner: set[Operand] = {inlet.inner for inlet in parts.inlets if inlet.outer in marked}
    _mark(sharded.body.nodes, needed, inner)
    marked.update(outlet.outer for outlet in parts.outlets if outlet.inner in inner)
