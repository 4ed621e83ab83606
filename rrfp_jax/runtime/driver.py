"""The asyncio driver: one event loop in a thread of its own, an actor and a compute thread for each stage it hosts.

``submit`` may be called from any thread and returns a future. A task's error, or no completion within the progress
deadline, ends the run: every pending future fails with the wait-for report, and so does every later ``submit``.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rrfp_jax.arbitration import Message, RunTask, StageArbiter
from rrfp_jax.runtime.actor import StageActor
from rrfp_jax.runtime.compute import ComputeThread
from rrfp_jax.runtime.event_log import EventLog
from rrfp_jax.runtime.executor import Batch, StageExecutor
from rrfp_jax.runtime.report import NoProgress, RunFailed, TaskFailed, WaitForReport, stage_state
from rrfp_jax.runtime.transport import Deliver, Transport
from rrfp_jax.timeline import Timeline

_CHECKS_PER_DEADLINE = 8
_STOP_TIMEOUT_S = 5.0


class PipelineClosed(RuntimeError):
    """The pipeline was closed before this step had ended, or before it was enqueued."""

    def __init__(self) -> None:
        super().__init__("the pipeline was closed: make a new one to go on")


def check_runtime_options(progress_deadline_s: float, log_steps: int) -> None:
    """Raise ValueError for a deadline or a log length that cannot be meant."""
    if not 0 < progress_deadline_s < float("inf"):
        raise ValueError(f"progress_deadline_s is {progress_deadline_s}: give a positive number of seconds")
    if log_steps < 1:
        raise ValueError(f"log_steps is {log_steps}: keep the event log of at least 1 step")


@dataclass(frozen=True)
class StepOutcome:
    """What a finished step leaves: each stage's outcome, by stage, and the record of all stages."""

    step: int
    outcomes: dict[int, Any]
    timeline: Timeline
    ended_s: float
    """When the last stage ended the step (``time.perf_counter``)."""


_Completion = tuple[int, RunTask, float, float, BaseException | None]
"""Stage, instruction, start, end and error of a task that has run."""


@dataclass
class _Pending:
    future: "Future[StepOutcome]"
    timeline: Timeline
    outcomes: dict[int, Any] = field(default_factory=dict)


