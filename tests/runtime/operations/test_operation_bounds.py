"""Bounds and the optimum with operations: engines give bounds of their own, and no simulated run is below them."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core import Agreement, Ordering, StepRules
from rrfp_jax.schedules import COMPUTE, Op, Per, ScheduleRequest, build_schedule, chain, linear, looped, with_operations
from rrfp_jax.simulation import Costs, Links, Machine, find_optimum, lower_bound, simulate
from rrfp_jax.simulation.bounds import lower_bound as vectorised
from rrfp_jax.simulation.bounds import path_bounds
from rrfp_jax.simulation.costs import constant
from tests.runtime.operations.test_operations import offload

RULES = StepRules(updates=False, agreement=Agreement.NONE)
TEN = (10.0, 10.0, 10.0)
needs_solver = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="the extra 'optimum' is missing")


@pytest.mark.parametrize(("split", "num_microbatches"), [(False, 5), (True, 5), (True, 1)])
@pytest.mark.parametrize("placement", [linear(3), looped(2, 2)])
def test_paths_task_by_task_give_what_arrays_give(split, num_microbatches, placement):
    graph = chain(placement.num_chunks, num_microbatches, split=split)
    durations_ms = np.random.default_rng(0).uniform(1, 9, (graph.num_chunks, num_microbatches, 3))
    links = Links(latency_ms=1.5)
    expected = vectorised(graph, placement, durations_ms, links=links, host_ms=0.25)
    critical_path_ms, lanes_ms = path_bounds(graph, placement, durations_ms, links=links, host_ms=0.25)
    assert critical_path_ms - 0.25 == pytest.approx(expected.critical_path_ms)
    stages_ms = [lanes_ms[stage, COMPUTE] - 0.25 for stage in range(placement.num_stages)]
    assert stages_ms == pytest.approx(expected.stage_ms)


def test_the_busiest_engine_gives_the_bound():
    graph = replace(chain(1, 4), ops=offload(ms=40.0, lanes=("copy", "copy")))
    bound = lower_bound(graph, linear(1), constant(TEN, graph)[0])
    assert bound.engine_ms == {(0, "copy"): 10 + 8 * 40 + 20}
    assert bound.total_ms == 350
    assert lower_bound(graph, linear(1), constant(TEN, graph)[0], operations_ms={"O": 1.0, "L": 1.0}).total_ms == 120


def test_what_need_not_run_between_start_and_end_bounds_nothing():
    ops = (Op("G", before="F", per="chunk", lane="net", ms=500.0), Op("O", after="F", lane="d2h", ms=500.0))
    graph = replace(chain(2, 3), ops=ops)
    bound = lower_bound(graph, linear(2), constant(TEN, graph)[0])
    assert (bound.engine_ms, bound.total_ms) == (
        {},
        lower_bound(chain(2, 3), linear(2), constant(TEN, graph)[0]).total_ms,
    )


def test_work_on_the_compute_lane_counts():
    graph = replace(chain(1, 3), ops=(Op("S", after="F", ms=4.0),))
    assert lower_bound(graph, linear(1), constant(TEN, graph)[0]).total_ms == 3 * 34


@st.composite
def offloaded_runs(draw):
    """A run of some table or hint with operations on all kinds of lanes."""
    name = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"]))
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    chunks = 2 if name == "interleaved-1f1b" else None
    m = m * p if chunks else m
    table = build_schedule(name, ScheduleRequest(num_stages=p, num_microbatches=m, chunks_per_stage=chunks))
    ms = st.floats(0, 30)
    lanes = draw(st.sampled_from([("d2h", "h2d"), ("copy", "copy"), ("copy", "compute")]))
    ops = [
        *offload(ms=draw(ms), lanes=lanes, lead=draw(st.integers(0, 3)), part=draw(st.sampled_from([0.0, 0.5, 1.0])))
    ]
    if draw(st.booleans()):
        ops.append(Op("S", after=draw(st.sampled_from("FB")), ms=draw(ms)))
    if draw(st.booleans()):
        ops.append(Op("G", before=("F",), per=Per.CHUNK, lane=draw(st.sampled_from(["net", "compute"])), ms=draw(ms)))
    consume = draw(st.sampled_from(["strict", "ready"]))
    table = with_operations(table, ops)
    order = Ordering(schedule=table, consume=consume).resolve(table.placement, replace(table.graph, ops=()))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return order, rng.uniform(0, 20, (1, order.graph.num_chunks, m, 3))


@given(offloaded_runs(), st.floats(0, 5), st.floats(0, 2))
@settings(max_examples=30, deadline=None)
def test_no_simulated_run_is_below_its_bound(run, latency_ms, host_ms):
    order, durations_ms = run
    machine = Machine(links=Links(latency_ms=latency_ms), dispatch_overhead_ms=host_ms)
    timeline = simulate(order.arbiters(RULES), Costs(durations_ms=durations_ms), machine=machine).timeline
    bound = lower_bound(order.graph, order.placement, durations_ms[0], links=machine.links, host_ms=host_ms)
    assert bound.total_ms <= timeline.makespan_s() * 1e3 + 1e-6


@needs_solver
def test_the_optimum_runs_engines_beside_compute():
    plain = chain(2, 3)
    durations_ms = constant(TEN, plain)[0]
    best = find_optimum(plain, linear(2), durations_ms, time_limit_s=60)
    fetched = Op("G", before="F", per="chunk", lane="net", ms=7.0)
    beside = replace(plain, ops=(*offload(ms=2.0), fetched))
    assert find_optimum(beside, linear(2), durations_ms, time_limit_s=60).makespan_ms == best.makespan_ms
    slow = replace(plain, ops=offload(ms=30.0, lanes=("copy", "copy")))
    found = find_optimum(slow, linear(2), durations_ms, time_limit_s=60)
    assert found.is_proven
    assert found.makespan_ms >= lower_bound(slow, linear(2), durations_ms).total_ms > best.makespan_ms
