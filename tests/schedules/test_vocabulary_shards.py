"""The graph of a decoder whose vocabulary lies in shards on every stage, and its order."""

import pytest

from rrfp_jax.schedules import (
    Edge,
    PipelineGraph,
    ScheduleRequest,
    build_schedule,
    chain,
    linear,
    to_csv,
    vocabulary_sharded,
)
from rrfp_jax.schedules.published import heads_first


def ordered(p, m, **options):
    graph, placement = vocabulary_sharded(p, m, **options)
    request = ScheduleRequest(num_stages=p, num_microbatches=m, graph=graph, placement=placement)
    return build_schedule(heads_first, request)


def test_two_stages_written_out():
    graph, placement = vocabulary_sharded(2, 4)
    assert placement.stage_of_chunk == (0, 1, 0, 1, 0, 1, 1)
    pairs = [(0, 2), (1, 2), (2, 3), (3, 5), (3, 4), (4, 6), (5, 6)]
    assert graph.edges == tuple(Edge(*pair) for pair in pairs)
    assert graph.weights == (0.01, 0.01, 1, 1, 0.01, 0.01, 0.01)
    assert not graph.passes
    assert all(map(graph.has_backward, range(7)))


def test_with_one_barrier_the_loss_alone_returns_the_gradient_of_the_stream():
    graph, _ = vocabulary_sharded(3, 4, barriers=1)
    heads, loss, last = (6, 7, 8), 9, 5
    assert graph.gradient_successors(last) == (loss,)
    assert graph.successors(last) == (*heads, loss)
    assert all(graph.gradient_successors(head) == (loss,) for head in heads)


@pytest.mark.parametrize("p", range(1, 10))
@pytest.mark.parametrize("fan_out", [None, 1, 2, 3])
@pytest.mark.parametrize("barriers", [1, 2])
def test_the_stream_reaches_every_head_once(p, fan_out, barriers):
    graph, placement = vocabulary_sharded(p, 2, fan_out=fan_out, barriers=barriers, is_tied=True)
    stage_of, loss = placement.stage_of_chunk, graph.num_chunks - 1
    heads = range(loss - p, loss)
    relays = range(2 * p, heads[0])
    assert [stage_of[head] for head in heads] == list(range(p))
    assert graph.passes == tuple((s, head) for s, head in enumerate(heads))
    for chunk in (*relays, *heads):
        assert len(graph.predecessors(chunk)) == 1
    for giver in (2 * p - 1, *relays):
        other = [c for c in graph.successors(giver) if stage_of[c] != stage_of[giver] and c != loss]
        assert len(other) <= (fan_out or p)
        assert len({stage_of[c] for c in other}) == len(other)
    assert {stage_of[c] for giver in (2 * p - 1, *relays) for c in graph.successors(giver)} == set(range(p))
    if fan_out == 1:
        assert [stage_of[c] for c in relays] == list(range(p - 2, 0, -1))


@pytest.mark.parametrize("fan_out", [None, 2])
def test_the_schedule_of_the_name_makes_the_graph_of_two_barriers(fan_out):
    name = "vocabulary" if fan_out is None else f"vocabulary:{fan_out}"
    table = build_schedule(name, ScheduleRequest(num_stages=4, num_microbatches=6))
    assert (table.name, table.orders) == (name, ordered(4, 6, fan_out=fan_out).orders)
    assert (table.graph, table.placement) == vocabulary_sharded(4, 6, fan_out=fan_out)


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 8])
def test_peaks_are_the_published_ones(p, barriers):
    """On p stages p + 1 microbatches with one barrier, p + 2 with two; there are no hops on one stage."""
    more = barriers if p > 1 else 0
    for m in (1, 2, p, 3 * p + 1):
        peaks = ordered(p, m, barriers=barriers).peak_activations()
        assert all(peak <= min(m, p - stage + more) + 0.2 for stage, peak in enumerate(peaks))
    assert [round(peak) for peak in peaks] == [p - stage + more for stage in range(p)]


@pytest.mark.parametrize("fan_out", [1, 2, 3])
def test_hops_take_memory(fan_out):
    """Eight stages hold 12 microbatches where each sends the stream to 2 others, and 16 along a chain."""
    peaks = ordered(8, 40, fan_out=fan_out).peak_activations()
    assert round(peaks[0]) == {1: 16, 2: 12, 3: 11}[fan_out]


def test_two_stages_in_order():
    """Chunks 0, 1 embed, 2, 3 are the chain, 4, 5 the heads, and 6 is the loss."""
    assert to_csv(ordered(2, 4, barriers=1)) == (
        "0F0,0F1,0F2,0F3,2F0,2F1,4F0,2F2,4B0,4F1,2B0,4F2,0B0,2F3,4B1,2B1,4F3,0B1,4B2,2B2,0B2,4B3,2B3,0B3\n"
        "1F0,1F1,1F2,1F3,3F0,5F0,6F0,6B0,3F1,5B0,5F1,3B0,6F1,6B1,3F2,5B1,5F2,3B1,6F2,1B0,3F3,6B2,5F3,5B2,3B2,6F3,1B1,"
        "6B3,5B3,3B3,1B2,1B3\n"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_stages": 0}, "at least 1"),
        ({"barriers": 3}, "give 1 or 2"),
        ({"fan_out": 0}, "at least 1, or None"),
        ({"shard_keeps": 0}, "positive numbers"),
    ],
)
def test_refused(options, words):
    with pytest.raises(ValueError, match=words):
        vocabulary_sharded(**{"num_stages": 2, "num_microbatches": 2} | options)


@pytest.mark.parametrize("graph", [chain(2, 4), PipelineGraph(7, 4, tuple(Edge(c, c + 1) for c in range(6)))])
def test_heads_first_refuses_another_graph(graph):
    request = ScheduleRequest(
        num_stages=graph.num_chunks, num_microbatches=4, graph=graph, placement=linear(graph.num_chunks)
    )
    with pytest.raises(ValueError, match="give graph and placement of vocabulary_sharded"):
        build_schedule(heads_first, request)
