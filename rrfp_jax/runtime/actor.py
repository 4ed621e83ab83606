"""A stage actor feeds events to the arbiter of its stage and carries out the instructions that this returns.

All methods run in the serial executor (:mod:`rrfp_jax.runtime.serial_executor`): one call at a time, on any thread, and
none may block. Tasks run on the stage's threads; their completions come back as events.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rrfp_jax.core import (
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
    StepPlan,
    StepStarted,
    TaskFinished,
    WakeAt,
)
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

if TYPE_CHECKING:
    from rrfp_jax.runtime.driver import PipelineRuntime


class StageActor:
    """Drives one stage.

    Args:
        threads: the threads that launch the stage's tasks.
        engines: a thread for each lane beside compute that the stage's operations use.
        hands_ahead: by number, the stages of this process that can promise each other their outputs.
        log_steps: number of steps of the event log that are kept.
        pieces: makes the thread for pieces of other work, from the call that follows each of them; None: there is none.
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
        pieces: Callable[[Callable[[float], None]], PieceThread] | None = None,
    ) -> None:
        self.arbiter, self.executor, self.stage = arbiter, executor, arbiter.stage
        self.threads: list[StageThreads] = [threads, *engines.values()]
        self.log = EventLog(arbiter, log_steps)
        self.last_event_s = time.perf_counter()
        self._runtime, self._threads, self._hands_ahead = runtime, threads, hands_ahead
        self._send, self._submit = runtime.transport.send, threads.submit
        self._beside = {kind: (lane, engines[lane].submit) for kind, lane in lanes_beside(arbiter.graph).items()}
        """Lanes beside compute, by the kind of their tasks."""
        self._awaited: dict[Task, AwaitedInputs] = {}
        """Inputs of tasks that were handed over before all of them were delivered."""
        self._wake: WakeAt | None = None
        """End of the present hold; the start of a task has ended it."""
        self._recorder = StageRecorder(self.stage, arbiter.placement.num_stages)
        self.pieces = None if pieces is None else pieces(self._note_idle)
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
        beside = self._beside.get(instruction.task.kind)
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

    # -- instructions ------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        instructions: list[Instruction] = []
        try:
            instructions = self.arbiter.handle(event)
        finally:  # The event that breaks the core is the one that a replay needs most.
            self.log.append(event, instructions)
        self.last_event_s = event.time_s
        if instructions:
            self._carry_out(instructions, event.time_s)
        self._note_idle(event.time_s)
        if instructions and isinstance(instructions[-1], FinishStep):
            self._start_coming()

    def _note_idle(self, time_s: float) -> None:
        """Records why the stage idles, and has a piece of other work run meanwhile, if there is one."""
        arbiter = self.arbiter
        reason = arbiter.idle_reason()
        if self.pieces is not None:
            place = -1 - arbiter.num_started if arbiter.evaluates else arbiter.num_started
            reason = self.pieces.look(time_s, place, reason, is_active=arbiter.is_active)
        self._recorder.observe(time_s, reason)

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
        beside = self._beside.get(instruction.task.kind)
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
