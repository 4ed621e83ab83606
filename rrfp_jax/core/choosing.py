"""Which of the ready tasks a stage starts, on its compute lane and on the engines beside it."""

from functools import partial

from rrfp_jax.core.engines import Engines
from rrfp_jax.core.events import Instruction, RunTask, record
from rrfp_jax.core.hints import Choice, Heads
from rrfp_jax.core.lookout import Lookout
from rrfp_jax.core.read_ahead import ReadAhead
from rrfp_jax.core.ready_set import HELD
from rrfp_jax.core.story import RUNNING
from rrfp_jax.core.transitions import Transitions
from rrfp_jax.schedules import Task


class Choosing(Lookout, Transitions):
    """An arbiter as far as it chooses."""

    __slots__ = ()

    def _dispatch(self, out: list[Instruction]) -> None:
        if self._engines is not None:
            self._dispatch_beside(self._engines, out)
        choose = self.consumption.choose
        certainty = self._certainty
        while len(self._running) < self._capacity or (certainty is not None and self._counts_on(out)):
            if not any(self._ready.lanes):
                promised = self._promised_next() if self._promises.made else None
                if promised is None:
                    return
                self._start(self._ranked.at[promised], promised, out)
                continue
            heads = self._heads()
            position, state = choose(self._hint_state, heads)
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
        if footprint is not None:
            if first is not None and not footprint.admits(first, self._waiting):
                lanes = self._ready.lanes
                is_first = self._follows_row and self._row.is_even  # type: ignore[union-attr]
                find = footprint.first_costless if is_first else partial(footprint.first_admitted, self._waiting)
                heads = (find(lanes[0], lanes[HELD]), *heads[1:])
            if self._has_other_takers:
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
        if self._waiting[node]:
            self._promises.awaiting[node] = self._waiting[node]
            self._make_ready(node, out)
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
        self._is_told = False
        self._num_started += 1
        out.append(record(RunTask, (self.step, task)))
        foresight = self._foresight
        if foresight is not None:
            sends = foresight.start(position, self._now_s)
            is_first = self._certainty is None or self._due is None
            if sends and is_first and node not in self._promises.awaiting:
                self._announce(sends, out)

    def _start_beside(self, ahead: ReadAhead, forward: Task, position: int) -> None:
        """Start an F of a stage with bounds of read-ahead."""
        self._ready.remove(self._list_of(forward), position)
        ahead.start(forward)
        if forward.microbatch not in self._window.held:
            self._window.start_forward(forward.microbatch)
            self._ready.hold(self._ranked.forwards_of[forward.microbatch])
