"""A stage's threads, in both ways: every task is launched and reported in order, with its span or its error."""

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from rrfp_jax.arbitration import RunTask
from rrfp_jax.runtime.compute import ComputeThread, LaunchAndWait
from rrfp_jax.runtime.executor import Launched
from rrfp_jax.tasks import Task

TASKS = [RunTask(0, Task.parse(f"0F{m}")) for m in range(4)]
both = pytest.mark.parametrize("way", [ComputeThread, LaunchAndWait])


class Device:
    """Notes launches; tasks end when they are told to, at once or with an error."""

    def __init__(self) -> None:
        self.launched: list[Task] = []
        self.ends = {instruction.task: threading.Event() for instruction in TASKS}
        self.launch_errors: dict[Task, BaseException] = {}
        self.errors: dict[Task, BaseException] = {}

    def launch(self, step: int, task: Task) -> Launched:
        if task in self.launch_errors:
            raise self.launch_errors[task]
        self.launched.append(task)
        return Launched(time.perf_counter(), partial(self._wait, task))

    def _wait(self, task: Task) -> None:
        self.ends[task].wait()
        if task in self.errors:
            raise self.errors[task]


Report = tuple[RunTask, float, float, BaseException | None]


def started(way: type[Any], device: Device) -> tuple[Any, "SimpleQueue[Report]"]:
    reports: SimpleQueue[Report] = SimpleQueue()
    threads = way("stage", device.launch, lambda *report: reports.put(report))
    threads.start()
    for instruction in TASKS:
        threads.submit(instruction)
    return threads, reports


def eventually(holds: Callable[[], bool]) -> None:
    until_s = time.perf_counter() + 10
    while not holds():
        assert time.perf_counter() < until_s
        time.sleep(0.001)


@both
def test_tasks_are_reported_in_order_one_span_after_another(way: type[Any]) -> None:
    device = Device()
    for end in device.ends.values():
        end.set()
    threads, reports = started(way, device)
    told = [reports.get(timeout=10) for _ in TASKS]
    assert [instruction for instruction, *_ in told] == TASKS
    assert all(error is None for *_, error in told)
    times = [time_s for _, start_s, end_s, _ in told for time_s in (start_s, end_s)]
    assert times == sorted(times)
    threads.ask_to_stop()
    assert threads.join(10)
    assert not threads.is_alive()
    assert threads.started is None


@both
def test_a_launch_or_a_wait_that_fails_is_reported_with_its_error(way: type[Any]) -> None:
    device = Device()
    device.launch_errors[TASKS[1].task] = RuntimeError("no memory")
    device.errors[TASKS[2].task] = RuntimeError("broken arithmetic")
    for end in device.ends.values():
        end.set()
    threads, reports = started(way, device)
    errors = [str(reports.get(timeout=10)[3]) for _ in TASKS]
    assert errors == ["None", "no memory", "broken arithmetic", "None"]
    threads.ask_to_stop()
    assert threads.join(10)


@both
def test_a_task_that_hangs_is_known_and_does_not_hold_up_who_closes(way: type[Any]) -> None:
    device = Device()
    device.ends[TASKS[0].task].set()
    before_s = time.perf_counter()
    threads, reports = started(way, device)
    assert reports.get(timeout=10)[0] == TASKS[0]
    eventually(lambda: threads.started is not None and threads.started[0] == TASKS[1])
    assert before_s < threads.started[1] <= time.perf_counter()
    threads.ask_to_stop()
    assert not threads.join(0.05)
    assert threads.is_alive()
    for end in device.ends.values():
        end.set()
    assert threads.join(10)
    assert [reports.get(timeout=10)[0] for _ in TASKS[1:]] == TASKS[1:], "what was queued has run"


def test_tasks_are_launched_while_one_runs_and_begin_when_it_ends() -> None:
    device = Device()
    threads, reports = started(LaunchAndWait, device)
    eventually(lambda: len(device.launched) == len(TASKS))
    assert reports.empty()
    device.ends[TASKS[1].task].set()
    time.sleep(0.02)
    assert reports.empty(), "a task is reported behind the ones before it"
    device.ends[TASKS[0].task].set()
    first, second = reports.get(timeout=10), reports.get(timeout=10)
    assert (first[0], second[0]) == (TASKS[0], TASKS[1])
    assert second[1] == first[2]
    for end in device.ends.values():
        end.set()
    threads.ask_to_stop()
    assert threads.join(10)
