"""One place as a finite automaton: its arbiter's states, numbered, with their transitions computed once.

A state is the arbiter's own key together with the judge's account, so two states are one only if both agree. Every
transition is made by a real arbiter on a copy, judged, and its new state validated. Where the arbiter may choose
(:mod:`tests.model_checker.free_choice`), one event has an outcome for each choice. ``moves`` gives what a place can
visibly do next; which deliveries it may leave out is explained in :mod:`tests.model_checker.explore`.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

from rrfp_jax.core import (
    ClockTick,
    DecideNow,
    Event,
    IllegalTransition,
    StageArbiter,
    TaskAnnounced,
    TaskFinished,
    WakeAt,
)
from rrfp_jax.schedules import Task
from tests.model_checker.account import Account
from tests.model_checker.contract import Wiring
from tests.model_checker.free_choice import TICK_S, Choices, FreeChoice, Script
from tests.model_checker.judge import StageJudge
from tests.model_checker.packets import Stimulus
from tests.model_checker.setting import Setting
from tests.model_checker.trace import Violation

T = TypeVar("T")
Happening = TaskFinished | DecideNow | ClockTick
"""What can happen at a place besides deliveries."""


class Move(NamedTuple):
    """What a place can do next: packets reach it, then perhaps something happens to a task that it runs."""

    packets: int
    """In ascending order of their bits, ``last_packet`` excepted, which comes last."""
    last_packet: int
    """The packet that the place answers; 0 if something else happens last."""
    last: Happening | None
    """A running task ends, or is about to, or the tick comes that was asked for."""
    target: int
    choices: Choices = ()
    """Those that belong to what comes last."""


class Outcome(NamedTuple):
    """What may come of an event."""

    choices: Choices
    target: int
    is_visible: bool
    """Whether the place answers it."""


class Fault(Exception):
    """A move broke a rule: what was broken, and the events of the place from the state on."""

    def __init__(self, what: str, stimuli: list[Stimulus]) -> None:
        super().__init__(what)
        self.what, self.stimuli = what, stimuli


class PlaceAutomaton:
    """The states of one place that have come up so far; 0 is the first.

    ``sent[state]`` and ``delivered[state]`` are packets as bits.
    """

    def __init__(self, setting: Setting, place: int, wiring: Wiring, *, reduced: bool, demand_work: bool) -> None:
        self.sent: list[int] = []
        self.delivered: list[int] = []
        self.is_done: list[bool] = []
        self.targets: dict[tuple[int, int], tuple[int, ...]] = {}
        """By state and packets in flight to the place, the states that its moves lead to; filled by :meth:`expand`."""
        self._place = place
        self._judge = StageJudge(setting, place, wiring, demand_work=demand_work)
        self._script = setting.foresight.script if isinstance(setting.foresight, FreeChoice) else Script()
        self._packets, self._reduced = wiring.packets, reduced
        self._accounts: list[Account] = []
        self._arbiters: list[StageArbiter] = []
        self._numbers: dict[Hashable, int] = {}
        self._deliveries: dict[tuple[int, int], tuple[Outcome, ...]] = {}
        self._happenings: dict[tuple[int, type[Event], Happening], tuple[Outcome, ...]] = {}
        self._number(setting.make_arbiter(place), Account())

    @property
    def num_states(self) -> int:
        return len(self._arbiters)

    def account(self, state: int) -> Account:
        return self._accounts[state]

    def arbiter(self, state: int) -> StageArbiter:
        """The arbiter in a state, to look at."""
        return self._arbiters[state]

    def running(self, state: int) -> list[Task]:
        return self._judge.running(self._accounts[state])

    def expand(self, state: int, in_flight: int) -> tuple[int, ...]:
        """Fill in and return ``targets[state, in_flight]``; raises Fault."""
        targets = tuple(dict.fromkeys(move.target for move in self.moves(state, in_flight)))
        self.targets[state, in_flight] = targets
        return targets

    def moves(self, state: int, in_flight: int) -> list[Move]:
        """What the place can do while these packets are in flight to it; raises Fault."""
        return self._visible_moves(state, in_flight) if self._reduced else self._single_moves(state, in_flight)

    def stimuli(self, move: Move) -> list[Stimulus]:
        """A move as the events that it stands for."""
        bits = _bits(move.packets & ~move.last_packet) + _bits(move.last_packet)
        events = [*map(self._packets.event, bits), *([] if move.last is None else [move.last])]
        return [Stimulus(self._place, e, move.choices * (n == len(events))) for n, e in enumerate(events, start=1)]

    def _single_moves(self, state: int, in_flight: int) -> list[Move]:
        """Every delivery and everything else that can happen as a move of its own: no reduction."""
        bits = [bit for bit in _bits(in_flight & ~self._packets.joins) if self._is_due(state, bit)]
        moves = [Move(bit, bit, None, o.target, o.choices) for bit in bits for o in self._deliver(state, bit)]
        happenings: list[Happening] = [*self._possible_ends(state, in_flight), *self._possible_ticks(state)]
        happenings += self._possible_decisions(state)
        return moves + [Move(0, 0, what, o.target, o.choices) for what in happenings for o in self._happen(state, what)]

    def _visible_moves(self, state: int, in_flight: int) -> list[Move]:
        """The visible moves, without those that one packet less and its delivery afterwards come to."""
        silent = {0: state}
        moves: list[Move] = []
        for packets in _subsets(_bits(in_flight & ~self._packets.joins)):
            for bit in _bits(packets):
                before = silent.get(packets & ~bit)
                if before is None or not self._is_due(before, bit):
                    continue
                for choices, target, is_visible in self._behind(packets & ~bit, partial(self._deliver, before, bit)):
                    move = Move(packets, bit, None, target, choices)
                    if is_visible:
                        moves.append(move)
                    elif silent.setdefault(packets, target) != target:
                        raise Fault("the order of arrivals shows in the arbiter's state", self.stimuli(move))
        for packets, before in silent.items():
            moves += self._moves_of_tasks(packets, before, in_flight)
        leads_to = {_what(move, move.packets): move.target for move in moves}
        return [move for move in moves if not self._is_contained(move, leads_to)]

    def _moves_of_tasks(self, packets: int, before: int, in_flight: int) -> list[Move]:
        """What can happen after the silent delivery of these packets: to running tasks, or that the tick comes."""
        moves: list[Move] = []
        happenings: list[Happening] = [*self._possible_ends(before, in_flight), *self._possible_ticks(before)]
        for what in happenings:
            for choices, target, _ in self._behind(packets, partial(self._happen, before, what)):
                moves.append(Move(packets, 0, what, target, choices))
        for decision in self._possible_decisions(before):
            for choices, target, is_visible in self._behind(packets, partial(self._happen, before, decision)):
                if is_visible:
                    moves.append(Move(packets, 0, decision, target, choices))
                else:
                    check = partial(self._check_waits, before, decision, target, in_flight & ~packets)
                    self._behind(packets, check, decision)
        return moves

    def _check_waits(self, before: int, decision: DecideNow, target: int, in_flight: int) -> None:
        """A silent decision may as well come after whatever happens next, or not at all where the task ends."""
        for end in self._possible_ends(target, in_flight):
            later = _targets(self._happen(before, end))
            if end.task != decision.task:  # of an engine
                later = {o for state in later for o in self._after_decision(state, decision)}
            if not _targets(self._happen(target, end)) <= later:
                raise Fault("a decision that was not answered shows after the end of its task", [self._stimulus(end)])
        for bit in _bits(in_flight & ~self._packets.joins):
            if not self._is_due(target, bit):
                continue
            later = _targets(self._deliver(before, bit))
            after = {o for state in later for o in self._after_decision(state, decision)}
            if not _targets(self._deliver(target, bit)) <= after:
                stimulus = self._stimulus(self._packets.event(bit))
                raise Fault("it shows whether a decision came before or after an arrival", [stimulus])

    def _is_contained(self, move: Move, leads_to: dict[Hashable, int]) -> bool:
        """Whether one of the move's packets may as well arrive, silently, after it."""
        for bit in _bits(move.packets & ~move.last_packet):
            sooner = leads_to.get(_what(move, move.packets & ~bit))
            if sooner is not None and self._is_due(sooner, bit):
                outcomes = self._deliver(sooner, bit)
                if any(o.target == move.target and not o.is_visible for o in outcomes):
                    return True
        return False

    def _possible_ends(self, state: int, in_flight: int) -> list[TaskFinished]:
        step = self._accounts[state].step
        running = self._judge.may_end(self._accounts[state])
        there = in_flight | self.delivered[state]
        return [TaskFinished(step, 0.0, task) for task in running if not self._judge.joins(step, task) & ~there]

    def _possible_decisions(self, state: int) -> list[DecideNow]:
        decision = self._judge.decision(self._accounts[state])
        return [] if decision is None else [decision]

    def _possible_ticks(self, state: int) -> list[ClockTick]:
        """The tick that the place has asked for, at any time."""
        account = self._accounts[state]
        return [] if account.wake_s is None else [ClockTick(account.step, TICK_S)]

    def _is_due(self, state: int, bit: int) -> bool:
        """Whether a packet may reach the place now: the start of a step waits for the end of the one before."""
        if bit & self._packets.starts and self._accounts[state].is_active:
            return False
        return not self._packets.earlier[bit.bit_length() - 1] & ~self.delivered[state]

    def _behind(self, packets: int, act: Callable[[], T], decision: DecideNow | None = None) -> T:
        """What ``act`` gives; its fault is told with what came before: these packets, and perhaps a decision."""
        try:
            return act()
        except Fault as fault:
            raise Fault(fault.what, [*self.stimuli(Move(packets, 0, decision, 0)), *fault.stimuli]) from fault

    def _stimulus(self, event: Event, choices: Choices = ()) -> Stimulus:
        return Stimulus(self._place, event, choices)

    def _deliver(self, state: int, bit: int) -> tuple[Outcome, ...]:
        """What may come of a packet's delivery."""
        known = self._deliveries.get((state, bit))
        if known is None:
            known = self._deliveries[state, bit] = self._outcomes(state, self._packets.event(bit))
        return known

    def _happen(self, state: int, what: Happening) -> tuple[Outcome, ...]:
        """What may come of what happens at the place."""
        key = (state, type(what), what)  # tuples of different types may be equal
        known = self._happenings.get(key)
        if known is None:
            known = self._happenings[key] = self._outcomes(state, what)
        return known

    def _after_decision(self, state: int, decision: DecideNow) -> set[int]:
        """The states after a decision; where it comes too late, it changes nothing."""
        return _targets(self._happen(state, decision)) if self._possible_decisions(state) == [decision] else {state}

    def _outcomes(self, state: int, event: Event) -> tuple[Outcome, ...]:
        num_states = self.num_states
        found = self._script.outcomes(partial(self._handle, state, event))
        outcomes = tuple(Outcome(choices, *result) for choices, result in found)
        for outcome in outcomes:
            if outcome.target >= num_states:
                self._check_idle_events(outcome.target, self._stimulus(event, outcome.choices))
        return outcomes

    def _handle(self, state: int, event: Event) -> tuple[int, bool]:
        """The state after an event, with the choices of the script, and whether the place answers it."""
        arbiter = self._arbiters[state].copy()
        try:
            instructions = arbiter.handle(event)
            account = self._judge.follow(self._accounts[state], event, instructions)
            return self._number(arbiter, account), bool(instructions)
        except (Violation, IllegalTransition, AssertionError) as error:
            what = str(error) or f"an invariant of the arbiter is broken: {error!r}"
            raise Fault(what, [self._stimulus(event, self._script.chosen)]) from error

    def _check_idle_events(self, state: int, before: Stimulus) -> None:
        """What is too late, too early, false or told twice changes nothing in a new state, which ``before`` led to."""
        arbiter, account = self._arbiters[state], self._accounts[state]
        asks_again = [WakeAt(account.step, account.wake_s)] if account.wake_s is not None else []
        for event in self._judge.idle_events(account):
            twin = arbiter.copy()
            self._script.choose(())
            allowed = ([], asks_again) if isinstance(event, ClockTick) else ([],)
            if twin.handle(event) not in allowed or twin.key() != arbiter.key():
                raise Fault(f"{_tell_idle(event)} changes something", [before, self._stimulus(event)])
        if account.wake_s is not None:
            self._check_ends_of_hold(state, before)

    def _check_ends_of_hold(self, state: int, before: Stimulus) -> None:
        """An announcement that ends a hold, whatever it makes the place run, leads to where the tick leads."""
        (tick,) = self._possible_ticks(state)
        announcement = next(e for e in self._judge.idle_events(self._accounts[state]) if isinstance(e, TaskAnnounced))
        announcement = announcement._replace(step=tick.step)
        try:
            by_tick = {outcome[:2] for outcome in self._happen(state, tick)}
            told = {outcome[:2] for outcome in self._outcomes(state, announcement) if None not in outcome.choices}
        except Fault as fault:
            raise Fault(fault.what, [before, *fault.stimuli]) from fault
        if by_tick != told:
            raise Fault("an announcement ends a hold otherwise than a tick", [before, self._stimulus(announcement)])

    def _number(self, arbiter: StageArbiter, account: Account) -> int:
        key = (arbiter.key(), account)
        number = self._numbers.get(key)
        if number is None:
            arbiter.validate()
            number = self._numbers[key] = len(self._arbiters)
            self._arbiters.append(arbiter)
            self._accounts.append(account)
            self.sent.append(account.sent)
            self.delivered.append(account.delivered)
            self.is_done.append(self._judge.is_done(account))
        return number


def _what(move: Move, packets: int) -> Hashable:
    """All of a move but where it leads, with these packets; what happens last may be equal as tuples."""
    return (packets, move.last_packet, move.last, type(move.last), move.choices)


def _targets(outcomes: Iterable[Outcome]) -> set[int]:
    return {outcome.target for outcome in outcomes}


def _tell_idle(event: Event) -> str:
    if isinstance(event, DecideNow):
        return f"a decision about {event.task} that is too late, or comes twice,"
    return "a tick that comes early or in vain" if isinstance(event, ClockTick) else "an announcement"


def _bits(bits: int) -> list[int]:
    """The single bits of a number, ascending."""
    single = []
    while bits:
        lowest = bits & -bits
        single.append(lowest)
        bits ^= lowest
    return single


def _subsets(bits: list[int]) -> list[int]:
    """All non-empty sums of these bits; every proper part of a sum comes before it."""
    sums = [0]
    for bit in bits:
        sums += [known | bit for known in sums]
    return sums[1:]
