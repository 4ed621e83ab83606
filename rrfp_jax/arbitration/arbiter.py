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
come to a state that it could have reached without deciding early, for which :mod:`rrfp_jax.arbitration.window` has the
argument.

A stage that hands over certain choices early (:mod:`rrfp_jax.arbitration.certainty`) counts each task as due from its
start, and behind it starts what is certain only. One with engines beside compute does not.

Beside compute
--------------
Where the graph has operations on lanes of their own (:mod:`rrfp_jax.tasks.operations`), the stage runs one task on
each of these engines beside those of its compute lane, to which alone the hint, consumption and dispatch ahead apply.

Steps that evaluate
-------------------
A step whose start says so runs by other rules of the same kind: a graph without gradients, its own plan and consumption
(:mod:`rrfp_jax.arbitration.evaluation`). The arbiter takes them over as the step starts, and those of training again as
it ends. What it has learnt of times rests meanwhile.

Why one event at a time is enough
---------------------------------
``handle`` never calls itself: what an event makes ready is counted down, dispatched and, at the end of the step,
reported within the same call, and nothing begins after :class:`FinishStep`. Counts only fall, so the order in which
messages arrive never shows in the state, and any driver may deliver them in any order.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import NoReturn

from rrfp_jax.arbitration import invariants, story
from rrfp_jax.arbitration.certainty import Certainty
from rrfp_jax.arbitration.consumption import Consumption
from rrfp_jax.arbitration.engines import NOTHING, Engines, engine_of
from rrfp_jax.arbitration.estimates import Estimates
from rrfp_jax.arbitration.evaluation import evaluation_setup
from rrfp_jax.arbitration.events import (
    Announce,
    ClockTick,
    DecideNow,
    Event,
    FinishStep,
    GroupHeard,
    InputArrived,
    Instruction,
    Message,
    MessageKind,
    RunTask,
    Send,
    StepStarted,
    TaskAnnounced,
    TaskFinished,
)
from rrfp_jax.arbitration.footprint import Footprint, RowMemory, canonical_row
from rrfp_jax.arbitration.foresight import Foresight, ForesightRules
from rrfp_jax.arbitration.hints import Choice, Heads
from rrfp_jax.arbitration.lookout import Lookout
from rrfp_jax.arbitration.plan import FINISHED, StagePlan, StepRules, followers, others, stage_plan
from rrfp_jax.arbitration.read_ahead import AheadBound, ReadAhead
from rrfp_jax.arbitration.ready_set import AHEAD, HELD, ReadySet
from rrfp_jax.arbitration.reserve import Reserve
from rrfp_jax.arbitration.self_report import SelfReport
from rrfp_jax.arbitration.stage_setup import StageSetup
from rrfp_jax.arbitration.step_plan import StepPlan
from rrfp_jax.arbitration.story import DUE, RUNNING, IllegalTransition
from rrfp_jax.arbitration.window import Window, check_weights
from rrfp_jax.tasks import Absences, PipelineGraph, Task

_RUNNING_OR_DUE = (RUNNING, DUE)
_TAKEN = MessageKind.TAKEN


class _Regime:
    """What is fixed for all steps of one kind; an arbiter takes these attributes over."""

    def __init__(self, setup: StageSetup, *, evaluates: bool = False) -> None:
        self.graph, self.rules, self.consumption = setup.graph, setup.rules, setup.consumption
        self.footprint, self.capacity = setup.footprint, setup.capacity
        is_strict = self.consumption.is_strict
        self.limit = None if is_strict or setup.footprint is not None else setup.window
        self.read_ahead = () if is_strict else setup.read_ahead
        row = self.consumption.hint.row
        self._follows_row = row is not None
        plan = stage_plan(setup.graph, setup.placement, setup.stage, setup.rules, has_row=self._follows_row)
        self._full = StepPlan(plan, self.consumption, evaluates=evaluates)
        self._row_tasks: Sequence[Task] = row or ()
        self._row = None
        if setup.footprint is not None:
            if row is None:
                self._row_tasks = canonical_row(setup.graph, setup.placement.chunks_of_stage[setup.stage])
            self._row = RowMemory(self._full, setup.graph, self._row_tasks)
            self._row.check_limit(setup.footprint, setup.stage)
        self._has_other_takers = self._row is not None and self._row.has_other_takers


