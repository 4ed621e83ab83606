"""Partition of a backward into I, what the input gradient needs, and W, the rest that weight gradients need.

Rules, for straight-line nodes
------------------------------
1. What the *first* outputs (the input gradient) need is computed in I. Everything else that the *second* outputs
   (weight gradients) need is the rest.
2. A heavy node of the rest (a matrix product, say) is computed in W. A light one may go to either side, but never to
   I when something that it reads is computed in W.
3. Hence every node runs exactly once, with two exceptions that cost nothing or are not per microbatch: free nodes may
   be redone in W, and fixed values (of parameters and constants alone) never cross, each side makes its own.
4. A value crosses from I to W if W reads it and I has it. Within the rules above the set that crosses is the one with
   the fewest bytes: a minimum cut (`cut`).

Why it is exact: both programs consist of nodes of the one backward, with the same operands, in the same order. By rule
2 and the cut, each operand of a node in W is computed in W, or crosses, or is fixed.

Loops and shard maps
--------------------
A loop of which I needs some outputs and W the others is two loops. I takes the outputs that it needs and every carry
that these need; the body is partitioned by the same rules, so each level has its own cut. A value of the body that
crosses becomes a stack of I's loop and a slice of W's, which runs in the same direction. What crosses unchanged from a
constant or slice of the loop is read by W's loop from where the first read it. If W's loop carries nothing, which is so
for weights of stacked layers, it runs all layers at once under `vmap`.

Of a shard map, a value that crosses may have no global form, so each shard's piece becomes a row of a global array,
with as many rows as there are shards that may differ.

Barriers (of rematerialisation) matter to I only, where they keep the recomputation of one layer from running ahead of
the cotangents of the next. W reads what went into the barrier, so a residual crosses as it is and not as a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rrfp_jax.programs.splitting.cut import CutProblem, minimum_cut
from rrfp_jax.programs.splitting.ir import Node, Operand, Value, is_fixed, values
from rrfp_jax.programs.splitting.liveness import (
    Entry,
    Inlet,
    Outlet,
    ShardedParts,
    Stack,
    close_over_carries,
    loop_parts,
    restrict,
    sharded_parts,
    slice_nodes,
)
from rrfp_jax.programs.splitting.operations import Barrier, Loop, Sharded
from rrfp_jax.programs.splitting.rules import can_batch, is_splittable


class Halves(NamedTuple):
    """The nodes of I and of W in order, the values that W reads and I makes or has read itself, and W's outputs."""

    first: list[Node]
    second: list[Node]
    crossing: list[Value]
    outputs: list[Operand]


def partition(
    nodes: Sequence[Node],
    first: Sequence[Operand],
    second: Sequence[Operand],
    *,
    prices: Mapping[Value, int],
    late: frozenset[Value] = frozenset(),
) -> Halves:
    """Cuts `nodes` for the outputs `first` of I and `second` of W.

    `prices` names every input that is not fixed and gives the bytes that it costs when it crosses as it is. The inputs
    `late` are there in W only (what W's part of a loop carries).
    """
    live = slice_nodes(nodes, [*first, *second]).nodes
    separated, urgent = _separate(live, first)
    origins = _behind_barriers(separated)
    deferrable = [_redirect(node, origins) for node in separated if not isinstance(node.operation, Barrier)]
    wanted = [origins.get(operand, operand) for operand in second]
    problem = CutProblem(nodes=deferrable, urgent=urgent, second=wanted, prices=prices, late=late)
    crossing = minimum_cut(problem)
    in_second = slice_nodes(deferrable, wanted, given=crossing, keep_effects=False).nodes
    used = {operand for node in in_second for operand in node.inputs} | set(wanted)
    order = [*prices, *(output for node in separated for output in node.outputs)]
    chosen = [value for value in order if value in crossing and value in used]
    in_first = slice_nodes(separated, [*first, *chosen]).nodes
    return Halves(first=in_first, second=in_second, crossing=chosen, outputs=wanted)


def _separate(nodes: Sequence[Node], first: Sequence[Operand]) -> tuple[list[Node], set[Value]]:
    """Splits the loops and shard maps of which I needs a part; also returns every value that I must compute."""
    needed = set(values(first))
    urgent: set[Value] = set()
    separated: list[Node] = []
    for node in reversed(nodes):
        keep = [output in needed for output in node.outputs]
        pieces = [node]
        if any(keep) or node.operation.effectful:
            if is_splittable(node) and not all(keep) and not all(map(is_fixed, node.outputs)):
                pieces = split_nest(node, keep)
            now = restrict(node, keep) if isinstance(node.operation, Barrier) else pieces[0]
            needed.update(values(now.inputs))
            urgent.update(pieces[0].outputs)
        separated.extend(reversed(pieces))
    return separated[::-1], urgent


