"""What picture and page draw: groups, times, facts of the title, and the errors."""

import math

import pytest

from rrfp_jax.observe.panels import TaskGroup, facts, format_ms, panels
from rrfp_jax.schedules import Task, TaskKind
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline, Wait
from tests.observe.conftest import SampleTimeline


def test_times_start_at_zero_and_nothing_is_lost(sample: SampleTimeline) -> None:
    timeline = sample(3, 5, chunks_per_stage=2, window=5, start_s=123.0)
    (panel,) = panels([("a  caption\nof two lines", timeline)])
    assert panel.caption == "a caption of two lines"
    assert sum(map(len, panel.tasks.values())) == len(timeline.spans)
    assert sum(map(len, panel.waits.values())) == len(timeline.waits)
    assert min(boxes.start_ms.min() for boxes in panel.tasks.values()) == pytest.approx(0, abs=1e-6)
    assert panel.chunks_of_stage == ((0, 3), (1, 4), (2, 5))
    assert set(panel.tasks) == {TaskGroup(kind, rank) for kind in "FBRU" for rank in (0, 1)}
    assert panel.summary == f"{facts(timeline)} · step 0"
    assert f"makespan {format_ms(timeline.makespan_s() * 1e3)} · bubble " in panel.summary


def test_several_steps_give_means(sample: SampleTimeline) -> None:
    timeline = sample(2, 4, step=5)
    first_ms = timeline.makespan_s() * 1e3
    timeline.extend(sample(2, 4, step=6, start_s=1.0, durations_ms={"F": 10.0, "B": 20.0}))
    (panel,) = panels([("", timeline)])
    assert panel.summary.startswith(f"steps 5 to 6, mean: makespan {format_ms(1.5 * first_ms)} · ")
    assert set(panel.step_starts_ms) == {5, 6}


@pytest.mark.parametrize(
    ("timeline", "message"),
    [
        (Timeline(2), "'x' holds no task"),
        (Timeline(2, [], [Wait(0, 0, 0.0, 1.0, IdleReason.FILL)]), "holds no task .and 1 idle"),
        (Timeline(2, [Span(0, 2, Task(TaskKind.F, 0, 0), 0.0, 1.0)]), "give num_stages=3 or more"),
        (Timeline(2, [Span(0, 1, Task(TaskKind.F, 0, 0), 2.0, 1.0)]), "the start not after the end"),
        (Timeline(2, [Span(0, 1, Task(TaskKind.F, 0, 0), 0.0, math.nan)]), "finite times"),
    ],
)
def test_what_cannot_be_drawn_is_refused(timeline: Timeline, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        panels([("x", timeline)])


def test_no_timeline_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        panels([])


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(0, "0 ms"), (57.25, "57.25 ms"), (1234.4, "1,234 ms"), (0.01234, "0.01234 ms"), (999999, "999,999 ms")],
)
def test_milliseconds_have_four_digits(milliseconds: float, text: str) -> None:
    assert format_ms(milliseconds) == text
