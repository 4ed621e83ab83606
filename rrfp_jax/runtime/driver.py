"""The driver runs the stages that this process hosts: an event loop in a thread, and an actor and threads for each.

The actors run in a serial executor (:mod:`rrfp_jax.runtime.serial_executor`), on the threads of stages and on the event
loop, on which messages of other processes arrive.

``submit`` may be called from any thread and returns a future. The error of a task, no completion within the progress
deadline, or the loss of another process ends the run: every pending future fails with the wait-for report, and so does
every later ``submit``. Where there are several processes, all of them end so, within a moment of each other.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from rrfp_jax.cluster.failure_detector import WaitKind
from rrfp_jax.cluster.loop_thread import LoopThread, runs_here
from rrfp_jax.core import (
    BESIDE,
    Event,
    InputPromised,
    Message,
    RunInstruction,
    StageArbiter,
    TaskAnnounced,
    timing_rule,
)
from rrfp_jax.core.dispatch import GapTimer
from rrfp_jax.core.groups import GroupMember
from rrfp_jax.core.replicas import StepOwners, moved_pairs
from rrfp_jax.layout import name_unit
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime.actor import StageActor
from rrfp_jax.runtime.control_plane import Peers
from rrfp_jax.runtime.event_log import EventLog, RunLog, take_log
from rrfp_jax.runtime.failure import (
    Failure,
    FailureReport,
    NoProgress,
    PeerLost,
    RunFailed,
    StageState,
    TaskFailed,
    TransportFailed,
    error_text,
    stage_state,
)
from rrfp_jax.runtime.mailbox import SendArray
from rrfp_jax.runtime.options import Pieces, RuntimeOptions
from rrfp_jax.runtime.serial_executor import SerialExecutor
from rrfp_jax.runtime.sleeping import DelayInjection
from rrfp_jax.runtime.stage_threads import (
    ComputeThread,
    LaunchAndWait,
    PieceThread,
    StageExecutor,
    StageThreads,
)
from rrfp_jax.runtime.steps import StepOutcome, StepsUnderWay
from rrfp_jax.runtime.transports import Deliver, Failed, PipelineTransport
from rrfp_jax.schedules import Absences, Task, lanes_beside
from rrfp_jax.waiting import wait_for

_LOG = logging.getLogger(__name__)
_CHECKS_PER_DEADLINE = 8
_CAUSE_WITHIN_S = 1.0
"""Seconds for which a task that fails before its input was delivered waits for the task that made that to fail."""
_STOP_TIMEOUT_S = 5.0
_STOP_AFTER_FAILURE_S = 0.5
"""Seconds until threads are left behind after a failure: a program that hangs, or waits for a lost process, never
ends."""


class PipelineClosed(RuntimeError):
    """The pipeline was closed before this step had ended, or before it was enqueued."""

    def __init__(self) -> None:
        super().__init__("the pipeline was closed: make a new one to go on")


class PipelineRuntime:
    """Runs the stages that this process hosts.

    Args:
        arbiters: one per hosted stage.
        make_stage: builds a stage's executor from its number and the transport's ``send_array``.
        make_transport: builds the transport, which is closed with the runtime, from the functions that deliver a
            message to a hosted stage and that end the run for a transport that fails.
        options: the deadline of progress, and the length of the event logs; the rest of them is not for the driver.
        just_in_time: choose a stage's next task when the running one may end within the host's latency.
        delay_s: returns the seconds by which a message is handed over late, to emulate slow links; None: no delays.
        loop: the event loop on which the transport's messages arrive; None: a loop of the runtime's own.
        stages_of_replica: the number of stages of each replica, if there are several replicas; for reports.
        peers: the other processes of the run; rank 0's futures wait for the stages of all of them.
        on_failure: called on the loop when the run is given up, beside the futures that fail.
    """

    def __init__(
        self,
        arbiters: Sequence[StageArbiter],
        make_stage: Callable[[int, SendArray], StageExecutor],
        make_transport: Callable[[Deliver, Failed], PipelineTransport],
        options: RuntimeOptions,
        *,
        just_in_time: bool = False,
        delay_s: Callable[[Message], float] | None = None,
        loop: LoopThread | None = None,
        stages_of_replica: int | None = None,
        peers: Peers | None = None,
        on_failure: Callable[[RunFailed], None] | None = None,
    ) -> None:
        self._options = options
        self._own_loop = LoopThread() if loop is None else None
        self._loop: asyncio.AbstractEventLoop = (loop or self._own_loop).loop  # type: ignore[union-attr]
        self.peers, self._on_failure, self._stages_of_replica = peers, on_failure, stages_of_replica
        self.failure = FailureReport(
            self._loop,
            peers,
            options.progress_deadline_s,
            lambda: self._serial.run_exclusive(self._states),  # A stage's thread may be running a call.
            self._end_with,
        )
        self._serial = SerialExecutor(
            self._loop,
            lambda: self.failure.failing is None,
            lambda error: self._give_up(TaskFailed, f"the scheduler failed: {error_text(error)}", error),
        )
        self.run_serially = self._serial.submit
        self._delays = None if delay_s is None else DelayInjection(self._loop, self._deliver, delay_s)
        self.transport = make_transport(self._delays or self._deliver, self._transport_failed)
        self._actors: dict[int, StageActor] = {}
        self._hands_ahead: dict[int, StageExecutor] = {}
        """Stages that lie wholly in this process and whose outputs can be promised to each other."""
        self._closing = threading.Lock()
        self._is_closed = False
        self.steps = StepsUnderWay(arbiters[0].placement.num_stages, len(arbiters), peers)
        for arbiter in arbiters:
            self._add_stage(arbiter, make_stage(arbiter.stage, self.transport.send_array), just_in_time)
        self._threads = [thread for actor in self._actors.values() for thread in actor.threads]
        for thread in self._threads:
            thread.start()
        self._loop.call_soon_threadsafe(self._serial.start)
        self._loop.call_soon_threadsafe(self._watch)
        if peers is not None:
            self._loop.call_soon_threadsafe(peers.attach, self)
            self._loop.call_soon_threadsafe(peers.watch_waits, self._loop)

    def _add_stage(self, arbiter: StageArbiter, executor: StageExecutor, just_in_time: bool) -> None:
        stage, launch = arbiter.stage, executor.launch
        name = f"rrfp-stage-{stage}"
        # The tasks of a group send notes, which only the loop can.
        call = self._serial.submit_to_loop if isinstance(arbiter, GroupMember) else self._serial.submit
        done = partial(self._completed, stage, call=call)
        beside = lanes_beside(arbiter.graph)
        threads: StageThreads
        if just_in_time:
            # The thread that waits for tasks launched ahead must go on waiting, to see them end: the loop decides.
            threads = LaunchAndWait(
                name,
                launch,
                partial(self._completed, stage, call=self._serial.submit_to_loop),
                decide=lambda *task: self._serial.submit_to_loop(self._actors[stage].decide, *task),
                rule=timing_rule(looks_ahead=arbiter.setup.foresight is not None),
            )
            is_whole = self.peers is None or [*self.peers.layout.ranks_of(stage)] == [self.peers.rank]
            # A pair is made of tasks that have their inputs.
            if self._delays is None and is_whole and executor.hands_ahead and not arbiter.setup.pairs:
                self._hands_ahead[stage] = executor
        else:
            threads = ComputeThread(name, launch, done)
        self._actors[stage] = StageActor(
            arbiter,
            executor,
            threads,
            self,
            engines={lane: ComputeThread(f"{name}-{lane}", launch, done) for lane in sorted({*beside.values()})},
            hands_ahead=self._hands_ahead,
            log_steps=self._options.log_steps,
            pieces=None if self._options.pieces is None else partial(self._piece_thread, stage, self._options.pieces),
        )

    def _piece_thread(self, stage: int, pieces: Pieces, gaps: GapTimer, ended: Callable[[float], None]) -> PieceThread:
        return PieceThread(f"rrfp-pieces-{stage}", pieces(stage), gaps, self._serial.submit, ended)

    # -- called from any thread --------------------------------------------------------------------------------------

    def submit(
        self,
        step: int,
        batch: StepBatch,
        absent: Absences = (),
        weights: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        *,
        evaluates: bool = False,
        owners: StepOwners | None = None,
        trained: int | None = None,
    ) -> "Future[StepOutcome]":
        """Enqueues a step and returns a future that resolves when every awaited stage has ended it.

        Steps count up without gaps, steps that evaluate (:mod:`rrfp_jax.core.stage_setup`) like any others; and so do
        evaluations in idle time, from :data:`rrfp_jax.core.BESIDE` on. The plans of a step that lacks some pairs are
        made here, on the calling thread.

        Args:
            absent: pairs of chunk and microbatch that the step lacks, whoever owns them.
            weights: for stages whose capacity bounds the bytes that they hold, the weight of each of their
                microbatches.
            owners: the owners of the microbatches; None: the blocks of replicas.
            trained: the number of training steps before this one, by which people know the step; None: ``step``.

        Raises PipelineClosed after ``close``, and ValueError for pairs that cannot be absent, or owners that these
        stages cannot have.
        """
        actors, is_beside = [*self._actors.values()], step >= BESIDE
        arbiters = [actor.beside.arbiter if is_beside else actor.arbiter for actor in actors]
        is_another = evaluates and not is_beside  # In idle time an arbiter runs nothing but evaluations.
        graph = arbiters[0].graph_of(evaluates=is_another, owners=owners)
        absent = absent if owners is None else moved_pairs(absent, graph)
        graph = graph.skipping(absent)
        plans = [
            arbiter.plan_without(absent, weights.get(arbiter.stage, ()), evaluates=is_another, owners=owners)
            for arbiter in arbiters
        ]
        future: Future[StepOutcome] = Future()

        def start() -> None:
            for actor, plan in zip(actors, plans, strict=True):
                (actor.start_beside if is_beside else actor.start_step)(step, batch, graph, plan)

        self.steps.call(step, trained, "evaluation" if evaluates else "verification" if batch.verifies else "")
        with self._closing:
            if self._is_closed:
                raise PipelineClosed() from self.failure.error
            self._loop.call_soon_threadsafe(self._begin, step, start, future)
        return future

    def hurry(self) -> None:
        """Has evaluations in idle time run whenever a stage idles, since somebody waits for them."""
        self._loop.call_soon_threadsafe(self._serial.submit, self._hurry)

    def _hurry(self) -> None:
        self.steps.hurry()
        for actor in self._actors.values():
            actor.beside.hurries = actor.beside.is_due
            actor.note_idle(time.perf_counter())

    def name_tasks(self, is_on: bool) -> None:
        """Names every task in traces of :mod:`jax.profiler`, or no more; no step may be under way."""
        for thread in self._threads:
            thread.names_tasks = is_on

    def close(self) -> bool:
        """Stops the threads, and the loop if it is the runtime's own; the future of a step under way fails.

        Returns whether all threads have ended; one that hangs in a program cannot be stopped and is left behind.
        """
        with self._closing:  # Steps submitted before are on the loop by now, ahead of the end.
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return all(thread.join(0.0) for thread in self._threads)
        for thread in self._threads:
            thread.ask_to_stop()
        # A thread may wait for an input that no other will launch any more.
        for actor in self._actors.values():
            actor.give_up()
        until_s = time.perf_counter() + (_STOP_TIMEOUT_S if self.failure.failing is None else _STOP_AFTER_FAILURE_S)
        ended = [thread.join(max(0.0, until_s - time.perf_counter())) for thread in self._threads]
        # A piece that hangs is left behind, but may yet tell its end, for which the serial executor stays.
        pieces = [actor.pieces for actor in self._actors.values() if actor.pieces is not None]
        have_ended = [each.close(max(0.0, until_s - time.perf_counter())) for each in pieces]
        left_loop = threading.Event()
        self._loop.call_soon_threadsafe(self._leave_loop, left_loop)
        wait_for(left_loop, _STOP_TIMEOUT_S)
        if self._own_loop is not None:
            self._own_loop.close()
        self.transport.close()
        if all(ended) and all(have_ended) and left_loop.is_set():
            self._serial.close()
            if self._delays is not None:
                self._delays.close()
        return all(ended)

    def close_soon(self) -> None:
        """Closes the runtime on a thread of its own, without waiting.

        For the garbage collector, which calls on any thread and within any call: nothing here may take a lock.
        """
        if not self._is_closed:
            self._loop.call_soon_threadsafe(threading.Thread(target=self.close, name="rrfp-close", daemon=True).start)

    def wait_for_failure(self, summary: str) -> RunFailed:
        """Blocks until the failure report is complete and returns the error that ends the run.

        For callers that detect the failure before the driver does; ``summary`` counts where nothing else went wrong.
        """
        self._loop.call_soon_threadsafe(self._serial.submit_always, self._give_up, PeerLost, summary)
        return self.failure.wait()

    def logs(self) -> Mapping[int, EventLog]:
        """Returns each hosted stage's event log, stable while no step is under way."""
        return {stage: actor.log for stage, actor in self._actors.items()}

    def event_log(self) -> RunLog:
        """Returns the event logs of all hosted stages as they stand, to be written to a file and replayed elsewhere."""
        started = {stage: actor.threads[0].started for stage, actor in self._actors.items()}
        return take_log(
            self.logs(),
            {stage: running for stage, running in started.items() if running is not None},
            report=None if self.failure.error is None else self.failure.error.report,
            rank=0 if self.peers is None else self.peers.rank,
            clock_offset_s=0.0 if self.peers is None else self.peers.clocks.offset_s,
        )

    # -- for the stages' threads and actors --------------------------------------------------------------------------

    def _completed(
        self,
        stage: int,
        instruction: RunInstruction,
        start_s: float,
        end_s: float,
        error: BaseException | None,
        *,
        call: Callable[..., None],
    ) -> None:
        """Passes a completion on to the stage's actor, through ``call``; on the stage's threads."""
        if error is None:
            call(self._actors[stage].completed, instruction, start_s, end_s)
        else:
            call(self._task_failed, stage, instruction, error)

    def announce(self, stage: int, step: int, message: Message) -> None:
        """Tells a stage that the task which will send it this message has started; or promises the message, where the
        stage can fetch it."""
        if stage in self._hands_ahead:
            actor = self._actors[stage]
            if actor.arbiter.placement.stage_of_chunk[message.source] in self._hands_ahead:
                self._serial.submit(actor.observe, InputPromised, step, message)
                return
        if self.peers is not None and self.peers.layout.ranks_of(stage)[0] != self.peers.rank:
            self.peers.announce_task(stage, step, message)
        else:
            self.observe(stage, TaskAnnounced, step, message)

    def wake_later(self, at_s: float, call: Callable[[], None]) -> None:
        """Makes a call at a time, in the serial executor."""
        if runs_here(self._loop):
            self._loop.call_later(max(0.0, at_s - time.perf_counter()), self._serial.submit, call)
        else:
            self._loop.call_soon_threadsafe(self.wake_later, at_s, call)

    # -- on the event loop -------------------------------------------------------------------------------------------

    def _begin(self, step: int, start: Callable[[], None], future: "Future[StepOutcome]") -> None:
        if self.failure.error is not None:
            future.set_exception(self.failure.error)
            return
        self.steps.begin(step, future)
        self._serial.submit(start)

    def _leave_loop(self, left: threading.Event) -> None:
        if self.peers is not None:
            self.peers.detach()
        self._serial.stop()
        if self._delays is not None:
            self._delays.stop()
        self._serial.shut_down()
        self._serial.submit_always(self.steps.fail, PipelineClosed())
        self._serial.submit_always(left.set)

    def _deliver(self, stage: int, step: int, message: Message, payload: Any) -> None:
        self._serial.submit(self._actors[stage].receive, step, message, payload)

    def observe(self, unit: int, event: Callable[..., Event], step: int, *details: Any) -> None:
        """Has a hosted unit handle an event that another stage or rank caused."""
        self._serial.submit(self._actors[unit].observe, event, step, *details)

    def _watch(self) -> None:
        """Ends the run when nothing has happened for the deadline while a step is under way."""
        if self._is_closed:
            return
        deadline_s = self._options.progress_deadline_s
        progress_s = max(self.steps.begun_s, *(actor.last_event_s for actor in self._actors.values()))
        stalled_s = time.perf_counter() - progress_s
        if self.steps and self.failure.failing is None and stalled_s > deadline_s:
            summary = f"no task finished for {stalled_s:.1f} s (progress deadline {deadline_s:g} s)"
            self._serial.submit(self._give_up, NoProgress, summary)
        if self.peers is not None:
            self.peers.clocks.refresh()
        self._loop.call_later(deadline_s / _CHECKS_PER_DEADLINE, self._watch)

    def waits(self) -> dict[WaitKind, tuple[float, str]]:
        """Returns the present waits of the hosted stages, each with its beginning and in words."""
        waits = {}
        for stage, actor in self._actors.items() if self.steps else ():
            name, started = name_unit(stage, self._stages_of_replica), actor.threads[0].started
            if started is None:
                waits[stage, False] = max(actor.last_event_s, self.steps.begun_s), f"{name} waits for others"
            else:
                (step, task), start_s = started
                waits[stage, True] = start_s, f"{name} runs {task} of {self.steps.name(step)}"
        return waits

    def _end_with(self, failure: RunFailed) -> None:
        self._serial.shut_down()
        for actor in self._actors.values():
            actor.give_up()  # The close may come long after this.
        self._serial.submit_always(self.steps.fail, failure)
        if self._on_failure is not None:
            self._on_failure(failure)

    # -- giving up, in the serial executor ---------------------------------------------------------------------------

    def _task_failed(
        self, stage: int, instruction: RunInstruction, error: BaseException, *, has_waited: bool = False
    ) -> None:
        task, arbiter = instruction.task, self._actors[stage].arbiter
        # Pairs have all inputs, as forwards in idle time have.
        may_lack = not has_waited and instruction.step < BESIDE
        if may_lack and isinstance(task, Task) and arbiter.awaits_input(task):
            # The task that makes its input has failed, too, and is about to say so: that is the cause to report.
            later_s = time.perf_counter() + _CAUSE_WITHIN_S
            self.wake_later(later_s, partial(self._task_failed, stage, instruction, error, has_waited=True))
        elif isinstance(error, TransportFailed):
            self._transport_failed(error)
        else:
            name = f"{task} on {name_unit(stage, self._stages_of_replica)}"
            summary = f"{self.steps.name(instruction.step)}: {name} failed: {error_text(error)}"
            self._give_up(TaskFailed, summary, error, failed_stage=stage)

    def _transport_failed(self, error: Exception) -> None:
        """Gives the run up, since messages are missing from now on; on any thread. The failure is this process's,
        unless a rank turns out to be lost."""
        self._serial.submit_always(self._give_up, TaskFailed, f"a transport failed: {error}", error)

    def _give_up(
        self,
        kind: type[RunFailed],
        summary: str,
        cause: BaseException | None = None,
        *,
        failed_stage: int | None = None,
    ) -> None:
        failure = Failure(kind, summary, self._states(failed_stage), cause)
        if runs_here(self._loop):
            self.failure.begin(failure)
        else:
            self._loop.call_soon_threadsafe(self.failure.begin, failure)

    def _states(self, failed_stage: int | None = None) -> list[StageState]:
        now = time.perf_counter()
        rank = None if self.peers is None else self.peers.rank
        states = []
        for stage, actor in self._actors.items():
            started = actor.threads[0].started
            try:
                state = stage_state(
                    actor.arbiter,
                    now - (started[1] if started else actor.last_event_s),
                    failed=stage == failed_stage,
                    rank=rank,
                    stages_of_replica=self._stages_of_replica,
                )
                number = None if state.step is None else self.steps.number(state.step)
                states.append(replace(state, step=number, is_launching=actor.threads[0].is_launching))
            except Exception:  # A fault in the report must not replace the error that ends the run.
                _LOG.exception("stage %d cannot tell what it waits for", stage)
        return states
