"""The vocabulary: text forms, placements, graphs and their dependencies."""

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.schedules import (
    BUILT_IN_KINDS,
    NO_MICROBATCH,
    Edge,
    PipelineGraph,
    Placement,
    Task,
    TaskKind,
    absences,
    bidirectional,
    chain,
    linear,
    looped,
    opposite_chains,
    v_shaped,
    waves,
)

TWO_ENCODERS = PipelineGraph(4, 2, (Edge(0, 2), Edge(1, 2), Edge(2, 3)))


def names(tasks):
    return [str(task) for task in tasks]


def dependencies(graph, text):
    return names(graph.dependencies(Task.parse(text)))


# -- tasks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("2F5", Task(TaskKind.F, 2, 5)),
        ("0I0", Task(TaskKind.I, 0, 0)),
        (" 10W12 ", Task(TaskKind.W, 10, 12)),
        ("3R", Task(TaskKind.R, 3)),
        ("3U", Task(TaskKind.U, 3, NO_MICROBATCH)),
    ],
)
def test_text_form(text, task):
    assert Task.parse(text) == task
    assert str(task) == text.strip()


@given(st.sampled_from(BUILT_IN_KINDS), st.integers(0, 10**6), st.integers(0, 10**6))
def test_text_form_round_trips(kind, chunk, microbatch):
    task = Task(kind, chunk) if kind in (TaskKind.R, TaskKind.U) else Task(kind, chunk, microbatch)
    assert Task.parse(str(task)) == task


@pytest.mark.parametrize("text", ["", "F5", "2x5", "2F", "2f5", "-1F5", "2F5 3F5", "3R1", "3U0", "2F-1", "2.0F5"])
def test_what_is_not_a_task(text):
    with pytest.raises(ValueError, match="is not a task"):
        Task.parse(text)


# -- placements --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "stages"),
    [
        (linear(3), (0, 1, 2)),
        (looped(2, 3), (0, 1, 0, 1, 0, 1)),
        (v_shaped(3), (0, 1, 2, 2, 1, 0)),
        (waves(2, 2), (0, 1, 1, 0, 0, 1, 1, 0)),
        (bidirectional(2), (0, 1, 1, 0)),
    ],
)
def test_named_placements(placement, stages):
    assert placement.stage_of_chunk == stages
    assert placement.num_chunks == len(stages)
    assert placement.num_stages == max(stages) + 1


def test_chunks_of_a_stage_ascend():
    assert Placement((1, 0, 1, 0, 0)).chunks_of_stage == ((1, 3, 4), (0, 2))


@pytest.mark.parametrize(
    ("stages", "what"),
    [
        ((), "a placement needs at least one chunk"),
        ((0, 2), r"leaves stages \[1\] without a chunk"),
        ((1, 2), r"leaves stages \[0\] without a chunk"),
        ((0, -1), "number the stages from 0 without gaps"),
    ],
)
def test_bad_placements(stages, what):
    with pytest.raises(ValueError, match=what):
        Placement(stages)


@pytest.mark.parametrize("make", [lambda: linear(0), lambda: looped(2, 0), lambda: waves(0, 1), lambda: v_shaped(0)])
def test_placements_of_nothing(make):
    with pytest.raises(ValueError, match="must both be at least 1"):
        make()


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_chain():
    graph = chain(3, 2)
    assert graph.edges == (Edge(0, 1), Edge(1, 2))
    assert [graph.predecessors(c) for c in range(3)] == [(), (0,), (1,)]
    assert [graph.successors(c) for c in range(3)] == [(1,), (2,), ()]
    assert names(graph.tasks([1])) == ["1F0", "1B0", "1F1", "1B1"]
    assert len(list(graph.tasks())) == 12


def test_dependencies_of_a_chain():
    graph = chain(3, 2)
    assert dependencies(graph, "0F1") == []
    assert dependencies(graph, "1F1") == ["0F1"]
    assert dependencies(graph, "2B1") == ["2F1"]
    assert dependencies(graph, "1B0") == ["1F0", "2B0"]
    assert dependencies(graph, "1R") == dependencies(graph, "1U") == ["1B0", "1B1"]


def test_dependencies_of_a_split_backward():
    graph = chain(2, 2, split=True)
    assert graph.kinds(0) == (TaskKind.F, TaskKind.I, TaskKind.W)
    assert dependencies(graph, "0I1") == ["0F1", "1I1"]
    assert dependencies(graph, "0W1") == ["0I1"]
    assert dependencies(graph, "0R") == ["0W0", "0W1"]


