"""Names of tasks in a trace: what encloses a launch, and that nothing is left of it afterwards."""

from collections.abc import Callable
from typing import Any

import pytest

from rrfp_jax.core import RunTask
from rrfp_jax.runtime import named_tasks
from rrfp_jax.runtime.compute import ComputeThread
from rrfp_jax.runtime.executor import Launched
from rrfp_jax.runtime.launching import LaunchAndWait
from rrfp_jax.schedules import Task


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

    monkeypatch.setattr(named_tasks, "TraceAnnotation", Annotation)
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
    threads.name_tasks(True)
    threads.start()
    threads.submit(RunTask(3, Task.parse("2F5")))
    threads.ask_to_stop()
    assert threads.join(10)
    assert told == expected


def test_without_names_the_launch_is_the_stage_s_own(told: list[str]) -> None:
    def launch(step: int, task: Task) -> Launched:
        return Launched(0.0)

    for threads in (ComputeThread("stage", launch, print), LaunchAndWait("stage", launch, print)):
        for is_on in (True, False):
            threads.name_tasks(is_on)
        assert threads._launch is launch
    assert told == []


@pytest.mark.parametrize("until_ended", [True, False])
def test_a_task_that_fails_ends_its_name_too(until_ended: bool, told: list[str]) -> None:
    def fails(step: int, task: Task) -> Launched:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        named_tasks.named(fails, until_ended=until_ended)(0, Task.parse("0B1"))
    assert told == ["begin 0B1 of step 0", "end 0B1 of step 0"]
