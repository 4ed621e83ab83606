"""Tables of any graph: encoders beside a decoder, shared stages, frozen chunks, pairs that do not exist."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.schedules import (
    Edge,
    PipelineGraph,
    Placement,
    ScheduleRequest,
    ScheduleTable,
    TaskKind,
    absences,
    build_schedule,
    linear,
    to_csv,
)
from rrfp_jax.schedules.language import Stage
from rrfp_jax.schedules.registry import schedules_of_any_graph
from rrfp_jax.schedules.table import check_orders

NAMES = schedules_of_any_graph()

TWO_ENCODERS = PipelineGraph(5, 4, (Edge(0, 1), Edge(1, 3, is_optional=True), Edge(2, 3, is_optional=True), Edge(3, 4)))
"""One encoder of two chunks and one of one, into a decoder of two."""


def request_of(graph: PipelineGraph, placement: Placement | None = None) -> ScheduleRequest:
    stages = (placement or linear(graph.num_chunks)).num_stages
    return ScheduleRequest(num_stages=stages, num_microbatches=graph.num_microbatches, graph=graph, placement=placement)


def build(name: str, graph: PipelineGraph, placement: Placement | None = None) -> ScheduleTable:
    return build_schedule(name, request_of(graph, placement))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[PipelineGraph, Placement]:
    """Any graph of up to seven chunks that leads to one loss, on any placement, with frozen chunks."""
    num_chunks = draw(st.integers(1, 7))
    last = num_chunks - 1
    edges = []
    for source in range(last):
        targets = draw(st.sets(st.integers(source + 1, last), min_size=1, max_size=3))
        edges += [Edge(source, t, draw(st.booleans()), draw(st.booleans())) for t in sorted(targets)]
    stages = draw(st.lists(st.integers(0, 4), min_size=num_chunks, max_size=num_chunks))
    numbers = {stage: number for number, stage in enumerate(sorted(set(stages)))}
    frozen = draw(st.frozensets(st.integers(0, last)))
    graph = PipelineGraph(num_chunks, draw(st.integers(1, 12)), tuple(edges), frozen=frozen)
    return graph, Placement(tuple(numbers[stage] for stage in stages))


@settings(deadline=None, max_examples=150)
@given(pipelines(), st.sampled_from(NAMES))
def test_every_graph_has_a_table_that_runs_to_its_end(pipeline, name):
    graph, placement = pipeline
    table = build(name, graph, placement)  # complete, on the right stages, and free of deadlock: build_schedule checks
    split = frozenset(range(graph.num_chunks)) if "zb" in name or "split" in name else frozenset()
    assert table.graph == replace(graph, split=split)
    assert table.placement == placement
    table.check_accumulation()


@settings(deadline=None, max_examples=150)
@given(pipelines())
def test_a_chunk_holds_one_microbatch_more_than_its_hops_to_the_loss(pipeline):
    graph, placement = pipeline
    stage = Stage(0, placement, graph, ScheduleRequest(num_stages=placement.num_stages, num_microbatches=1))
    hops = [stage.hops(chunk) for chunk in range(graph.num_chunks)]
    deepest = max((depth for chunk, depth in enumerate(hops) if graph.has_backward(chunk)), default=0)
    for name in ("1f1b", "1f1b-split", "zb-h1"):
        table = build(name, graph, placement)
        for chunk in filter(graph.has_backward, range(graph.num_chunks)):
            is_deferred = name == "zb-h1" and graph.trains(chunk)
            held = (deepest if is_deferred else hops[chunk]) + 1
            assert _peak(table, chunk) == min(held, graph.num_microbatches)


def _peak(table, chunk):
    """The microbatches of a chunk between F and the end of its backward, at most."""
    last = table.graph.accumulating_kind(chunk)
    row = [task.kind for task in table.orders[table.placement.stage_of_chunk[chunk]] if task.chunk == chunk]
    return max(accumulate((kind is TaskKind.F) - (kind is last) for kind in row))


@settings(deadline=None, max_examples=100)
@given(pipelines(), st.sampled_from(NAMES), st.data())
def test_what_a_step_lacks_is_skipped_without_a_deadlock(pipeline, name, data):
    graph, placement = pipeline
    table = build(name, graph, placement)
    wanted = data.draw(st.sets(st.tuples(st.integers(0, graph.num_chunks - 1), st.integers(0, 11))))
    try:
        step = table.graph.skipping(absences((c, m) for c, m in wanted if m < graph.num_microbatches))
    except ValueError:  # pairs that cannot be absent together
        return
    present = set(step.tasks())
    orders = [[task for task in row if task in present] for row in table.orders]
    check_orders(name, placement, step, orders)


def test_1f1b_with_two_encoders_warms_up_by_the_longest_way():
    table = build("1f1b", TWO_ENCODERS)
    stage = Stage(0, linear(5), TWO_ENCODERS, ScheduleRequest(num_stages=5, num_microbatches=4))
    assert [stage.hops(chunk) for chunk in range(5)] == [3, 2, 2, 1, 0]
    assert table.peak_in_flight() == (4, 3, 3, 2, 1)
    assert to_csv(table) == (
        "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n"
        "1F0,1F1,1F2,1B0,1F3,1B1,1B2,1B3\n"
        "2F0,2F1,2F2,2B0,2F3,2B1,2B2,2B3\n"
        "3F0,3F1,3B0,3F2,3B1,3F3,3B2,3B3\n"
        "4F0,4B0,4F1,4B1,4F2,4B2,4F3,4B3\n"
    )


def test_a_frozen_encoder_runs_forwards_alone_and_a_frozen_decoder_no_weight_gradients():
    table = build("zb-h1", replace(TWO_ENCODERS, frozen=frozenset({0, 1, 2})))
    assert [str(task) for task in table.orders[0]] == ["0F0", "0F1", "0F2", "0F3"]
    assert table.peak_activations() == (0, 0, 0, 2, 2)
    table = build("zb-h1", replace(TWO_ENCODERS, frozen=frozenset({4})))
    assert [str(task) for task in table.orders[4]] == ["4F0", "4I0", "4F1", "4I1", "4F2", "4I2", "4F3", "4I3"]
    split = build("1f1b-split", replace(TWO_ENCODERS, frozen=frozenset({4})))
    assert split.orders[4] == table.orders[4]


def test_an_encoder_may_share_the_stage_of_the_decoder():
    table = build("1f1b", TWO_ENCODERS, Placement((0, 0, 1, 1, 2)))
    assert table.peak_in_flight() == (3, 2, 1)
    assert [str(task) for task in table.orders[0][:6]] == ["0F0", "1F0", "0F1", "1F1", "0F2", "1F2"]
    assert [str(task) for task in table.orders[0][6:8]] == ["1B0", "0B0"]


def test_what_is_asked_of_a_graph_must_fit():
    with pytest.raises(
        ValueError, match=r"'zb-v' makes a chain of chunks and its own placement.*take 1f1b, 1f1b-split"
    ):
        build("zb-v", TWO_ENCODERS)
    with pytest.raises(ValueError, match="the chunks lie on 5 stages, not on 4"):
        ScheduleRequest(num_stages=4, num_microbatches=4, graph=TWO_ENCODERS)
    with pytest.raises(ValueError, match="the graph has 4 microbatches, not 8"):
        ScheduleRequest(num_stages=5, num_microbatches=8, graph=TWO_ENCODERS)
    with pytest.raises(ValueError, match="the graph has 5 chunks, the placement 2"):
        request_of(TWO_ENCODERS, linear(2))
    with pytest.raises(ValueError, match="give the graph too"):
        ScheduleRequest(num_stages=2, num_microbatches=4, placement=linear(2))
