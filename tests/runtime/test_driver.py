"""The driver's own promises: closing, misuse, and an executor that fails on the event loop."""

import asyncio
import random
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from rrfp_jax.cluster import LoopThread
from rrfp_jax.core import HINTS, Agreement, Dispatch, Message, StageArbiter, StageSetup, StepRules, ready
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime import NoProgress, PipelineClosed, PipelineRuntime, TaskFailed, driver, stage_threads
from rrfp_jax.runtime.options import RuntimeOptions
from rrfp_jax.runtime.stage_threads import AwaitedInputs, Launched, RunEnded, StageOutcome
from rrfp_jax.schedules import Task, absences, chain, linear

AT_COMPLETION = Dispatch()
JUST_IN_TIME = Dispatch(just_in_time=True, certain=True)
every_way = pytest.mark.parametrize("way", [AT_COMPLETION, Dispatch(certain=True), JUST_IN_TIME], ids=str)


class CountingStage:
    """An executor that only counts; told to, it fails in a payload."""

    hands_ahead = False

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

    def send_array(self, payload: Any, stage: int, message: Message) -> Any:
        return payload

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        self._deliver(stage, step, message, payload)

    def close(self) -> None:
        pass


def make_runtime(
    stages: list[CountingStage],
    deadline_s: float = 30,
    *,
    num_microbatches: int = 2,
    loop: LoopThread | None = None,
    way: Dispatch = AT_COMPLETION,
    peers: Any = None,
    transport: Any = DirectTransport,
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
                certain_ahead=way.certain,
            )
        )
        for stage in range(len(stages))
    ]
    return PipelineRuntime(
        arbiters,
        lambda stage, _: stages[stage],
        transport,
        RuntimeOptions(progress_deadline_s=deadline_s),
        just_in_time=way.just_in_time,
        loop=loop,
        peers=peers,
    )


def distant_peers(
    *, refresh: Callable[[], object] = lambda: None, ended: Callable[..., object] = lambda *_: None
) -> SimpleNamespace:
    """Other processes, of which none has a part in the stages here, and none ever says anything."""
    return SimpleNamespace(
        rank=0,
        tree=SimpleNamespace(is_root=True),
        others_go_on=False,
        tell=None,
        attach=lambda _: None,
        watch_waits=lambda _: None,
        detach=lambda: None,
        clocks=SimpleNamespace(refresh=refresh, offset_s=0.0),
        layout=SimpleNamespace(ranks_of=lambda _: (0,)),
        step_ended_here=ended,
    )


@every_way
def test_steps_may_be_enqueued_ahead_and_run_in_order(way: Dispatch) -> None:
    stages = [CountingStage(), CountingStage()]
    runtime = make_runtime(stages, way=way)
    outcomes = [future.result() for future in [runtime.submit(step, StepBatch()) for step in range(4)]]
    runtime.close()
    assert [outcome.step for outcome in outcomes] == [0, 1, 2, 3]
    assert outcomes[-1].peak_memory_bytes == {0: 16, 1: 16}
    assert [name.split(":")[0] for name in stages[0].ran] == sorted(name.split(":")[0] for name in stages[0].ran)


class StuckStage(CountingStage):
    """One of its tasks fails when it is waited for, or does not end before it is let go."""

    def __init__(self, task: str, *, hangs: bool) -> None:
        super().__init__()
        self.task, self.hangs = Task.parse(task), hangs
        self.waiting, self.free = threading.Event(), threading.Event()

    def launch(self, step: int, task: Task) -> Launched:
        launched = super().launch(step, task)
        return launched if task != self.task else launched._replace(wait=self._wait)

    def _wait(self) -> None:
        self.waiting.set()
        if not self.hangs:
            raise RuntimeError("broken arithmetic")
        self.free.wait()


@every_way
def test_a_task_that_fails_when_it_is_waited_for_ends_the_run(way: Dispatch) -> None:
    runtime = make_runtime([CountingStage(), StuckStage("1B0", hangs=False)], way=way)
    with pytest.raises(TaskFailed, match=r"step 0: 1B0 on stage 1 failed: .*broken arithmetic"):
        runtime.submit(0, StepBatch()).result(timeout=10)
    runtime.close()


@every_way
def test_a_task_that_hangs_is_named_within_the_deadline(way: Dispatch) -> None:
    stuck = StuckStage("1F0", hangs=True)
    runtime = make_runtime([CountingStage(), stuck], deadline_s=0.3, way=way)
    with pytest.raises(NoProgress, match="stage 1 has been running 1F0") as failure:
        runtime.submit(0, StepBatch()).result(timeout=10)
    assert failure.value.report.culprits() == (1,)
    assert not runtime.close(), "a thread that hangs is left behind"
    stuck.free.set()


