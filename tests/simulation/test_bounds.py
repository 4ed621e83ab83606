"""Bounds: tight where the field knows the answer, and never on the wrong side of a simulated run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.schedules import Edge, PipelineGraph, Placement, absences, chain, linear, looped
from rrfp_jax.simulation import (
    Communication,
    Costs,
    Links,
    Machine,
    at_least_ms,
    bf_upper_bound_ms,
    constant,
    lower_bound,
    paper,
    simulate,
)
from rrfp_jax.simulation.bounds import one_way_ms
from rrfp_jax.simulation.costs import SleepLevel
from tests.simulation.helpers import by_hint, makespan_ms, run

TEN = (10.0, 10.0, 10.0)


@pytest.mark.parametrize(("split", "expected_ms"), [(False, 570), (True, 510)])
def test_the_bound_is_tight_for_equal_times(split, expected_ms):
    graph = chain(4, 16, split=split)
    bound = lower_bound(graph, linear(4), constant(TEN, graph)[0])
    assert bound.total_ms == expected_ms
    assert bound.stage_ms[0] == 480
    assert bound.critical_path_ms == (80 + 10 if split else 120)


def test_the_bound_counts_transfers_and_the_host():
    graph = chain(2, 1)
    machine = Machine(links=Links(latency_ms=2, extra_ms={(1, 0): 3.0}), dispatch_overhead_ms=1)
    bound = lower_bound(graph, linear(2), constant(TEN, graph)[0], links=machine.links, host_ms=machine.host_ms)
    assert bound.total_ms == makespan_ms(run(by_hint(graph, linear(2)), TEN, machine=machine)) == 70


def test_the_bound_knows_frozen_encoders_and_skipped_ones():
    # Chunks 0 and 1 feed chunk 2; no gradient goes to 0, and microbatch 1 skips 1.
    graph = PipelineGraph(3, 2, (Edge(0, 2, False), Edge(1, 2)), absent=absences({(1, 1)}))
    bound = lower_bound(graph, linear(3), constant(TEN, graph)[0])
    assert bound.stage_ms == (20 + 10 + 20, 10 + 20 + 0, 10 + 60 + 0)
    assert bound.critical_path_ms == 10 + 10 + 20 + 20
    assert makespan_ms(run(by_hint(graph, linear(3)), TEN)) >= bound.total_ms


@pytest.mark.parametrize("split", [False, True])
def test_frozen_chunks_pass_gradients_through_without_weights(split):
    # Chunk 0 trains; 1 is frozen behind it, 2 computes the loss and is frozen too.
    graph = replace(chain(3, 1, split=split), frozen=frozenset({1, 2}))
    bound = lower_bound(graph, linear(3), constant(TEN, graph)[0])
    assert bound.critical_path_ms == 10 + 10 + 10 + 10 + 10 + 20
    assert bound.stage_ms[1:] == (10 + 20 + 20, 20 + 20 + 30)
    assert makespan_ms(run(by_hint(graph, linear(3)), TEN)) == bound.total_ms == 70


@given(data=st.data(), seed=st.integers(0, 10_000))
def test_no_run_of_a_graph_beats_the_lower_bound(data, seed):
    num_chunks, num_microbatches = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4))
    edges = [
        Edge(c, data.draw(st.integers(c + 1, num_chunks - 1)), data.draw(st.booleans()), data.draw(st.booleans()))
        for c in range(num_chunks - 1)
    ]
    everything = st.frozensets(st.integers(0, num_chunks - 1))
    graph = PipelineGraph(
        num_chunks, num_microbatches, tuple(edges), frozen=data.draw(everything), split=data.draw(everything)
    )
    placement = data.draw(st.sampled_from([linear(num_chunks), Placement((0,) * (num_chunks - 1) + (1,))]))
    durations_ms = np.random.default_rng(seed).exponential(10.0, (1, num_chunks, num_microbatches, 3))
    simulation = run(by_hint(graph, placement, window=data.draw(st.integers(1, 4))), durations_ms)
    bound = lower_bound(graph, placement, durations_ms[0])
    assert bound.total_ms <= simulation.timeline.makespan_s() * 1e3 + 1e-6


def test_one_way_pipelines():
    assert one_way_ms(np.array([[1.0, 2.0, 3.0]])) == 6
    assert one_way_ms(np.full((4, 3), 2.0)) == (4 + 3 - 1) * 2
    assert one_way_ms(np.array([[1.0, 1.0], [5.0, 1.0], [1.0, 1.0]])) == 8


def test_the_paper_bound_is_tight_for_equal_times():
    assert bf_upper_bound_ms(np.full((4, 16), 10.0), np.full((4, 16), 20.0)) == 570


@given(
    num_stages=st.integers(1, 5),
    per_stage=st.integers(1, 2),
    num_microbatches=st.integers(1, 6),
    split=st.booleans(),
    hint=st.sampled_from(["bf", "bf-deep", "fb", "b-priority", "f-priority"]),
    window=st.integers(1, 6),
    communication=st.sampled_from(list(Communication)),
    latency_ms=st.sampled_from([0.0, 2.0, 7.5]),
    host_ms=st.sampled_from([0.0, 0.5]),
    sleeps=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_no_run_beats_the_lower_bound(
    num_stages, per_stage, num_microbatches, split, hint, window, communication, latency_ms, host_ms, sleeps, seed
):
    graph, placement = chain(num_stages * per_stage, num_microbatches, split=split), looped(num_stages, per_stage)
    rng = np.random.default_rng(seed)
    durations_ms = rng.exponential(10.0, (1, graph.num_chunks, num_microbatches, 3))
    level = SleepLevel(probability=0.3, base_ms=15.0, alpha=1.5)
    costs = Costs(durations_ms=durations_ms, sleeps=paper(level, durations_ms.shape, rng) if sleeps else None)
    machine = Machine(links=Links(latency_ms=latency_ms), communication=communication, dispatch_overhead_ms=host_ms)
    simulation = simulate(by_hint(graph, placement, hint, window=window), costs, machine=machine)
    shortest_ms = at_least_ms(costs.durations_ms, costs.sleeps)[0]
    bound = lower_bound(graph, placement, shortest_ms, links=machine.links, host_ms=host_ms)
    assert bound.total_ms <= simulation.timeline.makespan_s() * 1e3 + 1e-6


@given(num_stages=st.integers(1, 6), num_microbatches=st.integers(1, 10), seed=st.integers(0, 10_000))
def test_bf_never_exceeds_the_paper_bound(num_stages, num_microbatches, seed):
    durations_ms = np.random.default_rng(seed).exponential(10.0, (1, num_stages, num_microbatches, 3))
    simulation = run(by_hint(chain(num_stages, num_microbatches), linear(num_stages)), durations_ms)
    bound_ms = bf_upper_bound_ms(durations_ms[0, ..., 0], durations_ms[0, ..., 1:].sum(axis=-1))
    assert simulation.timeline.makespan_s() * 1e3 <= bound_ms + 1e-6
