"""Tables planned anew while a pipeline trains: what is computed stays, and the stages go on with other rows."""

import logging
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.arbitration import Message, MessageKind, Order, Ordering
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.planning.replanning import Plan, Recording, rows_of, with_rows
from rrfp_jax.runtime import adapting
from rrfp_jax.runtime.adapting import latencies_ms
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.schedules import ScheduleRequest, build_schedule
from rrfp_jax.tasks import Task, chain, linear
from rrfp_jax.testing import DelayedStage
from rrfp_jax.timeline import Span, Timeline
from tests.long_sums import NUM_MICROBATCHES, NUM_STAGES, make_pipeline, train

NUM_STEPS = 6


def table(name: str) -> Any:
    return build_schedule(name, ScheduleRequest(num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES))


@pytest.fixture(scope="module")
def base() -> Pipeline:
    return make_pipeline(deterministic=True)


def to_zb_h2(order: Order, recording: Recording) -> Plan:
    """In place of the planner: any other table of the same tasks that the footprint has room for."""
    assert recording.durations_ms.shape[1:] == (NUM_STAGES, NUM_MICROBATCHES, 3)
    assert recording.durations_ms.min() > 0
    assert set(recording.links.extra_ms) == {(s, t) for s in range(NUM_STAGES) for t in (s - 1, s + 1)} - {
        (0, -1),
        (NUM_STAGES - 1, NUM_STAGES),
    }
    return Plan(with_rows(order, table("zb-h2").orders), "test", 0.1)


def test_the_stages_go_on_with_the_planned_table_and_the_same_bits(
    base: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(base.reordered(Ordering(hint="bf")), NUM_STEPS)
    monkeypatch.setattr(adapting, "replanned", to_zb_h2)
    ordering = Ordering(schedule=table("zb-h1"), window=2 * NUM_STAGES, adaptive=True)
    pipeline = base.reordered(ordering, options=RuntimeOptions(log_steps=3))
    told = []
    with caplog.at_level(logging.INFO, logger=adapting.__name__):
        losses, params = train(pipeline, NUM_STEPS, lambda result: told.append(result.tables_planned))
    assert losses == expected[0]
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (params, expected[1])), strict=True))
    assert rows_of(pipeline.order) == table("zb-h2").orders
    assert caplog.text.count("planned anew") == 1
    assert told == [0, 0, 0, 0, 1, 1]
    for log in pipeline.runtime.logs().values():
        replayed = [segment.replay() for segment in log.segments]
        assert replayed == [segment.entries for segment in log.segments]
        assert sum(map(len, replayed))


def test_without_a_better_table_the_present_one_stays(base: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Order] = []

    def keep(order: Order, recording: Recording) -> Plan:
        asked.append(order)
        return Plan(order, None, 0.0)

    monkeypatch.setattr(adapting, "replanned", keep)
    pipeline = base.reordered(Ordering(schedule=table("zb-h1"), adaptive=True))
    train(pipeline, NUM_STEPS)
    assert len(asked) == 1
    assert rows_of(pipeline.order) == table("zb-h1").orders


@pytest.mark.slow
def test_stages_that_are_held_up_in_every_step_have_the_table_planned_anew(base: Pipeline) -> None:
    """Stages so uneven that ZB-H2's rows cost a fifth of the step (20.2% in simulation); what serves even stages does
    not serve these."""
    held_up_ms = {"F": (40, 40, 60), "I": (60, 20, 60), "W": (40, 120, 20)}

    def delay(step: int, task: Task) -> float:
        return 1e-3 * held_up_ms.get(task.kind, (0, 0, 0))[task.chunk]

    options = RuntimeOptions(wrap_stage=lambda stage: DelayedStage(stage, delay))
    pipeline = base.reordered(Ordering(schedule=table("zb-h2"), adaptive=True), options=options)
    train(pipeline, 10)
    assert rows_of(pipeline.order) != table("zb-h2").orders


def test_adaptive_has_no_meaning_without_a_table_to_plan() -> None:
    with pytest.raises(ValueError, match="adaptive needs a schedule"):
        Ordering(hint="bf", adaptive=True)
    with pytest.raises(ValueError, match="adaptive needs a schedule"):
        Ordering(schedule=table("1f1b"), consume="strict", adaptive=True)
    with pytest.raises(ValueError, match="leave these on"):
        Ordering(schedule=table("1f1b"), footprint=False, adaptive=True)


def test_a_latency_is_the_median_from_the_end_of_a_task_to_the_arrival() -> None:
    graph, placement = chain(2, 3, split=True), linear(2)
    spans = [Span(0, 0, Task.parse(f"0F{m}"), m, m + 1.0) for m in range(3)]
    spans += [Span(0, 1, Task.parse("1I0"), 4.0, 5.0)]
    late = (0.010, 0.030, 0.020)
    arrivals = [
        (0, *Message(MessageKind.ACTIVATION, 0, 1, m), m + 1.0 + by) for m, by in zip(range(3), late, strict=True)
    ]
    arrivals += [(0, *Message(MessageKind.GRADIENT, 1, 0, 0), 4.999), (7, *Message(MessageKind.GRADIENT, 1, 0, 0), 9.0)]
    found = latencies_ms(Timeline(2, spans), arrivals, graph, placement)
    assert found == {(0, 1): pytest.approx(20.0), (1, 0): 0.0}


def test_a_table_stays_where_a_step_lacks_tasks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapting, "replanned", lambda order, recording: Plan(order, "test", 0.1))
    order = Ordering(schedule=table("1f1b")).resolve(linear(NUM_STAGES), chain(NUM_STAGES, NUM_MICROBATCHES))
    spans = [Span(step, task.chunk, task, 0.0, 1.0) for step in range(2) for task in order.graph.tasks()]
    with caplog.at_level(logging.INFO, logger=adapting.__name__):
        assert adapting._plan(order, Timeline(NUM_STAGES, spans), []) is not None
        assert not caplog.text
        assert adapting._plan(order, Timeline(NUM_STAGES, spans[1:]), []) is None
    assert "only from steps in which every chunk runs every microbatch" in caplog.text
