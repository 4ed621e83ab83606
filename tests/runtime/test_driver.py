"""The driver's own promises: closing, misuse, and an executor that fails on the event loop."""

import asyncio
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import pytest

from rrfp_jax.arbitration import HINTS, Agreement, Message, StageArbiter, StageSetup, StepRules, ready
from rrfp_jax.network import LoopThread
from rrfp_jax.runtime import PipelineClosed, PipelineRuntime, TaskFailed
from rrfp_jax.runtime.executor import Launched, StageOutcome
from rrfp_jax.tasks import Task, chain, linear


class CountingStage:
    """An executor that only counts; told to, it fails in a payload."""

    def __init__(self, *, fails: bool = False) -> None:
        self.ran: list[str] = []
        self.fails = fails

    def begin(self, step: int, batch: Any, graph: Any) -> None:
        pass

    def launch(self, step: int, task: Task) -> Launched:
        self.ran.append(f"{step}:{task}")
        return Launched(time.perf_counter())

    def payload(self, step: int, message: Message) -> Any:
        if self.fails:
            raise RuntimeError("lost the payload")

    def accept(self, step: int, message: Message, payload: Any) -> None:
        pass

    def finish(self, step: int) -> StageOutcome:
        return StageOutcome(peak_memory_bytes=len(self.ran))


class DirectTransport:
    def __init__(self, deliver: Any, failed: Any) -> None:
        self._deliver = deliver

    def ship(self, payload: Any, stage: int, message: Message) -> Any:
        return payload

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        self._deliver(stage, step, message, payload)

    def close(self) -> None:
        pass


def make_runtime(
    stages: list[CountingStage], deadline_s: float = 30, *, num_microbatches: int = 2, loop: LoopThread | None = None
) -> PipelineRuntime:
    graph, placement = chain(len(stages), num_microbatches), linear(len(stages))
    arbiters = [
        StageArbiter(
            StageSetup(
                graph,
                placement,
                stage,
                consumption=ready(HINTS["bf"]),
                window=2,
                rules=StepRules(updates=False, agreement=Agreement.ALL),
            )
        )
        for stage in range(len(stages))
    ]
    return PipelineRuntime(
        arbiters, lambda stage, _: stages[stage], DirectTransport, progress_deadline_s=deadline_s, loop=loop
    )


def test_steps_may_be_enqueued_ahead_and_run_in_order() -> None:
    stages = [CountingStage(), CountingStage()]
    runtime = make_runtime(stages)
    outcomes = [future.result() for future in [runtime.submit(step, {}) for step in range(4)]]
    runtime.close()
    assert [outcome.step for outcome in outcomes] == [0, 1, 2, 3]
    assert outcomes[-1].peak_memory_bytes == {0: 16, 1: 16}
    assert [name.split(":")[0] for name in stages[0].ran] == sorted(name.split(":")[0] for name in stages[0].ran)


def test_after_close_steps_are_refused_and_closing_again_does_nothing() -> None:
    runtime = make_runtime([CountingStage()])
    runtime.submit(0, {}).result()
    runtime.close()
    runtime.close()
    with pytest.raises(PipelineClosed, match="was closed"):
        runtime.submit(1, {})


def test_an_error_on_the_event_loop_ends_the_run_with_a_report() -> None:
    runtime = make_runtime([CountingStage(fails=True), CountingStage()])
    with pytest.raises(TaskFailed, match="lost the payload"):
        runtime.submit(0, {}).result()
    with pytest.raises(TaskFailed, match="lost the payload"):
        runtime.submit(1, {}).result()
    runtime.close()


def test_the_deadline_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive number of seconds"):
        make_runtime([CountingStage()], deadline_s=0)


def test_a_runtime_without_work_never_reaches_its_deadline() -> None:
    import time

    runtime = make_runtime([CountingStage()], deadline_s=0.05)
    time.sleep(0.2)
    assert runtime.submit(0, {}).result().step == 0
    runtime.close()


class SlowLoop:
    """A loop that takes a step only after whoever closes the pipeline meanwhile has had time to do so."""

    def __init__(self, loop: asyncio.AbstractEventLoop, closed: threading.Event) -> None:
        self._loop, self._closed = loop, closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_soon_threadsafe(self, call: Any, *arguments: Any) -> None:
        if call.__name__ == "_begin":
            self._closed.wait(0.3)
        self._loop.call_soon_threadsafe(call, *arguments)


def test_a_step_submitted_while_the_pipeline_closes_ends_too() -> None:
    shared, closed = LoopThread(), threading.Event()
    runtime = make_runtime([CountingStage()], loop=shared)
    runtime._loop = SlowLoop(shared.loop, closed)  # type: ignore[assignment]
    closing = threading.Timer(0.1, lambda: (runtime.close(), closed.set()))
    closing.start()
    with suppress(PipelineClosed):
        runtime.submit(0, {}).result(timeout=5)  # it ended before the pipeline was closed, or with PipelineClosed
    closing.join()
    shared.close()


class Interrupted(deque[Any]):
    """A queue that lets other threads run right after it was found empty."""

    def __len__(self) -> int:
        if not (length := super().__len__()):
            time.sleep(0)
        return length


def test_wake_ups_are_never_lost() -> None:
    """Thousands of tasks over four stages, whose ends come just after the loop has found no more of them."""
    runtime = make_runtime([CountingStage() for _ in range(4)], num_microbatches=64)
    runtime._completions = Interrupted()
    for step in range(20):
        assert runtime.submit(step, {}).result(timeout=20).step == step
    runtime.close()
