"""Two steps under way on a stage: the next one's tasks fill the idle time that the end of a step leaves.

With a *delay* of one update (:attr:`rrfp_jax.core.stage_setup.StageSetup.delay`), step t computes its gradients at the
weights that the update of step t - 2 left, and its own update is applied to those of step t - 1. That is the rule of
PipeDream-2BW (2006.09503, section 3.1), and training is that of a plain loop with the same delay:

    weights(t) = weights(t - 1) + optimizer's update from the gradient of step t at weights(t - 2)

So step t + 1 may start on a stage while step t runs there, and step t + 2 may once step t, its update included, has
ended. A stage then needs the weights of two steps. 2BW fixes an order of the tasks; here readiness picks them.

Stages may differ in it. One without a delay is a plain :class:`StageArbiter`, which starts step t + 1 once step t has
ended there, and keeps the messages of later steps until then.

How it works
------------
Each of the two steps has a :class:`StageArbiter`, one for even and one for odd steps. They share the compute lane and
the window. Whenever the lane is free, each step names the task that it would run, and the better one runs: R and U,
which end a step, before B and I, then F, and W last; of equally good ones that of the older step. The tasks at the end
of the younger step, R and U, wait for the end of the older one: updates apply in the order of the steps, a check of the
learning rate sees the count of its own update, and collectives over replicas come in one order everywhere. So does the
end of the younger step itself, as a stage without parameters that train has neither R nor U. A choice is certain
(:mod:`rrfp_jax.core.dispatch`) only if it is an R, U, B or I of the older step: instead of an F or a W the younger one
may still get a better task.

Why no deadlock
---------------
The argument of :mod:`rrfp_jax.core.memory`, with one total order of the tasks of all steps: all tasks of step t in the
window's order, then its R and U, then those of step t + 1. Every dependency goes forward in it, also the two new ones:
the younger step's R, U and end wait for the older one, and the start of step t + 2 for the end of step t (of step t + 1
where the stage has no delay). The window takes and lets go of the microbatches of both steps in one sequence, those of
the older step first, by the same rule: a slot is free, and afterwards the oldest unfinished microbatch of that sequence
has one, or another slot is free. Let T be the first unfinished task of the total order, with nothing running and
nothing under way. All that T waits for has finished, and its step has started, since the steps before it have ended
here. T's microbatch is the oldest unfinished one, so the window has kept a slot for it. So the stage runs T or another
task.

Beginning in the middle
-----------------------
The stage is never idle between steps, so an event log opens its segments at a step's end, when at most one other step
is under way, whose R and U wait for nothing more. That step is kept as a :class:`StepUnderWay`. The state of its
arbiter follows from the messages that have come and the tasks that have finished, in whatever order that was, from the
running ones in theirs, and from the hint's state: all but the last are counts that only fall.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Self

from rrfp_jax.core.arbiter import StageArbiter
from rrfp_jax.core.dispatch import Certainty
from rrfp_jax.core.events import Event, FinishStep, InputArrived, Instruction, Message, StepStarted
from rrfp_jax.core.explain import IllegalTransition, Waiting
from rrfp_jax.core.hints import Choice, Heads
from rrfp_jax.core.memory import Window
from rrfp_jax.core.plan import FINISHED
from rrfp_jax.core.stage_setup import StageSetup, StepPlan
from rrfp_jax.schedules import Absences, Task
from rrfp_jax.schedules.timeline import IdleReason

_TURN_OF_LANE = (2, 1, 3, 0)
"""The turn of a task among those of both steps, by its lane: R and U, which end a step, then B and I, F, and W last."""
_TURN_OF_BACKWARD = _TURN_OF_LANE[1]


class _SharedWindow(Window):
    """One step's part of a stage's window, of which ``other`` is the other step's part while that one is active."""

    __slots__ = ("is_older", "other")

    is_older: bool
    other: "_SharedWindow | None"

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self._free(self.limit) < 1

    def _free(self, limit: int) -> int:
        return limit - self.load - (0 if self.other is None else self.other.load)

    def admits(self, microbatch: int) -> bool:
        if self.limit is None or microbatch in self.held:
            return True
        free = self._free(self.limit)
        if free != 1:
            return free > 1
        older = self if self.is_older or self.other is None else self.other
        younger = self.other if older is self else self
        first = younger if older.is_done and younger is not None else older
        return first.oldest in first.held or (first is self and microbatch == first.oldest)

    @property
    def is_done(self) -> bool:
        """Whether every microbatch has been let go."""
        return self.oldest >= self.first + len(self.left)


