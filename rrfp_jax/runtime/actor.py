"""A stage actor feeds events to the arbiter of its stage and carries out the instructions that this returns.

All methods run in the serial executor (:mod:`rrfp_jax.runtime.serial_executor`): one call at a time, on any thread, and
none may block. Tasks run on the stage's threads; their completions come back as events.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rrfp_jax.core import (
    BESIDE,
    Announce,
    ClockTick,
    DecideNow,
    Event,
    FinishStep,
    InputArrived,
    Instruction,
    Message,
    RunInstruction,
    RunPair,
    RunTask,
    Send,
    StageArbiter,
    StageSetup,
    StepPlan,
    StepStarted,
    TaskFinished,
    WakeAt,
)
from rrfp_jax.core.dispatch import GapTimer
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime.event_log import EventLog, StageRecorder
from rrfp_jax.runtime.stage_threads import (
    AwaitedInputs,
    ComputeThread,
    LaunchAndWait,
    PieceThread,
    StageExecutor,
    StageThreads,
)
from rrfp_jax.schedules import COMPUTE, PipelineGraph, Task, lanes_beside
from rrfp_jax.schedules.timeline import IdleReason, Timeline

if TYPE_CHECKING:
    from rrfp_jax.runtime.driver import PipelineRuntime


class Beside:
    """Evaluations in the idle time of one stage. An arbiter of their own chooses the forwards, one at a time.

    Each chosen forward waits until the stage idles, and will do so for as long as the forward probably takes. It then
    runs on the stage's own thread: were it launched from another one, the collectives of both could meet in another
    order on each device. A task that becomes ready meanwhile runs after it.
    """

    def __init__(self, setup: StageSetup) -> None:
        self.arbiter = StageArbiter(replace(setup.evaluating(), certain_ahead=False))
        self.coming: deque[tuple[int, StepPlan]] = deque()
        """Evaluations whose batches are here and that have not started."""
        self.chosen: RunTask | None = None
        """The forward that waits for idle time."""
        self.running: RunTask | None = None
        self.hurries = False
        """Whether somebody waits for the results, so that forwards run whenever the stage idles."""

    @property
    def is_due(self) -> bool:
        """Whether an evaluation has not ended."""
        return self.arbiter.is_active or bool(self.coming)


class StageActor:
    """Drives one stage.

    Args:
        threads: the threads that launch the stage's tasks.
        engines: a thread for each lane beside compute that the stage's operations use.
        hands_ahead: by number, the stages of this process that can promise each other their outputs.
        log_steps: number of steps of the event log that are kept.
        pieces: makes the thread for pieces of other work, from the stage's timer and the call that follows each of
            them; None: there is none.
    """

    def __init__(
        self,
        arbiter: StageArbiter,
        executor: StageExecutor,
        threads: StageThreads,
        runtime: "PipelineRuntime",
        *,
        engines: Mapping[str, ComputeThread] = MappingProxyType({}),
        hands_ahead: Mapping[int, StageExecutor] = MappingProxyType({}),
        log_steps: int,
        pieces: Callable[[GapTimer, Callable[[float], None]], PieceThread] | None = None,
    ) -> None:
        self.arbiter, self.executor, self.stage = arbiter, executor, arbiter.stage
        self.threads: list[StageThreads] = [threads, *engines.values()]
        self.log = EventLog(arbiter, log_steps)
        self.last_event_s = time.perf_counter()
        self._runtime, self._threads, self._hands_ahead = runtime, threads, hands_ahead
        self._send, self._submit = runtime.transport.send, threads.submit
        self._lanes_beside = {kind: (lane, engines[lane].submit) for kind, lane in lanes_beside(arbiter.graph).items()}
        """Lanes beside compute, by the kind of their tasks."""
        self._awaited: dict[Task, AwaitedInputs] = {}
        """Inputs of tasks that were handed over before all of them were delivered."""
        self._wake: WakeAt | None = None
        """End of the present hold; the start of a task has ended it."""
        self._recorder = StageRecorder(self.stage, arbiter.placement.num_stages)
        self._gaps = None if pieces is None else GapTimer()
        """Knows how long the stage idles; None where nothing is to run meanwhile."""
        self.pieces = None if pieces is None or self._gaps is None else pieces(self._gaps, self.note_idle)
        self._beside: Beside | None = None
        self._making_beside = threading.Lock()
        self._coming: deque[tuple[int, StepPlan]] = deque()
        """Steps whose batches are here and that have not started."""

    # -- events ------------------------------------------------------------------------------------------------------

    def start_step(self, step: int, batch: StepBatch, graph: PipelineGraph, plan: StepPlan) -> None:
        """Takes the batch of a step, which starts once the present step has ended.

        ``graph`` and ``plan`` are the step's own, prepared when it was submitted.
        """
        self.executor.begin(step, batch, graph)
        self._coming.append((step, plan))
        self._start_coming()

    def _start_coming(self) -> None:
        while self._coming and self.arbiter.may_start(self._coming[0][0], evaluates=self._coming[0][1].evaluates):
            step, plan = self._coming.popleft()
            time_s = time.perf_counter()
            if not self.arbiter.is_active:
                self._recorder.begin(step, time_s)
            self.arbiter.prepare(plan)
            self._handle(StepStarted(step, time_s, plan.absent, plan.weights, plan.evaluates, plan.owners))

    def receive(self, step: int, message: Message, payload: Any) -> None:
        self.executor.accept(step, message, payload)
        if step >= BESIDE:
            self._handle_beside(InputArrived(step, time.perf_counter(), message))
            return
        self._handle(InputArrived(step, time.perf_counter(), message))
        for task in [task for task in self._awaited if not self.arbiter.awaits_input(task)]:
            self._awaited.pop(task).came.set()

    def observe(self, event: Callable[..., Event], step: int, *details: Any) -> None:
        """Handles an event of a step that carries nothing for the executor."""
        self._handle(event(step, time.perf_counter(), *details))

    def completed(self, instruction: RunInstruction, start_s: float, end_s: float) -> None:
        if isinstance(instruction, RunPair):
            self._pair_completed(instruction, start_s, end_s)
            return
        if instruction.step >= BESIDE:
            self._ended_beside(instruction, start_s, end_s)
            return
        beside = self._lanes_beside.get(instruction.task.kind)
        self._recorder.ran(instruction, start_s, end_s, COMPUTE if beside is None else beside[0])
        self._handle(TaskFinished(instruction.step, time.perf_counter(), instruction.task))

    def _pair_completed(self, instruction: RunPair, start_s: float, end_s: float) -> None:
        # Nobody can tell how long each task of one program took: each gets a half of the time, so that the spans of a
        # lane do not overlap.
        middle_s, time_s = (start_s + end_s) / 2, time.perf_counter()
        for task, span in zip(instruction.task, ((start_s, middle_s), (middle_s, end_s)), strict=True):
            self._recorder.ran(RunTask(instruction.step, task), *span)
        for task in instruction.task:
            self._handle(TaskFinished(instruction.step, time_s, task))

    def decide(self, instruction: RunInstruction, due_s: float) -> None:
        """Has the successor of a task or pair chosen that is about to end; the decision was due at ``due_s``."""
        assert isinstance(self._threads, LaunchAndWait)
        if instruction.step >= BESIDE:  # No task is chosen for its end.
            return
        self._threads.answers_due_s = due_s
        try:
            last = instruction.task.second if isinstance(instruction, RunPair) else instruction.task
            self._handle(DecideNow(instruction.step, time.perf_counter(), last))
        finally:
            self._threads.answers_due_s = None

    def give_up(self) -> None:
        """Ends all waits for inputs, since the run ends."""
        for inputs in [*self._awaited.values()]:
            inputs.give_up()

    def _handle(self, event: Event) -> None:
        instructions: list[Instruction] = []
        try:
            instructions = self.arbiter.handle(event)
        finally:  # The event that breaks the core is the one that a replay needs most.
            self.log.append(event, instructions)
        self.last_event_s = event.time_s
        if instructions:
            self._carry_out(instructions, event.time_s)
        self.note_idle(event.time_s)
        if instructions and isinstance(instructions[-1], FinishStep):
            self._start_coming()

    # -- idle time ---------------------------------------------------------------------------------------------------

    def note_idle(self, time_s: float) -> None:
        """Records why the stage idles, and has other work run meanwhile, if there is some."""
        reason = self.arbiter.idle_reason()
        if self._gaps is not None and self._fills(self._gaps, time_s, reason):
            reason = IdleReason.PIECE
        self._recorder.observe(time_s, reason)

    def _fills(self, gaps: GapTimer, time_s: float, reason: IdleReason | None) -> bool:
        """Begins other work if the stage idles for a reason, and some fits in; returns whether some runs."""
        arbiter, beside = self.arbiter, self._beside
        if reason is None:
            gaps.goes_on(time_s)
        else:
            gaps.idles(-1 - arbiter.num_started if arbiter.evaluates else arbiter.num_started, time_s)
        if beside is not None and beside.running is not None:
            return True
        if reason is None or (self.pieces is None and (beside is None or beside.chosen is None)):
            return False
        earliest_s = arbiter.earliest_input_s(time_s)
        if self.pieces is not None and self.pieces.look(time_s, earliest_s, is_active=arbiter.is_active):
            return True
        # A task that waits for its input may have been handed over, and the forward would come after it.
        if beside is None or beside.chosen is None or arbiter.running():
            return False
        if beside.hurries or (arbiter.is_active and gaps.fits(time_s, beside.chosen.task.chunk, earliest_s)):
            beside.running, beside.chosen = beside.chosen, None
            self._submit(beside.running)
            return True
        return False

    @property
    def beside(self) -> Beside:
        """Evaluations in idle time, made when first asked for; on any thread."""
        with self._making_beside:
            if self._beside is None:
                self._gaps = self._gaps or GapTimer()
                self._beside = Beside(self.arbiter.setup)
            return self._beside

    def start_beside(self, step: int, batch: StepBatch, graph: PipelineGraph, plan: StepPlan) -> None:
        """Takes the batch of an evaluation in idle time, which starts once the one before it has ended."""
        self.executor.begin(step, batch, graph)
        self.beside.coming.append((step, plan))
        self._start_beside()

    def _start_beside(self) -> None:
        beside = self.beside
        if beside.coming and not beside.arbiter.is_active:
            step, plan = beside.coming.popleft()
            beside.arbiter.prepare(plan)
            self._handle_beside(StepStarted(step, time.perf_counter(), plan.absent))

    def _ended_beside(self, instruction: RunTask, start_s: float, end_s: float) -> None:
        beside, gaps = self.beside, self._gaps
        assert gaps is not None
        beside.running = None
        gaps.piece_ended(end_s - start_s, instruction.task.chunk)
        self._handle_beside(TaskFinished(instruction.step, time.perf_counter(), instruction.task))

    def _handle_beside(self, event: Event) -> None:
        beside, ended = self.beside, None
        for instruction in beside.arbiter.handle(event):
            if isinstance(instruction, RunTask):
                beside.chosen = instruction
            elif isinstance(instruction, Send):
                step, message, stage = instruction
                self._send(stage, step, message, self.executor.payload(step, message))
            else:
                assert isinstance(instruction, FinishStep)
                ended = instruction.step
        self.last_event_s = event.time_s
        if ended is not None:
            outcome, timeline = self.executor.finish(ended), Timeline(beside.arbiter.placement.num_stages)
            beside.hurries &= bool(beside.coming)
            self._runtime.steps.stage_ended(self.stage, ended, outcome, timeline, looks_ahead=False)
            self._start_beside()
        self.note_idle(event.time_s)

    # -- instructions ------------------------------------------------------------------------------------------------

    def _carry_out(self, instructions: list[Instruction], time_s: float) -> None:
        outgoing, announced, ended = [], [], []
        for instruction in instructions:
            if isinstance(instruction, RunTask):
                self._hand_over(instruction)
            elif isinstance(instruction, RunPair):
                self._wake = None
                self._submit(instruction)
            elif isinstance(instruction, Send):
                step, message, stage = instruction
                # Taken now: the next task, handed over below, may replace it.
                outgoing.append((stage, step, message, self.executor.payload(step, message)))
            elif isinstance(instruction, Announce):
                announced.append(instruction)
            elif isinstance(instruction, WakeAt):
                self._hold(instruction)
            elif isinstance(instruction, FinishStep):
                ended.append(instruction.step)
            else:
                assert self._runtime.peers is not None
                self._runtime.peers.tell(self.stage, instruction.member, instruction.step, instruction.note)
        # Sent only now: sending takes longer than handing over the next task, which the devices wait for.
        for item in outgoing:
            self._send(*item)
        for step, message, stage in announced:  # No data should wait for an announcement.
            self._runtime.announce(stage, step, message)
        for step in ended:  # Other stages wait for what was sent, and nobody for the record of the step.
            self._recorder.end(time_s)
            outcome, looks_ahead = self.executor.finish(step), self.arbiter.looks_ahead
            self._runtime.steps.stage_ended(self.stage, step, outcome, self._recorder.take(), looks_ahead=looks_ahead)
            if self.arbiter.is_active or step != ended[-1]:  # The next step is under way already, or ends with it.
                self._recorder.begin(step + 1, time_s)

    def _hand_over(self, instruction: RunTask) -> None:
        """Hands a task to the thread of its lane, perhaps ahead of inputs that other stages here are about to
        launch."""
        beside = self._lanes_beside.get(instruction.task.kind)
        if beside is not None:
            beside[1](instruction)
            return
        self._wake = None
        missing = self.arbiter.awaited_inputs(instruction.task)
        if not missing:
            self._submit(instruction)
            return
        step, stage_of = instruction.step, self.arbiter.placement.stage_of_chunk
        own, makers = self._hands_ahead[self.stage], [self._hands_ahead[stage_of[m.source]] for m in missing]
        inputs = AwaitedInputs(
            [
                partial(own.fetch, step, message, partial(maker.ahead, step, message))
                for message, maker in zip(missing, makers, strict=True)
            ]
        )
        self._awaited[instruction.task] = inputs
        self._submit(instruction, inputs)

    def _hold(self, instruction: WakeAt) -> None:
        """Has the stage woken at the end of a hold: by its own thread where that is about to wait, else by a timer."""
        self._wake, call = instruction, partial(self._woken, instruction)
        if not self._threads.wake_later(instruction.time_s, partial(self._runtime.run_serially, call)):
            self._runtime.wake_later(instruction.time_s, call)

    def _woken(self, asked: WakeAt) -> None:
        if asked is self._wake:
            self._wake = None
            self._handle(ClockTick(asked.step, max(asked.time_s, time.perf_counter())))