class StageArbiter(Lookout, SelfReport):
    """Decides what one stage runs next."""

    graph: PipelineGraph
    """Of training, but during a step that evaluates; so it is with the other rules of a step."""
    rules: StepRules
    consumption: Consumption
    footprint: int | None
    """How many activations the stage may hold; None: :attr:`limit` counts."""
    limit: int | None
    """How many microbatches the stage may hold; None: as many as come."""
    capacity: int | None
    """What the microbatches held may weigh together, in steps with weights."""
    read_ahead: tuple[AheadBound, ...]
    """How far chunks that run F only may run ahead."""
    _follows_row: bool
    _full: StepPlan
    _row_tasks: Sequence[Task]
    """The order in which memory is reserved: the table's, or else the canonical one."""
    _row: RowMemory | None
    _has_other_takers: bool

    def __init__(self, setup: StageSetup) -> None:
        self.placement, self.stage = setup.placement, setup.stage
        self.dispatch_ahead, self.evaluation_batches = setup.dispatch_ahead, setup.evaluation_batches
        self.certain_ahead = setup.certain_ahead
        self.step: int | None = None
        self.is_active = self.evaluates = False
        self._training = _Regime(setup)
        self._evaluation = _Regime(evaluation_setup(setup), evaluates=True) if setup.evaluation_batches else None
        self.__dict__.update(vars(self._training))
        self._prepared = self._full
        self._foresight = None if setup.foresight is None else setup.foresight.make()
        self._resting: Foresight | None = None
        """The foresight of training, during an evaluation."""
        self._early: dict[int, tuple[InputArrived, ...]] = {}
        self._weights: tuple[int, ...] = ()
        self._begin(self._full)

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

    def copy(self) -> "StageArbiter":
        """An independent arbiter in the same state; fixed tables are shared."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._waiting = self._waiting.copy()
        twin._arrived = self._arrived.copy()
        twin._ready = self._ready.copy()
        twin._certainty = self._certainty and self._certainty.copy()
        twin._window = self._window.copy()
        twin._running = self._running.copy()
        twin._early = self._early.copy()
        twin._engines = self._engines and self._engines.copy()
        twin._footprint = self._footprint and self._footprint.copy()
        twin._ahead = self._ahead and self._ahead.copy()
        twin._foresight = self._foresight and self._foresight.copy()
        twin._resting = self._resting and self._resting.copy()
        return twin

    def plan_without(self, absent: Absences, weights: tuple[int, ...] = (), *, evaluates: bool = False) -> StepPlan:
        """The plan of a step without these pairs, beyond those of the graph; from any thread, at any time.

        ``weights``: what each microbatch of the stage weighs, for a stage with a capacity. Raises ValueError for
        weights that do not fit it, and where the stage was not made for evaluations.
        """
        regime = self._regime(evaluates)
        plan = regime._full.without(absent, regime.graph, regime.rules, regime.consumption)
        if not weights:
            return plan
        check_weights(weights, len(plan.plan.tasks_per_microbatch), regime.capacity, self.stage)
        return plan.weighing(weights)

    def graph_of(self, *, evaluates: bool) -> PipelineGraph:
        """The graph of steps of one kind; raises ValueError where the stage was not made for evaluations."""
        return self._regime(evaluates).graph

    def _regime(self, evaluates: bool) -> _Regime:
        if not evaluates:
            return self._training
        if self._evaluation is None:
            raise ValueError(f"stage {self.stage} was not made for steps that evaluate: prepare it for them")
        return self._evaluation

    def _change(self, *, evaluates: bool) -> None:
        """Go by the rules of the other kind of steps."""
        self.__dict__.update(vars(self._regime(evaluates)))
        self.evaluates = evaluates
        self._foresight, self._resting = self._resting, self._foresight

    def prepare(self, plan: StepPlan) -> None:
        """Take what :meth:`plan_without` made for the next step, so that its start has nothing to make.

        It changes no answer: a step that starts with other pairs, or unprepared, has its plan made then.
        """
        self._prepared = plan

    def fresh(self, after: int | None, estimates: Estimates | None = None) -> "StageArbiter":
        """An arbiter made alike that has ended step ``after``, or has not begun, and knows nothing of later steps.

        ``estimates`` is what :meth:`estimates` gave when that step had ended.
        """
        twin = self.copy()
        twin.step, twin.is_active = after, False
        if twin.evaluates:
            twin._change(evaluates=False)
        twin._early, twin._prepared, twin._weights = {}, twin._full, ()
        twin._foresight = twin._foresight and twin._foresight.fresh(estimates or Estimates())
        twin._begin(twin._full)
        return twin

    def succeeding(self, former: "StageArbiter") -> "StageArbiter":
        """This one, fresh, in the place of another that is between steps: it knows what the other has ended, has learnt
        and has been sent early."""
        twin = self.fresh(former.step, former.estimates())
        twin._early = former._early.copy()
        return twin

    def estimates(self) -> Estimates | None:
        """What the stage has learnt for its foresight so far; None if it has none."""
        foresight = self._foresight or self._resting
        return None if foresight is None else foresight.estimates.copy()

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

    def key(self) -> Hashable:
        """The state as a hashable value, without times and orders of arrival: equal keys mean equal futures."""
        early = frozenset(early._replace(time_s=0.0) for events in self._early.values() for early in events)
        seen = self._foresight and self._foresight.key(is_active=self.is_active)
        if not self.is_active:
            return (self.step, early, seen)
        return (
            self.step,
            early,
            self._resting.key(is_active=False) if self._resting else seen,
            self._ranked.absent,
            self.evaluates,
            self._weights,
            tuple(self._waiting),
            frozenset(self._arrived),
            self._hint_state,
            tuple(self._running),
        )

    # -- steps -------------------------------------------------------------------------------------------------------

    def _begin(self, ranked: StepPlan) -> None:
        self._ranked = ranked
        plan = ranked.plan
        self._waiting = list(plan.needs)
        self._arrived: set[Message] = set()
        self._ready = ReadySet(len(self.read_ahead))
        self._ahead = ReadAhead(self.read_ahead, plan, self.graph) if self.read_ahead else None
        self._engines = Engines(len(plan.engines)) if plan.engines else None
        self._footprint = None if self._row is None else Footprint(self._row.ranked(ranked.at), self.footprint or 0)
        self._window = self._new_window(plan)
        self._running: list[int] = []
        self._due: int | None = None
        self._capacity = 1 + self.dispatch_ahead
        self._certainty = Certainty(ranked) if self.certain_ahead and not plan.engines else None
        self._hint_state = self.consumption.initial
        self._left = plan.num_nodes - len(plan.absent)
        self._tasks_left = sum(plan.tasks_per_microbatch)
        self._num_started = 0
        if self._foresight is not None:
            self._foresight.begin(-1 if self.step is None else self.step)

    def _new_window(self, plan: StagePlan) -> Window | Reserve:
        ends, first = plan.tasks_per_microbatch, plan.first_microbatch
        if not self._weights:
            return Window(self.limit, ends, first)
        assert self.capacity is not None
        return Reserve(self.capacity, ends, first, weights=self._weights)

    def _take(self, event: Event, out: list[Instruction]) -> bool:
        """Take an event in; tells whether the stage may have something to do."""
        if event.step != self.step or not self.is_active:
            return self._take_other_step(event, out)
        if isinstance(event, InputArrived):
            self._arrive(event, out)
        elif isinstance(event, TaskFinished):
            self._finish_task(event.task, out)
        elif isinstance(event, ClockTick):
            if self._foresight is not None:
                self._foresight.tick()
            return self.is_holding
        elif isinstance(event, DecideNow):
            return self._decide_now(event.task, out)
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

    # -- transitions -------------------------------------------------------------------------------------------------

    def _arrive(self, event: InputArrived, out: list[Instruction]) -> None:
        message, plan = event.message, self._ranked.plan
        if message in self._arrived:
            return
        if message not in plan.arrivals:
            what = f"{message} arrived, and nothing here waits for it"
            raise story.illegal(what, self.stage, self.step, message, self.tell(message.microbatch))
        self._arrived.add(message)
        if self._ahead is not None and message.kind is _TAKEN:
            self._ahead.hear(message)
        if self._foresight is not None:
            self._foresight.arrived(message, event.time_s)
        self._count_down((plan.arrivals[message],), out)

    def _finish_task(self, task: Task, out: list[Instruction]) -> None:
        plan = self._ranked.plan
        node = plan.index.get(task)
        left = FINISHED if node is None else self._waiting[node]
        if node is None or left not in _RUNNING_OR_DUE:
            what = f"{task} finished without having been started"
            raise story.illegal(what, self.stage, self.step, task, self.tell(task.microbatch))
        if self._engines is not None and plan.lanes[node] < 0:
            self._engines.running[engine_of(plan.lanes[node])] = NOTHING
        else:
            if self._due is not None:
                self._settle_due(node, task)
            self._running.remove(node)
            if self._foresight is not None:
                self._foresight.finish(task, self._now_s)
                if self._certainty is not None and self._running:
                    self._announce(self._running[0], out)
        if task.microbatch >= 0:
            self._tasks_left -= 1
            if left == RUNNING:
                self._free(node)
        dependents = plan.dependents[node]
        self._finish_node(node, dependents if left == RUNNING else others(plan, dependents), out)

    def _settle_due(self, node: int, task: Task) -> None:
        """A task ends while one is due: the due one itself, or one that was handed over before it."""
        running = self._running
        assert self._due is not None
        if node == self._due:
            self._due = None
            self._capacity -= 1
        elif running.index(node) > running.index(self._due):
            due = self._ranked.plan.tasks[self._due]
            what = f"{task} finished before {due}, behind which it was handed over on a device that keeps to its order"
            raise story.illegal(what, self.stage, self.step, task, self.tell(task.microbatch))

    def _finish_node(self, node: int, dependents: tuple[int, ...], out: list[Instruction]) -> None:
        """``dependents``: those that have waited for it until now."""
        self._waiting[node] = FINISHED
        self._left -= 1
        for message, stage in self._ranked.plan.sends[node]:
            out.append(Send(self.step, message, stage))  # type: ignore[arg-type]
        self._count_down(dependents, out)

    def _decide_now(self, task: Task, out: list[Instruction]) -> bool:
        """Mark the last running task as due; tells whether that was news."""
        plan = self._ranked.plan
        node = plan.index.get(task)
        if node is None or self._waiting[node] >= 0 or node in plan.absent:
            what = f"{task} was about to end without having been started"
            raise story.illegal(what, self.stage, self.step, task, self.tell(task.microbatch))
        if self._due is not None or not self._running or self._running[-1] != node:
            return False
        self._count_as_ended(node, out)
        return True

    def _count_as_ended(self, node: int, out: list[Instruction]) -> None:
        """The last running task is due from now on."""
        plan = self._ranked.plan
        self._due = node
        self._capacity += 1
        self._waiting[node] = DUE
        if plan.tasks[node].microbatch >= 0:
            self._free(node)
        self._count_down(followers(plan, plan.dependents[node]), out)

    def _count_down(self, nodes: tuple[int, ...], out: list[Instruction]) -> None:
        waiting = self._waiting
        for node in nodes:
            waiting[node] -= 1
            if not waiting[node]:
                self._make_ready(node, out)

    def _make_ready(self, node: int, out: list[Instruction]) -> None:
        ranked = self._ranked
        if node < len(ranked.position):
            lane, position = ranked.plan.lanes[node], ranked.position[node]
            if lane <= 0:
                if lane:
                    self._engines.add(engine_of(lane), position)  # type: ignore[union-attr]
                    return
                if self._ahead is not None:
                    lane = self._list_of(ranked.plan.tasks[node])
                elif ranked.microbatch_at[position] in self._window.held:
                    lane = HELD
            self._ready.add(lane, position)
        else:
            self._finish_node(node, ranked.plan.dependents[node], out)

    def _list_of(self, forward: Task) -> int:
        """Where an F waits among the ready."""
        number = None if self._ahead is None else self._ahead.number.get(forward.chunk)
        if number is not None:
            return AHEAD + number
        return HELD if forward.microbatch in self._window.held else 0

    def _free(self, node: int) -> None:
        """A task with a microbatch has ended, or counts as ended: so does what it held."""
        self._window.finish(self._ranked.plan.tasks[node].microbatch)
        if self._ahead is not None:
            self._ahead.finish(node, self._ranked.plan.tasks[node].microbatch)
        if self._footprint is not None:
            self._footprint.finish(self._ranked.position[node])

    def _dispatch(self, out: list[Instruction]) -> None:
        if self._engines is not None:
            self._dispatch_beside(self._engines, out)
        while (len(self._running) < self._capacity or self._counts_on(out)) and any(self._ready.lanes):
            heads = self._heads()
            position, state = self.consumption.choose(self._hint_state, heads)
            if self._certainty is not None and self._due is not None:
                sure = self._certainty.choice(self.consumption.choose, self._hint_state, self._waiting)
                if position is None or position != sure:
                    return
            foresight = self._foresight
            if foresight is not None:
                if position is None:
                    foresight.release()
                elif position != foresight.next:
                    position = self._look_ahead(foresight, position, heads, out)
            if position is None:
                return
            self._hint_state = state
            self._start(self._ranked.at[position], position, out)

    def _counts_on(self, out: list[Instruction]) -> bool:
        """Whether a certain choice may go behind the running task, which is due from its start then."""
        if self._certainty is None or self._due is not None:
            return False
        self._count_as_ended(self._running[-1], out)
        return True

    def _dispatch_beside(self, engines: Engines, out: list[Instruction]) -> None:
        """Hand each free engine the first of its tasks that may start."""
        footprint, plan = self._footprint, self._ranked.plan
        for engine, position in engines.startable(self._admits_beside):
            node = self._ranked.at[position]
            engines.running[engine] = node
            self._waiting[node] = RUNNING
            if footprint is not None:
                footprint.start(position)
            out.append(RunTask(self.step, plan.tasks[node]))  # type: ignore[arg-type]

    def _admits_beside(self, position: int) -> bool:
        """Whether an operation on an engine may start: what a due task will free is not there for it yet."""
        if self._footprint is None or self._footprint.is_free(position):
            return True
        due = None if self._due is None else self._ranked.position[self._due]
        return self._footprint.admits(position, self._waiting, due)

    def _choose(self) -> Choice:
        """What the hint alone would run next."""
        return self.consumption.choose(self._hint_state, self._heads())

    def _heads(self) -> Heads:
        ranked = self._ranked
        heads = self._ready.heads(self._window, ranked.microbatch_at, ranked.forwards_of)
        footprint, first = self._footprint, heads[0]
        if footprint is not None and first is not None and not footprint.admits(first, self._waiting):
            lanes = self._ready.lanes
            is_first = self._follows_row and self._row.is_even  # type: ignore[union-attr]
            find = footprint.first_costless if is_first else partial(footprint.first_admitted, self._waiting)
            heads = (find(lanes[0], lanes[HELD]), *heads[1:])
        if self._has_other_takers:
            assert footprint is not None
            lanes = self._ready.lanes
            second, third = (footprint.first_admitted(self._waiting, lane) for lane in lanes[1:3])
            heads = (heads[0], second, third, heads[3])
        if self._ahead is not None:
            ahead = self._ready.first_ahead(self._ahead.reserves, self._window, ranked.microbatch_at)
            if ahead is not None and (heads[0] is None or ahead < heads[0]):
                heads = (ahead, *heads[1:])
        return heads

    def _admits(self, position: int) -> bool:
        """Whether the task at this position, an F, may start as far as memory goes."""
        if self._ahead is not None and not self._ahead.admits(self._ranked.plan.tasks[self._ranked.at[position]]):
            return False
        if self._footprint is not None:
            return self._footprint.admits(position, self._waiting)
        return self._window.admits(self._ranked.microbatch_at[position])

    def _start(self, node: int, position: int, out: list[Instruction]) -> None:
        plan = self._ranked.plan
        lane, task = plan.lanes[node], plan.tasks[node]
        if lane:
            self._ready.remove(lane, position)
        elif self._ahead is not None:
            self._start_beside(self._ahead, task, position)
        elif task.microbatch in self._window.held:
            self._ready.remove(HELD, position)
        else:
            self._ready.remove(lane, position)
            self._window.start_forward(task.microbatch)
            self._ready.hold(self._ranked.forwards_of[task.microbatch])
        if self._footprint is not None:
            self._footprint.start(position)
        self._waiting[node] = RUNNING
        self._running.append(node)
        self._num_started += 1
        out.append(RunTask(self.step, task))  # type: ignore[arg-type]
        foresight = self._foresight
        if foresight is not None:
            foresight.start(task, position, self._now_s)
            if self._certainty is None or self._due is None:
                self._announce(node, out)

    def _announce(self, node: int, out: list[Instruction]) -> None:
        """The device begins a task: say what it will send."""
        if self._foresight.is_awake:  # type: ignore[union-attr]
            for message, stage in self._ranked.plan.sends[node]:
                if message.kind is not _TAKEN:
                    out.append(Announce(self.step, message, stage))  # type: ignore[arg-type]

    def _start_beside(self, ahead: ReadAhead, forward: Task, position: int) -> None:
        """Start an F of a stage with bounds of read-ahead."""
        self._ready.remove(self._list_of(forward), position)
        ahead.start(forward)
        if forward.microbatch not in self._window.held:
            self._window.start_forward(forward.microbatch)
            self._ready.hold(self._ranked.forwards_of[forward.microbatch])

    def validate(self) -> None:
        """Check every invariant from first principles; raises AssertionError. For tests: it is slow."""
        invariants.check(self)