class _CertainOfTwo(Certainty):
    """The certain choices of the older step, whatever tasks the younger one may get."""

    __slots__ = ()

    def choice(self, choose: Callable[[int, Heads], Choice], state: int, waiting: Sequence[int]) -> int | None:
        position = super().choice(choose, state, waiting)
        if position is None or _turn(self._ranked, position) > _TURN_OF_BACKWARD:
            return None
        return position


def _turn(ranked: StepPlan, position: int) -> int:
    return _TURN_OF_LANE[ranked.plan.lanes[ranked.at[position]]]


@dataclass(frozen=True, kw_only=True)
class StepUnderWay:
    """A plain record of a step that has begun on a stage, from which its arbiter goes on.

    Event logs hold this record, so its fields are part of their format.
    """

    step: int
    absent: Absences
    arrived: tuple[Message, ...]
    finished: tuple[Task, ...]
    running: tuple[Task, ...]
    """The running tasks, in the order in which they were handed over."""
    is_due: bool
    """Whether the first of these counts as finished."""
    is_told: bool
    hint_state: int


class _OneOfTwo(StageArbiter):
    """The arbiter of every second step, which dispatches when it is told to."""

    def _begin(self, ranked: StepPlan) -> None:
        super()._begin(ranked)
        plain, window = self._window, object.__new__(_SharedWindow)
        for name in Window.__slots__:
            setattr(window, name, getattr(plain, name))
        window.is_older, window.other = True, None
        self._window = window
        self._certainty = self._certainty and _CertainOfTwo(ranked)
        if self._end_waits:
            self._left += 1
            for node in self._end_nodes():
                self._waiting[node] += 1

    def _end_nodes(self) -> list[int]:
        """Returns the tasks at the end of the step: R and U."""
        return [node for node, task in self._ranked.plan.present() if task.microbatch < 0]

    def release_end(self, out: list[Instruction]) -> None:
        """Let R, U and the end come as soon as they have all that they wait for, since the step before has ended."""
        if self._end_waits:
            self._end_waits = False
            self._left -= 1
            self._count_down(tuple(self._end_nodes()), out)
            if not self._left:
                self._end_step(out)

    def record(self) -> StepUnderWay:
        ranked, waiting = self._ranked, self._waiting
        tasks, absent = ranked.plan.tasks, ranked.plan.absent
        assert self.step is not None
        return StepUnderWay(
            step=self.step,
            absent=ranked.absent,
            arrived=tuple(message for message, n in ranked.plan.arrivals.items() if n in self._arrived),
            finished=tuple(tasks[node] for node in ranked.at if waiting[node] == FINISHED and node not in absent),
            running=self.running(),
            is_due=self.is_due,
            is_told=self._is_told,
            hint_state=self._hint_state,
        )

    def go_on(self, past: StepUnderWay) -> None:
        """Come to the recorded state. Raises ValueError for a record of a state that cannot be."""
        unheeded: list[Instruction] = []
        self._start_step(StepStarted(past.step, 0.0, past.absent), unheeded)
        for message in past.arrived:
            self._arrive(InputArrived(past.step, 0.0, message), unheeded)
        left = past.finished
        while left:
            later = []
            for task in left:
                if self._waiting[self._ranked.plan.index[task]]:
                    later.append(task)
                else:
                    self._start_ready(task, unheeded)
                    self._finish_task(task, unheeded)
            if len(later) == len(left):
                raise ValueError(f"{later[0]} of step {past.step} finished, although it lacks something")
            left = tuple(later)
        for number, task in enumerate(past.running):
            self._start_ready(task, unheeded)
            if past.is_due and not number:
                self._count_as_ended(self._running[-1], unheeded)
        self._is_told, self._hint_state = past.is_told, past.hint_state

    def _start_ready(self, task: Task, out: list[Instruction]) -> None:
        node = self._ranked.plan.index[task]
        if self._waiting[node]:
            raise ValueError(f"{task} of step {self.step} runs, although it lacks something")
        self._start(node, self._ranked.position[node], out)

    def _dispatch(self, out: list[Instruction]) -> None:
        """Leave it to the stage's arbiter, which knows both steps."""

    def start_tasks(self, room: int, out: list[Instruction], *, is_alone: bool) -> None:
        """Start what may start, with room for so many tasks behind those that run.

        ``is_alone``: whether the other step runs nothing, so that a certain choice may go behind the running task.
        """
        self._is_alone = is_alone
        self._capacity = len(self._running) + room
        super()._dispatch(out)
        self._capacity = 1 + (self._due is not None)

    def _counts_on(self, out: list[Instruction]) -> bool:
        return self._is_alone and bool(self._running) and super()._counts_on(out)

    def turn(self) -> int:
        """Returns the turn of the task that this step runs next among the tasks of both steps."""
        position = self._choose()[0] if any(self._ready.lanes) else None
        return len(_TURN_OF_LANE) if position is None else _turn(self._ranked, position)

    @property
    def is_due(self) -> bool:
        return self._due is not None

    @property
    def is_told(self) -> bool:
        return self._is_told


