"""A stage actor: the shell that feeds events to its arbiter and carries out the instructions.

Everything here is called in turns (:mod:`rrfp_jax.runtime.turns`): one call at a time, on any thread, and none may
block. Tasks run on the actor's compute thread; their completions come back as events.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rrfp_jax.core import (
    Announce,
    ClockTick,
    DecideNow,
    Event,
    FinishStep,
    GroupHeard,
    InputArrived,
    InputPromised,
    Instruction,
    Message,
    Note,
    RunTask,
    Send,
    StageArbiter,
    StepPlan,
    StepStarted,
    TaskAnnounced,
    TaskFinished,
    WakeAt,
)
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime.awaited import AwaitedInputs
from rrfp_jax.runtime.event_log import EventLog
from rrfp_jax.runtime.executor import StageExecutor, StageOutcome
from rrfp_jax.runtime.recorder import StageRecorder
from rrfp_jax.runtime.transports import Transport
from rrfp_jax.schedules import PipelineGraph, Task, lanes_beside
from rrfp_jax.schedules.timeline import Timeline

StepEnded = Callable[[int, int, StageOutcome, Timeline], None]
"""Called with the stage, the step, the executor's outcome and the stage's record of the step."""
Tell = Callable[[int, int, int, Note], None]
"""Called with the stage, the member of its group, the step and what to tell it."""

AnnounceTo = Callable[[int, int, Message], None]
"""Called with a stage, the step and the message whose task has started, for that stage to hear of."""
SubmitAwaiting = Callable[[RunTask, Sequence[Message]], AwaitedInputs]
"""Called with an instruction and the inputs that it lacks still, to hand it to the stage's thread."""
WakeLater = Callable[[float, Callable[[], None]], None]
"""Called with a time (``time.perf_counter``) and what to call then."""


class StageActor:
    """Drives one stage; ``submit`` hands a task to the thread of its lane."""

    def __init__(
        self,
        arbiter: StageArbiter,
        executor: StageExecutor,
        transport: Transport,
        *,
        submit: Callable[[RunTask], None],
        submit_awaiting: SubmitAwaiting | None = None,
        ended: StepEnded,
        announce: AnnounceTo,
        wake_later: WakeLater,
        tell: Tell | None = None,
        log_steps: int,
    ) -> None:
        self.arbiter, self.executor = arbiter, executor
        self._beside = lanes_beside(arbiter.graph)
        self.stage = arbiter.stage
        self.log = EventLog(arbiter, log_steps)
        self.last_event_s = time.perf_counter()
        self._transport, self._submit, self._ended, self._tell = transport, submit, ended, tell
        self._announce, self._wake_later = announce, wake_later
        self._submit_awaiting = submit_awaiting
        self._awaited: dict[Task, AwaitedInputs] = {}
        """Of tasks that were handed over before all their inputs were delivered."""
        self._wake: WakeAt | None = None
        """What ends the present hold; a task that starts has ended it."""
        self._recorder = StageRecorder(self.stage, arbiter.placement.num_stages)
        self._coming: deque[tuple[int, StepPlan]] = deque()
        """Steps whose batches are here and that have not started."""

    def start_step(self, step: int, batch: StepBatch, graph: PipelineGraph, plan: StepPlan) -> None:
        """The batch of a step is here; it starts once the present step has ended.

        ``graph`` and ``plan`` are the step's own, prepared when it was submitted.
        """
        self.executor.begin(step, batch, graph)
        self._coming.append((step, plan))
        self._start_coming()

    def _start_coming(self) -> None:
        """Start the next step if its batch is here and no other is under way."""
        if self._coming and not self.arbiter.is_active:
            step, plan = self._coming.popleft()
            time_s = time.perf_counter()
            self._recorder.begin(step, time_s)
            self.arbiter.prepare(plan)
            self._handle(StepStarted(step, time_s, plan.absent, plan.weights, plan.evaluates))

    def receive(self, step: int, message: Message, payload: Any) -> None:
        self.executor.accept(step, message, payload)
        self._handle(InputArrived(step, time.perf_counter(), message))
        for task in [task for task in self._awaited if not self.arbiter.awaits_input(task)]:
            self._awaited.pop(task).came()

    def hear(self, step: int, member: int, note: Note) -> None:
        self._handle(GroupHeard(step, time.perf_counter(), member, note))

    def announced(self, step: int, message: Message) -> None:
        """Another stage has started the task that will send this."""
        self._handle(TaskAnnounced(step, time.perf_counter(), message))

    def promised(self, step: int, message: Message) -> None:
        """Another stage has been told to start the task that will send this, which can be had from its launch on."""
        self._handle(InputPromised(step, time.perf_counter(), message))

    def give_up(self) -> None:
        """The run ends: no thread is to wait for an input any more."""
        for inputs in [*self._awaited.values()]:
            inputs.give_up()

    def _woken(self, asked: WakeAt) -> None:
        if asked is self._wake:
            self._wake = None
            self._handle(ClockTick(asked.step, max(asked.time_s, time.perf_counter())))

    def completed(self, instruction: RunTask, start_s: float, end_s: float) -> None:
        lane = self._beside.get(instruction.task.kind)
        if lane is None:
            self._recorder.ran(instruction, start_s, end_s)
        else:
            self._recorder.ran_beside(instruction, start_s, end_s, lane)
        self._handle(TaskFinished(instruction.step, time.perf_counter(), instruction.task))

    def decide(self, instruction: RunTask) -> None:
        """This task is about to end."""
        self._handle(DecideNow(instruction.step, time.perf_counter(), instruction.task))

    def _handle(self, event: Event) -> None:
        instructions: list[Instruction] = []
        try:
            instructions = self.arbiter.handle(event)
        finally:  # the event that breaks the core is the one that a replay wants most
            self.log.append(event, instructions)
        self.last_event_s = event.time_s
        if instructions:
            self._carry_out(instructions, event.time_s)
        self._recorder.observe(event.time_s, self.arbiter.idle_reason())
        if instructions and isinstance(instructions[-1], FinishStep):
            self._start_coming()

    def _carry_out(self, instructions: list[Instruction], time_s: float) -> None:
        outgoing, announced, ended = [], [], False
        for instruction in instructions:
            if isinstance(instruction, RunTask):
                self._hand_over(instruction)
                if instruction.task.kind not in self._beside:
                    self._wake = None
            elif isinstance(instruction, Send):
                step, message, stage = instruction
                outgoing.append((stage, step, message, self.executor.payload(step, message)))
            elif isinstance(instruction, Announce):
                announced.append(instruction)
            elif isinstance(instruction, WakeAt):
                self._wake = instruction
                self._wake_later(instruction.time_s, partial(self._woken, instruction))
            elif isinstance(instruction, FinishStep):
                ended = True
            else:
                assert self._tell is not None
                self._tell(self.stage, instruction.member, instruction.step, instruction.note)
        for item in outgoing:  # later than the hand-over of the next task, for it takes longer
            self._transport.send(*item)
        for step, message, stage in announced:  # which no data should wait for
            self._announce(stage, step, message)
        if ended:  # others wait for what was sent, and nobody for the record of the step
            self._finish(instructions[-1].step, time_s)

    def _hand_over(self, instruction: RunTask) -> None:
        missing = self.arbiter.awaited_inputs(instruction.task)
        if not missing:
            self._submit(instruction)
            return
        assert self._submit_awaiting is not None
        self._awaited[instruction.task] = self._submit_awaiting(instruction, missing)

    def _finish(self, step: int, time_s: float) -> None:
        self._recorder.end(time_s)
        self._ended(self.stage, step, self.executor.finish(step), self._recorder.take())
