"""The discrete-event driver: the same arbiters as in the runtime, in virtual time.

Each stage is a device that runs one task at a time, a host that hands it tasks, and the stage's own
:class:`StageArbiter`. The driver hands the arbiters events (step started, input arrived, task finished) and carries
out their instructions; it decides nothing about the order. With just-in-time dispatch it also tells them that a task is
about to end, at the time at which a stage's own timer expects it. Times are milliseconds inside, seconds in the record.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from rrfp_jax.core import (
    Announce,
    ClockTick,
    DecideNow,
    DecisionTimer,
    Event,
    FinishStep,
    InputPromised,
    Instruction,
    RunPair,
    RunTask,
    Send,
    StageArbiter,
    StepStarted,
    TaskAnnounced,
    TaskFinished,
    TimingRule,
    WakeAt,
    timing_rule,
)
from rrfp_jax.core.dispatch import GapTimer
from rrfp_jax.core.events import record
from rrfp_jax.core.replicas import StepOwners, moved_pairs
from rrfp_jax.schedules import COMPUTE, Absences, Pair, Task, lanes_beside
from rrfp_jax.schedules.timeline import IdleReason, Span, Timeline, Wait
from rrfp_jax.simulation.costs import Costs, StageTimes, for_graph
from rrfp_jax.simulation.links import (
    AsyncTransfers,
    BlockingTransfers,
    Communication,
    Links,
    RendezvousTransfers,
    VirtualTime,
)

ArbiterLog = list[tuple[Event, tuple[Instruction, ...]]]
"""The events that one arbiter was given, each with its answer, in order."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The costs between tasks: links, host and group. Raises ValueError on negative times."""

    links: Links = field(default_factory=Links)
    communication: Communication = Communication.ASYNC
    dispatch_overhead_ms: float = 0.0
    """Time of the host per task: from the choice of a task to its start, if the device is free by then."""
    agreement_ms: float = 0.0
    """Time of a tensor-parallel group per task: its ranks agree on the task before the host hands it over."""
    just_in_time: Callable[[TimingRule], DecisionTimer] | None = None
    """Makes each stage's timer, from the rule that suits the stage: it says when to choose the task that follows a
    running one. None: at the running task's end."""
    awaits_inputs: bool = False
    """Whether devices wait for inputs by themselves, so that a task may be handed over before its inputs are there. An
    announcement then is a promise (:class:`rrfp_jax.core.InputPromised`)."""

    def __post_init__(self) -> None:
        if self.dispatch_overhead_ms < 0 or self.agreement_ms < 0 or self.piece_ms < 0:
            raise ValueError(
                f"dispatch_overhead_ms ({self.dispatch_overhead_ms}), agreement_ms ({self.agreement_ms}) and piece_ms "
                f"({self.piece_ms}) must not be negative"
            )
        if self.communication is not Communication.ASYNC and (self.just_in_time is not None or self.awaits_inputs):
            option = "launches before the input have" if self.just_in_time is None else "just-in-time dispatch has"
            raise ValueError(
                f"{option} no meaning with {self.communication} communication, in which a stage sends "
                "before it goes on: leave it out, or take async"
            )

    piece_ms: float = 0.0
    """Time of each of the pieces of other work that idle stages run (:class:`rrfp_jax.core.dispatch.GapTimer`); 0: they
    have none."""
    gap_timer: Callable[[], GapTimer] = GapTimer
    """Makes each stage's timer for pieces."""

    @property
    def host_ms(self) -> float:
        """Time of the host per task before it can start; hidden behind the running task where there is one."""
        return self.dispatch_overhead_ms + self.agreement_ms


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The record of a simulated run."""

    timeline: Timeline
    step_ends_ms: tuple[float, ...]
    """The time at which each step had ended on every stage, its agreement included."""
    logs: tuple[ArbiterLog, ...] = ()
    """The log of each stage, if logs were asked for."""
    filled_ms: float = 0.0
    """Time of the pieces of other work that all stages ran."""

    @property
    def step_ms(self) -> list[float]:
        """The intervals between the ends of steps, the first one from the start of the run."""
        return [end - start for start, end in zip((0.0, *self.step_ends_ms), self.step_ends_ms, strict=False)]


def simulate(
    arbiters: Sequence[StageArbiter],
    costs: Costs,
    *,
    machine: Machine = Machine(),
    num_steps: int = 1,
    record_events: bool = False,
    absent: Sequence[Absences] = (),
    owners: Sequence[StepOwners | None] = (),
) -> Simulation:
    """Runs fresh arbiters, one per stage, through ``num_steps`` steps.

    A stage begins its next step as soon as its arbiter has finished the one before. ``absent`` holds the pairs that
    each step lacks beyond those of the graph, beginning again after the last; empty: none. ``owners`` likewise holds
    the owners of each step's microbatches; None: the blocks of replicas. A unit that is lost in one step stays so.
    Raises ValueError where costs, absent pairs, owners and pipeline do not fit together, and RuntimeError, with the
    tasks for which every stage waits, if the run cannot end (a strict order that deadlocks).
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}: simulate at least 1")
    for pairs in absent:
        arbiters[0].graph.skipping(pairs)
    if any(owners) and machine.communication is not Communication.ASYNC:
        raise ValueError("other owners are simulated with asynchronous communication alone: take that")
    driver = _Driver(arbiters, costs, machine, num_steps, record_events=record_events, absent=absent, owners=owners)
    for step in range(num_steps):
        driver.run_step(step)
    driver.queue.run()
    return Simulation(
        timeline=driver.timeline,
        step_ends_ms=tuple(driver.step_ends_ms),
        logs=tuple(stage.log for stage in driver.stages if stage.log is not None),
        filled_ms=driver.filled_ms,
    )


