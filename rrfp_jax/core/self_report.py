"""What a stage's arbiter tells of itself: why it idles, what runs, and what each task waits for.

A part of :class:`rrfp_jax.core.arbiter.StageArbiter`, apart because it reads the arbiter's state and changes
nothing. Its words are those of :mod:`rrfp_jax.core.story`.
"""

from collections.abc import Sequence

from rrfp_jax.core import story
from rrfp_jax.core.engines import Engines
from rrfp_jax.core.events import Message, MessageKind
from rrfp_jax.core.hints import Choice
from rrfp_jax.core.read_ahead import ReadAhead
from rrfp_jax.core.stage_state import StageState
from rrfp_jax.core.story import Waiting
from rrfp_jax.schedules import Task, TaskKind
from rrfp_jax.schedules.timeline import IdleReason

_TAKEN = MessageKind.TAKEN


class SelfReport(StageState):
    """An arbiter as far as reports see it."""

    __slots__ = ()

    def _choose(self) -> Choice:
        """What the hint alone would run next."""
        raise NotImplementedError

    def idle_reason(self) -> IdleReason | None:
        """Why the stage runs nothing; None while it runs a task."""
        if self._running:
            return IdleReason.INPUT if self._running[0] in self._promises.awaiting else None
        if not self.is_active or not self._tasks_left:
            return IdleReason.DRAIN
        if self._engines is not None and self._waits_for_engine(self._engines):
            return IdleReason.ENGINE
        if self._foresight is not None and self._foresight.held_since_s is not None:
            return IdleReason.HOLD
        if self._ready:
            return IdleReason.ORDER if self.consumption.is_strict else IdleReason.WINDOW
        return IdleReason.INPUT if self._num_started else IdleReason.FILL

    def _waits_for_engine(self, engines: Engines) -> bool:
        """Whether the stage could compute now if the engines beside it were done."""
        if not engines.is_busy:
            return False
        if self._ready:
            return self._choose()[0] is None and self._footprint is not None
        plan, waiting, coming = self._ranked.plan, self._waiting, engines.nodes()
        for node in coming:  # grows by operations that wait for nothing else
            for follower in plan.dependents[node]:
                if waiting[follower] == 1 and follower < len(plan.tasks):
                    if plan.lanes[follower] >= 0:
                        return True
                    coming.append(follower)
        return False

    def running(self) -> tuple[Task, ...]:
        """The tasks that were dispatched and have not finished: the compute lane's in order, then those of engines."""
        nodes = self._running if self._engines is None else [*self._running, *self._engines.nodes()]
        return tuple(self._ranked.plan.tasks[node] for node in nodes)

    def awaits_input(self, task: Task) -> bool:
        """Whether a task was handed over before its inputs, and some are still to come."""
        awaiting = self._promises.awaiting
        return bool(awaiting) and self._ranked.plan.index[task] in awaiting

    def awaited_inputs(self, task: Task) -> Sequence[Message]:
        """Those of a task that was handed over before they were here."""
        if not self.awaits_input(task):
            return ()
        plan, foresight = self._ranked.plan, self._foresight
        assert foresight is not None
        inputs = foresight.outlook.inputs_of[plan.index[task]]
        return [plan.messages[number] for number in inputs if number not in self._arrived]

    def held(self) -> frozenset[int]:
        """The microbatches that the stage holds."""
        return frozenset(self._window.held)

    def waiting(self) -> list[Waiting]:
        """Every task and gate of the present step that has not begun, with what it lacks; for the wait-for report."""
        if not self.is_active:
            return []
        restrained = {} if self._ahead is None else self._untaken(self._ahead)
        plan, waiting, arrived = self._ranked.plan, self._waiting, self._arrived
        handed_over = [story.describe(plan, node, waiting, arrived) for node in self._promises.awaiting]
        return handed_over + story.waiting_nodes(plan, waiting, arrived, restrained)

    def _untaken(self, ahead: ReadAhead) -> dict[int, tuple[Message, ...]]:
        """For each ready F that only its chunk's read-ahead restrains, the word of its readers that is missing."""
        plan = self._ranked.plan
        told = [m for m, number in plan.arrivals.items() if m.kind is _TAKEN and number not in self._arrived]
        restrained = {}
        for chunk, number in ahead.number.items():
            reserve = ahead.reserves[number]
            words = tuple(m for m in told if m.target == chunk and m.microbatch in reserve.held)
            for m in self.graph.microbatches(chunk):
                node = plan.index[Task(TaskKind.F, chunk, m)]
                if not self._waiting[node] and not reserve.admits(m):
                    restrained[node] = words
        return restrained

    def tell(self, microbatch: int) -> str:
        """The story of one microbatch on this stage."""
        return story.tell(self._ranked.plan, self._waiting, self._arrived, microbatch)
