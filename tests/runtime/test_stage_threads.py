"""A stage's threads, in both ways: every task is launched and reported in order, with its span or its error."""

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from rrfp_jax.core import BESIDE, RunPair, RunTask
from rrfp_jax.runtime import stage_threads
from rrfp_jax.runtime.stage_threads import ComputeThread, LaunchAndWait, Launched
from rrfp_jax.schedules import Pair, Task

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


class Asked:
    """What is asked for on behalf of the running task, and how long before its end."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[tuple[RunTask, float, float]] = SimpleQueue()

    def decide(self, instruction: RunTask, due_s: float) -> None:
        self.tasks.put((instruction, due_s, time.perf_counter()))


def run_timed(duration_s: float, num_tasks: int) -> tuple[list[tuple[RunTask, float, float]], list[Report]]:
    """Tasks of this duration one after another, each launched by the answer to the last decision."""
    asked, reports = Asked(), SimpleQueue[Report]()

    def launch(step: int, task: Task) -> Launched:
        begun_s = time.perf_counter()
        return Launched(begun_s, lambda: time.sleep(max(0.0, begun_s + duration_s - time.perf_counter())))

    threads = LaunchAndWait("stage", launch, lambda *report: reports.put(report), decide=asked.decide)
    threads.start()
    decisions: list[tuple[RunTask, float, float]] = []
    for m in range(num_tasks):
        threads.answers_due_s = decisions[-1][1] if decisions else time.perf_counter()
        threads.submit(RunTask(0, Task.parse(f"0F{m}")))
        eventually(lambda m=m: reports.qsize() == m + 1)
        while not asked.tasks.empty():
            decisions.append(asked.tasks.get())
    threads.ask_to_stop()
    assert threads.join(10)
    return decisions, [reports.get() for _ in range(num_tasks)]


def test_a_decision_is_asked_for_once_a_task_and_before_its_end_once_lengths_are_known() -> None:
    """But for a task that has ended when the thread wakes up, on a machine that is busy."""
    decisions, reports = run_timed(0.2, 4)
    ends_s = {instruction: (start_s, end_s) for instruction, start_s, end_s, _ in reports}
    asked_for = [instruction for instruction, *_ in decisions]
    assert len(set(asked_for)) == len(asked_for)
    for instruction, due_s, _ in decisions:
        assert ends_s[instruction][0] <= due_s < ends_s[instruction][1]
    first, first_due_s, _ = decisions[0]
    assert (first, first_due_s) == (reports[0][0], reports[0][1]), "of an unknown kind the first decides as it starts"


def test_no_decision_is_asked_for_when_the_task_has_ended() -> None:
    asked, device = Asked(), Device()
    threads = LaunchAndWait("stage", device.launch, lambda *report: None, decide=asked.decide)
    threads.start()
    threads._timer.ended(TASKS[0].task, 0.2)
    threads.submit(TASKS[0])
    device.ends[TASKS[0].task].set()
    time.sleep(0.3)
    assert asked.tasks.empty()
    threads.ask_to_stop()
    assert threads.join(10)


def test_its_own_thread_wakes_a_stage_unless_an_instruction_comes_first() -> None:
    woken: SimpleQueue[tuple[str, float, int]] = SimpleQueue()
    asked: list[bool] = []

    def wake(name: str) -> None:
        woken.put((name, time.perf_counter(), threading.get_ident()))
        if name == "first":
            asked.append(threads.wake_later(time.perf_counter() + 0.02, partial(wake, "again")))

    def done(instruction: RunTask, *_: object) -> None:
        number = TASKS.index(instruction)
        in_s = {0: 0.05, 1: 60.0}.get(number)
        if in_s is not None:
            asked.append(threads.wake_later(time.perf_counter() + in_s, partial(wake, ["first", "never"][number])))

    threads = ComputeThread("stage", lambda *_: Launched(time.perf_counter(), lambda: None), done)
    threads.start()
    assert not threads.wake_later(0.0, partial(wake, "from elsewhere"))
    begun_s = time.perf_counter()
    threads.submit(TASKS[0])
    (first, first_s, thread), (again, again_s, _) = (woken.get(timeout=10) for _ in range(2))
    assert [first, again] == ["first", "again"]
    assert first_s >= begun_s + 0.05
    assert again_s >= first_s + 0.02
    assert thread == threads._threads[0].ident
    for instruction in TASKS[1:3]:
        threads.submit(instruction)
    eventually(lambda: len(asked) == 3)
    assert asked == [True] * 3
    threads.ask_to_stop()
    assert threads.join(10)
    assert woken.empty()


def test_a_forward_in_idle_time_leaves_the_end_of_a_hold_alone() -> None:
    woken, ended = SimpleQueue[float](), SimpleQueue[RunTask]()

    def done(instruction: RunTask, *_: object) -> None:
        ended.put(instruction)
        if instruction == TASKS[0]:
            assert threads.wake_later(time.perf_counter() + 0.1, lambda: woken.put(time.perf_counter()))

    threads = ComputeThread("stage", lambda *_: Launched(time.perf_counter(), lambda: None), done)
    threads.start()
    begun_s = time.perf_counter()
    beside = TASKS[1]._replace(step=BESIDE)
    for instruction in (TASKS[0], beside):
        threads.submit(instruction)
        assert ended.get(timeout=10) == instruction
    assert woken.empty()
    assert woken.get(timeout=10) >= begun_s + 0.1
    threads.ask_to_stop()
    assert threads.join(10)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    class Annotation:
        def __init__(self, name: str, **metadata: Any) -> None:
            self._name = f"{name} of step {metadata['step']}"

        def __enter__(self) -> None:
            told.append(f"begin {self._name}")

        def __exit__(self, *_: object) -> None:
            told.append(f"end {self._name}")

    monkeypatch.setattr(stage_threads, "TraceAnnotation", Annotation)
    return told


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (ComputeThread, ["begin 2F5 of step 3", "launch", "wait", "end 2F5 of step 3", "done"]),
        (LaunchAndWait, ["begin 2F5 of step 3", "launch", "end 2F5 of step 3", "wait", "done"]),
    ],
)
def test_a_name_lasts_as_long_as_its_thread_has_the_task(
    make: Callable[..., Any], expected: list[str], told: list[str]
) -> None:
    def launch(step: int, task: Task) -> Launched:
        told.append("launch")
        return Launched(0.0, lambda: told.append("wait"))

    threads = make("stage", launch, lambda *_: told.append("done"))
    threads.names_tasks = True
    threads.start()
    threads.submit(RunTask(3, Task.parse("2F5")))
    threads.ask_to_stop()
    assert threads.join(10)
    assert told == expected


def test_a_pair_runs_as_one_and_has_one_name(told: list[str]) -> None:
    pair = RunPair(3, Pair(Task.parse("1F3"), Task.parse("0B1")))
    done: list[Any] = []
    threads = ComputeThread("stage", lambda step, task: Launched(0.0), lambda *each: done.append(each))
    threads.names_tasks = True
    threads.start()
    threads.submit(pair)
    threads.ask_to_stop()
    assert threads.join(10)
    assert told == ["begin 1F3+0B1 of step 3", "end 1F3+0B1 of step 3"]
    assert [instruction for instruction, *_ in done] == [pair]


@both
def test_without_names_nothing_is_annotated(way: type[Any], told: list[str]) -> None:
    device = Device()
    for end in device.ends.values():
        end.set()
    threads, _ = started(way, device)
    threads.ask_to_stop()
    assert threads.join(10)
    assert told == []


@both
def test_a_task_that_fails_ends_its_name_too(way: type[Any], told: list[str]) -> None:
    def fails(step: int, task: Task) -> Launched:
        raise RuntimeError("out of memory")

    reports: SimpleQueue[Report] = SimpleQueue()
    threads = way("stage", fails, lambda *report: reports.put(report))
    threads.names_tasks = True
    threads.start()
    threads.submit(RunTask(0, Task.parse("0B1")))
    threads.ask_to_stop()
    assert threads.join(10)
    assert str(reports.get(timeout=10)[3]) == "out of memory"
    assert told == ["begin 0B1 of step 0", "end 0B1 of step 0"]