class PipelineRuntime:
    """Runs the stages that this process hosts.

    Args:
        arbiters, executors: one of each per hosted stage, in the same order.
        make_transport: builds the transport from the function that delivers a message to a hosted stage.
        progress_deadline_s: how long no task may finish while a step is under way.
        log_steps: how many steps of each stage's event log are kept.
    """

    def __init__(
        self,
        arbiters: Sequence[StageArbiter],
        executors: Sequence[StageExecutor],
        make_transport: Callable[[Deliver], Transport],
        *,
        progress_deadline_s: float,
        log_steps: int = 2,
    ) -> None:
        check_runtime_options(progress_deadline_s, log_steps)
        self._deadline_s = progress_deadline_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rrfp-loop", daemon=True)
        self.transport = make_transport(self._deliver)
        self._actors: dict[int, StageActor] = {}
        self._threads: dict[int, ComputeThread] = {}
        self._pending: dict[int, _Pending] = {}
        self._completions: deque[_Completion] = deque()
        self._is_waking = False
        self._inbox: deque[Callable[[], None]] = deque()
        self._pumping = False
        self._failure: RunFailed | None = None
        self._is_closed = False
        self._progress_s = time.perf_counter()
        for arbiter, executor in zip(arbiters, executors, strict=True):
            self._add_stage(arbiter, executor, log_steps)
        self._start()

    def _add_stage(self, arbiter: StageArbiter, executor: StageExecutor, log_steps: int) -> None:
        stage = arbiter.stage

        def done(instruction: RunTask, start_s: float, end_s: float, error: BaseException | None) -> None:
            self._completions.append((stage, instruction, start_s, end_s, error))
            self._wake()

        thread = ComputeThread(f"rrfp-stage-{stage}", executor.run, done)
        self._threads[stage] = thread
        self._actors[stage] = StageActor(
            arbiter, executor, self.transport, submit=thread.submit, ended=self._stage_ended, log_steps=log_steps
        )

    def _wake(self) -> None:
        """Have the loop take what has completed; called on compute threads.

        A wake-up costs two system calls, so one that is on its way serves all completions until it arrives: the loop
        clears the flag before it looks.
        """
        if not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop was closed while the task ran
                self._loop.call_soon_threadsafe(self._take_completions)

    def _start(self) -> None:
        for thread in self._threads.values():
            thread.start()
        self._thread.start()
        self._loop.call_soon_threadsafe(self._watch)

    # -- called from any thread --------------------------------------------------------------------------------------

    def submit(
        self, step: int, batch: Batch, absent: frozenset[tuple[int, int]] = frozenset()
    ) -> "Future[StepOutcome]":
        """Enqueue a step; its future resolves when every hosted stage has ended it. Steps count up without gaps.

        Raises PipelineClosed after ``close``.
        """
        if self._is_closed:
            raise PipelineClosed() from self._failure
        future: Future[StepOutcome] = Future()
        self._loop.call_soon_threadsafe(self._begin, step, batch, absent, future)
        return future

    def close(self) -> bool:
        """Stop the loop and the threads; the future of a step under way fails with PipelineClosed.

        Returns whether all threads have ended; one that hangs in a program cannot be stopped and is left behind.
        """
        if self._is_closed:
            return not any(thread.is_alive() for thread in self._threads.values())
        self._is_closed = True
        for thread in self._threads.values():
            thread.ask_to_stop()
        until_s = time.perf_counter() + _STOP_TIMEOUT_S
        ended = [thread.join(max(0.0, until_s - time.perf_counter())) for thread in self._threads.values()]
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)
        for pending in self._pending.values():
            pending.future.set_exception(PipelineClosed())
        self._pending.clear()
        if not self._thread.is_alive():
            self._loop.close()
        return all(ended)

    @staticmethod
    def clock() -> float:
        """The clock of every recorded time, in seconds."""
        return time.perf_counter()

    def logs(self) -> Mapping[int, EventLog]:
        """Each hosted stage's event log; stable while no step is under way."""
        return {stage: actor.log for stage, actor in self._actors.items()}

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _begin(
        self, step: int, batch: Batch, absent: frozenset[tuple[int, int]], future: "Future[StepOutcome]"
    ) -> None:
        if self._failure is not None:
            future.set_exception(self._failure)
            return
        if not self._pending:
            self._progress_s = time.perf_counter()
        num_stages = next(iter(self._actors.values())).arbiter.placement.num_stages
        self._pending[step] = _Pending(future, Timeline(num_stages))
        for actor in self._actors.values():
            self._post(lambda actor=actor: actor.start_step(step, batch, absent))  # type: ignore[misc]
        self._pump()

    def _deliver(self, stage: int, step: int, message: Message, payload: Any) -> None:
        self._post(lambda: self._actors[stage].receive(step, message, payload))
        self._pump()

    def _take_completions(self) -> None:
        self._is_waking = False
        while self._completions:
            self._completed(*self._completions.popleft())

    def _completed(
        self, stage: int, instruction: RunTask, start_s: float, end_s: float, error: BaseException | None
    ) -> None:
        self._progress_s = end_s
        if error is not None:
            what = f"step {instruction.step}: {instruction.task} on stage {stage} failed: {error!r}"
            self._fail(TaskFailed(self._report(what, failed_stage=stage)), error)
        elif self._failure is None:
            self._post(lambda: self._actors[stage].completed(instruction, start_s, end_s))
            self._pump()

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.append(call)

    def _pump(self) -> None:
        """Run what was posted, first in first out; a call that posts more finds it run after itself."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._inbox and self._failure is None:
                self._inbox.popleft()()
        except Exception as error:
            self._fail(TaskFailed(self._report(f"the scheduler failed: {error!r}")), error)
        finally:
            self._pumping = False

    def _stage_ended(self, stage: int, step: int, outcome: Any, timeline: Timeline) -> None:
        pending = self._pending[step]
        pending.outcomes[stage] = outcome
        pending.timeline.extend(timeline)
        if len(pending.outcomes) == len(self._actors):
            del self._pending[step]
            pending.future.set_result(StepOutcome(step, pending.outcomes, pending.timeline, time.perf_counter()))

    def _watch(self) -> None:
        """End the run when no task has finished for the deadline while a step is under way."""
        stalled_s = time.perf_counter() - self._progress_s
        if self._pending and self._failure is None and stalled_s > self._deadline_s:
            what = f"no task finished for {stalled_s:.1f} s (progress deadline {self._deadline_s:g} s)"
            self._fail(NoProgress(self._report(what)), None)
        self._loop.call_later(self._deadline_s / _CHECKS_PER_DEADLINE, self._watch)

    def _fail(self, failure: RunFailed, cause: BaseException | None) -> None:
        if self._failure is not None:
            return
        failure.__cause__ = cause
        self._failure = failure
        for pending in self._pending.values():
            pending.future.set_exception(failure)
        self._pending.clear()
        self._inbox.clear()

    def _report(self, summary: str, failed_stage: int | None = None) -> WaitForReport:
        now = time.perf_counter()
        states = []
        for stage, actor in self._actors.items():
            started = self._threads[stage].started
            since_s = now - (started[1] if started else actor.last_event_s)
            states.append(stage_state(actor.arbiter, since_s, failed=stage == failed_stage))
        return WaitForReport(summary=summary, stages=tuple(states))
