"""Steps that overlap, simulated: the interval between their ends beside the work of the fullest stage."""

from typing import Any

import numpy as np
import pytest

from rrfp_jax.core import Agreement, ForesightRules, Ordering, StepRules
from rrfp_jax.schedules import Edge, PipelineGraph, ScheduleRequest, build_schedule, chain, linear
from rrfp_jax.simulation import Costs, Simulation, simulate

RULES = StepRules(agreement=Agreement.ALL)
NUM_STEPS, TASK_MS, UPDATE_MS = 12, 10.0, 2.0


def run(p: int, m: int, sigma: float, rules: StepRules = RULES, **words: Any) -> tuple[Simulation, float]:
    """Returns the run, and the interval between the ends of its steps over the mean work of the fullest stage."""
    noise = np.random.default_rng(3).normal(size=(NUM_STEPS, p, m, 3))
    durations = TASK_MS * np.exp(sigma * noise - sigma**2 / 2)
    work = durations.sum(axis=(2, 3)).mean(0).max() + UPDATE_MS
    ordering = Ordering(**words)
    placement = linear(p)
    order = ordering.resolve(placement, chain(p, m))
    ended = simulate(order.arbiters(rules), Costs(durations_ms=durations, update_ms=UPDATE_MS), num_steps=NUM_STEPS)
    ends = ended.step_ends_ms
    return ended, (ends[-2] - ends[NUM_STEPS // 4]) / (NUM_STEPS - 2 - NUM_STEPS // 4) / work


@pytest.mark.parametrize(("p", "m"), [(4, 4), (8, 8), (8, 16)])
@pytest.mark.parametrize("hint", ["bf", "bfw"])
def test_no_bubble_is_left_at_the_window_of_1f1b(p: int, m: int, hint: str) -> None:
    assert run(p, m, 0.0, hint=hint, window=p, delay=1)[1] <= 1.005


@pytest.mark.parametrize(("m", "most"), [(8, 1.17), (16, 1.09), (32, 1.02)])
def test_little_is_left_under_noise(m: int, most: float) -> None:
    _, interval = run(8, m, 0.5, hint="bfw", window=12, delay=1)
    _, with_flush = run(8, m, 0.5, hint="bfw", window=12)
    assert interval <= most
    assert interval < with_flush


LONG = [pytest.param(32, *each, marks=pytest.mark.slow) for each in ((0.0, 1.09), (0.5, 1.12))]


@pytest.mark.parametrize(("m", "sigma", "most"), [(8, 0.0, 1.25), (8, 0.5, 1.31), *LONG])
def test_a_last_stage_without_a_delay_waits_for_the_verdict_if_there_is_one(m: int, sigma: float, most: float) -> None:
    words = {"hint": "bfw", "window": 12, "delay": "by-stage"}
    ended, interval = run(8, m, sigma, **words)
    assert run(8, m, sigma, StepRules(agreement=Agreement.NONE), **words)[1] <= 1 + sigma / 7 < interval <= most
    last = [span for span in ended.timeline.spans if span.stage == 7]
    assert [span.step for span in last] == sorted(span.step for span in last)


def test_more_than_one_update_of_delay_is_refused_with_the_microbatches_that_would_do() -> None:
    with pytest.raises(ValueError, match=r"with 6 microbatches for 8 stages .* give at least 7, or delay 1"):
        Ordering(delay="by-stage").resolve(linear(8), chain(8, 6))
    assert Ordering(delay="by-stage").resolve(linear(8), chain(8, 7)).delays == (1,) * 7 + (0,)
    assert Ordering(delay="by-stage").resolve(linear(2), chain(2, 4), num_replicas=2).delays == (1, 0, 1, 0)


def test_step_t_plus_2_starts_after_the_update_of_step_t_and_updates_keep_their_order() -> None:
    ended, _ = run(4, 6, 0.5, hint="bfw", window=8, delay=1)
    spans = ended.timeline.spans
    updates = {(span.step, span.stage): span for span in spans if span.task.kind == "U"}
    assert len(updates) == 4 * NUM_STEPS
    overlaps = 0
    for span in spans:
        before = updates.get((span.step - 2, span.stage))
        assert before is None or before.end_s <= span.start_s
        overlaps += span.step > 0 and span.start_s < updates[span.step - 1, span.stage].start_s
    assert overlaps > 4 * NUM_STEPS
    for (step, stage), update in updates.items():
        assert step == 0 or updates[step - 1, stage].end_s <= update.start_s


def test_a_table_ranks_within_its_own_window() -> None:
    table = build_schedule("1f1b", ScheduleRequest(num_stages=4, num_microbatches=8))
    order = Ordering(schedule=table, delay=1).resolve(table.placement, table.graph)
    assert order.label == "1f1b as hint without a flush"
    assert (order.windows, order.footprints, order.foresight) == ((4, 3, 2, 1), None, None)
    ended = simulate(order.arbiters(RULES), Costs(durations_ms=np.full((1, 4, 8, 3), TASK_MS)), num_steps=6)
    assert ended.step_ms[3] == pytest.approx(8 * 3 * TASK_MS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"delay": 2}, "delay is 2: give 0, or 1 for steps that overlap, or by-stage"),
        ({"foresight": ForesightRules()}, "leave out consume strict, footprint and foresight"),
        ({"footprint": True}, "leave out consume strict, footprint and foresight"),
        ({"consume": "strict"}, "leave out consume strict, footprint and foresight"),
    ],
)
def test_what_does_not_go_with_overlapping_steps_is_refused(words: dict[str, Any], message: str) -> None:
    table = build_schedule("1f1b", ScheduleRequest(num_stages=2, num_microbatches=2))
    with pytest.raises(ValueError, match=message):
        Ordering(schedule=table, **{"delay": 1, **words})


def test_stages_of_several_processes_and_chunks_that_run_ahead_are_refused() -> None:
    order = Ordering(delay=1).resolve(linear(2), chain(2, 2))
    with pytest.raises(ValueError, match="give every stage one process"):
        order.arbiters(RULES, members={0: (0, 2)})
    frozen = PipelineGraph(2, 2, (Edge(0, 1, carries_gradient=False),), frozen=frozenset({0}))
    with pytest.raises(ValueError, match="chunks that run F only"):
        Ordering(delay=1).resolve(linear(2), frozen).arbiters(RULES)