@every_way
def test_closing_while_a_task_runs_ends_the_step(way: Dispatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp_jax.runtime.driver._STOP_TIMEOUT_S", 0.1)
    stuck = StuckStage("1F0", hangs=True)
    runtime = make_runtime([CountingStage(), stuck], way=way)
    future = runtime.submit(0, StepBatch())
    assert stuck.waiting.wait(10)
    assert not runtime.close()
    with pytest.raises(PipelineClosed):
        future.result(timeout=10)
    stuck.free.set()


def test_after_close_steps_are_refused_and_closing_again_does_nothing() -> None:
    runtime = make_runtime([CountingStage()])
    runtime.submit(0, StepBatch()).result()
    runtime.close()
    runtime.close()
    with pytest.raises(PipelineClosed, match="was closed"):
        runtime.submit(1, StepBatch())


def test_an_error_on_the_event_loop_ends_the_run_with_a_report() -> None:
    runtime = make_runtime([CountingStage(fails=True), CountingStage()])
    with pytest.raises(TaskFailed, match="lost the payload"):
        runtime.submit(0, StepBatch()).result()
    with pytest.raises(TaskFailed, match="lost the payload"):
        runtime.submit(1, StepBatch()).result()
    runtime.close()


def test_a_report_that_cannot_be_made_does_not_hide_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "stage_state", lambda *_, **__: 1 / 0)
    runtime = make_runtime([CountingStage(fails=True), CountingStage()])
    with pytest.raises(TaskFailed, match="lost the payload"):
        runtime.submit(0, StepBatch()).result(timeout=20)
    runtime.close()


def test_a_failure_ends_the_wait_for_inputs_before_the_runtime_is_closed() -> None:
    runtime = make_runtime([CountingStage(fails=True), CountingStage()])
    inputs = AwaitedInputs([lambda: False])
    runtime._actors[1]._awaited[Task.parse("1F0")] = inputs
    with ThreadPoolExecutor() as launching:
        fetched = launching.submit(inputs.fetch)
        with pytest.raises(TaskFailed, match="lost the payload"):
            runtime.submit(0, StepBatch()).result()
        with pytest.raises(RunEnded):
            fetched.result(timeout=20)
    runtime.close()


def test_an_input_that_does_not_come_is_asked_for_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(stage_threads, "sleep_exactly", pauses.append)
    AwaitedInputs([lambda: len(pauses) >= 100, lambda: len(pauses) >= 110]).fetch()
    assert pauses[:100] == sorted(pauses[:100])
    assert pauses[0] == pauses[100] < 1e-4
    assert all(pause <= 1e-4 or pause <= 0.15 * sum(pauses[:number]) for number, pause in enumerate(pauses[:100]))
    assert pauses[99] == 1e-3


def test_the_deadline_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive number of seconds"):
        make_runtime([CountingStage()], deadline_s=0)


def test_a_runtime_without_work_never_reaches_its_deadline() -> None:
    import time

    runtime = make_runtime([CountingStage()], deadline_s=0.05)
    time.sleep(0.2)
    assert runtime.submit(0, StepBatch()).result().step == 0
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
        runtime.submit(0, StepBatch()).result(
            timeout=5
        )  # it ended before the pipeline was closed, or with PipelineClosed
    closing.join()
    shared.close()


class Interrupted(deque[Any]):
    """A queue that lets other threads run right after it was found empty."""

    def __len__(self) -> int:
        if not (length := super().__len__()):
            time.sleep(0)
        return length


@every_way
def test_wake_ups_are_never_lost(way: Dispatch) -> None:
    """Thousands of tasks over four stages, whose ends come just after the loop has found no more of them."""
    runtime = make_runtime([CountingStage() for _ in range(4)], num_microbatches=64, way=way)
    runtime._serial._calls = Interrupted()
    for step in range(20):
        assert runtime.submit(step, StepBatch()).result(timeout=20).step == step
    runtime.close()


def test_patterns_of_absent_pairs_leave_nothing_behind() -> None:
    """Every step lacks other microbatches: what was worked out for one is not kept for the next."""
    chance, num_stages, num_microbatches = random.Random(0), 2, 32
    stages = [CountingStage() for _ in range(num_stages)]
    runtime = make_runtime(stages, num_microbatches=num_microbatches)
    held_bytes = []
    tracemalloc.start()
    for step in range(60):
        pairs = {(chunk, m) for m in chance.sample(range(num_microbatches), 12) for chunk in range(num_stages)}
        runtime.submit(step, StepBatch(), absences(pairs)).result(timeout=20)
        for stage in stages:
            stage.ran.clear()
        held_bytes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    runtime.close()
    assert max(held_bytes[50:]) < max(held_bytes[10:20]) + (1 << 17)


def test_the_thread_of_a_stage_chooses_what_follows_also_where_there_are_other_processes() -> None:
    chosen_on, ended = set[str](), threading.Event()

    class Watched(CountingStage):
        def payload(self, step: int, message: Message) -> Any:
            chosen_on.add(threading.current_thread().name)

    runtime = make_runtime([Watched(), Watched()], peers=distant_peers(ended=lambda *_: ended.set()))
    runtime.submit(0, StepBatch())
    assert ended.wait(10)
    runtime.close()
    assert chosen_on == {"rrfp-stage-0", "rrfp-stage-1"}


def test_clocks_are_compared_as_long_as_a_runtime_lives() -> None:
    refreshed = threading.Semaphore(0)
    peers = distant_peers(refresh=refreshed.release)
    runtime = make_runtime([CountingStage()], deadline_s=0.2, peers=peers)
    assert all(refreshed.acquire(timeout=10) for _ in range(3))
    runtime.close()


class FailingTransport(DirectTransport):
    """Fails at its first message."""

    def __init__(self, deliver: Any, failed: Any) -> None:
        super().__init__(deliver, failed)
        self._failed = failed

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        self._failed(MemoryError("no room for an activation"))


def test_a_transport_that_fails_is_a_failure_of_this_process() -> None:
    runtime = make_runtime([CountingStage(), CountingStage()], transport=FailingTransport)
    with pytest.raises(TaskFailed, match="a transport failed: no room for an activation"):
        runtime.submit(0, StepBatch()).result(20)
    runtime.close()
