"""Loops and shard maps taken apart by role, and put together again.

A `Loop` node keeps its operands in three runs and its body's in three more. To drop, split or forward some of them one
wants each array's outer and inner side as a pair; that is what the records here are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rrfp_jax.programs.splitting.ir import Block, Node, Operand, Value
from rrfp_jax.programs.splitting.operations import Loop, Port, Sharded


class Entry(NamedTuple):
    """An array that goes into a body: a loop's constant or slice."""

    outer: Operand
    inner: Value


class Carry(NamedTuple):
    """An array that a loop hands from pass to pass."""

    start: Operand
    before: Value
    after: Operand
    final: Value


class Stack(NamedTuple):
    """An array of each pass of a loop, and the stack of all of them."""

    inner: Operand
    outer: Value


@dataclass(frozen=True, eq=False, kw_only=True)
class LoopParts:
    """All that goes into a loop and comes out of it."""

    constants: Sequence[Entry]
    carries: Sequence[Carry]
    slices: Sequence[Entry]
    stacks: Sequence[Stack]

    def node(self, template: Loop, nodes: Sequence[Node], *, batched: bool = False) -> Node:
        """The loop with these parts around the body `nodes`, for the rest as `template`; unread entries are dropped."""
        carried = [carry.after for carry in self.carries]
        outputs = (*carried, *(stack.inner for stack in self.stacks))
        used = {operand for node in nodes for operand in node.inputs} | set(outputs)
        constants = [entry for entry in self.constants if entry.inner in used]
        slices = [entry for entry in self.slices if entry.inner in used]
        befores = [carry.before for carry in self.carries]
        inputs = (*(e.inner for e in constants), *befores, *(e.inner for e in slices))
        loop = replace(
            template,
            body=Block(inputs=inputs, nodes=tuple(nodes), outputs=outputs),
            num_constants=len(constants),
            num_carries=len(self.carries),
            batched=batched and bool(slices) and not self.carries,
            effectful=any(node.operation.effectful for node in nodes),
        )
        operands = (*(e.outer for e in constants), *(c.start for c in self.carries), *(e.outer for e in slices))
        return Node(loop, operands, (*(c.final for c in self.carries), *(s.outer for s in self.stacks)))


def loop_parts(node: Node, loop: Loop) -> LoopParts:
    body, first, last = loop.body, loop.num_constants, loop.num_constants + loop.num_carries
    pairs = [Entry(outer, inner) for outer, inner in zip(node.inputs, body.inputs, strict=True)]
    results = list(zip(body.outputs, node.outputs, strict=True))
    carries = [
        Carry(entry.outer, entry.inner, after, final)
        for entry, (after, final) in zip(pairs[first:last], results[: loop.num_carries], strict=True)
    ]
    stacks = [Stack(inner, outer) for inner, outer in results[loop.num_carries :]]
    return LoopParts(constants=pairs[:first], carries=carries, slices=pairs[last:], stacks=stacks)


class Inlet(NamedTuple):
    """An array that goes into a shard map."""

    outer: Operand
    inner: Value
    port: Port


class Outlet(NamedTuple):
    """An array that comes out of a shard map."""

    inner: Operand
    outer: Value
    port: Port


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedParts:
    """All that goes into a shard map and comes out of it."""

    inlets: Sequence[Inlet]
    outlets: Sequence[Outlet]

    def node(self, template: Sharded, nodes: Sequence[Node]) -> Node:
        """The shard map with these parts around the body `nodes`; unread inlets are dropped."""
        outputs = tuple(outlet.inner for outlet in self.outlets)
        used = {operand for node in nodes for operand in node.inputs} | set(outputs)
        inlets = [inlet for inlet in self.inlets if inlet.inner in used]
        sharded = replace(
            template,
            body=Block(inputs=tuple(i.inner for i in inlets), nodes=tuple(nodes), outputs=outputs),
            ports_in=tuple(inlet.port for inlet in inlets),
            ports_out=tuple(outlet.port for outlet in self.outlets),
            effectful=any(node.operation.effectful for node in nodes),
        )
        return Node(sharded, tuple(inlet.outer for inlet in inlets), tuple(outlet.outer for outlet in self.outlets))


def sharded_parts(node: Node, sharded: Sharded) -> ShardedParts:
    inlets = map(Inlet, node.inputs, sharded.body.inputs, sharded.ports_in)
    outlets = map(Outlet, sharded.body.outputs, node.outputs, sharded.ports_out)
    return ShardedParts(inlets=list(inlets), outlets=list(outlets))
