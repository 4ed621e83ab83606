"""The definitions of the timeline, by examples computed by hand."""

import pytest

from rrfp_jax.schedules import Task
from rrfp_jax.schedules.timeline import IdleReason, Span, StepSums, Timeline, Wait


def timeline(num_stages, *spans, step=0):
    """Spans given as (stage, task text, start, end)."""
    return Timeline(num_stages, [Span(step, s, Task.parse(text), float(a), float(b)) for s, text, a, b in spans])


TWO_STAGES = timeline(
    2,
    (0, "0F0", 0, 1),
    (0, "0F1", 1, 2),
    (1, "1F0", 1, 2),
    (1, "1B0", 2, 4),
    (1, "1F1", 4, 5),
    (1, "1B1", 5, 7),
    (0, "0B0", 4, 6),
    (0, "0B1", 7, 9),
)
"""1F1B of two microbatches; F takes 1 s, B 2 s."""


def test_makespan_is_first_start_to_last_end():
    assert TWO_STAGES.makespan_s() == 9
    assert timeline(1, (0, "0F0", 5, 6), (0, "0B0", 8, 9)).makespan_s() == 4


def test_cost_is_the_longest_span_of_a_stage():
    assert TWO_STAGES.sums().cost_s == 9  # stage 0: 0..9; stage 1: 1..7
    assert timeline(2, (0, "0F0", 0, 2), (1, "1F0", 2, 5)).sums().cost_s == 3


def test_work_and_bubbles():
    assert TWO_STAGES.work_s() == [6, 6]
    assert TWO_STAGES.bubble_fraction() == pytest.approx((9 - 6) / 9)
    assert TWO_STAGES.stage_bubbles() == pytest.approx([3 / 9, 3 / 9])


def test_a_parallelogram_has_no_bubble_but_stages_wait_within_the_makespan():
    shifted = timeline(2, (0, "0F0", 0, 2), (0, "0F1", 2, 4), (1, "1F0", 2, 4), (1, "1F1", 4, 6))
    assert shifted.bubble_fraction() == 0
    assert shifted.stage_bubbles() == pytest.approx([2 / 6, 2 / 6])


def test_a_stage_without_work_counts_in_the_mean():
    assert timeline(2, (0, "0F0", 0, 4)).work_s() == [4, 0]
    assert timeline(2, (0, "0F0", 0, 4)).bubble_fraction() == pytest.approx(0.5)


def test_the_end_of_the_step_counts_in_nothing():
    with_update = timeline(1, (0, "0F0", 0, 1), (0, "0B0", 1, 3), (0, "0R", 3, 10), (0, "0U", 10, 20))
    assert (with_update.makespan_s(), with_update.sums().cost_s, with_update.work_s()) == (3, 3, [3])
    assert [list(map(str, row)) for row in with_update.order()] == [["0F0", "0B0"]]
    assert with_update.peak_in_flight() == [1]


def test_order_is_by_start():
    assert [" ".join(map(str, row)) for row in TWO_STAGES.order()] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def test_peak_in_flight():
    assert TWO_STAGES.peak_in_flight() == [2, 1]


def test_a_microbatch_is_held_to_its_last_weight_gradient_and_over_all_chunks():
    split = timeline(
        1, (0, "0F0", 0, 1), (0, "0I0", 1, 2), (0, "0F1", 2, 3), (0, "0W0", 3, 4), (0, "0I1", 4, 5), (0, "0W1", 5, 6)
    )
    assert split.peak_in_flight() == [2]
    chunks = timeline(1, (0, "0F0", 0, 1), (0, "1F0", 1, 2), (0, "1B0", 2, 3), (0, "0B0", 3, 4), (0, "0F1", 4, 5))
    assert chunks.peak_in_flight() == [1]


def test_a_slot_is_free_at_the_moment_of_the_last_end():
    back_to_back = timeline(1, (0, "0F0", 0, 1), (0, "0B0", 1, 2), (0, "0F1", 2, 3), (0, "0B1", 3, 4))
    assert back_to_back.peak_in_flight() == [1]


def test_steps_are_kept_apart():
    both = timeline(1, (0, "0F0", 0, 1), (0, "0B0", 1, 2))
    both.extend(timeline(1, (0, "0F0", 2, 4), (0, "0B0", 4, 5), step=1))
    assert both.steps() == [0, 1]
    assert both.of_step(1).makespan_s() == 3
    assert both.makespan_s() == 5
    assert both.peak_in_flight() == [1]


def test_overlapping_steps_add_up_in_flight():
    overlapping = timeline(1, (0, "0F0", 0, 1), (0, "0B0", 5, 6))
    overlapping.extend(timeline(1, (0, "0F0", 2, 3), (0, "0B0", 7, 8), step=1))
    assert overlapping.peak_in_flight() == [2]


def test_one_stage_alone():
    alone = TWO_STAGES.of_stage(1)
    assert alone.num_stages == 2
    assert alone.work_s() == [0, 6]
    assert alone.makespan_s() == 6


def test_idle_time_by_reason():
    record = Timeline(2)
    record.waits += [
        Wait(0, 0, 0.0, 1.0, IdleReason.INPUT),
        Wait(0, 0, 3.0, 3.5, IdleReason.INPUT),
        Wait(0, 1, 0.0, 2.0, IdleReason.FILL),
        Wait(1, 1, 5.0, 6.0, IdleReason.WINDOW),
    ]
    assert record.idle_s_by_reason() == [{IdleReason.INPUT: 1.5}, {IdleReason.FILL: 2.0, IdleReason.WINDOW: 1.0}]
    assert record.of_step(1).idle_s_by_reason() == [{}, {IdleReason.WINDOW: 1.0}]
    assert record.of_stage(0).idle_s_by_reason() == [{IdleReason.INPUT: 1.5}, {}]


def test_sums_of_different_stages_add_up():
    one = StepSums(num_stages=2, start_s=1.0, end_s=3.0, work_s=2.0, idle_s={IdleReason.HOLD: 0.5}, looking_ahead=1)
    other = StepSums(num_stages=2, start_s=0.0, end_s=1.0, work_s=1.0, idle_s={IdleReason.HOLD: 0.25}, looking_ahead=1)
    both = one.merged(other, later_s=1.5)
    assert (both.start_s, both.end_s, both.work_s) == (1.0, 3.0, 3.0)
    assert (both.idle_s, both.looking_ahead) == ({IdleReason.HOLD: 0.75}, 2)


def test_nothing_ran():
    empty = Timeline(2)
    assert (empty.makespan_s(), empty.sums().cost_s, empty.bubble_fraction()) == (0, 0, 0)
    assert (empty.work_s(), empty.stage_bubbles(), empty.order()) == ([0, 0], [0, 0], [[], []])
    assert empty.peak_in_flight() == [0, 0]
    assert empty.steps() == []
