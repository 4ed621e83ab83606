"""The recorder turns a stage's history into spans and waits that tile it."""

from rrfp_jax.core import RunTask
from rrfp_jax.runtime.event_log import StageRecorder
from rrfp_jax.schedules import Task
from rrfp_jax.schedules.timeline import IdleReason, Span, Wait

F0, B0 = RunTask(3, Task.parse("0F0")), RunTask(3, Task.parse("0B0"))


def test_idle_time_before_between_and_after_tasks_has_its_reason() -> None:
    recorder = StageRecorder(1, 2)
    recorder.begin(3, 10.0)
    recorder.observe(10.0, IdleReason.FILL)
    recorder.observe(12.0, None)
    recorder.ran(F0, 12.5, 14.0)
    recorder.observe(14.2, IdleReason.WINDOW)
    recorder.observe(15.0, IdleReason.INPUT)
    recorder.observe(16.0, None)
    recorder.ran(B0, 16.0, 17.0)
    recorder.observe(17.1, IdleReason.DRAIN)
    recorder.end(18.0)
    timeline = recorder.take()
    assert timeline.spans == [Span(3, 1, F0.task, 12.5, 14.0), Span(3, 1, B0.task, 16.0, 17.0)]
    assert timeline.waits == [
        Wait(3, 1, 10.0, 12.0, IdleReason.FILL),
        Wait(3, 1, 12.0, 12.5, IdleReason.HOST),
        Wait(3, 1, 14.0, 15.0, IdleReason.WINDOW),
        Wait(3, 1, 15.0, 16.0, IdleReason.INPUT),
        Wait(3, 1, 17.0, 18.0, IdleReason.DRAIN),
    ]
    assert recorder.take().spans == []


def test_time_between_steps_belongs_to_no_step() -> None:
    recorder = StageRecorder(0, 1)
    recorder.begin(0, 0.0)
    recorder.ran(RunTask(0, Task.parse("0F0")), 0.0, 1.0)
    recorder.observe(1.0, IdleReason.DRAIN)
    recorder.end(1.0)
    recorder.observe(1.0, IdleReason.DRAIN)
    recorder.begin(1, 5.0)
    recorder.observe(5.0, None)
    recorder.ran(RunTask(1, Task.parse("0F0")), 5.0, 6.0)
    assert recorder.take().waits == []