def simulated_steps_ms(
    arbiters: Sequence[StageArbiter],
    costs: Costs,
    *,
    machine: Machine = Machine(),
    num_steps: int,
    starts_ms: Sequence[float] = (),
) -> Iterator[float]:
    """Yields :attr:`Simulation.step_ms` of such a run. Each step is simulated when it is asked for, without a record.

    ``starts_ms`` holds the time at which each stage starts the first step, as if the step before had ended at the last
    of them; empty: all start at 0.
    """
    driver = _Driver(arbiters, costs, machine, num_steps, keeps_record=False, starts_ms=starts_ms)
    before_ms = max(starts_ms, default=0.0)
    for step in range(num_steps):
        driver.run_step(step)
        end_ms = driver.step_ends_ms[step]
        yield end_ms - before_ms
        before_ms = end_ms


class _Stage:
    """The state of a stage's device, host and record."""

    __slots__ = (
        "answers",
        "arbiter",
        "awaits_input",
        "dispatched",
        "filled_until_ms",
        "gaps",
        "holds",
        "host_free_ms",
        "idle",
        "idle_since_ms",
        "is_over",
        "log",
        "started_ms",
        "timer",
        "times",
    )

    def __init__(
        self,
        arbiter: StageArbiter,
        times: StageTimes,
        timer: DecisionTimer | None,
        gaps: GapTimer | None,
        record_events: bool,
    ) -> None:
        self.arbiter, self.times = arbiter, times
        self.dispatched: deque[tuple[float, int, Task | Pair]] = deque()
        """(time at which the host is ready, step, task or pair) of the running program and those behind it."""
        self.host_free_ms = 0.0
        self.awaits_input = False
        """Whether the device waits for an input of the next task."""
        self.holds = False
        """Whether the arbiter has asked to be woken and has started no task since."""
        self.idle: tuple[int, IdleReason] | None = None
        self.idle_since_ms = 0.0
        self.answers = False
        """Whether the next RunTask answers a decision that the timer asked for."""
        self.is_over = False
        self.gaps = gaps
        self.filled_until_ms = 0.0
        """The end of the last piece of other work."""
        self.timer = timer
        self.started_ms = 0.0
        """The start of the running task, for the timer."""
        self.log: ArbiterLog | None = [] if record_events else None


