"""A loop or shard map as two: one that I runs and one that W runs.

Of a loop, I takes the outputs that it needs and every carry that these need; the body is partitioned as any list of
nodes is. A value of the body that crosses becomes a stack of I's loop and a slice of W's, which runs in the same
direction. What crosses unchanged from a constant or slice of the loop is read by W's loop from where the first read it.
If W's loop carries nothing, which is so for weights of stacked layers, it runs all layers at once under `vmap`.

Of a shard map, a value that crosses may have no global form, so each shard's piece becomes a row of a global array,
with as many rows as there are shards that may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rrfp_jax.programs.splitting.cut import Partition
from rrfp_jax.programs.splitting.ir import Node, Value
from rrfp_jax.programs.splitting.liveness import close_over_carries
from rrfp_jax.programs.splitting.nests import (
    Entry,
    Inlet,
    Outlet,
    ShardedParts,
    Stack,
    loop_parts,
    sharded_parts,
)
from rrfp_jax.programs.splitting.operations import Loop, Sharded
from rrfp_jax.programs.splitting.rules import can_batch

Partitioner = Callable[..., Partition]


def split_nest(node: Node, keep: Sequence[bool], partition: Partitioner) -> list[Node]:
    """The node as [I's part] or [I's part, W's part], where I needs the outputs marked in `keep`."""
    if isinstance(node.operation, Loop):
        return _split_loop(node, node.operation, keep, partition)
    assert isinstance(node.operation, Sharded)
    return _split_sharded(node, node.operation, keep, partition)


def _split_loop(node: Node, loop: Loop, keep: Sequence[bool], partition: Partitioner) -> list[Node]:
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


def _split_sharded(node: Node, sharded: Sharded, keep: Sequence[bool], partition: Partitioner) -> list[Node]:
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
