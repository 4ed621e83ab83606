"""Which values cross from I to W: a minimum cut over bytes.

The graph: a vertex per node and per value; being on the source's side means *computed in I* for a node and *not
available in W* for a value. An edge of the value's size leads from a node to each value that it makes: cutting it means
that the value crosses. An edge without bound leads from a value to each node that reads it: a node in W needs its
operands in W. Three more kinds without bound state the rules of `partition`:

* source to each node that I must compute, except free ones and fixed ones, which W may do again;
* each heavy node that I need not compute, and each output of W, to the sink;
* from each reader to the node that makes what it reads, where both belong to the rest and the latter is neither free
  nor fixed: if that is computed in W, so are its readers, since no array goes from W back to I.

Fixed values have no way from the source, and an unbounded edge from their node: they cost nothing and never cross.
Among cuts of equal size the one nearest to the source is taken: it prefers what is in the stash already.

`FlowGraph` finds it by Dinic's algorithm, written without recursion. The cut nearest to the source is unique: the
vertices that the source still reaches when the flow is maximal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from rrfp_jax.programs.splitting.ir import Node, Operand, Value, is_fixed, values
from rrfp_jax.programs.splitting.rules import is_free, is_heavy


@dataclass(frozen=True, eq=False, kw_only=True)
class CutProblem:
    """What `partition` knows when it asks what shall cross."""

    nodes: Sequence[Node]
    """All nodes but barriers, in order."""
    urgent: Collection[Value]
    """The values that I must compute."""
    second: Sequence[Operand]
    """What W must have in the end."""
    prices: Mapping[Value, int]
    """Bytes of each input that is not fixed."""
    late: Collection[Value]
    """Inputs that only W has."""


def minimum_cut(problem: CutProblem) -> set[Value]:
    graph = FlowGraph()
    source, sink = "source", "sink"
    graph.add_edge(source, sink, 0)
    makers = {output: node for node in problem.nodes for output in node.outputs}
    for value, price in problem.prices.items():
        graph.add_edge(source, ("input", value))
        graph.add_edge(("input", value), value, max(1, price))
    for value in problem.late:
        graph.add_edge(value, sink)
    for operand in values(problem.second):
        graph.add_edge(operand, sink)
    for node in problem.nodes:
        _add_node(graph, node, problem, makers)
    side = graph.source_side(source, sink)
    made = [output for node in problem.nodes if node in side for output in node.outputs]
    return {value for value in [*problem.prices, *made] if value not in side}


def _add_node(graph: FlowGraph, node: Node, problem: CutProblem, makers: Mapping[Value, Node]) -> None:
    is_urgent = any(output in problem.urgent for output in node.outputs)
    for output in node.outputs:
        graph.add_edge(node, output, UNBOUNDED if output.fixed else max(1, output.num_bytes))
    if is_urgent and not is_repeatable(node):
        graph.add_edge("source", node)
        return
    for operand in values(node.inputs):
        graph.add_edge(operand, node)
        maker = makers.get(operand)
        if operand in problem.late:
            graph.add_edge(node, operand)
        elif not is_urgent and maker is not None and _is_exclusive(maker, problem):
            graph.add_edge(node, maker)
    if not is_urgent and is_heavy(node):
        graph.add_edge(node, "sink")


def _is_exclusive(node: Node, problem: CutProblem) -> bool:
    """Whether the node belongs to the rest and must run on one side only."""
    return not is_repeatable(node) and not any(output in problem.urgent for output in node.outputs)


def is_repeatable(node: Node) -> bool:
    """Whether W may do again what I does: it costs nothing, or makes values that must not cross."""
    return is_free(node) or all(map(is_fixed, node.outputs))


UNBOUNDED = 1 << 60


class FlowGraph:
    """Edges with capacities between vertices of any hashable kind."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._edges: list[list[int]] = []
        self._heads: list[int] = []
        self._room: list[int] = []

    def _number(self, vertex: Hashable) -> int:
        if vertex not in self._numbers:
            self._numbers[vertex] = len(self._edges)
            self._edges.append([])
        return self._numbers[vertex]

    def add_edge(self, tail: Hashable, head: Hashable, capacity: int = UNBOUNDED) -> None:
        for start, end, room in ((tail, head, capacity), (head, tail, 0)):
            number = self._number(start)
            self._edges[number].append(len(self._heads))
            self._heads.append(self._number(end))
            self._room.append(room)

    def source_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The vertices on the source's side of the minimum cut nearest to it."""
        start, end = self._number(source), self._number(sink)
        while (depths := self._depths(start))[end] >= 0:
            nexts = [0] * len(self._edges)
            while pushed := self._push(start, end, depths, nexts):
                if pushed >= UNBOUNDED:
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
                if self._room[edge] > 0 and depths[head] < 0:
                    depths[head] = depths[vertex] + 1
                    queue.append(head)
        return depths

    def _push(self, start: int, end: int, depths: list[int], nexts: list[int]) -> int:
        """Sends flow along one shortest path that still has room; returns how much, 0 if there is none."""
        path: list[int] = []
        vertex = start
        while vertex != end:
            edge = self._next_edge(vertex, depths, nexts)
            if edge is not None:
                path.append(edge)
                vertex = self._heads[edge]
            elif path:
                vertex = self._heads[path.pop() ^ 1]
                nexts[vertex] += 1
            else:
                return 0
        pushed = min(self._room[edge] for edge in path)
        for edge in path:
            self._room[edge] -= pushed
            self._room[edge ^ 1] += pushed
        return pushed

    def _next_edge(self, vertex: int, depths: list[int], nexts: list[int]) -> int | None:
        edges = self._edges[vertex]
        while nexts[vertex] < len(edges):
            edge = edges[nexts[vertex]]
            if self._room[edge] > 0 and depths[self._heads[edge]] == depths[vertex] + 1:
                return edge
            nexts[vertex] += 1
        return None