def _behind_barriers(nodes: Sequence[Node]) -> dict[Operand, Operand]:
    """What went into a barrier, for each value that came out of one."""
    origins: dict[Operand, Operand] = {}
    for node in nodes:
        if isinstance(node.operation, Barrier):
            origins.update((o, origins.get(i, i)) for i, o in zip(node.inputs, node.outputs, strict=True))
    return origins


def _redirect(node: Node, origins: Mapping[Operand, Operand]) -> Node:
    return replace(node, inputs=tuple(origins.get(operand, operand) for operand in node.inputs))


def split_nest(node: Node, keep: Sequence[bool]) -> list[Node]:
    """The node as [I's part] or [I's part, W's part], where I needs the outputs marked in `keep`."""
    if isinstance(node.operation, Loop):
        return _split_loop(node, node.operation, keep)
    assert isinstance(node.operation, Sharded)
    return _split_sharded(node, node.operation, keep)


def _split_loop(node: Node, loop: Loop, keep: Sequence[bool]) -> list[Node]:
    parts = loop_parts(node, loop)
    closed, _ = close_over_carries(parts, loop, keep)
    if all(closed):
        return [node]
    count = len(parts.carries)
    now = [carry for carry, kept in zip(parts.carries, closed[:count], strict=True) if kept]
    then = [carry for carry, kept in zip(parts.carries, closed[:count], strict=True) if not kept]
    prices = {e.inner: max(1, e.inner.num_bytes // loop.length) for e in parts.constants if not e.inner.fixed}
    prices |= {entry.inner: entry.inner.num_bytes for entry in parts.slices if not entry.inner.fixed}
    entries = set(prices)
    prices |= {carry.before: carry.before.num_bytes for carry in now}
    body = partition(
        loop.body.nodes, *_sides(loop.body.outputs, closed),
        prices=prices, late=frozenset(carry.before for carry in then),
    )  # fmt: skip
    stacks = {value: value.stacked(loop.length) for value in body.crossing if value not in entries}
    first = replace(
        parts,
        carries=now,
        stacks=[s for s, kept in zip(parts.stacks, closed[count:], strict=True) if kept]
        + [Stack(inner, outer) for inner, outer in stacks.items()],
    )
    left = [stack for stack, kept in zip(parts.stacks, closed[count:], strict=True) if not kept]
    second = replace(
        parts,
        carries=[carry._replace(after=after) for carry, after in zip(then, body.outputs, strict=False)],
        slices=[*parts.slices, *(Entry(outer, inner) for inner, outer in stacks.items())],
        stacks=[stack._replace(inner=inner) for stack, inner in zip(left, body.outputs[len(then) :], strict=True)],
    )
    later = second.node(loop, body.second)
    assert isinstance(later.operation, Loop)
    return [first.node(loop, body.first), second.node(loop, body.second, batched=can_batch(later.operation.body))]


def _split_sharded(node: Node, sharded: Sharded, keep: Sequence[bool]) -> list[Node]:
    parts = sharded_parts(node, sharded)
    prices = {inlet.inner: inlet.inner.num_bytes for inlet in parts.inlets if not inlet.inner.fixed}
    body = partition(sharded.body.nodes, *_sides(sharded.body.outputs, keep), prices=prices)
    crossing = [_row(value, sharded) for value in body.crossing if value not in prices]
    first: ShardedParts = replace(
        parts, outlets=[o for o, kept in zip(parts.outlets, keep, strict=True) if kept] + crossing
    )
    left = [outlet for outlet, kept in zip(parts.outlets, keep, strict=True) if not kept]
    second: ShardedParts = replace(
        parts,
        inlets=[*parts.inlets, *(Inlet(outlet.outer, _value(outlet.inner), outlet.port) for outlet in crossing)],
        outlets=[outlet._replace(inner=inner) for outlet, inner in zip(left, body.outputs, strict=True)],
    )
    return [first.node(sharded, body.first), second.node(sharded, body.second)]


def _row(value: Value, sharded: Sharded) -> Outlet:
    outer = Value(
        (sharded.num_rows(value.varying), *value.shape), value.dtype, fixed=False, varying=value.varying - sharded.axes
    )
    return Outlet(value, outer, sharded.crossing_port(value.varying))


def _sides(outputs: Sequence[Any], keep: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    pairs = list(zip(outputs, keep, strict=True))
    return [output for output, kept in pairs if kept], [output for output, kept in pairs if not kept]


def _value(operand: Any) -> Value:
    assert isinstance(operand, Value)
    return operand
