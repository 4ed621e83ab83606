"""Partition of a backward into I, which makes the input gradient, and W, the rest that weight gradients need.

Rules, for straight-line nodes
------------------------------
1. The nodes that the *first* outputs (the input gradient) need run in I. All others that the *second* outputs (weight
   gradients) need are the rest.
2. A heavy node of the rest (a matrix product, say) runs in W. A light one may go to either side, but never to I when
   one of its operands is computed in W.
3. Hence every node runs exactly once, with two exceptions that cost nothing or are not per microbatch: free nodes may
   be redone in W, and fixed values (of parameters and constants alone) never cross, each side makes its own.
4. A value crosses from I to W if W reads it and I has it. Within the rules above the set that crosses is the one with
   the fewest bytes: a minimum cut.

Why it is exact: both programs consist of nodes of the one backward, with the same operands, in the same order. By rule
2 and the cut, each operand of a node in W is computed in W, or crosses, or is fixed.

Loops and shard maps
--------------------
A loop of which I needs some outputs and W the others is two loops. I takes the outputs that it needs and every carry
that these need; the body is partitioned by the same rules, so each level has its own cut. A value of the body that
crosses becomes a stack of I's loop and a slice of W's, which runs in the same direction. A value that crosses unchanged
from a constant or slice of the loop is read by W's loop from where the first read it. If W's loop carries nothing,
which is so for weights of stacked layers, it runs all layers at once under `vmap`.

Of a shard map, a value that crosses may have no global form, so each shard's piece becomes a row of a global array,
with as many rows as there are shards that may differ.

Barriers (of rematerialisation) matter to I only, where they keep the recomputation of one layer from running ahead of
the cotangents of the next. W reads the operands of the barrier, so a residual crosses as it is and not as a copy.

The cut
-------
The graph has a vertex per node and per value; being on the source's side means *computed in I* for a node and *not
available in W* for a value. An edge of the value's size leads from a node to each value that it makes: cutting it means
that the value crosses. An edge without bound leads from a value to each node that reads it: a node in W needs its
operands in W. Three more kinds without bound state the rules:

* source to each node that I must compute, except free ones and fixed ones, which W may do again;
* each heavy node that I need not compute, and each output of W, to the sink;
* from each reader to the node that makes its operand, where both belong to the rest and the latter is neither free nor
  fixed: if that is computed in W, so are its readers, since no array goes from W back to I.

Fixed values have no way from the source, and an unbounded edge from their node: they cost nothing and never cross.
Among cuts of equal size the one nearest to the source is taken: it prefers values that are residuals of the forward
already. It is unique: the vertices that the source still reaches when the flow is maximal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from rrfp_jax.programs.splitting.ir import (
    Barrier,
    Inlet,
    Loop,
    Node,
    Operand,
    Outlet,
    Port,
    Sharded,
    Var,
    close_over_carries,
    is_fixed,
    loop_parts,
    restrict,
    sharded_parts,
    slice_nodes,
    variables,
)
from rrfp_jax.programs.splitting.rules import can_batch, is_free, is_heavy


class Halves(NamedTuple):
    """The two programs of a split backward."""

    first: list[Node]
    """The nodes of I, in order."""
    second: list[Node]
    """The nodes of W, in order."""
    crossing: list[Var]
    """The values that W reads and that I makes or has read itself."""
    outputs: list[Operand]
    """The outputs of W."""


def partition(
    nodes: Sequence[Node],
    first: Sequence[Operand],
    second: Sequence[Operand],
    *,
    prices: Mapping[Var, int],
    late: frozenset[Var] = frozenset(),
) -> Halves:
    """Cuts `nodes` for the outputs `first` of I and `second` of W.

    `prices` names every input that is not fixed and gives the bytes that it costs when it crosses as it is. The inputs
    `late` are there in W only (the carries of W's part of a loop).
    """
    live = slice_nodes(nodes, [*first, *second]).nodes
    separated, urgent = _separate(live, first)
    origins: dict[Operand, Operand] = {}
    for node in separated:
        if isinstance(node.operation, Barrier):
            origins.update((o, origins.get(i, i)) for i, o in zip(node.inputs, node.outputs, strict=True))
    deferrable = [
        replace(node, inputs=tuple(origins.get(operand, operand) for operand in node.inputs))
        for node in separated
        if not isinstance(node.operation, Barrier)
    ]
    wanted = [origins.get(operand, operand) for operand in second]
    crossing = _minimum_cut(deferrable, urgent, wanted, prices, late)
    in_second = slice_nodes(deferrable, wanted, given=crossing, keep_effects=False).nodes
    used = {operand for node in in_second for operand in node.inputs} | set(wanted)
    order = [*prices, *(output for node in separated for output in node.outputs)]
    chosen = [value for value in order if value in crossing and value in used]
    in_first = slice_nodes(separated, [*first, *chosen]).nodes
    return Halves(first=in_first, second=in_second, crossing=chosen, outputs=wanted)


def _separate(nodes: Sequence[Node], first: Sequence[Operand]) -> tuple[list[Node], set[Var]]:
    """Splits the loops and shard maps of which I needs a part; also returns every value that I must compute."""
    needed = set(variables(first))
    urgent: set[Var] = set()
    separated: list[Node] = []
    for node in reversed(nodes):
        keep = [output in needed for output in node.outputs]
        pieces = [node]
        if any(keep) or node.operation.effectful:
            if not all(keep) and not all(map(is_fixed, node.outputs)):
                if isinstance(node.operation, Loop):
                    pieces = _split_loop(node, node.operation, keep)
                elif isinstance(node.operation, Sharded):
                    pieces = _split_sharded(node, node.operation, keep)
            now = restrict(node, keep) if isinstance(node.operation, Barrier) else pieces[0]
            needed.update(variables(now.inputs))
            urgent.update(pieces[0].outputs)
        separated.extend(reversed(pieces))
    return separated[::-1], urgent


def _split_loop(node: Node, loop: Loop, keep: Sequence[bool]) -> list[Node]:
    """Returns [I's loop, W's loop], where I needs the outputs marked in `keep`; [the loop] where I needs all of it."""
    parts = loop_parts(node, loop)
    closed, _ = close_over_carries(parts, loop, keep)
    if all(closed):
        return [node]
    now, then = _sides(parts.carries, closed[: len(parts.carries)])
    kept_stacks, left_stacks = _sides(parts.stacks, closed[len(parts.carries) :])
    # a constant crosses once for all passes of the loop
    prices = {e.inner: max(1, e.inner.num_bytes // loop.length) for e in parts.constants if not e.inner.fixed}
    prices |= {entry.inner: entry.inner.num_bytes for entry in parts.slices if not entry.inner.fixed}
    entries = set(prices)
    prices |= {carry.before: carry.before.num_bytes for carry in now}
    body = partition(
        loop.body.nodes, *_sides(loop.body.outputs, closed),
        prices=prices, late=frozenset(carry.before for carry in then),
    )  # fmt: skip
    stacks = {
        value: Var((loop.length, *value.shape), value.dtype, value.fixed, value.varying)
        for value in body.crossing
        if value not in entries
    }
    first = replace(parts, carries=now, stacks=[*kept_stacks, *(Outlet(*pair) for pair in stacks.items())])
    second = replace(
        parts,
        carries=[carry._replace(after=after) for carry, after in zip(then, body.outputs, strict=False)],
        slices=[*parts.slices, *(Inlet(outer, inner) for inner, outer in stacks.items())],
        stacks=[
            stack._replace(inner=inner) for stack, inner in zip(left_stacks, body.outputs[len(then) :], strict=True)
        ],
    )
    later = second.node(loop, body.second)
    assert isinstance(later.operation, Loop)
    return [first.node(loop, body.first), second.node(loop, body.second, batched=can_batch(later.operation.body))]


def _split_sharded(node: Node, sharded: Sharded, keep: Sequence[bool]) -> list[Node]:
    """Returns [I's shard map, W's shard map], where I needs the outputs marked in `keep`."""
    parts = sharded_parts(node, sharded)
    prices = {inlet.inner: inlet.inner.num_bytes for inlet in parts.inlets if not inlet.inner.fixed}
    body = partition(sharded.body.nodes, *_sides(sharded.body.outputs, keep), prices=prices)
    kept, left = _sides(parts.outlets, keep)
    outlets: list[Outlet] = []
    inlets: list[Inlet] = []
    for value in body.crossing:
        if value not in prices:
            # a row of a global array for the piece of every shard that may differ
            axes = tuple(axis for axis in sharded.mesh.axis_names if axis in value.varying & sharded.axes)
            num_rows = math.prod(int(sharded.mesh.shape[axis]) for axis in axes)
            outer = Var((num_rows, *value.shape), value.dtype, False, value.varying - sharded.axes)
            port = Port(PartitionSpec(axes) if axes else PartitionSpec(None), stacked=True)
            outlets.append(Outlet(value, outer, port))
            inlets.append(Inlet(outer, value, port))
    first = replace(parts, outlets=[*kept, *outlets])
    second = replace(
        parts,
        inlets=[*parts.inlets, *inlets],
        outlets=[outlet._replace(inner=inner) for outlet, inner in zip(left, body.outputs, strict=True)],
    )
    return [first.node(sharded, body.first), second.node(sharded, body.second)]


def _sides(entries: Sequence[Any], keep: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Returns the entries that are marked, and the others."""
    pairs = list(zip(entries, keep, strict=True))
    return [entry for entry, kept in pairs if kept], [entry for entry, kept in pairs if not kept]


# -- the cut -----------------------------------------------------------------------------------------------------------


def _minimum_cut(
    nodes: Sequence[Node],
    urgent: set[Var],
    second: Sequence[Operand],
    prices: Mapping[Var, int],
    late: Collection[Var],
) -> set[Var]:
    """Returns the values that cross.

    `nodes` are all but barriers, in order, `urgent` the values that I must compute, `second` the outputs of W; `prices`
    and `late` are as in `partition`.
    """
    graph = FlowGraph()
    source, sink = "source", "sink"
    graph.add_edge(source, sink, 0)
    makers = {output: node for node in nodes for output in node.outputs}
    for value, price in prices.items():
        graph.add_edge(source, ("input", value))
        graph.add_edge(("input", value), value, max(1, price))
    for value in [*late, *variables(second)]:
        graph.add_edge(value, sink)
    for node in nodes:
        is_urgent = any(output in urgent for output in node.outputs)
        for output in node.outputs:
            graph.add_edge(node, output, _UNBOUNDED if output.fixed else max(1, output.num_bytes))
        if is_urgent and not _is_repeatable(node):
            graph.add_edge(source, node)
            continue
        for operand in variables(node.inputs):
            graph.add_edge(operand, node)
            maker = makers.get(operand)
            if operand in late:
                graph.add_edge(node, operand)
            elif not (is_urgent or maker is None or _is_repeatable(maker) or urgent.intersection(maker.outputs)):
                # both belong to the rest, and the maker runs on one side only
                graph.add_edge(node, maker)
        if not is_urgent and is_heavy(node):
            graph.add_edge(node, sink)
    side = graph.source_side(source, sink)
    made = [output for node in nodes if node in side for output in node.outputs]
    return {value for value in [*prices, *made] if value not in side}


def _is_repeatable(node: Node) -> bool:
    """Whether W may do again a node of I: it costs nothing, or makes values that must not cross."""
    return is_free(node) or all(map(is_fixed, node.outputs))


_UNBOUNDED = 1 << 60


class FlowGraph:
    """Edges with capacities between vertices of any hashable kind; finds a minimum cut by Dinic's algorithm.

    It is written without recursion, since a path may be as long as the program.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._edges: list[list[int]] = []
        self._heads: list[int] = []
        self._left: list[int] = []
        """The capacity that is left on each edge; edge ``number ^ 1`` leads back."""

    def _number(self, vertex: Hashable) -> int:
        if vertex not in self._numbers:
            self._numbers[vertex] = len(self._edges)
            self._edges.append([])
        return self._numbers[vertex]

    def add_edge(self, tail: Hashable, head: Hashable, capacity: int = _UNBOUNDED) -> None:
        """Adds an edge, and its way back without capacity."""
        for start, end, left in ((tail, head, capacity), (head, tail, 0)):
            number = self._number(start)
            self._edges[number].append(len(self._heads))
            self._heads.append(self._number(end))
            self._left.append(left)

    def source_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """Returns the vertices on the source's side of the minimum cut nearest to it."""
        start, end = self._number(source), self._number(sink)
        while (depths := self._depths(start))[end] >= 0:
            nexts = [0] * len(self._edges)
            while pushed := self._push(start, end, depths, nexts):
                if pushed >= _UNBOUNDED:
                    raise ValueError("every cut between source and sink has unbounded capacity")
        return {vertex for vertex, number in self._numbers.items() if depths[number] >= 0}

    def _depths(self, start: int) -> list[int]:
        depths = [-1] * len(self._edges)
        depths[start] = 0
        queue = deque([start])
        while queue:
            vertex = queue.popleft()
            for edge in self._edges[vertex]:
                head = self._heads[edge]
                if self._left[edge] > 0 and depths[head] < 0:
                    depths[head] = depths[vertex] + 1
                    queue.append(head)
        return depths

    def _push(self, start: int, end: int, depths: list[int], nexts: list[int]) -> int:
        """Sends flow along one shortest path with capacity left; returns how much, 0 if there is none.

        `nexts` has for every vertex how many of its edges lead nowhere any more.
        """
        path: list[int] = []
        vertex = start
        while vertex != end:
            edges = self._edges[vertex]
            while nexts[vertex] < len(edges):
                edge = edges[nexts[vertex]]
                if self._left[edge] > 0 and depths[self._heads[edge]] == depths[vertex] + 1:
                    path.append(edge)
                    vertex = self._heads[edge]
                    break
                nexts[vertex] += 1
            else:
                if not path:
                    return 0
                vertex = self._heads[path.pop() ^ 1]
                nexts[vertex] += 1
        pushed = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= pushed
            self._left[edge ^ 1] += pushed
        return pushed
