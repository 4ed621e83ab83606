"""The core: one stage's arbiter, a pure state machine with events in and instructions out.

``handle(event)`` is the one way in. The arbiter decides what may run (readiness, window) and what runs next (the hint
under its consumption); the asyncio runtime, the simulator and the checker all drive this same class. It knows nothing
of JAX, clocks, threads or sockets, and shares nothing mutable with its driver.

States
------
Between steps the arbiter is *idle* and remembers the last step's number and what has come early. :class:`StepStarted`
of the following step (of any, at first) makes it *active*: every task and gate of the step's plan then has a number,
how many inputs it lacks, which counts down to 0 (ready), or says that it runs or has finished. Each task goes from
ready to running once, by :class:`RunTask`, and to finished once, by :class:`TaskFinished`; a gate finishes by itself as
soon as it lacks nothing. When everything has finished, :class:`FinishStep` is the last instruction, and the arbiter is
idle again.

What may come early, late or twice
----------------------------------
A message of a later step is kept and taken in right at that step's start. One of an earlier step, or one that has come
before, changes nothing. A start comes only between steps, one step after the other: the driver keeps a batch that is
there sooner. The end of a task that does not run, and a message that nothing of its step waits for, are illegal.

Deciding before the end
-----------------------
A driver may say that the last task handed over is about to end (:class:`DecideNow`). That task is *due* from then on,
until it finishes: one more task may run, and if none is admissible yet, the first one that becomes so. What follows on
the stage itself counts a due task as finished: its dependents here are counted down, its microbatch's slot of the
window is free, and the hint sees what it would see after the end. That is right where the device runs its queue in
order: what is handed over behind a task starts after its end, finds its results, and may reuse the memory that it
frees. What leaves the stage's queue waits for the real end: gates, messages, the end of the step, and operations on
engines beside compute, for their memory too; other stages see nothing of it. At most one task is due, so a second
decision waits for the first one's end; and no task ends before a due one behind which it was handed over. Without these
events nothing of this exists.

Nothing new can deadlock. A due task waits for nothing and ends. Where nothing runs nothing is due, and what was started
while a task was due was ready and admissible with that task counted as finished, as it is by then: so the stage has
come to a state that it could have reached without deciding early, for which :mod:`rrfp_jax.core.window` has the
argument.

A stage that hands over certain choices early (:mod:`rrfp_jax.core.certainty`) counts each task as due from its
start, and behind it starts what is certain only, until it is told that the task is about to end: then anything. One
with engines beside compute waits for the word.

Before the input
----------------
Where devices wait for inputs by themselves, a driver may promise an input whose making has begun; a stage that would
hold for it hands over the task that it waits for (:mod:`rrfp_jax.core.promises`).

Beside compute
--------------
Where the graph has operations on lanes of their own (:mod:`rrfp_jax.schedules.operations`), the stage runs one task on
each of these engines beside those of its compute lane, to which alone the hint, consumption and dispatch ahead apply.

Steps that evaluate
-------------------
A step whose start says so runs by other rules of the same kind: a graph without gradients, its own plan and consumption
(:mod:`rrfp_jax.core.evaluation`). The arbiter takes them over as the step starts, and those of training again as
it ends. What it has learnt of times rests meanwhile.

Why one event at a time is enough
---------------------------------
``handle`` never calls itself: what an event makes ready is counted down, dispatched and, at the end of the step,
reported within the same call, and nothing begins after :class:`FinishStep`. Counts only fall, so the order in which
messages arrive never shows in the state, and any driver may deliver them in any order.
"""

from typing import NoReturn

from rrfp_jax.core import invariants
from rrfp_jax.core.choosing import Choosing
from rrfp_jax.core.events import (
    ClockTick,
    DecideNow,
    Event,
    FinishStep,
    GroupHeard,
    InputArrived,
    InputPromised,
    Instruction,
    StepStarted,
    TaskAnnounced,
    TaskFinished,
)
from rrfp_jax.core.foresight import ForesightRules
from rrfp_jax.core.story import IllegalTransition
from rrfp_jax.core.window import check_weights


