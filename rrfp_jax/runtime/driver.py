"""The asyncio driver: one event loop in a thread of its own, an actor and a compute thread for each stage it hosts.

The actors are called in turns (:mod:`rrfp_jax.runtime.turns`), on the threads of stages and on the loop, to which what
other processes send comes.

``submit`` may be called from any thread and returns a future. A task's error, no completion within the progress
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
from typing import Any, cast

from rrfp_jax.cluster.loop_thread import LoopThread, runs_here
from rrfp_jax.core import Message, Note, RunTask, StageArbiter, timing_rule
from rrfp_jax.core.group_member import GroupMember
from rrfp_jax.layout import name_unit
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime.actor import StageActor
from rrfp_jax.runtime.awaited import AwaitedInputs
from rrfp_jax.runtime.compute import ComputeThread, StageThreads
from rrfp_jax.runtime.error_text import error_text
from rrfp_jax.runtime.event_log import EventLog
from rrfp_jax.runtime.executor import HandsAhead, StageExecutor, StageOutcome
from rrfp_jax.runtime.failure_report import Failure, FailureReport
from rrfp_jax.runtime.late_delivery import LateDelivery
from rrfp_jax.runtime.launching import LaunchAndWait
from rrfp_jax.runtime.log_file import RunLog, take_log
from rrfp_jax.runtime.mailbox import Ship
from rrfp_jax.runtime.options import check_running
from rrfp_jax.runtime.outcomes import Summary
from rrfp_jax.runtime.peers import Peers
from rrfp_jax.runtime.report import FailureNews, NoProgress, PeerLost, RunFailed, StageState, TaskFailed, stage_state
from rrfp_jax.runtime.steps_under_way import StepOutcome, StepsUnderWay
from rrfp_jax.runtime.transports import Deliver, Failed, Transport, TransportFailed
from rrfp_jax.runtime.turns import Turns
from rrfp_jax.schedules import Absences, lanes_beside
from rrfp_jax.schedules.timeline import Timeline
from rrfp_jax.waiting import wait_for

_LOG = logging.getLogger(__name__)
_CHECKS_PER_DEADLINE = 8
_CAUSE_WITHIN_S = 1.0
"""How long a task that fails before its input was delivered waits to be the cause itself."""
_STOP_TIMEOUT_S = 5.0
_STOP_AFTER_FAILURE_S = 0.5
"""A program that hangs, or waits for a process that is lost, does not end."""


class PipelineClosed(RuntimeError):
    """The pipeline was closed before this step had ended, or before it was enqueued."""

    def __init__(self) -> None:
        super().__init__("the pipeline was closed: make a new one to go on")


class PipelineRuntime:
    """Runs the stages that this process hosts.

    Args:
        arbiters: one per hosted stage.
        make_stage: builds a stage's executor from its number and the transport's ``ship``.
        make_transport: builds the transport, which is closed with the runtime, from the functions that deliver a
            message to a hosted stage and that end the run for a transport that fails.
        progress_deadline_s: how long no task may finish, and no message arrive, while a step is under way.
        log_steps: how many steps of each stage's event log are kept.
        just_in_time: choose a stage's next task when the running one may end within the host's latency.
        delay_s: how much later than it came a message is handed over, to emulate slow links; None: at once.
        loop: the event loop that the transport's messages come in on; None: one of its own.
        stages_of_replica: the number of stages of each replica, if there are several replicas; for reports.
        peers: the other processes of the run; rank 0's futures wait for the stages of all of them.
        on_failure: called on the loop when the run is given up, beside the futures that fail.
    """

    def __init__(
        self,
        arbiters: Sequence[StageArbiter],
        make_stage: Callable[[int, Ship], StageExecutor],
        make_transport: Callable[[Deliver, Failed], Transport],
        *,
        progress_deadline_s: float,
        log_steps: int = 2,
        just_in_time: bool = False,
        delay_s: Callable[[Message], float] | None = None,
        loop: LoopThread | None = None,
        stages_of_replica: int | None = None,
        peers: Peers | None = None,
        on_failure: Callable[[RunFailed], None] | None = None,
    ) -> None:
        check_running(progress_deadline_s, log_steps)
        self._deadline_s = progress_deadline_s
        self._own_loop = LoopThread() if loop is None else None
        self._loop: asyncio.AbstractEventLoop = (loop or self._own_loop).loop  # type: ignore[union-attr]
        self._peers, self._on_failure, self._stages_of_replica = peers, on_failure, stages_of_replica
        self._ending = FailureReport(self._loop, peers, progress_deadline_s, self._states_apart, self._end_with)
        self._turns = Turns(self._loop, lambda: self._ending.failing is None, self._scheduler_failed)
        self._late = None if delay_s is None else LateDelivery(self._loop, self._deliver, delay_s)
        self.transport = make_transport(self._late or self._deliver, self._transport_failed)
        self._actors: dict[int, StageActor] = {}
        self._threads: dict[int, StageThreads] = {}
        self._hand_ahead: dict[int, HandsAhead] = {}
        """Stages that are wholly here and whose outputs can be promised to each other."""
        self._engines: list[ComputeThread] = []
        """The threads of engines beside compute."""
        self._closing = threading.Lock()
        self._is_closed = False
        self._steps = StepsUnderWay(arbiters[0].placement.num_stages, len(arbiters), peers)
        for arbiter in arbiters:
            self._add_stage(arbiter, make_stage(arbiter.stage, self.transport.ship), log_steps, just_in_time)
        self._start()

    def _add_stage(self, arbiter: StageArbiter, executor: StageExecutor, log_steps: int, just_in_time: bool) -> None:
        stage = arbiter.stage
        name, turns = f"rrfp-stage-{stage}", self._turns
        # a thread that waits for tasks launched ahead must go on waiting, to see them end
        waited = partial(self._completed, stage, call=turns.call_on_loop)
        # and every task of a group sends notes, which only the loop can
        sends_notes = isinstance(arbiter, GroupMember)
        done = partial(self._completed, stage, call=turns.call_on_loop if sends_notes else turns.call)
        thread: StageThreads
        if just_in_time:
            rule = timing_rule(looks_ahead=arbiter.foresight_rules is not None)
            thread = LaunchAndWait(name, executor.launch, waited, decide=partial(self._due, stage), rule=rule)
        else:
            thread = ComputeThread(name, executor.launch, done)
        self._threads[stage] = thread
        if just_in_time and self._late is None and self._is_here(stage) and getattr(executor, "hands_ahead", False):
            self._hand_ahead[stage] = cast(HandsAhead, executor)
        beside = lanes_beside(arbiter.graph)
        engines = {lane: ComputeThread(f"{name}-{lane}", executor.launch, done) for lane in sorted({*beside.values()})}
        self._engines += engines.values()
        self._actors[stage] = StageActor(
            arbiter,
            executor,
            self.transport,
            submit=thread.submit if not beside else partial(_submit, beside, engines, thread),
            submit_awaiting=partial(self._submit_awaiting, stage),
            ended=self._stage_ended,
            announce=self._announce,
            wake_later=partial(self._wake_by, thread) if isinstance(thread, ComputeThread) else self._wake_later,
            tell=None if self._peers is None else self._peers.tell,
            log_steps=log_steps,
        )

    def _completed(
        self,
        stage: int,
        instruction: RunTask,
        start_s: float,
        end_s: float,
        error: BaseException | None,
        *,
        call: Callable[..., None],
    ) -> None:
        """A task has run; called on the stages' threads, with the way of :class:`Turns` to have a call made."""
        if error is None:
            call(self._actors[stage].completed, instruction, start_s, end_s)
        else:
            call(self._task_failed, stage, instruction, error)

    def _due(self, stage: int, instruction: RunTask, due_s: float) -> None:
        """Have the loop decide what follows a task that is about to end; called on the stages' threads."""
        self._turns.call_on_loop(self._decide, stage, instruction, due_s)

    def _all_threads(self) -> list[StageThreads]:
        return [*self._threads.values(), *self._engines]

    def _start(self) -> None:
        for thread in self._all_threads():
            thread.start()
        self._loop.call_soon_threadsafe(self._turns.listen)
        self._loop.call_soon_threadsafe(self._watch)
        if self._peers is not None:
            self._loop.call_soon_threadsafe(self._peers.attach, self)

    # -- called from any thread --------------------------------------------------------------------------------------

    def submit(
        self,
        step: int,
        batch: StepBatch,
        absent: Absences = (),
        weights: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        *,
        evaluates: bool = False,
        trained: int | None = None,
    ) -> "Future[StepOutcome]":
        """Enqueue a step; its future resolves when every awaited stage has ended it. Steps count up without gaps, those
        that evaluate (:mod:`rrfp_jax.core.evaluation`) like any others.

        ``trained`` is the number by which people know the step, where steps that evaluate have come before: how many
        were trained. ``weights`` has, for stages whose capacity bounds what they hold, what each of their microbatches
        weighs. The plans of a step that lacks some pairs are made here, on the calling thread. Raises PipelineClosed
        after ``close``, and ValueError for pairs that cannot be absent.
        """
        arbiters = [actor.arbiter for actor in self._actors.values()]
        graph = arbiters[0].graph_of(evaluates=evaluates).skipping(absent)
        plans = [a.plan_without(absent, weights.get(a.stage, ()), evaluates=evaluates) for a in arbiters]
        starts = [
            partial(actor.start_step, step, batch, graph, plan)
            for actor, plan in zip(self._actors.values(), plans, strict=True)
        ]
        self._steps.call(step, trained, evaluates=evaluates)
        future: Future[StepOutcome] = Future()
        with self._closing:
            if self._is_closed:
                raise PipelineClosed() from self._ending.error
            self._loop.call_soon_threadsafe(self._begin, step, starts, future)
        return future

    def name_tasks(self, is_on: bool) -> None:
        """Have every task named in traces of :mod:`jax.profiler`, or no more; no step must be under way."""
        for thread in self._all_threads():
            thread.name_tasks(is_on)

    def close(self) -> bool:
        """Stop the threads, and the loop if it is the runtime's own; the future of a step under way fails.

        Returns whether all threads have ended; one that hangs in a program cannot be stopped and is left behind.
        """
        with self._closing:  # what was submitted before is on the loop now, ahead of the end
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return not any(thread.is_alive() for thread in self._all_threads())
        for thread in self._all_threads():
            thread.ask_to_stop()
        for actor in self._actors.values():
            actor.give_up()
        until_s = time.perf_counter() + (_STOP_TIMEOUT_S if self._ending.failing is None else _STOP_AFTER_FAILURE_S)
        ended = [thread.join(max(0.0, until_s - time.perf_counter())) for thread in self._all_threads()]
        left_loop = threading.Event()
        self._loop.call_soon_threadsafe(self._leave_loop, left_loop)
        wait_for(left_loop, _STOP_TIMEOUT_S)
        if self._own_loop is not None:
            self._own_loop.close()
        self.transport.close()
        if all(ended) and left_loop.is_set():
            self._turns.close()
            if self._late is not None:
                self._late.close()
        return all(ended)

    def close_soon(self) -> None:
        """Have the runtime closed without waiting, on a thread of its own. The caller is where objects are collected,
        which may be on any thread and within any call, so that nothing here may take a lock."""
        if not self._is_closed:
            self._loop.call_soon_threadsafe(threading.Thread(target=self.close, name="rrfp-close", daemon=True).start)

    def wait_for_failure(self, what: str) -> RunFailed:
        """The error with which the run ends, once its report is complete; for who has noticed before that it must.

        ``what`` becomes the summary where nothing else has gone wrong.
        """
        self._loop.call_soon_threadsafe(self._turns.always, self._give_up, PeerLost, what)
        return self._ending.wait()

    @staticmethod
    def clock() -> float:
        """The clock of every recorded time, in seconds."""
        return time.perf_counter()

    def logs(self) -> Mapping[int, EventLog]:
        """Each hosted stage's event log; stable while no step is under way."""
        return {stage: actor.log for stage, actor in self._actors.items()}

    def event_log(self) -> RunLog:
        """The event logs of all hosted stages as they stand, to be written to a file and replayed elsewhere."""
        started = {stage: thread.started for stage, thread in self._threads.items()}
        return take_log(
            self.logs(),
            {stage: running for stage, running in started.items() if running is not None},
            report=None if self._ending.error is None else self._ending.error.report,
            rank=0 if self._peers is None else self._peers.rank,
            clock_offset_s=0.0 if self._peers is None else self._peers.clocks.offset_s,
        )

    # -- steps: on the event loop, and in turns ----------------------------------------------------------------------

    def _leave_loop(self, left: threading.Event) -> None:
        if self._peers is not None:
            self._peers.detach()
        self._turns.hush()
        if self._late is not None:
            self._late.hush()
        self._turns.stop()
        self._turns.always(self._steps.fail, PipelineClosed())
        self._turns.always(left.set)

    def _begin(self, step: int, starts: "list[partial[None]]", future: "Future[StepOutcome]") -> None:
        if self._ending.error is not None:
            future.set_exception(self._ending.error)
            return
        self._steps.begin(step, future)
        self._turns.call(self._start_all, starts)

    @staticmethod
    def _start_all(starts: "list[partial[None]]") -> None:
        for start in starts:
            start()

    def is_under_way(self) -> bool:
        """Whether a step that was submitted has not ended everywhere; on the event loop."""
        return bool(self._steps)

    def _deliver(self, stage: int, step: int, message: Message, payload: Any) -> None:
        self._turns.call(self._actors[stage].receive, step, message, payload)

    def _is_here(self, stage: int) -> bool:
        """Whether a stage has no part in another process."""
        return self._peers is None or [*self._peers.layout.ranks_of(stage)] == [self._peers.rank]

    def _submit_awaiting(self, stage: int, instruction: RunTask, missing: Sequence[Message]) -> AwaitedInputs:
        """Hand a task over that lacks inputs which other stages here are about to launch."""
        step, thread, own = instruction.step, self._threads[stage], self._hand_ahead[stage]
        assert isinstance(thread, LaunchAndWait)
        stage_of = self._actors[stage].arbiter.placement.stage_of_chunk
        makers = [(message, self._hand_ahead[stage_of[message.source]]) for message in missing]
        inputs = AwaitedInputs([partial(own.fetch, step, m, partial(maker.ahead, step, m)) for m, maker in makers])
        thread.submit(instruction, inputs)
        return inputs

    def _announce(self, stage: int, step: int, message: Message) -> None:
        """Have a stage hear that what will send this message has started; it is promised where it can be fetched."""
        if stage in self._hand_ahead:
            source = self._actors[stage].arbiter.placement.stage_of_chunk[message.source]
            if source in self._hand_ahead:
                self._turns.call(self._actors[stage].promised, step, message)
                return
        if self._peers is not None and self._peers.layout.ranks_of(stage)[0] != self._peers.rank:
            self._peers.announce_task(stage, step, message)
        else:
            self._turns.call(self._actors[stage].announced, step, message)

    def _wake_later(self, at_s: float, call: Callable[[], None]) -> None:
        """Have this called then."""
        if runs_here(self._loop):
            self._loop.call_later(max(0.0, at_s - time.perf_counter()), self._turns.call, call)
        else:
            self._loop.call_soon_threadsafe(self._wake_later, at_s, call)

    def _wake_by(self, thread: ComputeThread, at_s: float, call: Callable[[], None]) -> None:
        """The same for a stage that starts nothing until then: by its own thread, where that is about to wait."""
        if not thread.wake_later(at_s, partial(self._turns.call, call)):
            self._wake_later(at_s, call)

    def _decide(self, stage: int, instruction: RunTask, due_s: float) -> None:
        thread = self._threads[stage]
        assert isinstance(thread, LaunchAndWait)
        with thread.answering(due_s):
            self._actors[stage].decide(instruction)

    def _stage_ended(self, stage: int, step: int, outcome: StageOutcome, timeline: Timeline) -> None:
        looks_ahead = self._actors[stage].arbiter.looks_ahead
        self._steps.stage_ended(stage, step, outcome, timeline, looks_ahead=looks_ahead)

    # -- on the event loop: what other ranks say ---------------------------------------------------------------------

    def heard(self, unit: int, step: int, member: int, note: Note) -> None:
        """A member of a hosted unit's group says something."""
        self._turns.call(self._actors[unit].hear, step, member, note)

    def task_announced(self, unit: int, step: int, message: Message) -> None:
        """Another rank has started the task that will send this message to a hosted unit."""
        self._turns.call(self._actors[unit].announced, step, message)

    def step_ended(self, step: int, summary: Summary) -> None:
        """All stages, also those elsewhere, have ended a step; on rank 0."""
        self._steps.ended_everywhere(step, summary)

    def failed(self, news: FailureNews) -> None:
        """Another rank gives up."""
        self._ending.heard(news)

    def lost(self, rank: int, reason: str) -> None:
        """Another rank died or fell silent."""
        self._ending.lost(rank, reason)

    def broken(self, text: str) -> None:
        """The network broke between ranks that live."""
        self._ending.broken(text)

    def _transport_failed(self, error: Exception) -> None:
        """Give the run up: messages are missing from now on. It is a failure of this process, unless a rank turns out
        to be lost."""
        self._turns.always(self._give_up, TaskFailed, f"a transport failed: {error}", error)

    # -- on the event loop: giving up --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """End the run when nothing has happened for the deadline while a step is under way."""
        if self._is_closed:
            return
        progress_s = max(self._steps.begun_s, *(actor.last_event_s for actor in self._actors.values()))
        stalled_s = time.perf_counter() - progress_s
        if self.is_under_way() and self._ending.failing is None and stalled_s > self._deadline_s:
            what = f"no task finished for {stalled_s:.1f} s (progress deadline {self._deadline_s:g} s)"
            self._turns.call(self._give_up, NoProgress, what)
        if self._peers is not None:
            self._peers.clocks.refresh()
        self._loop.call_later(self._deadline_s / _CHECKS_PER_DEADLINE, self._watch)

    def _end_with(self, failure: RunFailed) -> None:
        self._turns.stop()
        for actor in self._actors.values():
            actor.give_up()  # the close may come long after this
        self._turns.always(self._steps.fail, failure)
        if self._on_failure is not None:
            self._on_failure(failure)

    # -- giving up, in turns -----------------------------------------------------------------------------------------

    def _task_failed(self, stage: int, instruction: RunTask, error: BaseException) -> None:
        if self._actors[stage].arbiter.awaits_input(instruction.task):
            # what makes its input has failed, too, and is about to say so
            later_s = time.perf_counter() + _CAUSE_WITHIN_S
            self._wake_later(later_s, partial(self._blame, stage, instruction, error))
        else:
            self._blame(stage, instruction, error)

    def _blame(self, stage: int, instruction: RunTask, error: BaseException) -> None:
        if isinstance(error, TransportFailed):
            self._transport_failed(error)
            return
        step = self._steps.name(instruction.step)
        what = f"{step}: {instruction.task} on {name_unit(stage, self._stages_of_replica)} failed: {error_text(error)}"
        self._fail(Failure(TaskFailed, what, self._states(failed_stage=stage), error))

    def _scheduler_failed(self, error: Exception) -> None:
        """After the last turn."""
        self._fail(Failure(TaskFailed, f"the scheduler failed: {error_text(error)}", self._states(), error))

    def _give_up(self, kind: type[RunFailed], what: str, cause: Exception | None = None) -> None:
        self._fail(Failure(kind, what, self._states(), cause))

    def _fail(self, failure: Failure) -> None:
        if runs_here(self._loop):
            self._ending.begin(failure)
        else:
            self._loop.call_soon_threadsafe(self._ending.begin, failure)

    def _states_apart(self) -> list[StageState]:
        """On the loop, where a stage's thread may have the turn."""
        return self._turns.apart(self._states)

    def _states(self, failed_stage: int | None = None) -> list[StageState]:
        now = time.perf_counter()
        rank = None if self._peers is None else self._peers.rank
        states = []
        for stage, actor in self._actors.items():
            started = self._threads[stage].started
            since_s = now - (started[1] if started else actor.last_event_s)
            try:
                state = stage_state(
                    actor.arbiter,
                    since_s,
                    failed=stage == failed_stage,
                    rank=rank,
                    stages_of_replica=self._stages_of_replica,
                )
                states.append(replace(state, step=None if state.step is None else self._steps.number(state.step)))
            except Exception:  # a fault in the report must not replace the error that ends the run
                _LOG.exception("stage %d cannot tell what it waits for", stage)
        return states


def _submit(
    beside: Mapping[str, str], engines: Mapping[str, ComputeThread], compute: StageThreads, instruction: RunTask
) -> None:
    """Hand a task to the thread of its lane."""
    lane = beside.get(instruction.task.kind)
    thread = compute if lane is None else engines[lane]
    thread.submit(instruction)
