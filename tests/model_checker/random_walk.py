"""One random run of a pipeline's arbiters: for pipelines that are too large to explore completely.

Every message, start of a step and task takes a drawn time, most of them none or little, some very long; so messages
overtake each other, early messages meet stages that are steps behind, and slow stages hold up fast ones. Some messages
are delivered twice, the second time perhaps much later, and so are notes within a group. Where stages decide early,
each is told of each task, now and then or never, that it is about to end: early, late or twice. Where they look ahead,
announcements get lost, come late, twice, or steps too soon, and some are false; ticks come late, early ones come too,
and some in vain. Randomness comes in as ``draw``: the same draws give the same run.

Judged as in the exhaustive exploration, and again from outside: every task's dependencies have finished, wherever they
run, and the members of a group launch the same sequence. Each arbiter is validated after each of its events.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from rrfp_jax.core import (
    Announce,
    ClockTick,
    DecideNow,
    Event,
    FinishStep,
    GroupHeard,
    IllegalTransition,
    InputArrived,
    InputPromised,
    Instruction,
    Message,
    RunPair,
    RunTask,
    Send,
    StepStarted,
    TaskAnnounced,
    TaskFinished,
    TellGroup,
    WakeAt,
)
from rrfp_jax.schedules import COMPUTE, Task, TaskKind
from tests.model_checker.account import Account
from tests.model_checker.contract import wiring
from tests.model_checker.judge import StageJudge, diverging, stuck, tasks_of
from tests.model_checker.packets import Stimulus
from tests.model_checker.setting import Setting
from tests.model_checker.trace import CheckError, Violation

Draw = Callable[[int], int]
"""``draw(n)`` gives a number from 0 to n - 1."""

DELAYS_S = (0, 0, 0, 1, 1, 2, 3, 5, 20, 100)
"""Delays of messages and durations of tasks are drawn from these, in seconds of virtual time."""
START_STRETCHES = (1, 10, 100)
"""The pause before a step's start is a delay times one of these, so that starts come before, amid and after steps."""
DECISIONS_PER_TASK = (0, 1, 1, 1, 1, 2, 3)
COPIES_PER_MESSAGE = (1, 1, 1, 1, 1, 1, 2, 3)
COPIES_PER_ANNOUNCEMENT = (0, 1, 1, 1, 0, 1, 2, 3)
FALSE_ANNOUNCEMENTS = (0, 0, 0, 0, 1, 2)
"""Of anything, for each announcement that is made."""
STEPS_OFF = (0, 0, 0, 1, 2, -1)
"""How far ahead of its sender's step a false announcement is."""
EARLY_TICKS = (0, 0, 0, 1, 1)
"""For each tick that is asked for; an early one may be answered by asking again, so fewer than one on average."""


class WalkReport(NamedTuple):
    """How large the run was."""

    num_events: int
    num_tasks: int
    makespan_s: float


def random_walk(setting: Setting, draw: Draw) -> WalkReport:
    """Run a setting once with drawn delays; raises CheckError at the first violation or deadlock."""
    return _Walk(setting, draw).run()


