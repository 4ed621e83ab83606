"""Exhaustive exploration: every interleaving of arrivals and task ends of a small pipeline, with the real arbiters.

A *packet* is a message to a stage, or the start of a step there. Two things can happen to a stage: a packet that is in
flight to it is delivered, or a task that it runs ends. Any of them may happen next; only the starts of steps reach a
stage in their order. The arbiter answers with instructions; what it sends is in flight from then on. A global state is
thus a state per stage: what is in flight follows, as what the stages have sent and not yet received. Every event makes
progress and there are finitely many, so all runs end, and a breadth-first search over global states covers all runs.

Proved for a setting, if :func:`explore` returns: no run gets stuck before every stage has ended every step; and what
:mod:`rrfp_jax.checking.judge` watches holds throughout (each task once, dependencies, accumulation order, window,
messages sent once and complete, strict rows, no idling with work at hand), as do the arbiter's own invariants.

Why the reductions lose nothing
-------------------------------
*States once.* An arbiter is deterministic and equal keys mean equal futures, so a stage's states are numbered by key
and judge's account, each transition between them is made once by a real arbiter (:mod:`rrfp_jax.checking.automaton`),
and a global state is a tuple of numbers. Settings that differ in one stage's window share the other stages' automata.

*Silent deliveries wait.* A delivery is silent if the arbiter answers with no instruction, as one to a busy stage that
completes no gate. It changes nothing but that stage's own state, so it commutes with everything that happens elsewhere
and can be postponed until just before the next visible event of its stage. A *move* of a stage is therefore a set X of
packets in flight to it, delivered silently, and then one visible event: an answered delivery or the end of a task. All
sets X are tried, messages too early for their step included. That the order within X is irrelevant is not assumed: all
orders are followed, and a difference is an error.

*Contained moves are left out.* Let X' be X without one packet p, and let the moves (X, e) and (X', e) lead to the
states A and A'. If delivering p in A' is silent and leads to A, then (X, e) is (X', e) followed by a silent delivery,
which may wait: a run through A is a run through A' up to the moment at which p is delivered. The accounts of equal
states agree in what was started and sent, so the answers were the same too. This also is tested on the arbiter, for
every move left out. (X', e) in turn may be contained in a smaller move; as sets shrink, this ends at a move that is
kept.

So every visible state (what each stage has started, finished and sent) that any run reaches is reached by a run of
moves, and the reverse holds because moves are made of real events. A state without moves is stuck in earnest: all that
is in flight there could only be delivered silently. ``reduced=False`` explores without the last two reductions; the
tests compare both. Moves of different stages are interleaved in every way; nothing is assumed of their independence.
"""

from collections.abc import Hashable
from itertools import pairwise
from typing import NamedTuple

from rrfp_jax.checking.automaton import Fault, StageAutomaton
from rrfp_jax.checking.contract import Wiring, wiring
from rrfp_jax.checking.setting import Setting
from rrfp_jax.checking.trace import CheckError, Stimulus

State = tuple[int, ...]


class Report(NamedTuple):
    """How much was explored."""

    num_states: int
    num_transitions: int


class Explorer:
    """Explores settings one after another and shares between them what they have in common."""

    def __init__(self, *, reduced: bool = True, demand_work: bool = True) -> None:
        self.reduced, self.demand_work = reduced, demand_work
        self._wirings: dict[Hashable, Wiring] = {}
        self._automata: dict[Hashable, StageAutomaton] = {}

    def explore(self, setting: Setting) -> Report:
        """Explore a setting completely; raises CheckError at the first violation or deadlock."""
        search = self.search(setting)
        num_transitions = 0
        frontier = [search.start]
        while frontier:
            frontier, num_new = search.advance(frontier)
            num_transitions += num_new
        return Report(len(search.came_from), num_transitions)

    def search(self, setting: Setting) -> "Search":
        """A search of a setting that has not begun."""
        key = setting.wiring_key()
        wires = self._wirings.get(key)
        if wires is None:
            wires = self._wirings[key] = wiring(setting)
        return Search(setting, wires, [self._automaton(setting, s, wires) for s in range(setting.num_stages)])

    def _automaton(self, setting: Setting, stage: int, wires: Wiring) -> StageAutomaton:
        key = (setting.wiring_key(), setting.stage_key(stage))
        if key not in self._automata:
            self._automata[key] = StageAutomaton(
                setting, stage, wires, reduced=self.reduced, demand_work=self.demand_work
            )
        return self._automata[key]