class _Driver:
    def __init__(
        self,
        arbiters: Sequence[StageArbiter],
        costs: Costs,
        machine: Machine,
        num_steps: int,
        *,
        record_events: bool = False,
        keeps_record: bool = True,
        absent: Sequence[Absences] = (),
        owners: Sequence[StepOwners | None] = (),
        starts_ms: Sequence[float] = (),
    ) -> None:
        graph = arbiters[0].graph
        durations = for_graph(costs.durations_ms, graph)
        self.machine, self.num_steps = machine, num_steps
        self._lacks: list[tuple[Absences, StepOwners | None]] = []
        """For each step the pairs that it lacks and its owners."""
        for step in range(num_steps):
            given = owners[step % len(owners)] if owners else None
            pairs = absent[step % len(absent)] if absent else ()
            if given is not None and pairs:
                pairs = moved_pairs(pairs, arbiters[0].graph_of(evaluates=False, owners=given))
            self._lacks.append((pairs, given))
        times = StageTimes(replace(costs, durations_ms=durations), graph.ops)
        self._beside = lanes_beside(graph)
        """The engine of each operation that runs beside compute."""
        self.stages = [
            _Stage(
                arbiter,
                copy(times),
                machine.just_in_time(timing_rule(looks_ahead=arbiter.setup.foresight is not None))
                if machine.just_in_time
                else None,
                machine.gap_timer() if machine.piece_ms else None,
                record_events,
            )
            for arbiter in arbiters
        ]
        self.timeline = Timeline(len(arbiters))
        self._keeps_record = keeps_record
        self.step_ends_ms = [0.0] * num_steps
        self._unfinished = [len(arbiters) - len(given.lost if given else ()) for _, given in self._lacks]
        """The number of stages on which each step has not ended."""
        self.queue = VirtualTime()
        self._host_ms = machine.host_ms
        self._senders_wait = machine.communication is not Communication.ASYNC
        """Whether a stage may hear of its task's end later than at that end."""
        self._may_lose = machine.links.announce_loss > 0
        self._announcements_ms: list[dict[int, float]] = [{} for _ in arbiters]
        """The time of announcements, by sending and receiving stage."""
        self.transfers: AsyncTransfers
        parts = self.queue, machine.links, self.deliver
        if machine.communication is Communication.ASYNC:
            self.transfers = AsyncTransfers(*parts)
        elif machine.communication is Communication.BLOCKING:
            self.transfers = BlockingTransfers(*parts, arbiters)
        else:
            self.transfers = RendezvousTransfers(*parts, arbiters, lambda stage: bool(self.stages[stage].dispatched))
        self._carry_out: dict[type[Instruction], Callable[[int, Any], None]] = {
            RunTask: self._dispatch,
            RunPair: self._dispatch,
            Send: self.transfers.send,
            Announce: self._announce,
            WakeAt: self._wake_at,
            FinishStep: self._finish_step,
        }

        self.filled_ms = 0.0
        """Time of all pieces of other work."""
        self._strides = [1 + arbiter.setup.delay for arbiter in arbiters]
        """How many steps each stage may have under way."""
        for stage, start_ms in enumerate(starts_ms or [0.0] * len(arbiters)):
            for step in range(min(self._strides[stage], num_steps)):
                self.queue.post(start_ms, self._start_step, stage, step)

    def run_step(self, step: int) -> None:
        """Runs until this step has ended on every stage."""
        while self._unfinished[step] and self.queue.run():
            pass
        if self._unfinished[step]:
            lines = [
                f"  stage {index}: {waiting}"
                for index, stage in enumerate(self.stages)
                for waiting in stage.arbiter.waiting()[:3]
            ]
            raise RuntimeError("the simulated run cannot end:\n" + "\n".join(lines))

    def deliver(self, index: int, event: Event) -> None:
        """Hands an event to an arbiter, and carries out its instructions."""
        stage = self.stages[index]
        instructions = stage.arbiter.handle(event)
        if stage.log is not None:
            stage.log.append((event, tuple(instructions)))
        carry_out = self._carry_out
        for instruction in instructions:
            carry_out[type(instruction)](index, instruction)
        if stage.awaits_input:
            self._start_task(index, stage)
        if self._keeps_record and (stage.awaits_input or not stage.dispatched):
            self._note_idle(index, stage)
        if stage.gaps is not None and not stage.dispatched:
            self._fill(index)

    def _fill(self, index: int) -> None:
        """Has an idle stage run a piece of other work, if one fits in."""
        stage, now_ms = self.stages[index], self.queue.now_ms
        gaps = stage.gaps
        assert gaps is not None
        if stage.dispatched or now_ms < stage.filled_until_ms:
            return
        gaps.idles(stage.arbiter.num_started, now_ms / 1e3)
        if stage.arbiter.is_active and gaps.fits(now_ms / 1e3, earliest_s=stage.arbiter.earliest_input_s(now_ms / 1e3)):
            end_ms = stage.filled_until_ms = now_ms + self.machine.piece_ms
            gaps.piece_ended(self.machine.piece_ms / 1e3)
            self.filled_ms += self.machine.piece_ms
            self.queue.post(end_ms, self._fill, index)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _start_step(self, index: int, step: int) -> None:
        absent, owners = self._lacks[step]
        if owners is None or index not in owners.lost:
            self.deliver(index, StepStarted(step, self.queue.now_ms / 1e3, absent, owners=owners))

    def _finish_step(self, index: int, instruction: FinishStep) -> None:
        step = instruction.step
        self.step_ends_ms[step] = max(self.step_ends_ms[step], self.queue.now_ms)
        self._unfinished[step] -= 1
        self.queue.is_paused |= not self._unfinished[step]
        if step + self._strides[index] < self.num_steps:
            self.queue.post(self.queue.now_ms, self._start_step, index, step + self._strides[index])
        self.stages[index].is_over = step + 1 == self.num_steps

    # -- foresight ---------------------------------------------------------------------------------------------------

    def _announce(self, index: int, instruction: Announce) -> None:
        """Hands an announcement to its target: at once, although it counts later, unless the target holds.

        Only a stage that holds may answer, and so must hear it at its time. This saves an action per announcement.
        """
        step, message, target = instruction
        if self._may_lose and self.machine.links.loses_announcement(step, message):
            return
        lasts_ms = self._announcements_ms[index].get(target)
        if lasts_ms is None:
            lasts_ms = self._announcements_ms[index][target] = self.machine.links.announcement_ms(index, target)
        at_ms, stage = self.queue.now_ms + lasts_ms, self.stages[target]
        if self.machine.awaits_inputs:
            at_ms = max(at_ms, self.stages[index].host_free_ms)  # the sender's launch has ended by then
            self.queue.post_arrival(at_ms, self.deliver, target, InputPromised(step, at_ms / 1e3, message))
            return
        event = record(TaskAnnounced, (step, at_ms / 1e3, message))
        if stage.holds:
            self.queue.post_arrival(at_ms, self.deliver, target, event)
            return
        stage.arbiter.handle(event)  # without an answer, as the stage does not hold
        if stage.log is not None:
            stage.log.append((event, ()))

    def _wake_at(self, index: int, instruction: WakeAt) -> None:
        self.queue.post(instruction.time_s * 1e3, self._tick, index, record(ClockTick, instruction))
        self.stages[index].holds = True

    def _tick(self, index: int, tick: ClockTick) -> None:
        if self.stages[index].holds:
            self.deliver(index, tick)

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _dispatch(self, index: int, instruction: RunTask | RunPair) -> None:
        stage = self.stages[index]
        step, task = instruction
        if self._beside and isinstance(task, Task) and task.kind in self._beside:
            # An operation on an engine beside compute, which is free: no host and no order of the device delay it.
            start_ms = self.queue.now_ms
            end_ms = start_ms + stage.times.duration_ms(step, task)
            if self._keeps_record:
                span = Span(step, index, task, start_ms / 1e3, end_ms / 1e3, self._beside[task.kind])
                self.timeline.spans.append(span)
            self.queue.post(end_ms, self.deliver, index, TaskFinished(step, end_ms / 1e3, task))
            return
        stage.holds = False
        stage.host_free_ms = max(stage.host_free_ms, self.queue.now_ms) + self._host_ms
        if stage.gaps is not None:
            stage.gaps.goes_on(self.queue.now_ms / 1e3)
        # The device runs a piece to its end.
        stage.dispatched.append((max(stage.host_free_ms, stage.filled_until_ms), step, task))
        if stage.answers:
            stage.timer.latency((stage.host_free_ms - self.queue.now_ms) / 1e3)  # type: ignore[union-attr]
        if len(stage.dispatched) == 1:
            self._start_task(index, stage)

    def _start_task(self, index: int, stage: _Stage) -> None:
        now_ms = self.queue.now_ms
        host_ready_ms, step, task = stage.dispatched[0]
        if self.machine.awaits_inputs and isinstance(task, Task):
            stage.awaits_input = stage.arbiter.awaits_input(task)
            if stage.awaits_input:
                return
        start_ms = max(now_ms, host_ready_ms)
        if stage.idle is not None:
            self._set_idle(index, stage, None)
        if start_ms > now_ms and self._keeps_record:
            self.timeline.waits.append(Wait(step, index, now_ms / 1e3, start_ms / 1e3, IdleReason.HOST))
        end_ms = start_ms + stage.times.of_program_ms(step, task)
        if stage.timer is not None:
            stage.started_ms = start_ms
            decide_ms = start_ms + 1e3 * stage.timer.delay_s(task)
            if decide_ms < end_ms:
                last = task.second if isinstance(task, Pair) else task
                self.queue.post(decide_ms, self._decide, index, RunTask(step, last))
        if self._keeps_record:
            # Two tasks that run at once are drawn as halves of their time: a span is of one task.
            tasks = task if isinstance(task, Pair) else (task,)
            lasts_ms = (end_ms - start_ms) / len(tasks)
            for number, one in enumerate(tasks):
                until_ms = end_ms if number + 1 == len(tasks) else start_ms + lasts_ms
                begun_ms = start_ms + number * lasts_ms
                self.timeline.spans.append(record(Span, (step, index, one, begun_ms / 1e3, until_ms / 1e3, COMPUTE)))
        self.queue.post(end_ms, self._end_task, index)

    def _decide(self, index: int, run: RunTask) -> None:
        stage = self.stages[index]
        if len(stage.dispatched) > 1:
            return  # the next task has been chosen already
        stage.answers = True
        self.deliver(index, DecideNow(run.step, self.queue.now_ms / 1e3, run.task))
        stage.answers = False

    def _end_task(self, index: int) -> None:
        stage = self.stages[index]
        _, step, task = stage.dispatched.popleft()
        if stage.timer is not None:
            stage.timer.ended(task, (self.queue.now_ms - stage.started_ms) / 1e3)
        # A task that was dispatched ahead starts before the arbiter hears of this end: its device does not wait.
        if stage.dispatched:
            self._start_task(index, stage)
        for one in task if isinstance(task, Pair) else (task,):
            self.transfers.task_ended(index, step, one)
        if self._senders_wait and self._keeps_record and not stage.dispatched:
            self._note_idle(index, stage)

    # -- record ------------------------------------------------------------------------------------------------------

    def _note_idle(self, index: int, stage: _Stage) -> None:
        """Records why a stage without a running task is idle."""
        if stage.arbiter.step is None:
            return
        if stage.is_over:
            self._set_idle(index, stage, None)
            return
        # A stage that is held up by its own transfer (blocking and rendezvous) counts as waiting for an input.
        reason = stage.arbiter.idle_reason() or IdleReason.INPUT
        self._set_idle(index, stage, (stage.arbiter.step, reason))

    def _set_idle(self, index: int, stage: _Stage, idle: tuple[int, IdleReason] | None) -> None:
        if idle == stage.idle:
            return
        now_ms = self.queue.now_ms
        if stage.idle is not None and now_ms > stage.idle_since_ms:
            step, reason = stage.idle
            self.timeline.waits.append(Wait(step, index, stage.idle_since_ms / 1e3, now_ms / 1e3, reason))
        stage.idle, stage.idle_since_ms = idle, now_ms
