"""The core: one stage's arbiter, a pure state machine with events in and instructions out.

``handle(event)`` is the one way in. The arbiter decides which tasks may run (readiness, memory) and which runs next
(the hint under its consumption); the asyncio runtime, the simulator and the checker all drive this same class. It knows
nothing of JAX, clocks, threads or sockets, and shares nothing mutable with its driver.

States
------
Between steps the arbiter is *idle* and remembers the last step's number and the early events. :class:`StepStarted`
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
until it finishes: one more task may run, and if none is admissible yet, the first one that becomes so. Tasks that
follow on the stage itself count a due task as finished: its dependents here are counted down, its memory is free, and
the hint sees the state after the end. That is right where the device runs its queue in order: a task that is handed
over behind another starts after its end, finds its results, and may reuse the memory that it frees. Everything outside
that queue waits for the real end: gates, messages, the end of the step, and operations on engines beside compute, for
their memory too; other stages notice nothing. At most one task is due, so a second decision waits for the first one's
end; and no task ends before a due one behind which it was handed over.

Nothing new can deadlock. A due task waits for nothing and ends. Where nothing runs nothing is due, and each task that
was started while another was due was ready and admissible with that task counted as finished, as it is by then: so the
stage has come to a state that it could have reached without deciding early, for which :mod:`rrfp_jax.core.memory` has
the argument.

A stage that hands over certain choices early (:mod:`rrfp_jax.core.dispatch`) counts each task as due from its start,
and behind it starts certain choices only, until it is told that the task is about to end: then any. A stage with
engines beside compute waits for that word.

Before the input
----------------
Where devices wait for inputs by themselves, a driver may promise an input whose making has begun; a stage that would
hold for it hands over the task that waits for it (:mod:`rrfp_jax.core.foresight`).

Beside compute
--------------
Where the graph has operations on lanes of their own (:mod:`rrfp_jax.schedules.operations`), the stage runs one task on
each of these engines beside those of its compute lane, to which alone the hint, consumption and dispatch ahead apply.

Pairs
-----
Where a stage joins tasks (:mod:`rrfp_jax.core.dispatch`), a task may start with a partner. One program runs both: they
start together, and end, or are due, together.

Steps of another kind
---------------------
A step that evaluates, or that has other owners of its microbatches, runs by another
:class:`rrfp_jax.core.stage_setup.StepMode`: its own graph, plan and consumption. The start of the step says so. The
arbiter changes the mode as the step starts, and changes back as it ends. Foresight, with all that it has learnt, rests
while the stage evaluates; for a step with other owners it begins with the tables of that step and takes all that it has
learnt there and back.

Why one event at a time is enough
---------------------------------
``handle`` never calls itself: tasks that an event makes ready are counted down, dispatched and, at the end of the step,
reported within the same call, and nothing begins after :class:`FinishStep`. Counts only fall, so the order in which
messages arrive never shows in the state, and any driver may deliver them in any order.
"""

from bisect import insort
from collections.abc import Hashable, Sequence
from functools import partial
from typing import NoReturn, Self

from rrfp_jax.core.dispatch import AHEAD, HELD, NOTHING, Certainty, Engines, ReadySet, best_partner
from rrfp_jax.core.events import (
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
    MessageKind,
    RunPair,
    RunTask,
    Send,
    StepStarted,
    TaskAnnounced,
    TaskFinished,
    WakeAt,
    record,
)
from rrfp_jax.core.explain import (
    IllegalTransition,
    check_invariants,
    illegal_transition,
    microbatch_story,
    waiting_tasks,
    why_idle,
)
from rrfp_jax.core.foresight import Estimates, Foresight, PendingInputs
from rrfp_jax.core.hints import Choice, Consumption, Heads
from rrfp_jax.core.memory import Footprint, ReadAhead, Window, check_weights
from rrfp_jax.core.plan import DUE, FINISHED, RUNNING, StepRules, end_followers
from rrfp_jax.core.replicas import StepOwners
from rrfp_jax.core.stage_setup import OwnerModes, StageSetup, StepMode, StepPlan
from rrfp_jax.schedules import Absences, Pair, PipelineGraph, Task

_TAKEN = MessageKind.TAKEN
_Sends = tuple[tuple[Message, int], ...]


