"""Dead code: the nodes that some outputs need, loops and shard maps cut down to the outputs that are read.

A `Loop` node keeps its operands in three runs and its body's in three more. To drop, split or forward some of them one
wants each array's outer and inner side as a pair: `loop_parts` and `sharded_parts` take loops and shard maps apart by
role, and the records that they return put them together again.

`slice_nodes` walks backwards from the wanted values. A loop's carry is needed when its final value is, or when a needed
output of the body reads its value before the pass: a least fixed point, reached in at most one round per carry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rrfp_jax.programs.splitting.ir import Barrier, Block, Loop, Node, Operand, Port, Sharded, Var, variables


class LoopInput(NamedTuple):
    """An array that goes into a body: a loop's constant or slice."""

    outer: Operand
    inner: Var


class Carry(NamedTuple):
    """An array that a loop hands from pass to pass."""

    start: Operand
    before: Var
    after: Operand
    final: Var


class Stack(NamedTuple):
    """An array of each pass of a loop, and the stack of all of them."""

    inner: Operand
    outer: Var


@dataclass(frozen=True, eq=False, kw_only=True)
class LoopParts:
    """All arrays that go into a loop and come out of it."""

    constants: Sequence[LoopInput]
    carries: Sequence[Carry]
    slices: Sequence[LoopInput]
    stacks: Sequence[Stack]

    def node(self, template: Loop, nodes: Sequence[Node], *, batched: bool = False) -> Node:
        """Returns the loop with these parts around the body `nodes`, otherwise as `template`, without unread inputs."""
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
    """Takes a loop apart; `loop` is the node's operation."""
    body, first, last = loop.body, loop.num_constants, loop.num_constants + loop.num_carries
    pairs = [LoopInput(outer, inner) for outer, inner in zip(node.inputs, body.inputs, strict=True)]
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
    inner: Var
    port: Port


class Outlet(NamedTuple):
    """An array that comes out of a shard map."""

    inner: Operand
    outer: Var
    port: Port


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedParts:
    """All arrays that go into a shard map and come out of it."""

    inlets: Sequence[Inlet]
    outlets: Sequence[Outlet]

    def node(self, template: Sharded, nodes: Sequence[Node]) -> Node:
        """Returns the shard map with these parts around the body `nodes`, without unread inlets."""
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
    """Takes a shard map apart; `sharded` is the node's operation."""
    inlets = map(Inlet, node.inputs, sharded.body.inputs, sharded.ports_in)
    outlets = map(Outlet, sharded.body.outputs, node.outputs, sharded.ports_out)
    return ShardedParts(inlets=list(inlets), outlets=list(outlets))


class Slice(NamedTuple):
    """The live nodes in order, and every variable that they or the outputs read."""

    nodes: list[Node]
    needed: set[Var]


def slice_nodes(
    nodes: Sequence[Node],
    wanted: Iterable[Operand],
    *,
    given: Collection[Var] = frozenset(),
    keep_effects: bool = True,
) -> Slice:
    """Returns the nodes that `wanted` needs when the values `given` are there already.

    Nodes with effects are kept too, whether or not somebody reads them, if `keep_effects`.
    """
    needed = set(variables(wanted)) - set(given)
    kept = []
    for node in reversed(nodes):
        keep = [output in needed for output in node.outputs]
        if any(keep) or (keep_effects and node.operation.effectful):
            live = restrict(node, keep, keep_effects=keep_effects)
            needed.update(value for value in variables(live.inputs) if value not in given)
            kept.append(live)
    return Slice(kept[::-1], needed)


def restrict(node: Node, keep: Sequence[bool], *, keep_effects: bool = True) -> Node:
    """Returns the node without the outputs that nobody reads, where it can do without."""
    operation = node.operation
    if all(keep):
        return node
    if isinstance(operation, Barrier):
        pairs = [(i, o) for i, o, wanted in zip(node.inputs, node.outputs, keep, strict=True) if wanted]
        return replace(node, inputs=tuple(i for i, _ in pairs), outputs=tuple(o for _, o in pairs))
    if isinstance(operation, Loop):
        parts = loop_parts(node, operation)
        closed, body = close_over_carries(parts, operation, keep, keep_effects=keep_effects)
        carries = [carry for carry, wanted in zip(parts.carries, closed, strict=False) if wanted]
        stacks = [stack for stack, wanted in zip(parts.stacks, keep[len(parts.carries) :], strict=True) if wanted]
        return replace(parts, carries=carries, stacks=stacks).node(operation, body.nodes, batched=operation.batched)
    if isinstance(operation, Sharded):
        shards = sharded_parts(node, operation)
        outlets = [outlet for outlet, wanted in zip(shards.outlets, keep, strict=True) if wanted]
        body = slice_nodes(operation.body.nodes, [outlet.inner for outlet in outlets], keep_effects=keep_effects)
        return replace(shards, outlets=outlets).node(operation, body.nodes)
    return node


def close_over_carries(
    parts: LoopParts, loop: Loop, keep: Sequence[bool], *, keep_effects: bool = True
) -> tuple[list[bool], Slice]:
    """Returns the kept outputs of a loop with the carries that they need, and the live part of the body."""
    closed = list(keep)
    while True:
        wanted = [operand for operand, kept in zip(loop.body.outputs, closed, strict=True) if kept]
        body = slice_nodes(loop.body.nodes, wanted, keep_effects=keep_effects)
        missing = [i for i, carry in enumerate(parts.carries) if carry.before in body.needed and not closed[i]]
        if not missing:
            return closed, body
        for index in missing:
            closed[index] = True
