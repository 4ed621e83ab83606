"""One place as a finite automaton: its arbiter's states, numbered, with their transitions computed once.

A state is the arbiter's own key together with the judge's account, so two states are one only if both agree. Every
transition is made by a real arbiter on a copy, judged, and its new state validated. ``moves`` gives what a place can
visibly do next; which deliveries it may leave out is explained in :mod:`rrfp_jax.checking.explore`.
"""

from collections.abc import Hashable
from typing import NamedTuple

from rrfp_jax.arbitration import Event, IllegalTransition, StageArbiter, TaskFinished
from rrfp_jax.checking.contract import Wiring
from rrfp_jax.checking.judge import Account, StageJudge
from rrfp_jax.checking.setting import Setting
from rrfp_jax.checking.trace import Violation
from rrfp_jax.tasks import Task


class Move(NamedTuple):
    """What a place can do next: packets reach it, then perhaps a task ends."""

    packets: int
    """In ascending order of their bits, ``last_packet`` excepted, which comes last."""
    last_packet: int
    """The packet that the place answers; 0 if the move ends with a task's end."""
    end: TaskFinished | None
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
        self._ends: dict[tuple[int, TaskFinished], int] = {}
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
        return packets if move.end is None else [*packets, move.end]

    def _single_moves(self, state: int, in_flight: int) -> list[Move]:
        """Every delivery and every end of a task as a move of its own: no reduction."""
        bits = [bit for bit in _bits(in_flight & ~self._packets.joins) if self._is_due(state, bit)]
        moves = [Move(bit, bit, None, self._deliver(state, bit)[0]) for bit in bits]
        return moves + [Move(0, 0, end, self._end(state, end)) for end in self._possible_ends(state, in_flight)]

    def _visible_moves(self, state: int, in_flight: int) -> list[Move]:
        """The visible moves, without those that one packet less and its delivery afterwards come to."""
        silent = {0: state}
        moves: list[Move] = []
        for packets in _subsets(_bits(in_flight & ~self._packets.joins)):
            for bit in _bits(packets):
                before = silent.get(packets & ~bit)
                if before is None or not self._is_due(before, bit):
                    continue
                target, is_visible = self._deliver_after(packets & ~bit, before, bit)
                if is_visible:
                    moves.append(Move(packets, bit, None, target))
                elif silent.setdefault(packets, target) != target:
                    what = "the order of arrivals shows in the arbiter's state"
                    raise Fault(what, self.events(Move(packets, bit, None, target)))
        for packets, before in silent.items():
            ends = self._possible_ends(before, in_flight)
            moves += [Move(packets, 0, end, self._end_after(packets, before, end)) for end in ends]
        leads_to = {move[:3]: move.target for move in moves}
        return [move for move in moves if not self._is_contained(move, leads_to)]

    def _is_contained(self, move: Move, leads_to: dict[tuple[int, int, TaskFinished | None], int]) -> bool:
        """Whether one of the move's packets may as well arrive, silently, after it."""
        for bit in _bits(move.packets & ~move.last_packet):
            sooner = leads_to.get((move.packets & ~bit, move.last_packet, move.end))
            if sooner is not None and self._is_due(sooner, bit) and self._deliver(sooner, bit) == (move.target, False):
                return True
        return False

    def _possible_ends(self, state: int, in_flight: int) -> list[TaskFinished]:
        step = self._accounts[state].step
        tasks = [task for task in self.running(state) if not self._judge.joins(step, task) & ~in_flight]
        return [TaskFinished(step, 0.0, task) for task in tasks]

    def _is_due(self, state: int, bit: int) -> bool:
        """Whether a packet may reach the place now: the start of a step waits for the end of the one before."""
        if bit & self._packets.starts and self._accounts[state].is_active:
            return False
        return not self._packets.earlier[bit.bit_length() - 1] & ~self.delivered[state]

    def _deliver_after(self, packets: int, state: int, bit: int) -> tuple[int, bool]:
        try:
            return self._deliver(state, bit)
        except Fault as fault:
            raise Fault(fault.what, self.events(Move(packets | bit, bit, None, state))) from fault

    def _end_after(self, packets: int, state: int, end: TaskFinished) -> int:
        try:
            return self._end(state, end)
        except Fault as fault:
            raise Fault(fault.what, self.events(Move(packets, 0, end, state))) from fault

    def _deliver(self, state: int, bit: int) -> tuple[int, bool]:
        """The state after a packet's delivery, and whether the place answers it."""
        known = self._deliveries.get((state, bit))
        if known is None:
            known = self._deliveries[state, bit] = self._handle(state, self._packets.event(bit))
        return known

    def _end(self, state: int, end: TaskFinished) -> int:
        known = self._ends.get((state, end))
        if known is None:
            known = self._ends[state, end] = self._handle(state, end)[0]
        return known

    def _handle(self, state: int, event: Event) -> tuple[int, bool]:
        arbiter = self._arbiters[state].copy()
        try:
            instructions = arbiter.handle(event)
            account = self._judge.follow(self._accounts[state], event, instructions)
            return self._number(arbiter, account), bool(instructions)
        except (Violation, IllegalTransition, AssertionError) as error:
            raise Fault(str(error) or f"an invariant of the arbiter is broken: {error!r}", [event]) from error

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