class StageArbiter:
    """Decides which task one stage runs next."""

    # Slots, since each event reads many attributes, and more of them than a shared dictionary of keys holds.
    __slots__ = (
        "_ahead",
        "_arrived",
        "_capacity",
        "_certainty",
        "_due",
        "_early",
        "_engines",
        "_evaluation",
        "_firsts",
        "_footprint",
        "_foresight",
        "_hint_state",
        "_is_told",
        "_left",
        "_mode",
        "_now_s",
        "_num_started",
        "_owned",
        "_pending",
        "_prepared",
        "_ranked",
        "_ready",
        "_resting",
        "_running",
        "_tasks_left",
        "_training",
        "_waiting",
        "_weights",
        "_window",
        "certain_ahead",
        "consumption",
        "evaluates",
        "evaluation_batches",
        "graph",
        "is_active",
        "placement",
        "rules",
        "setup",
        "stage",
        "step",
    )

    graph: PipelineGraph
    rules: StepRules
    consumption: Consumption
    evaluates: bool
    _end_waits = False
    """Whether R and U wait for the end of the step before, which is under way too (:mod:`rrfp_jax.core.overlap`)."""

    def __init__(self, setup: StageSetup) -> None:
        self.setup, self.placement, self.stage = setup, setup.placement, setup.stage
        self.certain_ahead, self.evaluation_batches = setup.certain_ahead, setup.evaluation_batches
        self.step: int | None = None
        """The present step, or the last one; None before the first."""
        self.is_active = False
        """Whether the step has started and not ended."""
        self._now_s = 0.0
        self._training = StepMode(setup)
        self._evaluation = StepMode(setup.evaluating(), evaluates=True) if setup.evaluation_batches else None
        self._owned = OwnerModes(setup)
        self._go_by(self._training)
        self._prepared = self._mode.full
        """The plan that the next step will probably need."""
        self._foresight = None if setup.foresight is None else setup.foresight.make(self._mode.full.arrival_table)
        self._resting: Foresight | None = None
        """The foresight of steps that train, during one that has none."""
        self._early: dict[int, tuple[InputArrived, ...]] = {}
        """Messages of later steps."""
        self._pending = PendingInputs()
        self._weights: tuple[int, ...] = ()
        self._begin(self._mode.full)

    def _begin(self, ranked: StepPlan) -> None:
        mode, plan = self._mode, ranked.plan
        self._ranked = ranked
        self._waiting = list(plan.needs)
        """For each node how many prerequisites it lacks, or one of ``RUNNING``, ``DUE`` and ``FINISHED``."""
        self._arrived: set[int] = set()
        """The numbers of the messages that are here."""
        self._pending.begin(self.step, {} if self._foresight is None else plan.arrivals)
        self._ready = ReadySet(len(mode.read_ahead))
        self._ahead = ReadAhead(mode.read_ahead, plan, mode.graph) if mode.read_ahead else None
        self._engines = Engines(len(plan.engines)) if plan.engines else None
        row = mode.row_memory
        self._footprint = None if row is None else Footprint(row.ranked(ranked.at), mode.footprint or 0)
        limit = mode.capacity if self._weights else mode.limit
        self._window = Window(
            limit, plan.tasks_per_microbatch, plan.first_microbatch, weights=self._weights, sequence=mode.sequence
        )
        self._running: list[int] = []
        """The compute lane's tasks that were handed over and have not ended, in order."""
        self._due: int | None = None
        """The running task that counts as ended on this stage."""
        self._is_told = False
        """Whether the driver has said that the due task is about to end, and nothing waits behind it yet."""
        self._firsts: set[int] = set()
        """The running tasks with a partner behind them, which is in the same program."""
        self._capacity = 1
        """How many tasks may run: one, and another one behind a due one, each perhaps with a partner."""
        self._certainty = Certainty(ranked) if self.certain_ahead and not plan.engines else None
        self._hint_state = mode.consumption.initial
        self._left = plan.num_nodes - len(plan.absent)
        """The number of nodes that have not finished."""
        self._tasks_left = sum(plan.tasks_per_microbatch)
        self._num_started = 0
        if self._foresight is not None:
            self._foresight.begin(-1 if self.step is None else self.step, ranked.arrival_table)

    def copy(self) -> Self:
        """Returns an independent arbiter in the same state; fixed tables are shared."""
        # Written out, since the model checker copies an arbiter for each event that it tries.
        twin = object.__new__(type(self))
        if hasattr(self, "__dict__"):  # attributes that a subclass adds
            twin.__dict__.update(self.__dict__)
        twin.setup, twin.placement, twin.stage = self.setup, self.placement, self.stage
        twin.certain_ahead, twin.evaluation_batches = self.certain_ahead, self.evaluation_batches
        twin.graph, twin.rules, twin.consumption = self.graph, self.rules, self.consumption
        twin.evaluates = self.evaluates
        twin.step, twin.is_active, twin._now_s = self.step, self.is_active, self._now_s
        twin._training, twin._evaluation, twin._mode = self._training, self._evaluation, self._mode
        twin._owned = self._owned
        twin._prepared, twin._ranked, twin._weights = self._prepared, self._ranked, self._weights
        twin._due, twin._is_told, twin._capacity = self._due, self._is_told, self._capacity
        twin._firsts = self._firsts.copy()
        twin._hint_state, twin._left, twin._tasks_left = self._hint_state, self._left, self._tasks_left
        twin._num_started = self._num_started
        twin._waiting, twin._arrived, twin._running = self._waiting.copy(), self._arrived.copy(), self._running.copy()
        twin._early, twin._pending, twin._ready = self._early.copy(), self._pending.copy(), self._ready.copy()
        twin._window = self._window.copy()
        twin._certainty = self._certainty and self._certainty.copy()
        twin._engines = self._engines and self._engines.copy()
        twin._footprint = self._footprint and self._footprint.copy()
        twin._ahead = self._ahead and self._ahead.copy()
        twin._foresight = self._foresight and self._foresight.copy()
        twin._resting = self._resting and self._resting.copy()
        return twin

    def fresh(self, after: int | None, estimates: Estimates | None = None) -> Self:
        """Returns an arbiter made alike that has ended step ``after``, or has not begun, and knows no later steps.

        ``estimates``: the result of :meth:`estimates` when that step had ended.
        """
        twin = self.copy()
        twin.step, twin.is_active = after, False
        twin._go_by(twin._training)
        twin._early, twin._prepared, twin._weights = {}, twin._mode.full, ()
        twin._pending = PendingInputs()
        rules, twin._resting = twin.setup.foresight, None
        twin._foresight = None if rules is None else rules.make(twin._mode.full.arrival_table, estimates)
        twin._begin(twin._mode.full)
        return twin

    def key(self) -> Hashable:
        """Returns the state as a hashable value, without times and orders of arrival: equal keys mean equal futures."""
        early = frozenset(early._replace(time_s=0.0) for events in self._early.values() for early in events)
        seen = self._foresight and self._foresight.key(is_active=self.is_active)
        if not self.is_active:
            return (self.step, early, seen, self._pending.key())
        return (
            self.step,
            early,
            self._resting.key(is_active=False) if self._resting else seen,
            self._ranked.absent,
            self._ranked.owners,
            self.evaluates,
            self._weights,
            tuple(self._waiting),
            frozenset(self._arrived),
            self._hint_state,
            tuple(self._running),
            frozenset(self._firsts),
            self._is_told,
            self._pending.key(),
        )

    # -- plans made ahead ----------------------------------------------------------------------------------------------

    def plan_without(
        self,
        absent: Absences,
        weights: tuple[int, ...] = (),
        *,
        evaluates: bool = False,
        owners: StepOwners | None = None,
    ) -> StepPlan:
        """Returns the plan of a step without these pairs, beyond those of the graph; from any thread, at any time.

        ``weights``: the weight of each microbatch of the stage, for a stage with a capacity. Raises ValueError for
        weights that do not fit it, for owners that the stage cannot have, and where it was not made for evaluations.
        """
        mode = self._mode_of(evaluates=evaluates, owners=owners)
        plan = mode.full.without(absent, mode.graph, mode.rules, mode.consumption)
        if not weights:
            return plan
        check_weights(weights, len(plan.plan.tasks_per_microbatch), mode.capacity, self.stage)
        return plan.changed(plan.plan, plan.absent, weights)

    def prepare(self, plan: StepPlan) -> None:
        """Take a plan of :meth:`plan_without` for the next step, so that its start has nothing to make.

        It changes no answer: a step that starts with other pairs, or unprepared, has its plan made then.
        """
        self._prepared = plan

    def graph_of(self, *, evaluates: bool, owners: StepOwners | None = None) -> PipelineGraph:
        """Returns the graph of steps of one kind; raises ValueError where the stage cannot run such steps."""
        return self._mode_of(evaluates=evaluates, owners=owners).graph

    def _mode_of(self, *, evaluates: bool, owners: StepOwners | None) -> StepMode:
        if evaluates and self._evaluation is None:
            raise ValueError(f"stage {self.stage} was not made for steps that evaluate: prepare it for them")
        if owners is not None:
            return self._owned.of(owners, evaluates=evaluates)
        return self._evaluation if evaluates and self._evaluation is not None else self._training

    def _go_by(self, mode: StepMode) -> None:
        """Go by the rules of this kind of steps; between steps by those of training."""
        self._mode, self.evaluates = mode, mode.evaluates
        self.graph, self.rules, self.consumption = mode.graph, mode.rules, mode.consumption

    def estimates(self) -> Estimates | None:
        """Returns the averages that foresight has learnt so far; None without foresight."""
        foresight = self._foresight or self._resting
        return None if foresight is None else foresight.estimates()

    def may_start(self, step: int, *, evaluates: bool = False) -> bool:
        """Returns whether the next step may start: the one before it has ended."""
        del step, evaluates
        return not self.is_active

    # -- events --------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return the instructions, in order. Raises IllegalTransition on an impossible event."""
        # An announcement may carry a time that is still to come, so it moves the clock only where it ends a hold.
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
        """Take an event in. Returns whether the stage may have something to do."""
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
        """Start the event's step, or keep the event for later. Returns whether the stage may have something to do."""
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
            self._pending.early.get(event.step, set()).discard(event.message)
            return False
        if self.is_active or (self.step is not None and event.step != self.step + 1 + self.setup.delay):
            when = "within" if self.is_active else "after"
            raise IllegalTransition(f"stage {self.stage}: step {event.step} was started {when} step {self.step}")
        self._start_step(event, out)
        return True

    def _refuse(self, event: GroupHeard) -> NoReturn:
        step, _, member, note = event
        raise IllegalTransition(f"stage {self.stage}, step {step}: member {member} said {note}, which is not expected")

    def _start_step(self, event: StepStarted, out: list[Instruction]) -> None:
        if event.evaluates or event.owners is not None:
            try:
                self._go_by(self._mode_of(evaluates=event.evaluates, owners=event.owners))
            except ValueError as error:
                how = "to evaluate" if event.evaluates else "with other owners"
                raise IllegalTransition(f"step {event.step} was started {how}: {error}") from None
            if self._mode.foresight is None:
                self._foresight, self._resting = None, self._foresight
            elif self._foresight is not None:
                self._foresight = self._foresight.of_other_steps(self._mode.full.arrival_table)
        if event.weights:
            try:
                num_microbatches = len(self._mode.full.plan.tasks_per_microbatch)
                check_weights(event.weights, num_microbatches, self._mode.capacity, self.stage)
            except ValueError as error:
                raise IllegalTransition(f"step {event.step} was started with wrong weights: {error}") from None
        self.step, self.is_active, self._weights = event.step, True, event.weights
        prepared = self._prepared
        kind = event.evaluates, event.owners
        is_prepared = prepared.absent == event.absent and (prepared.evaluates, prepared.owners) == kind
        if not is_prepared:
            prepared = self.plan_without(event.absent, evaluates=event.evaluates, owners=event.owners)
        self._begin(prepared)
        self._prepared = self._training.full
        for node, needs in enumerate(self._ranked.plan.needs):
            if not needs and not self._waiting[node]:
                self._make_ready(node, out)
        for early in self._early.pop(event.step, ()):
            self._arrive(early, out)

    def _end_step(self, out: list[Instruction]) -> None:
        assert self.step is not None
        self.is_active = False
        if self._mode is not self._training:
            if self._mode.foresight is None:
                self._foresight, self._resting = self._resting, None
            elif self._foresight is not None:
                self._foresight = self._foresight.of_other_steps(self._training.full.arrival_table)
            self._go_by(self._training)
        out.append(FinishStep(self.step))

    # -- arrivals ------------------------------------------------------------------------------------------------------

    def _arrive(self, event: InputArrived, out: list[Instruction]) -> None:
        message, arrived, plan = event.message, self._arrived, self._ranked.plan
        number = plan.arrivals.get(message)
        if number is None:
            raise illegal_transition(self, f"{message} arrived, and nothing here waits for it", message)
        if number in arrived:
            return
        arrived.add(number)
        if self._ahead is not None and message.kind is _TAKEN:
            self._ahead.let_go(message.target, message.microbatch)
        node, waiting, foresight = plan.awaited_by[number], self._waiting, self._foresight
        if foresight is not None:
            foresight.arrived(number, event.time_s)
            self._pending.promised.discard(number)
            awaiting = self._pending.awaiting
            if node in awaiting:
                # The task was handed over before this input; with its last one the device begins it.
                awaiting[node] -= 1
                if not awaiting[node]:
                    del awaiting[node]
                    position = self._ranked.position[node]
                    foresight.begun(position, self._now_s)
                    if self._certainty is None or self._running[0] == node:
                        self._announce(foresight.announcements(position), out)
                return
        waiting[node] -= 1
        if not waiting[node]:
            self._make_ready(node, out)

    def _hear_announcement(self, event: TaskAnnounced | InputPromised) -> bool:
        """Take in an announcement, which only foresight uses. Returns whether it may end a hold."""
        step, time_s, message = event
        foresight = self._foresight
        if step != self.step or not self.is_active:
            # A step without foresight, such as one in which this stage owns nothing, must not lose them either.
            later = foresight or self._resting
            if later is not None and (self.step is None or step > self.step) and self._lacks_early(step, message):
                later.hear_early(step, message, time_s)
            return False
        if foresight is None:
            return False
        number = self._ranked.plan.arrivals.get(message)
        if number is not None and number not in self._arrived:
            foresight.hear(number, time_s)
        return foresight.held_since_s is not None

    def _hear_promise(self, event: InputPromised) -> bool:
        """Take in a promise, which only foresight uses. Returns whether the stage may have something to do."""
        self._hear_announcement(event)
        step, _, message = event
        if step != self.step or not self.is_active:
            if self._lacks_early(step, message):
                self._pending.hear_early(step, message)
            return False
        number = self._ranked.plan.arrivals.get(message)
        if self._foresight is None or number is None or number in self._arrived:
            return False
        self._pending.promised.add(number)
        return True

    def _lacks_early(self, step: int, message: Message) -> bool:
        return all(message != early.message for early in self._early.get(step, ()))

    # -- ends of tasks -------------------------------------------------------------------------------------------------

    def _finish_task(self, task: Task, out: list[Instruction]) -> None:
        plan = self._ranked.plan
        node = plan.index.get(task)
        left = FINISHED if node is None else self._waiting[node]
        if node is None or left >= 0 or left == FINISHED:
            raise illegal_transition(self, f"{task} finished without having been started", task)
        foresight = self._foresight
        if foresight is not None and node in self._pending.awaiting:
            # Its inputs were there, then: their messages are still on their way.
            del self._pending.awaiting[node]
            for number in foresight.table.inputs_of[node]:
                if number not in self._arrived:
                    self._arrived.add(number)
                    self._pending.promised.discard(number)
                    foresight.arrived(number, self._now_s)
        if self._engines is not None and plan.lanes[node] < 0:
            self._engines.running[-1 - plan.lanes[node]] = NOTHING
        else:
            if self._due is not None:
                self._settle_due(node, task)
            if has_partner := node in self._firsts:
                self._firsts.discard(node)
                self._capacity -= 1
            running = self._running
            running.remove(node)
            if foresight is not None:
                foresight.finish(self._ranked.position[node], self._now_s, goes_on=has_partner)
                # A certain choice that was handed over behind this task begins now, where its inputs are there.
                if self._certainty is not None and running and running[0] not in self._pending.awaiting:
                    self._announce(foresight.announcements(self._ranked.position[running[0]]), out)
        dependents = plan.dependents[node]
        if task.microbatch >= 0:
            self._tasks_left -= 1
            if left == RUNNING:
                self._free(node, task.microbatch)
        # The followers in the queue counted a due task as ended already.
        self._finish_node(node, dependents if left == RUNNING else end_followers(plan, dependents), out)

    def _settle_due(self, node: int, task: Task) -> None:
        """Let a task end while one is due: the due one itself, or one that was handed over before it."""
        running = self._running
        assert self._due is not None
        if node == self._due:
            self._due, self._is_told = None, False
            self._capacity -= 1
        elif running.index(node) > running.index(self._due):
            due = self._ranked.plan.tasks[self._due]
            what = f"{task} finished before {due}, behind which it was handed over on a device that keeps to its order"
            raise illegal_transition(self, what, task)

    def _finish_node(self, node: int, dependents: tuple[int, ...], out: list[Instruction]) -> None:
        """Finish a task or gate; ``dependents`` have waited for it until now."""
        self._waiting[node] = FINISHED
        self._left -= 1
        for message, stage in self._ranked.plan.sends[node]:
            out.append(record(Send, (self.step, message, stage)))
        if dependents:
            self._count_down(dependents, out)

    def _decide_now(self, task: Task, out: list[Instruction]) -> bool:
        """Mark the last running task as due. Returns whether that was news."""
        plan = self._ranked.plan
        node = plan.index.get(task)
        if node is None or self._waiting[node] >= 0 or node in plan.absent:
            raise illegal_transition(self, f"{task} was about to end without having been started", task)
        if self._is_told or not self._running or self._running[-1] != node or self._due not in (None, node):
            return False
        if self._due is None:
            before = self._running[-2:-1]
            # A pair ends as a whole; an I whose own W follows counts as ended since its start.
            if before and before[0] in self._firsts and self._waiting[before[0]] == RUNNING:
                self._count_down_early(before[0], out)
            self._count_as_ended(node, out)
        self._is_told = True
        return True

    def _count_as_ended(self, node: int, out: list[Instruction]) -> None:
        """Let a running task be due from now on."""
        self._due = node
        self._capacity += 1
        self._count_down_early(node, out)

    def _count_down_early(self, node: int, out: list[Instruction]) -> None:
        """Let a running task count as ended for those that follow on the stage."""
        plan = self._ranked.plan
        self._waiting[node] = DUE
        if plan.tasks[node].microbatch >= 0:
            self._free(node, plan.tasks[node].microbatch)
        lanes, num_tasks = plan.lanes, len(plan.tasks)
        self._count_down(tuple([n for n in plan.dependents[node] if n < num_tasks and lanes[n] >= 0]), out)

    def _count_down(self, nodes: tuple[int, ...], out: list[Instruction]) -> None:
        waiting = self._waiting
        for node in nodes:
            waiting[node] -= 1
            if not waiting[node]:
                self._make_ready(node, out)

    def _make_ready(self, node: int, out: list[Instruction]) -> None:
        ranked = self._ranked
        plan = ranked.plan
        if node >= len(plan.tasks):
            self._finish_node(node, plan.dependents[node], out)
            return
        lane, position = plan.lanes[node], ranked.position[node]
        if lane <= 0:
            if lane:
                insort(self._engines.ready[-1 - lane], position)  # type: ignore[union-attr]
                return
            if self._ahead is not None:
                lane = self._list_of(plan.tasks[node], self._ahead)
            elif ranked.microbatch_at[position] in self._window.held:
                lane = HELD
        self._ready.add(lane, position)

    def _list_of(self, forward: Task, ahead: ReadAhead) -> int:
        """Returns the list of the ready set in which an F waits, where read-ahead is bounded."""
        number = ahead.number.get(forward.chunk)
        if number is not None:
            return AHEAD + number
        return HELD if forward.microbatch in self._window.held else 0

    def _free(self, node: int, microbatch: int) -> None:
        """Free the memory of a task of a microbatch that has ended, or counts as ended."""
        self._window.finish(microbatch)
        if self._ahead is not None:
            self._ahead.finish(node, microbatch)
        if self._footprint is not None:
            self._footprint.finish(self._ranked.position[node])

    # -- choices -------------------------------------------------------------------------------------------------------

    def _dispatch(self, out: list[Instruction]) -> None:
        """Start all that may start now, on the engines beside compute and on the compute lane."""
        if self._engines is not None:
            self._dispatch_beside(self._engines, out)
        certainty, running = self._certainty, self._running
        if certainty is None and len(running) >= self._capacity:
            return  # most events come while a task runs
        mode = self._mode
        choose, start = mode.consumption.choose, self._start_joined if mode.joins else self._start
        while len(running) < self._capacity or (certainty is not None and self._counts_on(out)):
            if not any(self._ready.lanes):
                promised = self._promised_next() if self._pending.promised else None
                if promised is None:
                    return
                self._start(self._ranked.at[promised], promised, out)
                continue
            heads = self._heads()
            position, state = choose(self._hint_state, heads)
            # Until the driver says that the due task is about to end, only a certain choice goes behind it.
            if certainty is not None and self._due is not None and not self._is_told:
                sure = certainty.choice(choose, self._hint_state, self._waiting)
                if position is None or position != sure:
                    return
            foresight = self._foresight
            if foresight is not None:
                if position is None:
                    foresight.release()
                elif position != foresight.next:
                    position = self._look_ahead(foresight, position, heads, out)
            if position is None or (mode.row_pairs and self._lacks_partner(position)):
                return
            self._hint_state = state
            start(self._ranked.at[position], position, out)

    def _lacks_partner(self, position: int) -> bool:
        """Returns whether the row joins the entry at this position with the next one, and that is not ready."""
        partner = self._mode.partner_in_row(self._ranked, position)
        return partner is not None and not self._may_join(self._ranked.at[position], self._ranked.at[partner])

    def _may_join(self, node: int, partner: int) -> bool:
        """Returns whether this partner of a task is ready, or is W of that very I."""
        left = self._waiting[partner]
        return not left or (left == 1 and partner in self._ranked.plan.dependents[node])

    def _start_joined(self, node: int, position: int, out: list[Instruction]) -> None:
        """Start a task, and in the same program its partner, if there is one."""
        ranked, before = self._ranked, len(out)
        partner = self._mode.partner_in_row(ranked, position)
        self._start(node, position, out)
        if not self.consumption.is_strict:
            partner = best_partner(ranked.plan.tasks[node].kind, self._heads(), ranked)
        elif partner is not None:
            self._hint_state += 1
        if partner is not None:
            self._start_partner(node, partner, before, out)

    def _start_partner(self, node: int, position: int, before: int, out: list[Instruction]) -> None:
        """Start the partner of a task that has just started, whose instruction stands at ``before``."""
        tasks, second, behind = self._ranked.plan.tasks, self._ranked.at[position], len(out)
        if self._waiting[second]:
            # W of the I that has just started: it follows in the same program, so it may count that as ended.
            self._count_down_early(node, out)
        self._firsts.add(node)
        self._capacity += 1
        self._start(second, position, out)
        del out[behind]
        out[before] = RunPair(self.step, Pair(tasks[node], tasks[second]))  # type: ignore[arg-type]

    def _counts_on(self, out: list[Instruction]) -> bool:
        """Let the running task be due from its start, if none is. Returns whether a certain choice may go behind it."""
        if self._certainty is None or self._due is not None:
            return False
        self._count_as_ended(self._running[-1], out)
        return True

    def _dispatch_beside(self, engines: Engines, out: list[Instruction]) -> None:
        """Hand each free engine the first of its tasks that may start."""
        for engine, positions in enumerate(engines.ready):
            if engines.running[engine] != NOTHING:
                continue
            position = next((p for p in positions if self._admits_beside(p)), None)
            if position is not None:
                self._start_beside(engines, self._ranked.at[position], out)

    def _start_beside(self, engines: Engines, node: int, out: list[Instruction]) -> None:
        """Start a task of an engine."""
        plan, position = self._ranked.plan, self._ranked.position[node]
        engine = -1 - plan.lanes[node]
        engines.ready[engine].remove(position)
        engines.running[engine] = node
        self._waiting[node] = RUNNING
        if self._footprint is not None:
            self._footprint.start(position)
        out.append(RunTask(self.step, plan.tasks[node]))  # type: ignore[arg-type]

    def _admits_beside(self, position: int) -> bool:
        """Returns whether an operation on an engine may start, for which a due task still holds its memory."""
        if self._footprint is None or self._footprint.is_free(position):
            return True
        due = None if self._due is None else self._ranked.position[self._due]
        return self._footprint.admits(position, self._waiting, due)

    def _choose(self) -> Choice:
        """Returns the choice of the hint alone."""
        return self.consumption.choose(self._hint_state, self._heads())

    def _heads(self) -> Heads:
        """Returns the best admissible position of each lane."""
        ranked, footprint = self._ranked, self._footprint
        heads = self._ready.heads(self._window, ranked.microbatch_at, ranked.forwards_of)
        if footprint is not None:
            mode, lanes, first = self._mode, self._ready.lanes, heads[0]
            if first is not None and not footprint.admits(first, self._waiting):
                # In the row's order no other F that takes as much is admitted either, so only costless ones are left.
                if mode.reserves_by_row and mode.row_memory.is_even:  # type: ignore[union-attr]
                    find = footprint.first_costless
                else:
                    find = partial(footprint.first_admitted, self._waiting)
                heads = (find(lanes[0], lanes[HELD]), *heads[1:])
            if mode.has_other_takers:
                second, third = (footprint.first_admitted(self._waiting, lane) for lane in lanes[1:3])
                heads = (heads[0], second, third, heads[3])
        if self._ahead is not None:
            ahead = self._ready.first_ahead(self._ahead.windows, self._window, ranked.microbatch_at)
            if ahead is not None and (heads[0] is None or ahead < heads[0]):
                heads = (ahead, *heads[1:])
        return heads

    def _admits(self, position: int) -> bool:
        """Returns whether memory admits the F at this position."""
        if self._ahead is not None and not self._ahead.admits(self._ranked.task_at[position]):
            return False
        if self._footprint is not None:
            return self._footprint.admits(position, self._waiting)
        return self._window.admits(self._ranked.microbatch_at[position])

    def _start(self, node: int, position: int, out: list[Instruction]) -> None:
        """Start a task of the compute lane."""
        ranked, window = self._ranked, self._window
        lane, task = ranked.plan.lanes[node], ranked.plan.tasks[node]
        if self._waiting[node]:  # handed over before its inputs
            self._pending.awaiting[node] = self._waiting[node]
            self._make_ready(node, out)
        if lane:
            self._ready.remove(lane, position)
        else:
            is_held = task.microbatch in window.held
            if self._ahead is None:
                self._ready.remove(HELD if is_held else lane, position)
            else:
                self._ready.remove(self._list_of(task, self._ahead), position)
                self._ahead.start(task)
            if not is_held:
                window.start_forward(task.microbatch)
                self._ready.hold(ranked.forwards_of[task.microbatch])
        if self._footprint is not None:
            self._footprint.start(position)
        self._waiting[node] = RUNNING
        self._running.append(node)
        self._is_told = False
        self._num_started += 1
        out.append(record(RunTask, (self.step, task)))
        foresight = self._foresight
        if foresight is not None:
            sends = foresight.start(position, self._now_s)
            # An announcement says that the device begins: not while the task waits behind another, or for its inputs.
            is_first = self._certainty is None or self._due is None
            if sends and is_first and node not in self._pending.awaiting:
                self._announce(sends, out)

    def _announce(self, sends: _Sends, out: list[Instruction]) -> None:
        for message, stage in sends:
            out.append(record(Announce, (self.step, message, stage)))

    # -- foresight -----------------------------------------------------------------------------------------------------

    def _look_ahead(self, foresight: Foresight, best: int, heads: Heads, out: list[Instruction]) -> int | None:
        """Returns the position to run instead of ``best``, or None to hold.

        It is best itself, another task that ends before the next entry's inputs arrive, or the next entry, where the
        device waits for its inputs.
        """
        ranked, waiting, place = self._ranked, self._waiting, foresight.next
        at = ranked.at
        while waiting[at[place]] < 0:
            place += 1
        foresight.next = place
        if self._ahead is not None:
            place = self._unrestrained(place)
        if place == best:
            return best
        missing = self._missing(place)
        if not missing:
            return best
        due = self._due
        if len(self._running) - len(self._firsts) > (due is not None):
            return None  # ahead of a running task only the next entry goes; its end decides on others
        now_s = self._now_s
        free_s = now_s if due is None else max(now_s, self._expected_end_s(foresight, due))
        chosen = foresight.choose(best, heads, missing, now_s, free_s)
        if chosen is None and self._pending.cover(missing) and foresight.awaits(place):
            return place
        if chosen is None and (wake_s := foresight.wake_at_s()) is not None:
            out.append(record(WakeAt, (self.step, wake_s)))
        return chosen

    def _expected_end_s(self, foresight: Foresight, due: int) -> float:
        """Returns when a due task usually ends, with the one in front of it in the same program."""
        place, before = self._ranked.position, self._running[self._running.index(due) - 1]
        end_s = foresight.expected_end_s(place[due])
        return end_s + foresight.usual_s(place[before]) if before in self._firsts and before != due else end_s

    def _promised_next(self) -> int | None:
        """Returns the next entry, where nothing is ready, if it lacks nothing but promised inputs."""
        foresight, due = self._foresight, self._due
        is_early = self._certainty is not None and due is not None and not self._is_told
        if foresight is None or is_early or len(self._running) - len(self._firsts) > (due is not None):
            return None
        place = self._unrestrained(foresight.next)
        missing = self._missing(place) if place < len(self._ranked.at) else ()
        return place if missing and self._pending.cover(missing) and foresight.awaits(place) else None

    def _unrestrained(self, place: int) -> int:
        """Returns the first entry from this one on that has not started and that read-ahead does not restrain.

        Behind the last entry where there is none.
        """
        at, tasks, waiting, ahead = self._ranked.at, self._ranked.plan.tasks, self._waiting, self._ahead
        while place < len(at):
            node = at[place]
            if waiting[node] >= 0 and (ahead is None or ahead.admits(tasks[node])):
                break
            place += 1
        return place

    def _missing(self, position: int) -> Sequence[int]:
        """Returns the numbers of the messages that the entry at this position lacks; none if it lacks anything else."""
        ranked, arrived = self._ranked, self._arrived
        node = ranked.at[position]
        missing: Sequence[int] = self._foresight.table.inputs_of[node]  # type: ignore[union-attr]
        if not arrived.isdisjoint(missing):
            missing = tuple(number for number in missing if number not in arrived)
        if len(missing) != self._waiting[node] or (not ranked.plan.lanes[node] and not self._admits(position)):
            return ()
        return missing

    @property
    def num_started(self) -> int:
        """How many tasks of the compute lane were handed over in the step."""
        return self._num_started

    def earliest_input_s(self, now_s: float) -> float | None:
        """Returns when the first input that is still to come may be here; None where foresight does not know it."""
        return None if self._foresight is None else self._foresight.earliest_s(self._arrived, now_s)

    @property
    def looks_ahead(self) -> bool:
        """Whether foresight is at work: it sleeps where tasks are too short for it."""
        return self._foresight is not None and self._foresight.is_awake

    @property
    def is_holding(self) -> bool:
        """Whether tasks are ready and foresight waits for another one."""
        return self._foresight is not None and self._foresight.held_since_s is not None

    # -- reports -------------------------------------------------------------------------------------------------------

    def running(self) -> tuple[Task, ...]:
        """Returns the tasks that were dispatched and have not finished: compute's in order, then those of engines."""
        nodes = self._running if self._engines is None else [*self._running, *self._engines.nodes()]
        return tuple(self._ranked.plan.tasks[node] for node in nodes)

    def awaits_input(self, task: Task) -> bool:
        """Returns whether a task was handed over before its inputs, and some are still to come."""
        awaiting = self._pending.awaiting
        return bool(awaiting) and self._ranked.plan.index[task] in awaiting

    def awaited_inputs(self, task: Task) -> Sequence[Message]:
        """Returns the inputs of a task that was handed over before they were here, as far as they are still to come."""
        if not self.awaits_input(task):
            return ()
        plan, foresight = self._ranked.plan, self._foresight
        assert foresight is not None
        inputs = foresight.table.inputs_of[plan.index[task]]
        return [plan.messages[number] for number in inputs if number not in self._arrived]

    def held(self) -> frozenset[int]:
        """Returns the microbatches that the stage holds."""
        return frozenset(self._window.held)

    # Why the stage runs nothing, all that has not begun, and the story of one microbatch. The last one checks every
    # invariant from first principles: for tests, since it is slow.
    idle_reason = why_idle
    waiting = waiting_tasks
    tell = microbatch_story
    validate = check_invariants