def test_split_and_fused_chunks_mix():
    graph = PipelineGraph(2, 1, (Edge(0, 1),), split=frozenset({1}))
    assert dependencies(graph, "0B0") == ["0F0", "1I0"]
    assert (graph.input_gradient_kind(0), graph.input_gradient_kind(1)) == (TaskKind.B, TaskKind.I)
    assert (graph.accumulating_kind(0), graph.accumulating_kind(1)) == (TaskKind.B, TaskKind.W)


def test_forks_and_joins():
    assert dependencies(TWO_ENCODERS, "2F1") == ["0F1", "1F1"]
    assert dependencies(TWO_ENCODERS, "1B1") == ["1F1", "2B1"]
    fork = PipelineGraph(3, 1, (Edge(0, 2), Edge(0, 1)))
    assert fork.successors(0) == (1, 2)
    assert dependencies(fork, "0B0") == ["0F0", "1B0", "2B0"]


def test_skipped_pairs():
    graph = TWO_ENCODERS.skipping(absences({(1, 0)}))
    assert graph.absent == ((1, 0b1),)
    assert not graph.exists(1, 0)
    assert graph.microbatches(1) == (1,)
    assert names(graph.tasks([1])) == ["1F1", "1B1"]
    assert dependencies(graph, "2F0") == ["0F0"]
    assert dependencies(graph, "2F1") == ["0F1", "1F1"]
    assert dependencies(graph, "1R") == ["1B1"]
    assert graph.skipping(()) is graph
    assert graph.skipping(absences({(0, 1)})) == replace(TWO_ENCODERS, absent=absences({(1, 0), (0, 1)}))


def test_frozen_chunks_have_no_backward():
    graph = PipelineGraph(4, 1, (Edge(0, 1), Edge(1, 3, carries_gradient=False), Edge(2, 3)))
    assert [graph.has_backward(c) for c in range(4)] == [False, False, True, True]
    assert names(graph.tasks()) == ["0F0", "1F0", "2F0", "2B0", "3F0", "3B0"]
    assert graph.gradient_predecessors(3) == (2,)
    assert graph.gradient_predecessors(1) == ()
    assert graph.gradient_successors(0) == graph.gradient_successors(1) == ()
    assert dependencies(graph, "3F0") == ["1F0", "2F0"]


def test_a_chunk_may_receive_gradients_over_one_edge_of_two():
    graph = PipelineGraph(3, 1, (Edge(0, 1, carries_gradient=False), Edge(0, 2), Edge(1, 2)))
    assert graph.has_backward(0)
    assert dependencies(graph, "0B0") == ["0F0", "2B0"]


def test_shared_parameters():
    graph = chain(4, 1, shared=((0, 3), (3, 1)))
    assert [graph.sharing(c) for c in range(4)] == [(0, 3), (1, 3), (2,), (0, 1, 3)]
    assert dependencies(graph, "0R") == ["0B0", "3B0"]
    assert dependencies(graph, "0U") == ["0B0"]


def test_opposite_chains():
    graph = opposite_chains(2, down_microbatches=[0, 2], num_microbatches=3)
    assert (graph.num_chunks, graph.shared) == (4, ((0, 2), (1, 3)))
    assert [graph.microbatches(c) for c in range(4)] == [(0, 2), (0, 2), (1,), (1,)]
    assert dependencies(graph, "3F1") == ["2F1"]
    assert dependencies(graph, "0R") == ["0B0", "0B2", "2B1"]
    assert opposite_chains(2, [0], 2, split=True).split == frozenset(range(4))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: chain(0, 1), r"num_chunks \(0\) and num_microbatches \(1\) must both be at least 1"),
        (lambda: chain(1, 0), r"num_microbatches \(0\)"),
        (lambda: PipelineGraph(2, 1, (Edge(1, 0),)), "edge 1 -> 0 does not go forward among 2 chunks"),
        (lambda: PipelineGraph(2, 1, (Edge(0, 2),)), "edge 0 -> 2 does not go forward"),
        (lambda: PipelineGraph(2, 1, (Edge(0, 1), Edge(0, 1, False))), "edge 0 -> 1 is given twice"),
        (lambda: PipelineGraph(2, 1, (), split=frozenset({2})), "chunk 2 is not one of the 2 chunks"),
        (lambda: chain(2, 1, shared=((0, 5),)), "chunk 5 is not one of the 2 chunks"),
        (lambda: TWO_ENCODERS.skipping(absences({(0, 7)})), r"absent pair \(chunk 0, microbatch 7\) names no pair"),
        (
            lambda: TWO_ENCODERS.skipping(absences({(0, 0), (1, 0)})),
            "skips chunk 0, and chunk 2 is left without",
        ),
        (lambda: TWO_ENCODERS.skipping(absences({(3, 1)})), "nobody reads the output of chunk 2 for microbatch 1"),
    ],
)
def test_bad_graphs(make, what):
    with pytest.raises(ValueError, match=what):
        make()


