"""Runs of bare arbiters in drawn interleavings, logged as the runtime logs them."""

from collections.abc import Callable, Mapping
from math import inf

from rrfp_jax.core import (
    Agreement,
    Announce,
    ClockTick,
    DecideNow,
    Event,
    GroupHeard,
    InputArrived,
    Instruction,
    Message,
    RunTask,
    Send,
    StageArbiter,
    StageSetup,
    StepRules,
    StepStarted,
    TaskAnnounced,
    TaskFinished,
    TellGroup,
    WakeAt,
    hint_by_name,
    ready,
)
from rrfp_jax.runtime.event_log import EventLog, open_segment
from rrfp_jax.schedules import Absences, chain, linear

Place = tuple[int, int]
"""A stage and a member of its group."""
Draw = Callable[[int], int]
"""``draw(n)`` gives a number from 0 to n - 1."""


def first_of(_: int) -> int:
    return 0


def arbiter_of(stage: int, *, num_stages: int = 3, num_microbatches: int = 3, hint: str = "bf") -> StageArbiter:
    """One stage of a chain without R and U, window 2."""
    return StageArbiter(
        StageSetup(
            chain(num_stages, num_microbatches),
            linear(num_stages),
            stage,
            consumption=ready(hint_by_name(hint)),
            window=2,
            rules=StepRules(updates=False, agreement=Agreement.ALL),
        )
    )


class LoggedRun:
    """Carries out what arbiters instruct, one drawn event after another, each at its own second.

    Args:
        lost: messages that never arrive.
        decides_early: tell a stage of each task once that it is about to end, at any moment from its start on. Tasks
            then end in the order in which they were started, as they do where arbiters hand over certain choices.
    """

    def __init__(
        self,
        arbiters: Mapping[Place, StageArbiter],
        *,
        log_steps: int = 2,
        draw: Draw = first_of,
        lost: frozenset[Message] = frozenset(),
        decides_early: bool = False,
    ) -> None:
        self.arbiters, self.draw, self.lost = arbiters, draw, lost
        self.decides_early = decides_early
        self.ends_in_order = decides_early or any(arbiter.certain_ahead for arbiter in arbiters.values())
        self.logs = {place: EventLog(arbiter, log_steps) for place, arbiter in arbiters.items()}
        self.pending: list[tuple[Place, Event]] = []
        self.now_s = 0.0

    def start(self, num_steps: int, absences: tuple[Absences, ...] = ((),)) -> "LoggedRun":
        """Post the starts of all steps; those of a stage stay in order."""
        for step in range(num_steps):
            self.pending += [(place, StepStarted(step, 0.0, absences[step % len(absences)])) for place in self.arbiters]
        return self

    def run(self, num_events: float = inf) -> "LoggedRun":
        """Carry out everything, or so many events."""
        while self.can_go_on() and self.now_s < num_events:
            self.take(*self.draw_event())
        return self

    def can_go_on(self) -> bool:
        """Whether anything is under way but starts that wait for the end of a step."""
        return any(self._may_come(p, e) for p, e in self.pending)

    def _may_come(self, place: Place, event: Event) -> bool:
        return not isinstance(event, StepStarted) or self.arbiters[place].may_start(event.step)

    def draw_event(self) -> tuple[Place, Event]:
        """What happens next; of a place some events come in their order, whichever of them is drawn."""
        possible = [n for n, (p, e) in enumerate(self.pending) if self._may_come(p, e)]
        number = possible[self.draw(len(possible))]
        place, event = self.pending[number]
        if isinstance(event, StepStarted) or (isinstance(event, TaskFinished) and self.ends_in_order):
            number = next(n for n, (p, e) in enumerate(self.pending) if p == place and type(e) is type(event))
        self.now_s += 1.0
        place, event = self.pending.pop(number)
        if isinstance(event, ClockTick):
            self.now_s = max(self.now_s, event.time_s)
        return place, event._replace(time_s=self.now_s)

    def take(self, place: Place, event: Event) -> None:
        arbiter, instructions = self.arbiters[place], list[Instruction]()
        try:
            instructions = arbiter.handle(event)
        finally:
            self.logs[place].append(event, instructions)
        for instruction in instructions:
            self._carry_out(place, instruction)

    def _carry_out(self, place: Place, instruction: Instruction) -> None:
        stage, member = place
        match instruction:
            case RunTask(step, task):
                self.pending.append((place, TaskFinished(step, 0.0, task)))
                if self.decides_early:
                    self.pending.append((place, DecideNow(step, 0.0, task)))
            case Send(step, message, receiver) if message not in self.lost:
                self.pending += [(p, InputArrived(step, 0.0, message)) for p in self._deliveries(receiver, member)]
            case Announce(step, message, receiver):
                self.pending.append(((receiver, 0), TaskAnnounced(step, 0.0, message)))
            case WakeAt(step, time_s):
                self.pending.append((place, ClockTick(step, time_s)))
            case TellGroup(step, other, note):
                self.pending.append(((stage, other), GroupHeard(step, 0.0, member, note)))

    def _deliveries(self, receiver: int, member: int) -> list[Place]:
        """Every member of the receiving stage gets one copy of its own, from the sender's first member."""
        return [] if member else [place for place in self.arbiters if place[0] == receiver]


def replays_as_recorded(log: EventLog) -> bool:
    """Whether the core answers the events of every segment as it did."""
    for segment in log.segments:
        arbiter = open_segment(log.arbiter, segment)
        if [(event, arbiter.handle(event)) for event, _ in segment.entries] != segment.entries:
            return False
    return True
