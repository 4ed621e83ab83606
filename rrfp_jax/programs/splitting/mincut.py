"""A minimum cut of a directed graph (Dinic's algorithm), written without recursion.

Of several minimum cuts the one nearest to the source is returned, which is unique: the vertices that the source still
reaches when the flow is maximal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

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