class StageArbiter(Choosing):
    """Decides what one stage runs next."""

    __slots__ = ()

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return what to do now, in order. Raises IllegalTransition on an impossible event."""
        if type(event) is TaskAnnounced and not self._hear_announcement(event):
            return []
        out: list[Instruction] = []
        self._now_s = event.time_s
        if self._take(event, out):
            self._dispatch(out)
            if not self._left:
                self._end_step(out)
        return out

    def _take(self, event: Event, out: list[Instruction]) -> bool:
        """Take an event in; tells whether the stage may have something to do."""
        if event.step != self.step or not self.is_active:
            return self._take_other_step(event, out)
        if type(event) is InputArrived:
            self._arrive(event, out)
        elif type(event) is TaskFinished:
            self._finish_task(event.task, out)
        elif isinstance(event, ClockTick):
            if self._foresight is not None:
                self._foresight.tick()
            return self.is_holding
        elif isinstance(event, DecideNow):
            return self._decide_now(event.task, out)
        elif isinstance(event, InputPromised):
            return self._hear_promise(event)
        elif isinstance(event, StepStarted):
            raise IllegalTransition(f"stage {self.stage}: step {event.step} was started twice")
        elif isinstance(event, GroupHeard):
            self._refuse(event)
        return True

    def _take_other_step(self, event: Event, out: list[Instruction]) -> bool:
        """Start the event's step, or keep the event for later; tells whether the stage may have something to do."""
        if isinstance(event, GroupHeard):
            self._refuse(event)
        is_over = self.step is not None and event.step <= self.step
        if isinstance(event, InputPromised):
            return not is_over and self._hear_promise(event)
        if isinstance(event, ClockTick | TaskAnnounced) or (isinstance(event, DecideNow) and is_over):
            return False
        if isinstance(event, TaskFinished | DecideNow):
            raise IllegalTransition(
                f"stage {self.stage}: {event.task} of step {event.step} "
                f"{'finished' if isinstance(event, TaskFinished) else 'was about to end'}, "
                f"but the stage is {'in' if self.is_active else 'done with'} step {self.step}"
            )
        if is_over:
            if isinstance(event, StepStarted):
                raise IllegalTransition(f"stage {self.stage}: step {event.step} was started again after its end")
            return False
        if isinstance(event, InputArrived):
            self._early[event.step] = (*self._early.get(event.step, ()), event)
            self._promises.arrived_early(event.step, event.message)
            return False
        if self.is_active or (self.step is not None and event.step != self.step + 1):
            when = "within" if self.is_active else "after"
            raise IllegalTransition(f"stage {self.stage}: step {event.step} was started {when} step {self.step}")
        self._start_step(event, out)
        return True

    def _refuse(self, event: GroupHeard) -> NoReturn:
        step, _, member, note = event
        raise IllegalTransition(f"stage {self.stage}, step {step}: member {member} said {note}, which is not expected")

    def _start_step(self, event: StepStarted, out: list[Instruction]) -> None:
        if event.evaluates:
            try:
                self._change(evaluates=True)
            except ValueError as error:
                raise IllegalTransition(f"step {event.step} was started to evaluate: {error}") from None
        if event.weights:
            try:
                num_microbatches = len(self._full.plan.tasks_per_microbatch)
                check_weights(event.weights, num_microbatches, self.capacity, self.stage)
            except ValueError as error:
                raise IllegalTransition(f"step {event.step} was started with wrong weights: {error}") from None
        self.step, self.is_active, self._weights = event.step, True, event.weights
        prepared = self._prepared
        is_prepared = prepared.absent == event.absent and prepared.evaluates == event.evaluates
        self._begin(prepared if is_prepared else self.plan_without(event.absent, evaluates=event.evaluates))
        self._prepared = self._full
        plan = self._ranked.plan
        for node, needs in enumerate(plan.needs):
            if not needs:
                self._make_ready(node, out)
        for early in self._early.pop(event.step, ()):
            self._arrive(early, out)

    def _end_step(self, out: list[Instruction]) -> None:
        assert self.step is not None
        self.is_active = False
        if self.evaluates:
            self._change(evaluates=False)
        out.append(FinishStep(self.step))

    @property
    def foresight_rules(self) -> ForesightRules | None:
        return None if self._foresight is None else self._foresight.rules

    @property
    def looks_ahead(self) -> bool:
        """Whether foresight is at work: it sleeps where tasks are too short for it."""
        return self._foresight is not None and self._foresight.is_awake

    @property
    def is_holding(self) -> bool:
        """Whether tasks are ready and foresight waits for another one."""
        return self._foresight is not None and self._foresight.is_holding

    def validate(self) -> None:
        """Check every invariant from first principles; raises AssertionError. For tests: it is slow."""
        invariants.check(self)