def test_a_microbatch_may_skip_everything():
    graph = chain(2, 2).skipping(absences({(0, 0), (1, 0)}))
    assert names(graph.tasks()) == ["0F1", "0B1", "1F1", "1B1"]


def test_graphs_are_frozen_and_hashable():
    with pytest.raises(FrozenInstanceError):
        TWO_ENCODERS.num_chunks = 5
    assert hash(chain(2, 2)) == hash(chain(2, 2))
    assert chain(2, 2) != chain(2, 3)


@given(st.data())
def test_every_dependency_comes_earlier_in_the_proofs_order(data):
    """By microbatch, then F ascending, then the backward descending: the order that the window's proof relies on."""
    num_chunks = data.draw(st.integers(1, 6))
    pairs = [(a, b) for b in range(num_chunks) for a in range(b)]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    split = data.draw(st.sets(st.integers(0, num_chunks - 1)))
    graph = PipelineGraph(
        num_chunks, 2, tuple(Edge(*e, data.draw(st.booleans())) for e in edges), split=frozenset(split)
    )

    def place(task):
        is_backward = task.kind is not TaskKind.F
        return (task.microbatch, is_backward, -task.chunk if is_backward else task.chunk, task.kind is TaskKind.W)

    tasks = set(graph.tasks())
    for task in tasks:
        for dependency in graph.dependencies(task):
            assert dependency in tasks
            assert place(dependency) < place(task)


def test_frozen_chunks_run_only_what_others_need_of_them() -> None:
    before = chain(4, 2, split=True)
    upstream = replace(before, frozen=frozenset({0, 1}))
    assert [upstream.kinds(c) for c in (0, 1)] == [(TaskKind.F,)] * 2
    assert upstream.gradient_predecessors(2) == ()
    downstream = replace(before, frozen=frozenset({2, 3}))
    assert downstream.kinds(3) == (TaskKind.F, TaskKind.I)
    assert downstream.kinds(1) == (TaskKind.F, TaskKind.I, TaskKind.W)
    assert [downstream.trains(c) for c in range(4)] == [True, True, False, False]
    assert downstream.accumulating_kind(2) is TaskKind.I
    assert downstream.dependencies(Task(TaskKind.R, 2)) == ()
    everything = replace(before, frozen=frozenset(range(4)))
    assert not any(everything.has_backward(c) for c in range(4))


def test_a_fused_frozen_chunk_passes_the_gradient_through() -> None:
    graph = PipelineGraph(3, 1, (Edge(0, 1), Edge(1, 2)), frozen=frozenset({1, 2}))
    assert [graph.kinds(c) for c in range(3)] == [(TaskKind.F, TaskKind.B)] * 3
    assert [graph.trains(c) for c in range(3)] == [True, False, False]


def test_an_optional_input_may_be_absent_although_it_is_the_only_one() -> None:
    edges = (Edge(0, 1, is_optional=True), Edge(1, 2))
    graph = PipelineGraph(3, 2, edges, absent=absences([(0, 1)]))
    assert graph.dependencies(Task(TaskKind.F, 1, 1)) == ()
    assert graph.dependencies(Task(TaskKind.F, 1, 0)) == (Task(TaskKind.F, 0, 0),)
    with pytest.raises(ValueError, match="make the edge optional"):
        PipelineGraph(3, 2, (Edge(0, 1), Edge(1, 2)), absent=absences([(0, 1)]))


def test_an_optional_input_does_not_stand_for_a_required_one() -> None:
    edges = (Edge(0, 2, is_optional=True), Edge(1, 2))
    with pytest.raises(ValueError, match="skips chunk 1"):
        PipelineGraph(3, 2, edges, absent=absences([(1, 0)]))
