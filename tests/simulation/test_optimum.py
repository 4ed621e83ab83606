"""The solver's optimum against bounds and simulated runs; without OR-tools only the refusal is tested."""

import importlib.util
import sys

import numpy as np
import pytest

from rrfp_jax.schedules import chain, linear, looped
from rrfp_jax.simulation import Links, Machine, constant, find_optimum, lower_bound
from tests.simulation.helpers import by_hint, makespan_ms, run

needs_solver = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="the extra 'optimum' is missing")
HINTS = ["bf", "bf-deep", "fb", "b-priority", "f-priority"]


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ImportError, match=r"pip install 'rrfp-jax\[optimum\]'"):
        find_optimum(chain(1, 1), linear(1), constant((1.0, 1.0, 1.0), chain(1, 1))[0])


@needs_solver
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("split", [False, True])
def test_no_hint_beats_the_optimum(seed, split):
    rng = np.random.default_rng(seed)
    placement = looped(2, 2) if seed % 2 else linear(3)
    graph = chain(placement.num_chunks, 3, split=split)
    durations_ms = rng.integers(1, 12, (1, graph.num_chunks, 3, 3)).astype(float)
    links = Links(latency_ms=float(seed % 3))
    best = find_optimum(graph, placement, durations_ms[0], links=links, time_limit_s=60)
    assert best.is_proven
    assert best.makespan_ms >= lower_bound(graph, placement, durations_ms[0], links=links).total_ms
    for hint in HINTS:
        assert makespan_ms(run(by_hint(graph, placement, hint), durations_ms, machine=Machine(links=links))) >= (
            best.makespan_ms
        )


@needs_solver
def test_equal_times_need_fill_work_and_drain():
    graph = chain(3, 4)
    best = find_optimum(graph, linear(3), constant((10.0, 10.0, 10.0), graph)[0])
    assert (best.makespan_ms, best.at_least_ms, best.is_proven) == (180, 180, True)


@needs_solver
def test_a_window_of_one_runs_one_microbatch_after_the_other():
    graph = chain(2, 3)
    durations_ms = constant((1.0, 1.0, 1.0), graph)[0]
    assert find_optimum(graph, linear(2), durations_ms, windows=[1, 1]).makespan_ms == 18
    assert find_optimum(graph, linear(2), durations_ms).makespan_ms == 12
