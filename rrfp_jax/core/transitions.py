"""What arrivals and ends of tasks do to a stage's state: what waited for them is counted down, and gets ready."""

from rrfp_jax.core import story
from rrfp_jax.core.engines import NOTHING, engine_of
from rrfp_jax.core.events import Announce, InputArrived, Instruction, Message, MessageKind, Send, record
from rrfp_jax.core.foresight import Foresight
from rrfp_jax.core.plan import FINISHED, followers, others
from rrfp_jax.core.ready_set import AHEAD, HELD
from rrfp_jax.core.self_report import SelfReport
from rrfp_jax.core.story import DUE, RUNNING
from rrfp_jax.schedules import Task

_RUNNING_OR_DUE = (RUNNING, DUE)
_TAKEN = MessageKind.TAKEN


class Transitions(SelfReport):
    """An arbiter as far as things happen to it."""

    __slots__ = ()

    def _arrive(self, event: InputArrived, out: list[Instruction]) -> None:
        message, arrived, plan = event.message, self._arrived, self._ranked.plan
        number = plan.arrivals.get(message)
        if number is None:
            what = f"{message} arrived, and nothing here waits for it"
            raise story.illegal(what, self.stage, self.step, message, self.tell(message.microbatch))
        if number in arrived:
            return
        arrived.add(number)
        if self._ahead is not None and message.kind is _TAKEN:
            self._ahead.hear(message)
        if self._foresight is not None:
            self._foresight.arrived(number, event.time_s)
        if self._promises.made:
            self._promises.made.discard(number)
        node = plan.awaited_by[number]
        if node in self._promises.awaiting:
            self._input_came(node, out)
            return
        self._waiting[node] -= 1
        if not self._waiting[node]:
            self._make_ready(node, out)

    def _input_came(self, node: int, out: list[Instruction]) -> None:
        """An input of a task that was handed over before; with the last one the device begins it."""
        awaiting, foresight = self._promises.awaiting, self._foresight
        awaiting[node] -= 1
        if awaiting[node]:
            return
        del awaiting[node]
        assert foresight is not None
        position = self._ranked.position[node]
        foresight.begun(position, self._now_s)
        if self._certainty is None or self._running[0] == node:
            self._announce(foresight.announcements(position), out)

    def _take_as_arrived(self, node: int) -> None:
        """A task has ended, and word of its inputs is still on its way: they were there."""
        del self._promises.awaiting[node]
        assert self._foresight is not None
        for number in self._foresight.outlook.inputs_of[node]:
            if number not in self._arrived:
                self._arrived.add(number)
                self._promises.made.discard(number)
                self._foresight.arrived(number, self._now_s)

    def _finish_task(self, task: Task, out: list[Instruction]) -> None:
        plan = self._ranked.plan
        node = plan.index.get(task)
        left = FINISHED if node is None else self._waiting[node]
        if node is None or left not in _RUNNING_OR_DUE:
            what = f"{task} finished without having been started"
            raise story.illegal(what, self.stage, self.step, task, self.tell(task.microbatch))
        if node in self._promises.awaiting:
            self._take_as_arrived(node)
        if self._engines is not None and plan.lanes[node] < 0:
            self._engines.running[engine_of(plan.lanes[node])] = NOTHING
        else:
            if self._due is not None:
                self._settle_due(node, task)
            self._running.remove(node)
            if self._foresight is not None:
                self._foresight.finish(self._ranked.position[node], self._now_s)
                if self._certainty is not None and self._running:
                    self._begin_next(self._foresight, self._running[0], out)
        microbatch = task.microbatch
        if microbatch >= 0:
            self._tasks_left -= 1
            if left == RUNNING:
                self._free(node, microbatch)
        dependents = plan.dependents[node]
        self._finish_node(node, dependents if left == RUNNING else others(plan, dependents), out)

    def _begin_next(self, foresight: Foresight, node: int, out: list[Instruction]) -> None:
        """The device begins what is behind a task that has ended, where its inputs are there."""
        if node not in self._promises.awaiting:
            self._announce(foresight.announcements(self._ranked.position[node]), out)

    def _announce(self, sends: tuple[tuple[Message, int], ...], out: list[Instruction]) -> None:
        """The device begins a task: say what it will send."""
        for message, stage in sends:
            out.append(record(Announce, (self.step, message, stage)))

    def _settle_due(self, node: int, task: Task) -> None:
        """A task ends while one is due: the due one itself, or one that was handed over before it."""
        running = self._running
        assert self._due is not None
        if node == self._due:
            self._due, self._is_told = None, False
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
            out.append(record(Send, (self.step, message, stage)))
        if dependents:
            self._count_down(dependents, out)

    def _decide_now(self, task: Task, out: list[Instruction]) -> bool:
        """Mark the last running task as due; tells whether that was news."""
        plan = self._ranked.plan
        node = plan.index.get(task)
        if node is None or self._waiting[node] >= 0 or node in plan.absent:
            what = f"{task} was about to end without having been started"
            raise story.illegal(what, self.stage, self.step, task, self.tell(task.microbatch))
        if self._is_told or not self._running or self._running[-1] != node or self._due not in (None, node):
            return False
        if self._due is None:
            self._count_as_ended(node, out)
        self._is_told = True
        return True

    def _count_as_ended(self, node: int, out: list[Instruction]) -> None:
        """The last running task is due from now on."""
        plan = self._ranked.plan
        self._due = node
        self._capacity += 1
        self._waiting[node] = DUE
        if plan.tasks[node].microbatch >= 0:
            self._free(node, plan.tasks[node].microbatch)
        self._count_down(followers(plan, plan.dependents[node]), out)

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
                self._engines.add(engine_of(lane), position)  # type: ignore[union-attr]
                return
            if self._ahead is not None:
                lane = self._list_of(plan.tasks[node])
            elif ranked.microbatch_at[position] in self._window.held:
                lane = HELD
        self._ready.add(lane, position)

    def _list_of(self, forward: Task) -> int:
        """Where an F waits among the ready."""
        number = None if self._ahead is None else self._ahead.number.get(forward.chunk)
        if number is not None:
            return AHEAD + number
        return HELD if forward.microbatch in self._window.held else 0

    def _free(self, node: int, microbatch: int) -> None:
        """A task of a microbatch has ended, or counts as ended: so does what it held."""
        self._window.finish(microbatch)
        if self._ahead is not None:
            self._ahead.finish(node, microbatch)
        if self._footprint is not None:
            self._footprint.finish(self._ranked.position[node])