def explore(setting: Setting, *, reduced: bool = True, demand_work: bool = True) -> Report:
    """Explore one setting completely; raises CheckError at the first violation or deadlock.

    ``reduced`` False makes every delivery a transition of its own: slower by orders, for comparison.
    ``demand_work`` False admits stages that idle with work at hand, as long as all work gets done.
    """
    return Explorer(reduced=reduced, demand_work=demand_work).explore(setting)


class Search:
    """A breadth-first search over the global states of one setting.

    A global state is one state number per stage; what is in flight follows from them: sent and not delivered.
    """

    def __init__(self, setting: Setting, wires: Wiring, automata: list[StageAutomaton]) -> None:
        self.setting, self.automata = setting, automata
        self.packets, self.inboxes = wires.packets, wires.inboxes
        self.start: State = (0,) * len(automata)
        self.came_from: dict[State, State | None] = {self.start: None}
        self._starts = sum(contract.start for contracts in wires.contracts for contract in contracts)

    def advance(self, frontier: list[State]) -> tuple[list[State], int]:
        """The new states one move away from a frontier, and the number of moves there."""
        automata, came_from = self.automata, self.came_from
        deliveries = [automaton.delivered for automaton in automata]
        sends = [automaton.sent for automaton in automata]
        targets = [automaton.targets for automaton in automata]
        numbered = list(zip(range(len(automata)), self.inboxes, targets, strict=True))
        found: list[State] = []
        num_moves = 0
        for state in frontier:
            in_flight, arrived = self._starts, 0
            for sent, delivered, local in zip(sends, deliveries, state, strict=True):
                in_flight |= sent[local]
                arrived |= delivered[local]
            in_flight &= ~arrived
            is_stuck = True
            for stage, inbox, known in numbered:
                local = state[stage]
                nexts = known.get((local, in_flight & inbox))
                if nexts is None:
                    nexts = self._expand(state, stage, in_flight & inbox)
                if nexts:
                    is_stuck = False
                    num_moves += len(nexts)
                    before, after = state[:stage], state[stage + 1 :]
                    for target in nexts:
                        new = (*before, target, *after)
                        if new not in came_from:
                            came_from[new] = state
                            found.append(new)
            if is_stuck:
                self._check_end(state, in_flight)
        return found, num_moves

    def trace(self, state: State) -> tuple[Stimulus, ...]:
        """The events that led to a state."""
        path = [state]
        while (previous := self.came_from[path[-1]]) is not None:
            path.append(previous)
        path.reverse()
        events: list[Stimulus] = []
        for before, after in pairwise(path):
            stage = next(s for s in range(len(before)) if before[s] != after[s])
            automaton = self.automata[stage]
            move = next(
                m for m in automaton.moves(before[stage], self.in_flight(before, stage)) if m.target == after[stage]
            )
            events += [Stimulus(stage, event) for event in automaton.events(move)]
        return tuple(events)

    def in_flight(self, state: State, stage: int) -> int:
        """The packets in flight to a stage, as bits."""
        sent, delivered = self._starts, 0
        for automaton, local in zip(self.automata, state, strict=True):
            sent |= automaton.sent[local]
            delivered |= automaton.delivered[local]
        return sent & ~delivered & self.inboxes[stage]

    def _expand(self, state: State, stage: int, in_flight: int) -> tuple[int, ...]:
        try:
            return self.automata[stage].expand(state[stage], in_flight)
        except Fault as fault:
            events = [Stimulus(stage, event) for event in fault.events]
            raise CheckError(fault.what, self.setting, (*self.trace(state), *events)) from fault

    def _check_end(self, state: State, in_flight: int) -> None:
        unfinished = [s for s, a in enumerate(self.automata) if not a.is_done[state[s]]]
        if unfinished:
            what = f"deadlock: stages {unfinished} have work left, and nothing runs or can start"
            rest = [packet for place, packet in enumerate(self.packets) if in_flight >> place & 1]
            raise CheckError(what, self.setting, (*self.trace(state), *rest))
        assert not in_flight, "a judge missed an input"
