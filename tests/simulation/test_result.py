"""The numbers of a run, by their definitions."""

import json
from dataclasses import asdict

import pytest

from rrfp_jax.schedules import chain, linear
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.simulation import run_metrics
from tests.simulation.helpers import by_hint, run


def test_the_numbers_of_two_equal_steps():
    simulation = run(by_hint(chain(2, 2), linear(2)), (10.0, 10.0, 10.0), num_steps=2)
    metrics = run_metrics(simulation.timeline, simulation.step_ms)
    assert metrics.makespan_ms == [90, 90]
    assert metrics.step_ms == [90, 90]
    assert metrics.us_per_task == 90e3 / 8
    assert metrics.bubble_fraction == pytest.approx(30 / 90)
    assert metrics.stage_bubbles == pytest.approx([30 / 90, 30 / 90])
    assert metrics.peak_in_flight == [2, 1]
    assert metrics.order[1] == ["1F0", "1B0", "1F1", "1B1"]
    assert metrics.idle_ms == [{"input": 30.0}, {"fill": 10.0, "drain": 20.0}]
    assert json.loads(json.dumps(asdict(metrics)))["order"] == metrics.order


def test_a_parallelogram_has_no_bubble():
    # Cost is a stage's own span, so stage 1 starting late costs nothing.
    simulation = run(by_hint(chain(2, 1), linear(2)), (10.0, 0.0, 0.0))
    metrics = run_metrics(simulation.timeline, simulation.step_ms)
    assert metrics.bubble_fraction == pytest.approx(0.5)
    assert metrics.stage_bubbles == [0.5, 0.5]


def test_a_record_needs_as_many_steps_as_step_times():
    with pytest.raises(ValueError, match="0 steps, and 1 step times"):
        run_metrics(Timeline(2), [1.0])
