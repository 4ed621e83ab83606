"""Exhaustive exploration: every interleaving of arrivals and task ends of a small pipeline, with the real arbiters.

An arbiter's *place* is a stage, or one of the processes that a stage spans. A *packet* is a message to a place, the
start of a step there, or a note from another member of its group. Things that can happen to a place: a packet that is
in flight to it is delivered, a task that it runs ends, or, where stages decide early, the last one handed over is said
to be about to end, at any moment or never, whatever a timer would say. A stage with engines beside compute runs a task
on each of them too, which may end at any moment and in any order. Any of these may happen next; only the starts of
steps reach a place in their order, each after the end of the step before, and no task ends before a due one in front of
it. Decisions that come too late or twice are tried in every state and must change nothing. A stage that holds may be
woken by the tick that it has asked for, at any moment. The arbiter answers with instructions; what it sends is in
flight from then on. A global state is thus a state per place: what is in flight follows, as what the places have sent
and not yet received. Every event makes progress and there are finitely many (of notes too, as
:mod:`rrfp_jax.core.groups` argues), so all runs end, and a breadth-first search over global states covers
all runs.

Proved for a setting, if :func:`explore` returns: no run gets stuck before every stage has ended every step; and what
:mod:`tests.model_checker.judge` watches holds throughout (each task once, dependencies, accumulation order, window,
messages sent once and complete, strict rows, no idling with work at hand, footprint, announcements, holds), as do the
arbiter's own invariants; and all members of a group launch the same sequence of tasks on the compute lane. Where a
group's tasks are collectives (``Setting.collective``), one of that lane ends on no member before all have started it.

Why free choice covers foresight
--------------------------------
What foresight decides depends on times, averages and announcements, none of which are explored. But it is asked only
where the row's next entry lacks nothing but inputs, and wherever it is asked it has the best task run, has another
candidate run, or holds. So real foresight is replaced by one that is told what to choose
(:mod:`tests.model_checker.free_choice`), and every event is followed with each way to choose; each run under real
foresight, whatever it has learnt and been told, is one of these as far as tasks, messages and steps go. An announcement
can do no more than make it choose again while the stage holds, and so can a tick. Hence the only one that is a move is
the tick that was asked for, after which a stage must run something: it may come at any moment. Early and vain ticks and
announcements of all kinds are tried in every state and must change nothing where the choice stays the same; where it
does not, an announcement must lead to where that tick leads.

Why the reductions lose nothing
-------------------------------
*States once.* An arbiter is deterministic but for its choices and equal keys mean equal futures, so a place's states
are numbered by key and judge's account, each transition between them is made once by a real arbiter
(:mod:`tests.model_checker.automaton`), and a global state is a tuple of numbers. Settings that differ in one stage's
window share the other places' automata.

*Silent deliveries wait.* A delivery is silent if the arbiter answers with no instruction, as one to a busy stage that
completes no gate. It changes nothing but that place's own state, so it commutes with everything that happens elsewhere
(a hold that goes on is no instruction) and can be postponed until just before the next visible event of its place. A
*move* of a place is therefore a set X of packets in flight to it, delivered silently, and then one visible event: an
answered delivery or the end of a task. All sets X are tried, messages too early for their step included. That the order
within X is irrelevant is not assumed: all orders are followed, and a difference is an error.

*Silent decisions wait.* A decision that the arbiter answers with no instruction, as where nothing is ready, may come
after whatever happens next at its place as well: after a packet's delivery, which then is answered together with the
decision or not at all, likewise after the end of an engine's task, or after the task's own end, by which it is late. So
it is postponed until it is answered, or left out. That both orders lead to one state is tested on the arbiter, for
every silent decision and everything that can happen next.

*Contained moves are left out.* Let X' be X without one packet p, and let the moves (X, e) and (X', e) lead to the
states A and A'. If delivering p in A' is silent and leads to A, then (X, e) is (X', e) followed by a silent delivery,
which may wait: a run through A is a run through A' up to the moment at which p is delivered. The accounts of equal
states agree in what was started and sent, so the answers were the same too. This also is tested on the arbiter, for
every move left out. (X', e) in turn may be contained in a smaller move; as sets shrink, this ends at a move that is
kept.

So every visible state (what each place has started, finished and sent) that any run reaches is reached by a run of
moves, and the reverse holds because moves are made of real events. A state without moves is stuck in earnest: all that
is in flight there could only be delivered silently. ``reduced=False`` explores without the last two reductions; the
tests compare both. Moves of different places are interleaved in every way; nothing is assumed of their independence.
"""

