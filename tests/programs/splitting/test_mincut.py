"""The minimum cut agrees with exhaustive search on small graphs."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.programs.splitting.partition import FlowGraph

VERTICES = range(5)
Edge = tuple[int, int, int]


def weight(edges: list[Edge], side: set[int]) -> int:
    return sum(capacity for tail, head, capacity in edges if tail in side and head not in side)


@given(st.lists(st.tuples(st.sampled_from(VERTICES), st.sampled_from(VERTICES), st.integers(0, 9)), max_size=14))
def test_it_is_the_smallest_cut_and_the_nearest_to_the_source(edges: list[Edge]) -> None:
    graph = FlowGraph()
    for vertex in VERTICES:
        graph.add_edge(vertex, vertex, 0)
    for edge in edges:
        graph.add_edge(*edge)
    side = graph.source_side(0, 4)
    inner = chain.from_iterable(combinations((1, 2, 3), size) for size in range(4))
    cuts = [{0, *chosen} for chosen in inner]
    least = min(weight(edges, cut) for cut in cuts)
    assert weight(edges, side) == least
    assert side == set.intersection(*(cut for cut in cuts if weight(edges, cut) == least))


def test_a_path_without_bound_is_refused() -> None:
    graph = FlowGraph()
    graph.add_edge("source", "middle")
    graph.add_edge("middle", "sink")
    with pytest.raises(ValueError, match="unbounded"):
        graph.source_side("source", "sink")
