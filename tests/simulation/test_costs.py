"""Costs and links: what is refused, and durations of recorded runs."""

from dataclasses import replace

import numpy as np
import pytest

from rrfp_jax.schedules import PipelineGraph, TaskKind, chain, linear
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import Costs, Links, both_directions, constant, for_graph, for_steps, recorded
from rrfp_jax.simulation.costs import of_tasks
from tests.simulation.helpers import by_hint, run


def record(graph: PipelineGraph, durations_ms: np.ndarray, num_steps: int = 1) -> Timeline:
    return run(by_hint(graph, linear(graph.num_chunks)), durations_ms, num_steps=num_steps).timeline


def some_durations(num_steps: int) -> np.ndarray:
    return np.random.default_rng(3).integers(1, 20, (num_steps, 2, 4, 3)).astype(float)


@pytest.mark.parametrize(
    "durations_ms",
    [
        np.ones((2, 4, 3)),
        np.ones((1, 2, 4, 2)),
        np.ones((0, 2, 4, 3)),
        -np.ones((1, 2, 4, 3)),
        np.full((1, 1, 1, 3), np.nan),
    ],
)
def test_impossible_durations_are_refused(durations_ms):
    with pytest.raises(ValueError, match=r"durations .* give"):
        Costs(durations_ms=durations_ms)


def test_steps_are_repeated_or_cut():
    durations_ms = some_durations(3)
    assert (for_steps(durations_ms, 5) == durations_ms[[0, 1, 2, 0, 1]]).all()
    assert (for_steps(durations_ms, 2) == durations_ms[:2]).all()


def test_a_record_gives_back_every_task():
    graph, durations_ms = chain(2, 4, split=True), some_durations(2)
    timeline = record(graph, durations_ms, num_steps=2)
    np.testing.assert_allclose(recorded(timeline, graph, per_task=True), durations_ms)


def test_a_record_gives_means_for_any_number_of_microbatches():
    durations_ms = some_durations(2)
    means = recorded(record(chain(2, 4, split=True), durations_ms, num_steps=2), chain(2, 6, split=True))
    assert means.shape == (1, 2, 6, 3)
    np.testing.assert_allclose(means[0, :, 5], durations_ms.mean(axis=(0, 2)))


def test_a_recorded_fused_backward_stays_whole():
    durations_ms = some_durations(1)
    timeline = record(chain(2, 4), durations_ms)
    fused = recorded(timeline, chain(2, 4), per_task=True)
    np.testing.assert_allclose(fused[..., 1], durations_ms[..., 1:].sum(axis=-1))
    assert not fused[..., 2].any()
    with pytest.raises(ValueError, match="cannot be split afterwards"):
        recorded(timeline, chain(2, 4, split=True))


def test_a_record_of_another_pipeline_is_refused():
    timeline = record(chain(2, 4), some_durations(1))
    with pytest.raises(ValueError, match="no 2F0: record a run of the same pipeline"):
        recorded(timeline, chain(3, 4))
    with pytest.raises(ValueError, match="no 0F4 in step 0"):
        recorded(timeline, chain(2, 5), per_task=True)


def test_a_split_record_serves_a_fused_simulation():
    durations_ms = some_durations(1)
    timeline = record(chain(2, 4, split=True), durations_ms)
    np.testing.assert_allclose(recorded(timeline, chain(2, 4), per_task=True), durations_ms)


@pytest.mark.parametrize(
    "wrong", [{"latency_ms": -1}, {"activation_bytes": -1}, {"extra_ms": {(0, 1): -1}}, {"bandwidth_gb_per_s": 0}]
)
def test_impossible_links_are_refused(wrong):
    with pytest.raises(ValueError, match="give"):
        Links(**wrong)


def test_a_delay_of_a_link_goes_both_ways():
    assert both_directions({(2, 1): 5.0}, 3) == {(1, 2): 5.0, (2, 1): 5.0}
    with pytest.raises(ValueError, match="link 1-3 does not exist"):
        both_directions({(1, 3): 5.0}, 3)


def test_frozen_chunks_take_no_time_for_weight_gradients():
    graph = replace(chain(3, 2), frozen=frozenset({1}))
    durations = for_graph(np.full((2, 3, 2, 3), 7.0), graph)
    assert (durations[:, 1, :, 2] == 0).all()
    assert (durations[:, [0, 2]] == 7).all()
    assert (durations[:, 1, :, :2] == 7).all()
    assert of_tasks(durations)[TaskKind.B][0] == [[14.0] * 2, [7.0] * 2, [14.0] * 2]


def test_constants_fill_the_array():
    durations_ms = constant((1.0, 2.0, 3.0), chain(2, 4))
    assert durations_ms.shape == (1, 2, 4, 3)
    assert (durations_ms == [1, 2, 3]).all()
