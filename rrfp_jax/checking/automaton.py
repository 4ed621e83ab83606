"""One place as a finite automaton: its arbiter's states, numbered, with their transitions computed once.

A state is the arbiter's own key together with the judge's account, so two states are one only if both agree. Every
transition is made by a real arbiter on a copy, judged, and its new state validated. ``moves`` gives what a place can
visibly do next; which deliveries it may leave out is explained in :mod:`rrfp_jax.checking.explore`.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple, TypeVar

from rrfp_jax.arbitration import DecideNow, Event, IllegalTransition, StageArbiter, TaskFinished
from rrfp_jax.checking.contract import Wiring
from rrfp_jax.checking.judge import Account, StageJudge
from rrfp_jax.checking.setting import Setting
from rrfp_jax.checking.trace import Violation
from rrfp_jax.tasks import Task

T = TypeVar("T")


class Move(NamedTuple):
    """What a place can do next: packets reach it, then perhaps something happens to a task that it runs."""

    packets: int
    """In ascending order of their bits, ``last_packet`` excepted, which comes last."""
    last_packet: int
    """The packet that the place answers; 0 if something else happens last."""
    last: TaskFinished | DecideNow | None
    """A running task ends, or is about to."""
    target: int


class Fault(Exception):
    """A move broke a rule: what was broken, and the events of the place from the state on."""

    def __init__(self, what: str, events: list[Event]) -> None:
        super().__init__(what)
        self.what, self.events = what, events


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
        self._judge = StageJudge(setting, place, wiring, demand_work=demand_work)
        self._packets, self._reduced = wiring.packets, reduced
        self._accounts: list[Account] = []
        self._arbiters: list[StageArbiter] = []
        self._numbers: dict[Hashable, int] = {}
        self._deliveries: dict[tuple[int, int], tuple[int, bool]] = {}
        self._of_tasks: dict[tuple[int, bool, TaskFinished | DecideNow], tuple[int, bool]] = {}
        self._may_postpone = not setting.dispatch_ahead
        """Whether a silent decision may wait; with tasks ahead another one might be the last by then."""
        self._number(setting.make_arbiter(place), Account())

    @property
    def num_states(self) -> int:
        return len(self._arbiters)

    def account(self, state: int) -> Account:
        return self._accounts[state]

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

    def events(self, move: Move) -> list[Event]:
        """A move as the events that it stands for."""
        bits = _bits(move.packets & ~move.last_packet) + _bits(move.last_packet)
        packets = [self._packets.event(bit) for bit in bits]
        return packets if move.last is None else [*packets, move.last]

    def _single_moves(self, state: int, in_flight: int) -> list[Move]:
        """Every delivery, every end of a task and every decision as a move of its own: no reduction."""
        bits = [bit for bit in _bits(in_flight & ~self._packets.joins) if self._is_due(state, bit)]
        moves = [Move(bit, bit, None, self._deliver(state, bit)[0]) for bit in bits]
        happenings: list[TaskFinished | DecideNow] = [
            *self._possible_ends(state, in_flight),
            *self._possible_decisions(state),
        ]
        return moves + [Move(0, 0, what, self._happen(state, what)[0]) for what in happenings]

    def _visible_moves(self, state: int, in_flight: int) -> list[Move]:
        """The visible moves, without those that one packet less and its delivery afterwards come to."""
        silent = {0: state}
        moves: list[Move] = []
        for packets in _subsets(_bits(in_flight & ~self._packets.joins)):
            for bit in _bits(packets):
                before = silent.get(packets & ~bit)
                if before is None or not self._is_due(before, bit):
                    continue
                target, is_visible = self._behind(packets & ~bit, partial(self._deliver, before, bit))
                if is_visible:
                    moves.append(Move(packets, bit, None, target))
                elif silent.setdefault(packets, target) != target:
                    what = "the order of arrivals shows in the arbiter's state"
                    raise Fault(what, self.events(Move(packets, bit, None, target)))
        for packets, before in silent.items():
            moves += self._moves_of_tasks(packets, before, in_flight)
        leads_to = {_what(move): move.target for move in moves}
        return [move for move in moves if not self._is_contained(move, leads_to)]

    def _moves_of_tasks(self, packets: int, before: int, in_flight: int) -> list[Move]:
        """What can happen to running tasks after the silent delivery of these packets."""
        moves: list[Move] = []
        for end in self._possible_ends(before, in_flight):
            target, _ = self._behind(packets, partial(self._happen, before, end))
            moves.append(Move(packets, 0, end, target))
        for decision in self._possible_decisions(before):
            target, is_visible = self._behind(packets, partial(self._happen, before, decision))
            if is_visible or not self._may_postpone:
                moves.append(Move(packets, 0, decision, target))
            else:
                check = partial(self._check_waits, before, decision, target, in_flight & ~packets)
                self._behind(packets, check, decision)
        return moves

    def _check_waits(self, before: int, decision: DecideNow, target: int, in_flight: int) -> None:
        """A silent decision may as well come after whatever happens next, or not at all where the task ends."""
        for end in self._possible_ends(target, in_flight):
            if self._happen(target, end)[0] != self._happen(before, end)[0]:
                raise Fault("a decision that was not answered shows after the end of its task", [end])
        for bit in _bits(in_flight & ~self._packets.joins):
            if not self._is_due(target, bit):
                continue
            later, _ = self._deliver(before, bit)
            if self._possible_decisions(later) != [decision] or (
                self._happen(later, decision)[0] != self._deliver(target, bit)[0]
            ):
                raise Fault("it shows whether a decision came before or after an arrival", [self._packets.event(bit)])

    def _is_contained(self, move: Move, leads_to: dict[Hashable, int]) -> bool:
        """Whether one of the move's packets may as well arrive, silently, after it."""
        for bit in _bits(move.packets & ~move.last_packet):
            sooner = leads_to.get(_what(move._replace(packets=move.packets & ~bit)))
            if sooner is not None and self._is_due(sooner, bit) and self._deliver(sooner, bit) == (move.target, False):
                return True
        return False

    def _possible_ends(self, state: int, in_flight: int) -> list[TaskFinished]:
        step = self._accounts[state].step
        running = self._judge.may_end(self._accounts[state])
        return [TaskFinished(step, 0.0, task) for task in running if not self._judge.joins(step, task) & ~in_flight]

    def _possible_decisions(self, state: int) -> list[DecideNow]:
        decision = self._judge.decision(self._accounts[state])
        return [] if decision is None else [decision]

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
            raise Fault(fault.what, [*self.events(Move(packets, 0, decision, 0)), *fault.events]) from fault

    def _deliver(self, state: int, bit: int) -> tuple[int, bool]:
        """The state after a packet's delivery, and whether the place answers it."""
        known = self._deliveries.get((state, bit))
        if known is None:
            known = self._deliveries[state, bit] = self._handle(state, self._packets.event(bit))
        return known

    def _happen(self, state: int, what: TaskFinished | DecideNow) -> tuple[int, bool]:
        """The state after a running task has ended, or is about to, and whether the place answers that."""
        key = (state, isinstance(what, DecideNow), what)  # tuples of both kinds may be equal
        known = self._of_tasks.get(key)
        if known is None:
            known = self._of_tasks[key] = self._handle(state, what)
        return known

    def _handle(self, state: int, event: Event) -> tuple[int, bool]:
        arbiter, num_states = self._arbiters[state].copy(), self.num_states
        try:
            instructions = arbiter.handle(event)
            account = self._judge.follow(self._accounts[state], event, instructions)
            number = self._number(arbiter, account)
        except (Violation, IllegalTransition, AssertionError) as error:
            raise Fault(str(error) or f"an invariant of the arbiter is broken: {error!r}", [event]) from error
        if number == num_states:  # a new one
            for decision in self._judge.idle_decisions(account):
                _check_changes_nothing(arbiter, event, decision)
        return number, bool(instructions)

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


def _what(move: Move) -> Hashable:
    """All of a move but where it leads; records of tasks that end and that are about to may be equal as tuples."""
    return (*move[:3], type(move.last))


def _check_changes_nothing(arbiter: StageArbiter, event: Event, decision: DecideNow) -> None:
    """Of a new state, which ``event`` has led to."""
    twin = arbiter.copy()
    if twin.handle(decision) or twin.key() != arbiter.key():
        what = f"a decision about {decision.task} that is too late, or comes twice, changes something"
        raise Fault(what, [event, decision])


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