from collections.abc import Hashable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from tests.model_checker.automaton import Fault, PlaceAutomaton
from tests.model_checker.contract import Wiring, wiring
from tests.model_checker.free_choice import FreeChoice
from tests.model_checker.judge import diverging, stuck
from tests.model_checker.packets import Stimulus
from tests.model_checker.setting import Setting
from tests.model_checker.trace import CheckError

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
        self._automata: dict[Hashable, PlaceAutomaton] = {}

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
        if setting.foresight is not None:
            setting = replace(setting, foresight=FreeChoice())
        key = setting.wiring_key()
        wires = self._wirings.get(key)
        if wires is None:
            wires = self._wirings[key] = wiring(setting)
        return Search(setting, wires, [self._automaton(setting, p, wires) for p in range(setting.num_places)])

    def _automaton(self, setting: Setting, place: int, wires: Wiring) -> PlaceAutomaton:
        key = (setting.wiring_key(), setting.place_key(place))
        if key not in self._automata:
            self._automata[key] = PlaceAutomaton(
                setting, place, wires, reduced=self.reduced, demand_work=self.demand_work
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

    A global state is one state number per place; what is in flight follows from them: sent and not delivered.
    """

    def __init__(self, setting: Setting, wires: Wiring, automata: list[PlaceAutomaton]) -> None:
        self.setting, self.automata = setting, automata
        self.packets = wires.packets
        self.start: State = (0,) * len(automata)
        self.came_from: dict[State, State | None] = {self.start: None}
        self._starts = wires.starts
        self._groups = [setting.group_of(place) for place in range(setting.num_places)]

    def advance(self, frontier: list[State]) -> tuple[list[State], int]:
        """The new states one move away from a frontier, and the number of moves there."""
        automata, came_from = self.automata, self.came_from
        deliveries = [automaton.delivered for automaton in automata]
        sends = [automaton.sent for automaton in automata]
        targets = [automaton.targets for automaton in automata]
        numbered = list(zip(range(len(automata)), self._groups, targets, strict=True))
        inboxes = self.packets.inboxes
        found: list[State] = []
        num_moves = 0
        for state in frontier:
            in_flight, arrived = self._starts, 0
            for sent, delivered, local in zip(sends, deliveries, state, strict=True):
                in_flight |= sent[local]
                arrived |= delivered[local]
            in_flight &= ~arrived
            is_stuck = True
            for place, group, known in numbered:
                local = state[place]
                nexts = known.get((local, in_flight & inboxes[place]))
                if nexts is None:
                    nexts = self._expand(state, place, in_flight & inboxes[place])
                if nexts:
                    is_stuck = False
                    num_moves += len(nexts)
                    before, after = state[:place], state[place + 1 :]
                    for target in nexts:
                        new = (*before, target, *after)
                        if new not in came_from:
                            came_from[new] = state
                            found.append(new)
                            if len(group) > 1:
                                self._check_sequences(new, group)
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
            place = next(p for p in range(len(before)) if before[p] != after[p])
            automaton = self.automata[place]
            move = next(
                m for m in automaton.moves(before[place], self.in_flight(before, place)) if m.target == after[place]
            )
            events += automaton.stimuli(move)
        return tuple(events)

    def in_flight(self, state: State, place: int) -> int:
        """The packets in flight to a place, as bits."""
        sent, delivered = self._starts, 0
        for automaton, local in zip(self.automata, state, strict=True):
            sent |= automaton.sent[local]
            delivered |= automaton.delivered[local]
        return sent & ~delivered & self.packets.inboxes[place]

    def _expand(self, state: State, place: int, in_flight: int) -> tuple[int, ...]:
        try:
            return self.automata[place].expand(state[place], in_flight)
        except Fault as fault:
            raise CheckError(fault.what, self.setting, (*self.trace(state), *fault.stimuli)) from fault

    def _check_sequences(self, state: State, group: tuple[int, ...]) -> None:
        """All members of a group have launched the same tasks, as far as each has come."""
        launched = [self.automata[place].account(state[place]).launched for place in group]
        what = diverging(launched, self.setting.places[group[0]].stage)
        if what is not None:
            raise CheckError(what, self.setting, self.trace(state))

    def _check_end(self, state: State, in_flight: int) -> None:
        unfinished = [p for p, a in enumerate(self.automata) if not a.is_done[state[p]]]
        if unfinished:
            what = stuck(self.setting, unfinished)
            raise CheckError(what, self.setting, (*self.trace(state), *self.packets.stimuli(in_flight)))
        assert not in_flight & self.packets.inputs, "a judge missed an input"