class _Walk:
    def __init__(self, setting: Setting, draw: Draw) -> None:
        places = range(setting.num_places)
        self.setting, self.draw = setting, draw
        self.wires = wiring(setting)
        self.arbiters = [setting.make_arbiter(place) for place in places]
        self.judges = [StageJudge(setting, place, self.wires) for place in places]
        self.accounts = [Account() for _ in places]
        self.graphs = [setting.graph_of_step(step) for step in range(setting.num_steps)]
        self.queue: list[tuple[float, int, int, Stimulus]] = []
        self.starts: list[list[Event]] = [[] for _ in places]
        """The starts of steps that have come to each place while another one was under way."""
        self.num_scheduled = 0
        self.free_at_s: dict[tuple[int, str], float] = defaultdict(float)
        """When each lane of each place has nothing to do any more."""
        self.end_orders = [(0.0, 0) for _ in places]
        """When the last task that each place computes is to end, and its place among the events of that moment."""
        self.joined: Counter[tuple[int, RunTask]] = Counter()
        """How many members of a stage have started each of its collectives."""
        self.finished: set[tuple[int, Task]] = set()
        self.handed_over: set[tuple[int, Task]] = set()
        self.queued: list[list[RunTask]] = [[] for _ in places]
        """Where inputs are promised: what each place's device has not begun, since it waits for inputs."""
        self.trace: list[Stimulus] = []
        self.now_s = 0.0

    def run(self) -> WalkReport:
        for place in range(self.setting.num_places):
            self._schedule_starts(place)
        while self.queue:
            self.now_s, _, _, stimulus = heappop(self.queue)
            if isinstance(stimulus.event, StepStarted) and self.arbiters[stimulus.place].is_active:
                self.starts[stimulus.place].append(stimulus.event)
                continue
            event = stimulus.event._replace(time_s=float(self.now_s))
            self.trace.append(Stimulus(stimulus.place, event))
            try:
                self._take(stimulus.place, stimulus.event, event)
            except (Violation, IllegalTransition, AssertionError) as error:
                what = str(error) or f"an invariant of the arbiter is broken: {error!r}"
                raise CheckError(what, self.setting, tuple(self.trace)) from error
        unfinished = [p for p, judge in enumerate(self.judges) if not judge.is_done(self.accounts[p])]
        if unfinished:
            raise CheckError(stuck(self.setting, unfinished), self.setting, tuple(self.trace))
        return WalkReport(len(self.trace), len(self.finished), float(self.now_s))

    def _schedule_starts(self, place: int) -> None:
        at_s = 0
        for step in range(self.setting.num_steps):
            at_s += self._delay_s() * START_STRETCHES[self.draw(len(START_STRETCHES))]
            self._schedule(at_s, place, self.setting.start_of(step))

    def _take(self, place: int, known: Event, event: Event) -> None:
        if isinstance(event, TaskFinished):
            self.finished.add((event.step, event.task))
            self._begin_queued()
        instructions = self.arbiters[place].handle(event)
        seen = event if isinstance(event, ClockTick) else known
        self.accounts[place] = self.judges[place].follow(self.accounts[place], seen, instructions)
        self.arbiters[place].validate()
        for instruction in instructions:
            self._carry_out(place, instruction)

    def _carry_out(self, place: int, instruction: Instruction) -> None:
        if isinstance(instruction, RunTask | RunPair):
            first, *rest = tasks_of(instruction)
            self._run(place, RunTask(instruction.step, first))
            for second in rest:
                self._run(place, RunTask(instruction.step, second), with_task=first)
        elif isinstance(instruction, Send):
            promise = self.wires.contracts[place][instruction.step].sends[instruction.message, instruction.stage]
            for target, arrival, _ in self.wires.packets.stimuli(promise.sent):
                self._deliver(target, arrival)
        elif isinstance(instruction, FinishStep):
            if self.starts[place]:
                self._schedule(self.now_s, place, self.starts[place].pop(0))
        elif isinstance(instruction, TellGroup):
            stage, member = self.setting.places[place]
            heard = GroupHeard(instruction.step, 0.0, member, instruction.note)
            self._deliver(self.setting.place(stage, instruction.member), heard)
        elif isinstance(instruction, Announce):
            self._announce(instruction)
        elif isinstance(instruction, WakeAt):
            self._wake(place, instruction)

    def _announce(self, instruction: Announce) -> None:
        """To all members of the stage, some of which do not care."""
        step, message, stage = instruction
        if self.setting.awaits_inputs:
            for _ in range(COPIES_PER_ANNOUNCEMENT[self.draw(len(COPIES_PER_ANNOUNCEMENT))]):
                self._schedule(self.now_s + self._delay_s(), stage, InputPromised(step, 0.0, message))
        told = [(step, message)] * COPIES_PER_ANNOUNCEMENT[self.draw(len(COPIES_PER_ANNOUNCEMENT))]
        for _ in range(FALSE_ANNOUNCEMENTS[self.draw(len(FALSE_ANNOUNCEMENTS))]):
            told.append((step + STEPS_OFF[self.draw(len(STEPS_OFF))], self._any_input(stage, message)))
        for of_step, each in told:
            for member in range(self.setting.group_size(stage)):
                place = self.setting.place(stage, member)
                self._schedule(self.now_s + self._delay_s(), place, TaskAnnounced(of_step, 0.0, each))

    def _any_input(self, stage: int, message: Message) -> Message:
        """Something that the stage waits for in some step, or something that does not exist."""
        contracts = self.wires.contracts[self.setting.place(stage, 0)]
        inputs = self.wires.packets.stimuli(contracts[self.draw(len(contracts))].inputs)
        messages = [event.message for _, event, _ in inputs if isinstance(event, InputArrived)]
        return [message._replace(target=1 << 16), *messages][self.draw(1 + len(messages))]

    def _wake(self, place: int, instruction: WakeAt) -> None:
        """In time or late, and before that now and then as well."""
        step, time_s = instruction
        tick, left_s = ClockTick(step, 0.0), max(0.0, time_s - self.now_s)
        self._schedule(max(self.now_s, time_s) + self._delay_s() // 5, place, tick)
        for _ in range(EARLY_TICKS[self.draw(len(EARLY_TICKS))]):
            self._schedule(self.now_s + left_s * self.draw(8) / 8, place, tick)

    def _run(self, place: int, instruction: RunTask, with_task: Task | None = None) -> None:
        self._check_dependencies(place, instruction, with_task)
        self.handed_over.add(instruction)
        group, stage = self.setting.group_of(place), self.setting.places[place].stage
        what = diverging([self.accounts[member].launched for member in group], stage)
        if what is not None:
            raise Violation(what)
        self.joined[stage, instruction] += 1
        if self.setting.awaits_inputs and self.setting.graph.lane(instruction.task.kind) == COMPUTE:
            self.queued[place].append(instruction)
            self._begin_queued()
        elif not self.setting.collective or self.setting.graph.lane(instruction.task.kind) != COMPUTE:
            self._schedule_end(place, instruction)
        elif self.joined[stage, instruction] == len(group):
            for member in group:
                self._schedule_end(member, instruction)

    def _begin_queued(self) -> None:
        """Devices begin what they were given in that order, each task as what it needs of other places has ended."""
        for place, queued in enumerate(self.queued):
            while queued and self._has_inputs(place, queued[0]):
                self._schedule_end(place, queued.pop(0))

    def _has_inputs(self, place: int, instruction: RunTask) -> bool:
        stage_of, (step, task) = self.setting.placement.stage_of_chunk, instruction
        needed = (
            t for t in self.graphs[step].dependencies(task) if stage_of[t.chunk] != self.setting.places[place].stage
        )
        return all((step, dependency) in self.finished for dependency in needed)

    def _schedule_end(self, place: int, instruction: RunTask) -> None:
        step, task = instruction
        lane = self.setting.graph.lane(task.kind)
        self.free_at_s[place, lane] = at_s = max(self.now_s, self.free_at_s[place, lane]) + self._delay_s()
        if not self.setting.keeps_order or lane != COMPUTE:
            self._schedule(at_s, place, TaskFinished(step, 0.0, task))
            return
        self.end_orders[place] = max(self.end_orders[place], (at_s, self.draw(1 << 16)))
        self._schedule(at_s, place, TaskFinished(step, 0.0, task), self.end_orders[place][1])
        is_told = self.setting.decides_early
        for _ in range(DECISIONS_PER_TASK[self.draw(len(DECISIONS_PER_TASK))] if is_told else 0):
            told_s = self.now_s + self.draw(int(at_s - self.now_s) + 1) + self._delay_s() // 5
            self._schedule(told_s, place, DecideNow(step, 0.0, task))

    def _check_dependencies(self, place: int, instruction: RunTask, with_task: Task | None) -> None:
        """``with_task``: the task that is its partner, of which only a W of it may have need."""
        step, task = instruction
        is_queued = self.setting.graph.lane(task.kind) == COMPUTE
        due = self.judges[place].due_tasks(self.accounts[place]) if is_queued else []
        before = [*self.graphs[step].dependencies(task)]
        if task.kind is TaskKind.U:
            before.append(Task(TaskKind.R, task.chunk))
        exists = self.judges[place].contracts[step].place
        for dependency in before:
            is_once = dependency.microbatch < 0  # on the stage itself, if the step has it
            if self.setting.awaits_inputs and (step, dependency) in self.handed_over:
                continue  # the judge knows what was promised
            if task.kind is TaskKind.W and dependency == with_task:
                continue
            if (
                (step, dependency) not in self.finished
                and dependency not in due
                and (not is_once or dependency in exists)
            ):
                raise Violation(f"{task} of step {step} runs before {dependency} has finished")

    def _deliver(self, place: int, event: Event) -> None:
        """After a delay, perhaps more than once."""
        for _ in range(COPIES_PER_MESSAGE[self.draw(len(COPIES_PER_MESSAGE))]):
            self._schedule(self.now_s + self._delay_s(), place, event)

    def _delay_s(self) -> int:
        return DELAYS_S[self.draw(len(DELAYS_S))]

    def _schedule(self, at_s: float, place: int, event: Event, order: int | None = None) -> None:
        """Events of the same moment come in drawn order, a place's starts of steps in their own."""
        if order is None:
            order = event.step if isinstance(event, StepStarted) else self.draw(1 << 16)
        self.num_scheduled += 1
        heappush(self.queue, (at_s, order, self.num_scheduled, Stimulus(place, event)))