class OverlappedArbiter:
    """The arbiter of a stage on which two steps are under way; it is used as a :class:`StageArbiter` is.

    ``setup.delay`` is 1.
    """

    looks_ahead = False
    is_holding = False

    def __init__(self, setup: StageSetup) -> None:
        even = _OneOfTwo(setup)
        self._pair = (even, even.copy())
        """The arbiters of even and of odd steps."""
        self._active: tuple[int, ...] = ()
        """The steps that have started and not ended, the older one first."""
        self._last: int | None = None
        """The last step that has started."""
        self.setup, self.stage, self.placement = setup, setup.stage, setup.placement
        self.graph, self.rules, self.consumption = even.graph, even.rules, even.consumption
        self.evaluation_batches, self.certain_ahead = setup.evaluation_batches, setup.certain_ahead
        self.graph_of, self.plan_without = even.graph_of, even.plan_without

    @property
    def step(self) -> int | None:
        """The oldest step that is active, or the last one; None before the first."""
        return self._active[0] if self._active else self._last

    @property
    def is_active(self) -> bool:
        """Whether some step has started and not ended."""
        return bool(self._active)

    @property
    def evaluates(self) -> bool:
        return bool(self._active) and self._of(self._active[0]).evaluates

    def may_start(self, step: int, *, evaluates: bool = False) -> bool:
        """Returns whether a step may start now; one that evaluates is alone on the stage."""
        if len(self._active) == 2 or (self._active and (evaluates or self.evaluates)):
            return False
        return step - 1 in self._active or not self._active

    def _of(self, step: int) -> _OneOfTwo:
        return self._pair[step % 2]

    def copy(self) -> Self:
        """Returns an independent arbiter in the same state; fixed tables are shared."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._pair = (self._pair[0].copy(), self._pair[1].copy())
        twin._link()
        return twin

    def fresh(self, after: int | None, past: StepUnderWay | None = None) -> Self:
        """Returns an arbiter made alike that has ended step ``after``, or has not begun, and knows no later steps but
        the next one, if that is under way.

        ``past``: the result of :meth:`step_under_way` when that step had ended.
        """
        twin = self.copy()
        ones = []
        for number, one in enumerate(twin._pair):
            one._end_waits = False
            ones.append(one.fresh(None if after is None else after - (after - number) % 2))
        twin._pair = (ones[0], ones[1])
        twin._active, twin._last = (), after
        if past is not None:
            if after is None or past.step != after + 1:
                raise ValueError(f"step {past.step} is under way after the end of step {after}")
            twin._of(past.step).go_on(past)
            twin._active, twin._last = (past.step,), past.step
        twin._link()
        return twin

    def step_under_way(self) -> StepUnderWay | None:
        """Returns a record of the step that is under way right after the end of another one; None: there is none."""
        return self._of(self._active[0]).record() if self._active else None

    def key(self) -> Hashable:
        """Returns the state as a hashable value: equal keys mean equal futures."""
        return (self._active, self._last, *(one.key() for one in self._pair), *(one._end_waits for one in self._pair))

    def prepare(self, plan: StepPlan) -> None:
        """Take a plan of :meth:`plan_without` for the next step."""
        self._of(0 if self._last is None else self._last + 1).prepare(plan)

    def estimates(self) -> None:
        """Returns None: such a stage has no foresight."""

    # -- events --------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return the instructions, in order. Raises IllegalTransition on an impossible event."""
        one, step = self._of(event.step), event.step
        if type(event) is StepStarted:
            self._check_start(event)
            one._end_waits = bool(self._active)
            if self._last is None:
                self._of(step + 1).step = step - 1  # as if that step had ended here, as it has before any other start
        out = one.handle(event)
        if type(event) is StepStarted:
            self._active, self._last = (*self._active, step), step
            self._link()
        ended = step in self._active and not one.is_active
        while self._active and not self._of(self._active[0]).is_active:
            self._active = self._active[1:]
            for younger in self._arbiters():
                younger.release_end(out)
        if ended:
            self._link()
        self._dispatch(out)
        if ended:  # whoever carries out the instructions looks for this one at the end
            out.sort(key=lambda instruction: type(instruction) is FinishStep)
        return out

    def _check_start(self, event: StepStarted) -> None:
        step = event.step
        is_next = self._last is None or step == self._last + 1
        if not is_next or not self.may_start(step, evaluates=event.evaluates):
            under_way = ", ".join(map(str, self._active)) or "none"
            before = f"step {step} was started after step {self._last}"
            raise IllegalTransition(f"stage {self.stage}: {before}, with these under way: {under_way}")

    def _link(self) -> None:
        """Tell each step's window of the other step's."""
        active = [self._of(step) for step in self._active]
        for one in self._pair:
            window = one._window
            assert isinstance(window, _SharedWindow)
            others = [other._window for other in active if other is not one]
            window.is_older = not active or active[0] is one
            window.other = others[0] if others and one in active else None  # type: ignore[assignment]

    def _dispatch(self, out: list[Instruction]) -> None:
        """Start what may start."""
        ones = self._arbiters()
        if len(ones) < 2:
            for one in ones:
                one.start_tasks(self._room(), out, is_alone=True)
            return
        older, younger = ones
        due = next((one for one in ones if one.is_due), None)
        if due is None or due.is_told:
            # What the younger step runs next is never certain, as the older one may get something better.
            for one in sorted(ones, key=_OneOfTwo.turn):
                if self._room() > 0:
                    one.start_tasks(self._room(), out, is_alone=one is older and not younger._running)
        if older._running and not younger._running:
            older.start_tasks(max(self._room(), 0), out, is_alone=True)

    def _room(self) -> int:
        """Returns how many more tasks may be handed over: one runs, and one may be behind it once it is due."""
        return 1 + sum(one.is_due - len(one._running) for one in self._pair)

    # -- reports -------------------------------------------------------------------------------------------------------

    def _arbiters(self) -> list[_OneOfTwo]:
        """Returns the arbiters of the active steps, the older one first."""
        return [self._of(step) for step in self._active]

    def running(self) -> tuple[Task, ...]:
        """Returns the tasks that were dispatched and have not finished, those of the older step first."""
        return tuple(task for one in self._arbiters() for task in one.running())

    def awaits_input(self, task: Task) -> bool:
        """Returns False: no task is handed over before its inputs."""
        del task
        return False

    def awaited_inputs(self, task: Task) -> tuple[Message, ...]:
        """Returns nothing: no task is handed over before its inputs."""
        del task
        return ()

    def held(self) -> frozenset[int]:
        """Returns the microbatches that the stage holds, of either step."""
        return frozenset(m for one in self._arbiters() for m in one.held())

    def waiting(self) -> list[Waiting]:
        """Returns every task and gate of both steps that has not begun, the older step's first."""
        return [
            each._replace(what=f"{each.what} of step {step}")
            for step in self._active
            for each in self._of(step).waiting()
        ]

    def of_step(self, step: int) -> StageArbiter:
        """Returns the arbiter of every second step, of which this step is one."""
        return self._of(step)

    def idle_reason(self) -> IdleReason | None:
        """Returns why the stage runs nothing, by the older step that has a task left; None while it runs a task."""
        reasons = [one.idle_reason() for one in self._arbiters()]
        if None in reasons:
            return None
        return next((reason for reason in reasons if reason is not IdleReason.DRAIN), IdleReason.DRAIN)

    def validate(self) -> None:
        """Raise AssertionError where the state breaks an invariant: for tests, since it is slow."""
        ones = self._arbiters()
        for one in ones:
            one.validate()
        assert sum(len(one._running) for one in ones) <= 1 + sum(one.is_due for one in ones) <= 2
        assert not any(one._end_waits for one in ones[:1])
        limit = self._pair[0]._mode.limit
        if limit is None or not ones:
            return
        # Every microbatch that is left fits once all before it have gone, those of the older step first.
        ages = [
            (n, m) for n, one in enumerate(ones) for m, left in enumerate(one._window.left, one._window.first) if left
        ]
        held = {(n, m) for n, one in enumerate(ones) for m in one._window.held}
        assert len(held) <= limit
        assert all(age in held or 1 + sum(other > age for other in held) <= limit for age in ages)
