"""The emulated accelerator: a queue of its own, a launch cost, exact times; and the runtime on it."""

import threading
import time
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import pytest

from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.core import Agreement, DecideNow, Order, StepRules, dispatch_of
from rrfp_jax.core.dispatch import JUST_IN_TIME
from rrfp_jax.runtime.stage_threads import Launched, StageOutcome
from rrfp_jax.schedules import Task
from rrfp_jax.testing import AcceleratedStage, EmulatedAccelerator, Emulation, emulate, idle_shares
from tests.runtime.logged_runs import replays_as_recorded

RULES = StepRules(updates=False, agreement=Agreement.ALL)


def test_tasks_run_one_after_another_for_exactly_their_durations() -> None:
    device = EmulatedAccelerator()
    first, second = device.launch(800.0), device.launch(20.0)
    assert time.perf_counter() < first.end_s, "nobody waits when a task is handed over"
    assert first.end_s - first.start_s == pytest.approx(0.800, abs=1e-9)
    assert second.start_s == first.end_s
    assert second.end_s - second.start_s == pytest.approx(0.020, abs=1e-9)
    second.wait()
    assert time.perf_counter() >= second.end_s
    third = device.launch(1.0)
    assert third.start_s >= second.end_s, "an idle device begins when it is given something"


def test_handing_over_takes_the_host_its_time_and_the_device_none() -> None:
    device = EmulatedAccelerator(launch_ms=5.0)
    before_s = time.perf_counter()
    tasks = [device.launch(2000.0) for _ in range(4)]
    assert time.perf_counter() - before_s >= 4 * 4.5e-3
    assert all(later.start_s == earlier.end_s for earlier, later in pairwise(tasks))


def test_several_threads_share_one_queue() -> None:
    device, spans = EmulatedAccelerator(), []
    threads = [threading.Thread(target=lambda: spans.extend(device.launch(0.5) for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ordered = sorted(spans, key=lambda span: span.start_s)
    assert len(ordered) == 200
    assert all(later.start_s >= earlier.end_s for earlier, later in pairwise(ordered))


@pytest.mark.parametrize("launch_ms", [-1.0, float("inf"), float("nan")])
def test_a_launch_cost_that_cannot_be_meant_is_refused(launch_ms: float) -> None:
    with pytest.raises(ValueError, match="0 or more milliseconds"):
        EmulatedAccelerator(launch_ms=launch_ms)


class Inner:
    """An executor whose task fails when it is waited for."""

    def begin(self, step: int, batch: Any, graph: Any) -> None: ...

    def launch(self, step: int, task: Task) -> Launched:
        return Launched(time.perf_counter(), self._fail)

    def _fail(self) -> None:
        raise RuntimeError("broken arithmetic")

    def payload(self, step: int, message: Any) -> Any: ...

    def accept(self, step: int, message: Any, payload: Any) -> None: ...

    def finish(self, step: int) -> StageOutcome:
        return StageOutcome(peak_memory_bytes=7)


def test_a_stage_of_ones_own_runs_on_it_and_fails_as_it_does() -> None:
    stage = AcceleratedStage(Inner(), EmulatedAccelerator(), lambda step, task: 2.0, stage=3)
    launched = stage.launch(0, Task.parse("0F0"))
    with pytest.raises(RuntimeError, match="broken arithmetic"):
        launched.wait()
    (span,) = stage.spans
    assert (span.step, span.stage, str(span.task)) == (0, 3, "0F0")
    assert time.perf_counter() >= span.end_s
    assert stage.finish(0).peak_memory_bytes == 7


def order(num_stages: int = 1, num_microbatches: int = 8) -> Order:
    ordering = OrderingOptions(hint="bf", window=8)
    return ordering.resolve(num_stages=num_stages, num_microbatches=num_microbatches, chunks_per_stage=1)


def run(
    resolved: Order,
    dispatch_ahead: int | str,
    *,
    duration_ms: float = 4.0,
    launch_ms: float = 1.0,
    num_steps: int = 2,
    certain: bool = True,
) -> Emulation:
    """``certain`` False: by the timer alone, where a single stage has no choice that is not certain."""
    shape = (1, resolved.graph.num_chunks, resolved.graph.num_microbatches, 3)
    durations_ms = np.broadcast_to(np.array([1.0, 0.5, 0.5]) * duration_ms, shape)
    dispatch = dispatch_of(dispatch_ahead, on_host=False)
    arbiters = resolved.arbiters(RULES, certain_ahead=certain and dispatch.certain)
    early = dispatch.just_in_time
    return emulate(arbiters, durations_ms, num_steps, launch_ms=launch_ms, just_in_time=early, log_steps=num_steps + 1)


@pytest.mark.parametrize("dispatch_ahead", [0, "certain", JUST_IN_TIME])
def test_every_task_runs_once_on_the_device_and_the_host_sees_no_end_before_it_has_come(
    dispatch_ahead: int | str,
) -> None:
    resolved = order(num_stages=2)
    emulation = run(resolved, dispatch_ahead, duration_ms=0.5)
    assert emulation.on_device is not None
    on_device = {(span.step, span.task): span for span in emulation.on_device.spans}
    assert sorted(on_device) == sorted((span.step, span.task) for span in emulation.timeline.spans)
    assert len(on_device) == 2 * len(list(resolved.graph.tasks()))
    for seen in emulation.timeline.spans:
        real = on_device[seen.step, seen.task]
        assert seen.stage == real.stage
        assert seen.end_s >= real.end_s
    for log in emulation.logs.values():
        assert replays_as_recorded(log)


def least_idle(emulation: Emulation) -> float:
    """Of the step that other load on the machine disturbed least."""
    assert emulation.on_device is not None
    return min(idle_shares(step)[0] for step in emulation.on_device.by_step())


@pytest.mark.slow
def test_the_device_waits_for_the_host_unless_tasks_are_handed_over_ahead() -> None:
    """Of a task of 12 ms and a launch of 3 ms, a fifth is lost; ahead of time nothing is, but where the host stalls."""
    at_completion, just_in_time, by_timer = (
        least_idle(run(order(num_microbatches=4), when, duration_ms=12.0, num_steps=6, launch_ms=3.0, certain=certain))
        for when, certain in ((0, True), (JUST_IN_TIME, True), (JUST_IN_TIME, False))
    )
    assert at_completion > 0.18
    assert just_in_time < 0.06
    assert by_timer < 0.06


@pytest.mark.slow
def test_just_in_time_the_next_task_is_chosen_late_and_launched_before_the_end() -> None:
    emulation = run(order(num_microbatches=6), JUST_IN_TIME, duration_ms=30.0, num_steps=6, certain=False)
    assert emulation.on_device is not None
    ends_s = {(span.step, span.task): span.end_s for span in emulation.on_device.spans}
    events = [entry for segment in emulation.logs[0].segments for entry in segment.entries]
    early_ms = [
        (ends_s[event.step, event.task] - event.time_s) * 1e3
        for event, instructions in events
        if isinstance(event, DecideNow) and instructions and event.step >= 2
    ]
    assert len(early_ms) > 4 * 6, "nearly every task but the last of a step is followed by another"
    assert 1.0 < median(early_ms) < 20.0, "not before the launch of 1 ms asks for it, nor when the task has just begun"
