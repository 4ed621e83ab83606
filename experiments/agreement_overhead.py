"""Cost of agreement: the seconds from the moment when all members of a group could have started a task to its launch.

A member could have started a task once the task was ready there (its messages had arrived, its own predecessors had
finished or were due) and the member was idle (fewer tasks were dispatched and unfinished than it may have). Both follow
from the member's log of events and instructions alone. Times of different members must be of one clock.

A certain choice (:mod:`rrfp_jax.core.dispatch`) that was handed over while another task ran is launched as that
one ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from rrfp_jax.core.arbiter import StageArbiter
from rrfp_jax.core.events import (
    DecideNow,
    Event,
    FinishStep,
    InputArrived,
    Instruction,
    Message,
    RunTask,
    StepStarted,
    TaskFinished,
)
from rrfp_jax.core.plan import StagePlan
from rrfp_jax.schedules import Task

Log = Iterable[tuple[Event, Sequence[Instruction]]]


class Launch(NamedTuple):
    """Launch of a task on one member, in seconds on the log's clock."""

    launch_s: float
    could_launch_s: float
    """Time at which the member was idle and the task was ready there."""


def launches(arbiter: StageArbiter, log: Log) -> dict[RunTask, Launch]:
    """Returns, for each task that a member launched, when it launched it and when it could have.

    Args:
        arbiter: the member's, or any other's of the group; it tells the stage's tasks and how many may be dispatched.
        log: the member's. Steps whose start is not in it are left out.
    """
    member = _Member(arbiter, log)
    return {
        run: Launch(launch_s, member.could_launch_s(run))
        for run, launch_s in member.launch_s.items()
        if run.step in member.plans
    }


def agreement_overhead(members: Sequence[Mapping[RunTask, Launch]]) -> dict[RunTask, float]:
    """Returns, for each task, the seconds from the moment when all members could have launched it to the last launch.

    ``members`` has the launches of every member. Tasks that some member did not launch are left out.
    """
    common = set.intersection(*map(set, members)) if members else set()
    return {
        run: max(member[run].launch_s for member in members) - max(member[run].could_launch_s for member in members)
        for run in sorted(common)
    }


class _Member:
    """Times of one member's events, by its log. Events before the log's beginning count as at minus infinity."""

    def __init__(self, arbiter: StageArbiter, log: Log) -> None:
        self.arbiter = arbiter
        self.plans: dict[int, StagePlan] = {}
        self.begin_s: dict[int, float] = {}
        self.arrival_s: dict[tuple[int, Message], float] = {}
        self.finish_s: dict[tuple[int, Task], float] = {}
        self.due_s: dict[tuple[int, Task], float] = {}
        """Due times of the tasks that were due before they finished."""
        self.launch_s: dict[RunTask, float] = {}
        self.idle_s: dict[RunTask, float] = {}
        """Time from which the member could have taken a task, for each task that it took."""
        self._running: list[RunTask] = []
        self._due: RunTask | None = None
        self._idle_since_s = -inf
        for event, instructions in log:
            self._take(event)
            for instruction in instructions:
                self._answer(instruction, event.time_s)

    def could_launch_s(self, run: RunTask) -> float:
        return max(self.idle_s[run], self._ready_s(run.step, self.plans[run.step].index[run.task]))

    def _take(self, event: Event) -> None:
        if isinstance(event, StepStarted):
            self.plans[event.step] = self.arbiter.plan_without(event.absent, evaluates=event.evaluates).plan
            self.begin_s[event.step] = max(event.time_s, self.begin_s.get(event.step, -inf))
        elif isinstance(event, InputArrived):
            self.arrival_s.setdefault((event.step, event.message), event.time_s)
        elif isinstance(event, TaskFinished):
            self.finish_s[event.step, event.task] = event.time_s
            self._finish(RunTask(event.step, event.task), event.time_s)
        elif isinstance(event, DecideNow) and self._due is None:
            run = RunTask(event.step, event.task)
            if self._running[-1:] == [run]:
                self._due = run
                self.due_s[event.step, event.task] = event.time_s
                self._note_idle(event.time_s, 1)

    def _finish(self, run: RunTask, time_s: float) -> None:
        """Records the end of a task. If another was due to follow already, the end lets none run earlier."""
        was_due, self._due = run == self._due, None if run == self._due else self._due
        if run in self._running:  # otherwise it was started before the log's beginning
            self._running.remove(run)
        if self._running and self.arbiter.certain_ahead:
            self.launch_s[self._running[0]] = self.idle_s[self._running[0]] = time_s
        if not was_due:
            self._note_idle(time_s, int(self._due is not None))

    def _note_idle(self, time_s: float, most_running: int) -> None:
        if len(self._running) == most_running:
            self._idle_since_s = time_s

    def _answer(self, instruction: Instruction, time_s: float) -> None:
        if isinstance(instruction, FinishStep):
            self.begin_s[instruction.step + 1] = time_s
        elif isinstance(instruction, RunTask):
            self.launch_s[instruction] = time_s
            self.idle_s[instruction] = self._idle_since_s
            self._running.append(instruction)
            self._idle_since_s = time_s

    def _ready_s(self, step: int, node: int) -> float:
        """Returns the time at which a task or gate had everything that it waits for."""
        plan = self.plans[step]
        ready_s = self.begin_s[step]
        for before in plan.prerequisites[node]:
            if isinstance(before, Message):
                ready_s = max(ready_s, self.arrival_s.get((step, before), -inf))
            elif before < len(plan.tasks):
                done = (step, plan.tasks[before])
                finished_s = self.finish_s.get(done, -inf)
                ready_s = max(ready_s, self.due_s.get(done, finished_s) if node < len(plan.tasks) else finished_s)
            else:
                ready_s = max(ready_s, self._ready_s(step, before))
        return ready_s
