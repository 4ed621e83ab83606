"""Membership explored: ranks that train and lose each other, with the real halves of :mod:`rrfp_jax.core.membership`.

A rank hosts one unit; what it does in a step is told in three transitions, as far as others can notice. As a step
begins it sends its shares of all sums to the others. Once all ranks of its epoch have begun the step, it has all *sums*
and reports. Once all have reported, the first rank makes the *verdict*, and the others learn it. Each then *updates*,
where the step is no evaluation, and begins the next step. At certain steps it calls a gathering, of which the last ends
the run: after that it leaves. ``tests/checking/test_losses.py`` shows with the real arbiters that the agreement of a
step gives no less than these transitions say.

*Newcomers.* Before certain steps all ranks hold, once they have the results of all gatherings that come before. A rank
that was lost and has ended may start anew, a number of times; it fetches a state that all ranks of an epoch have saved.

*Transitions.* Any of these may come next: a transition of a rank, a note or a declaration that reaches a rank, the
death of a rank, a new start, or a suspicion, also of a rank that lives. There are as many deaths, suspicions and starts
as the setting admits. Messages overtake each other.

Why this covers all runs
------------------------
*A rank may be slow.* So one that dies while others do not know it yet is one that does nothing for a while and then
dies; hence the head hears of a death, of a suspicion and of a farewell at once, and declarations alone are on their
way. (A suspicion that the head hears after the death of its sender, and after another death that came later still,
takes three faults; no setting has so many.) A rank that is stopped and comes back is a suspected one that is slow. And
a rank that has begun a step, and sent all its shares at once, does no more than one that sends them later: the others
may be slow to take them.

*Lost messages.* That some get lost when their sender dies needs no transition: those who have not got them come to the
next epoch first, and drop them.

*Facts.* What a rank sends of its steps stays as a fact that any rank may take at any time, or never. Nothing that a
rank does shows which of several facts it has taken first, so taking all that a transition needs in one moment loses
nothing.

*Silent notes come at once.* A note to the first rank that only adds to what it collects in its present epoch changes
nothing else, and is forgotten with the epoch, delivered or not; so it commutes with all that can happen instead, and
is the only transition followed.

*Judged.* In every state: ranks that run in the same epoch have the same owners; each step is updated once, in order; a
step is finished only with its sums; a result that two survivors have is the same; a note that comes twice changes
nothing. In states where nothing but faults can happen: the survivors have come to the end with the same updates and
results, or a stage has no replica left and nobody runs; no rank that was declared lost goes on, and none has gone
further than one verdict by itself; nobody holds for ever.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from operator import or_
from typing import Any, Generic, NamedTuple, TypeVar, cast

from rrfp_jax.core.explain import IllegalTransition
from rrfp_jax.core.membership import (
    Admission,
    BroughtData,
    DeclareCompleted,
    DeclareEpoch,
    EndRank,
    EpochDeclared,
    FetchState,
    FinishDecided,
    FreezeStep,
    GatherCalled,
    GatheringEnded,
    HeadEvent,
    HeadMembership,
    HoldCalled,
    HoldEnded,
    HoldReleased,
    LeaveRun,
    MembershipEvent,
    MembershipInstruction,
    NewcomerTold,
    NewestVerdict,
    PeerNote,
    RankGone,
    RankLeft,
    RankMembership,
    RankSuspected,
    RankTold,
    ReleaseHolds,
    ResumeFrom,
    RunCompleted,
    StepDecided,
    TellHead,
    TellRank,
)

T = TypeVar("T")
LANE = "main"


class MembershipFault(AssertionError):
    """A check failed; the text has the transitions that led there."""


@dataclass(frozen=True, kw_only=True)
class MembershipSetting:
    """What is explored."""

    num_stages: int = 2
    num_replicas: int = 2
    num_steps: int = 2
    evaluates: frozenset[int] = frozenset()
    """The steps without an update."""
    gatherings: tuple[int, ...] = ()
    """For each gathering the number of steps that a rank has finished when it calls it; the last one ends the run."""
    deaths: int = 1
    suspicions: int = 0
    holds: frozenset[int] = frozenset()
    """The steps before which all ranks hold."""
    starts: int = 0
    """How often a lost rank may start anew."""
    dies_first: int | None = None
    """The rank that dies before anything else happens, beside ``deaths``."""
    carries_epochs: bool = True
    """Whether messages carry epochs; without them all are taken as of the receiver's own epoch."""
    reports_early: bool = False
    """Whether ranks report before they have all sums, as where the verdict is on the loss alone."""
    member: type[RankMembership] = RankMembership
    head: type[HeadMembership] = HeadMembership

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.num_replicas

    @property
    def units_of(self) -> tuple[tuple[int, ...], ...]:
        return tuple((rank,) for rank in range(self.num_ranks))


class Status(StrEnum):
    RUNS = "runs"
    DEAD = "dead"
    ENDED = "ended"
    """It has heard that it is lost."""
    LEFT = "left"
    """It has come to the end of the run."""


class Phase(StrEnum):
    """What a rank does next in its step."""

    HOLD = "hold"
    BEGIN = "begin"
    SUMS = "sums"
    VERDICT = "verdict"
    UPDATE = "update"


class Fact(NamedTuple):
    """Something that a rank has sent of a step."""

    what: Phase
    rank: int
    step: int
    epoch: int
    verdict: Hashable = None


class Act(NamedTuple):
    """A transition of a rank by itself."""

    what: Phase | Status | str
    verdict: Hashable = None


Happening = MembershipEvent | FetchState | Act


class Packet(NamedTuple):
    """A message on its way to a rank."""

    rank: int
    what: EpochDeclared | RunCompleted | HoldReleased | FetchState | PeerNote


class Sent(NamedTuple):
    """All that a rank sends in one transition."""

    packets: list[Packet]
    facts: list[Fact]
    to_head: list[HeadEvent]


class Rank:
    """A rank: its half of the machine, and what a runtime does at its word."""

    def __init__(self, setting: MembershipSetting, rank: int, *, is_newcomer: bool = False) -> None:
        self.setting, self.rank = setting, rank
        self.machine = setting.member(rank, setting.num_ranks, is_newcomer=is_newcomer)
        self.status = Status.RUNS
        self.step, self.phase = 0, self._first_phase(0)
        self.fetches: int | None = None
        """The step before which a newcomer is to fetch the state."""
        self.fetched: int | None = None
        """The step before which a newcomer has fetched it."""
        self.known = frozenset(self.machine.living)
        """The ranks of the epoch in which this one has gone on last."""
        self.verdict: Hashable = None
        self.updates: tuple[tuple[int, Hashable], ...] = ()
        self.results: tuple[Hashable, ...] = ()
        self.is_gathering = False

    def key(self) -> Hashable:
        # Suspicions that the head has heard make no difference until they are told again.
        names = (name for name in RankMembership.__slots__ if name != "_accused")
        machine = tuple(_hashable(getattr(self.machine, name)) for name in names)
        own = (self.status, self.step, self.phase, self.verdict, self.updates, self.results, self.is_gathering)
        return (machine, own, self.fetches, self.fetched, self.known)

    @property
    def has_come(self) -> bool:
        """Whether this is no newcomer that waits for its first epoch."""
        return bool(self.machine.living)

    def _first_phase(self, step: int) -> Phase:
        return Phase.HOLD if step in self.setting.holds and step < self.setting.num_steps else Phase.SUMS

    def _num_before(self) -> int:
        """Returns the number of gatherings that come before this rank holds."""
        return sum(number <= self.step for number in self.setting.gatherings)

    def acts(self, facts: frozenset[Fact]) -> Iterator[Act]:
        """Yields what this rank may do by itself."""
        machine, setting = self.machine, self.setting
        number = len(self.results)
        if not self.has_come:
            yield from self._fetches(facts)
            return
        if machine.holds is not None:
            return
        if number < len(setting.gatherings) and not self.is_gathering and self.step >= setting.gatherings[number]:
            yield Act("gather")
        if machine.is_frozen:
            return
        if self.step == setting.num_steps:
            if setting.gatherings and number == len(setting.gatherings):
                yield Act(Status.LEFT)
            return
        yield from self._acts_of_step(facts)

    def _fetches(self, facts: frozenset[Fact]) -> Iterator[Act]:
        saved: dict[Fact, set[int]] = {}
        for fact in facts:
            if (fact.what, fact.step) == (Phase.HOLD, self.fetches):
                saved.setdefault(fact._replace(rank=0), set()).add(fact.rank)
        for fact, ranks in saved.items():
            living, updates = cast(tuple[tuple[int, ...], Hashable], fact.verdict)
            if ranks == set(living):
                yield Act("fetch", updates)

    def _acts_of_step(self, facts: frozenset[Fact]) -> Iterator[Act]:
        machine, number = self.machine, len(self.results)
        match self.phase:
            case Phase.UPDATE:
                yield Act(self.phase)
            case Phase.HOLD:
                if number == self._num_before() and not self.is_gathering:
                    yield Act(self.phase)
            case Phase.SUMS if self._may_report(facts):
                yield Act(Phase.SUMS)
            case Phase.VERDICT if self.rank == machine.first:
                if self._is_here(Phase.SUMS, facts):
                    yield Act(Phase.VERDICT, (self.step, machine.epoch, machine.living))
            case Phase.VERDICT:
                for fact in facts:
                    if fact.what is Phase.VERDICT and self._is_mine(fact):
                        yield Act(Phase.VERDICT, fact.verdict)

    def _may_report(self, facts: frozenset[Fact]) -> bool:
        # A stage without losses may end its part of an evaluation before the others begin.
        is_free = self.setting.reports_early or self.step in self.setting.evaluates
        return is_free or self._is_here(Phase.BEGIN, facts)

    def _is_mine(self, fact: Fact) -> bool:
        is_now = fact.epoch == self.machine.epoch or not self.setting.carries_epochs
        return fact.step == self.step and is_now

    def _is_here(self, what: Phase, facts: frozenset[Fact]) -> bool:
        senders = {fact.rank for fact in facts if fact.what is what and self._is_mine(fact)}
        return senders >= set(self.machine.living)

    def begin(self) -> list[Fact]:
        """Returns the fact that this rank has begun its step; none where it holds."""
        has_begun = self.phase is not Phase.HOLD
        return [Fact(Phase.BEGIN, self.rank, self.step, self.machine.epoch)] if has_begun else []

    def _let_go(self, sent: Sent) -> None:
        self.phase = Phase.SUMS
        sent.facts.extend(self.begin())

    def handle(self, happening: Happening) -> Sent:
        """Lets something happen to this rank; returns what it sends. Raises MembershipFault where it must not be."""
        sent = Sent([], [], [])
        machine = self.machine
        match happening:
            case Act(Phase.UPDATE):
                self._update()
                sent.facts.extend(self.begin())
            case Act(Phase.HOLD):
                state = machine.living, self.updates
                sent.facts.append(Fact(Phase.HOLD, self.rank, self.step, machine.epoch, state))
                self._obey(machine.handle(HoldCalled(self.step)), sent)
            case Act("fetch", updates):
                assert self.fetches is not None
                self.machine = self.setting.member(
                    self.rank, self.setting.num_ranks, first_step=self.fetches, is_newcomer=True
                )
                self.step, self.phase, self.updates = self.machine.newest + 1, Phase.HOLD, cast(Any, updates)
                self.fetched, self.fetches = self.step, None
                self.results = (None,) * self._num_before()
                sent.to_head.append(NewcomerTold(self.rank, self.step))
            case FetchState(_, step):
                if not self.has_come and self.fetched != step:
                    self.fetches = step
            case Act(Phase.VERDICT, verdict):
                if self.rank == machine.first:
                    sent.facts.append(Fact(Phase.VERDICT, self.rank, self.step, machine.epoch, verdict))
                machine.handle(StepDecided(self.step, verdict))
                self.phase, self.verdict = Phase.UPDATE, verdict
            case Act(Phase.SUMS):
                sent.facts.append(Fact(Phase.SUMS, self.rank, self.step, machine.epoch))
                self.phase = Phase.VERDICT
            case Act(Status() as status):
                self.status = status
                sent.to_head.append(RankLeft(self.rank) if status is Status.LEFT else RankGone(self.rank, "died"))
            case Act():
                self.is_gathering = True
                number = len(self.results) + 1
                self._obey(machine.handle(GatherCalled(LANE, (self.rank, number))), sent)
            case PeerNote() if not self.setting.carries_epochs:
                self._obey(machine.handle(happening._replace(epoch=machine.epoch)), sent)
            case _:
                self._obey(machine.handle(happening), sent)
        self.machine.validate()
        return sent

    def _obey(self, instructions: Sequence[MembershipInstruction], sent: Sent) -> None:
        for instruction in instructions:
            match instruction:
                case TellRank(rank, epoch, note):
                    sent.packets.append(Packet(rank, PeerNote(self.rank, epoch, note)))
                case TellHead(epoch, accusations, holds):
                    sent.to_head.append(RankTold(self.rank, epoch, accusations, holds))
                case HoldEnded():
                    self._let_go(sent)
                case FinishDecided(step, verdict):
                    self._finish(step, verdict)
                case ResumeFrom(_, living, step):
                    self._resume(step)
                    if self.phase is Phase.HOLD and set(living) - self.known:
                        self.phase = Phase.SUMS
                    self.known = frozenset(living)
                    sent.facts.extend(self.begin())
                case GatheringEnded(_, result):
                    self.results, self.is_gathering = (*self.results, result), False
                case EndRank():
                    self.status = Status.ENDED
                case LeaveRun():
                    self.status = Status.LEFT
                case FreezeStep():
                    pass  # The machine says that it is frozen.

    def _finish(self, step: int, verdict: Hashable) -> None:
        if (step, self.phase) != (self.step, Phase.VERDICT):
            raise MembershipFault(f"rank {self.rank} is told to finish step {step}, it is in {self._place}")
        if self.setting.reports_early:
            raise MembershipFault(f"rank {self.rank} may lack sums of step {step}, which it must finish")
        self.verdict = verdict
        self._update()

    def _resume(self, step: int) -> None:
        if self.phase is Phase.UPDATE:
            self._update()
        if step != self.step:
            raise MembershipFault(f"rank {self.rank} is told to go on with step {step}, it is in {self._place}")
        if self.phase is not Phase.HOLD:
            self.phase, self.verdict = Phase.SUMS, None

    @property
    def _place(self) -> str:
        return f"step {self.step}, before {self.phase}"

    def _update(self) -> None:
        if self.step not in self.setting.evaluates:
            self.updates = (*self.updates, (self.step, self.verdict))
        self.step, self.phase, self.verdict = self.step + 1, self._first_phase(self.step + 1), None


class State(NamedTuple):
    """A global state."""

    ranks: tuple[int, ...]
    """The number of each rank's state."""
    head: int
    facts: int
    """The facts that somebody may take, as bits."""
    packets: int
    """The messages on their way, as bits."""
    deaths: int
    """How many may still die."""
    suspicions: int
    starts: int


class Numbering(Generic[T]):
    """Numbers for values, in the order in which they come up."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: T, key: Hashable) -> int:
        """Returns the number of a value; values with equal keys are one."""
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]

    def bits(self, values: Iterable[T]) -> int:
        """Returns hashable values as bits."""
        # By their texts: tuples of different kinds are equal where their items are.
        return reduce(or_, (1 << self.number(value, repr(value)) for value in values), 0)

    def of(self, bits: int) -> list[tuple[int, T]]:
        """Returns the values that stand for some bits, each with its bit."""
        found = []
        while bits:
            lowest = bits & -bits
            bits ^= lowest
            found.append((lowest, self.values[lowest.bit_length() - 1]))
        return found


class Outcome(NamedTuple):
    """What follows from a transition of a rank or of the head."""

    after: int
    packets: int = 0
    facts: int = 0
    to_head: tuple[HeadEvent, ...] = ()


class MembershipSearch:
    """Explores a setting completely, breadth first. Each transition of a rank is made once, by the real machine."""

    def __init__(self, setting: MembershipSetting) -> None:
        self.setting = setting
        self.ranks, self.heads = Numbering[Rank](), Numbering[HeadMembership]()
        self.packets, self.facts = Numbering[Packet](), Numbering[Fact]()
        self._rank_steps: dict[tuple[int, type, Happening], Outcome] = {}
        self._head_steps: dict[tuple[int, type, HeadEvent], Outcome] = {}
        self._acts: dict[tuple[int, int], list[Act]] = {}
        self._relevant: dict[tuple[int, int], tuple[int, int]] = {}
        ranks = [Rank(setting, rank) for rank in range(setting.num_ranks)]
        head = self._number_head(setting.head(setting.units_of, setting.num_stages))
        facts = self.facts.bits(fact for rank in ranks for fact in rank.begin())
        self.start = State(tuple(map(self._number_rank, ranks)), head, facts, 0, *self._faults_left())
        if setting.dies_first is not None:
            self.start = self.apply(self.start, setting.dies_first, Act(Status.DEAD))
        self.came_from: dict[State, tuple[State, str] | None] = {self.start: None}
        self.num_ends = self.num_ends_with_newcomers = 0

    def _faults_left(self) -> tuple[int, int, int]:
        return self.setting.deaths, self.setting.suspicions, self.setting.starts

    def explore(self) -> int:
        """Returns the number of states. Raises MembershipFault at the first violation."""
        frontier = [self.start]
        while frontier:
            found: list[State] = []
            for state in frontier:
                found += [new for what, new in self.all_moves(state) if self.follow(state, what, new)]
            frontier = found
        return len(self.came_from)

    def follow(self, state: State, what: str, new: State) -> bool:
        """Notes where a transition leads. Returns whether it is a new state. Raises MembershipFault if it is wrong."""
        if new in self.came_from:
            return False
        self.came_from[new] = (state, what)
        self._check(new)
        return True

    def story(self, state: State) -> list[str]:
        """Returns the transitions that led to a state."""
        told = []
        at: State = state
        while (before := self.came_from[at]) is not None:
            at, what = before
            told.append(what)
        return [f"{number:3}. {what}" for number, what in enumerate(reversed(told), start=1)]

    def all_moves(self, state: State) -> list[tuple[str, State]]:
        """Returns the transitions from a state. Raises MembershipFault at the first one that is wrong."""
        try:
            return list(self.moves(state))
        except (IllegalTransition, AssertionError) as error:
            raise MembershipFault("\n".join([str(error), *self.story(state)])) from error

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields the transitions from a state, in words, and where they lead."""
        packets = self.packets.of(state.packets)
        for bit, packet in packets:
            if self._is_silent(state.ranks[packet.rank], packet.what):
                yield str(packet), self.apply(state._replace(packets=state.packets ^ bit), packet.rank, packet.what)
                return
        progress = bool(packets)
        for bit, packet in packets:
            yield str(packet), self.apply(state._replace(packets=state.packets ^ bit), packet.rank, packet.what)
        living = self.heads.values[state.head].living
        for rank, at in enumerate(state.ranks):
            if self.ranks.values[at].status is not Status.RUNS:
                continue
            for act in self._acts_of(at, state.facts):
                progress = True
                yield f"rank {rank}: {act}", self.apply(state, rank, act)
            if rank in living or not self.ranks.values[at].has_come:
                yield from self._faults(state, rank, living)
        if state.starts and living and not self.heads.values[state.head].is_completed:
            for rank, at in enumerate(state.ranks):
                if rank not in living and self.ranks.values[at].status in (Status.DEAD, Status.ENDED):
                    yield f"rank {rank} starts anew", self._started(state, rank)
        if not progress:
            self.num_ends += 1
            self._check_end(state)

    def _faults(self, state: State, rank: int, living: tuple[int, ...]) -> Iterator[tuple[str, State]]:
        if state.deaths:
            fewer = state._replace(deaths=state.deaths - 1)
            yield f"rank {rank} dies", self.apply(fewer, rank, Act(Status.DEAD))
        if state.suspicions and rank in living:
            fewer = state._replace(suspicions=state.suspicions - 1)
            for other in living:
                if other != rank:
                    yield f"rank {rank} suspects rank {other}", self.apply(fewer, rank, RankSuspected(other, ""))

    # -- transitions -------------------------------------------------------------------------------------------------

    def _started(self, state: State, rank: int) -> State:
        # What was on its way to the old process is not heard by the new one.
        for bit, packet in self.packets.of(state.packets):
            if packet.rank == rank:
                state = state._replace(packets=state.packets ^ bit)
        newcomer = self._number_rank(Rank(self.setting, rank, is_newcomer=True))
        ranks = (*state.ranks[:rank], newcomer, *state.ranks[rank + 1 :])
        head, packets, _, _ = self._step_head(state.head, NewcomerTold(rank, None))
        return state._replace(ranks=ranks, head=head, packets=state.packets | packets, starts=state.starts - 1)

    def _is_silent(self, at: int, event: Happening) -> bool:
        if not isinstance(event, PeerNote) or not isinstance(event.note, NewestVerdict | BroughtData):
            return False
        if event.epoch != self.ranks.values[at].machine.epoch or not self.setting.carries_epochs:
            return False
        outcome = self._step_rank(at, event)
        return not (outcome.packets or outcome.facts)

    def _acts_of(self, at: int, facts: int) -> list[Act]:
        known = self._acts.get((at, facts))
        if known is None:
            taken = frozenset(fact for _, fact in self.facts.of(facts))
            known = self._acts[at, facts] = list(self.ranks.values[at].acts(taken))
        return known

    def apply(self, state: State, rank: int, happening: Happening) -> State:
        """Returns the state to which it leads that something happens to a rank."""
        after, packets, facts, to_head = self._step_rank(state.ranks[rank], happening)
        ranks = (*state.ranks[:rank], after, *state.ranks[rank + 1 :])
        packets, facts, head = packets | state.packets, facts | state.facts, state.head
        for event in to_head:
            head, declared, _, _ = self._step_head(head, event)
            packets |= declared
        # Only what some rank may still take is left, so that states are equal which have equal futures.
        takeable_packets = takeable_facts = 0
        for at in ranks:
            own_packets, own_facts = self._takeable(at)
            takeable_packets |= own_packets
            takeable_facts |= own_facts
        return state._replace(ranks=ranks, head=head, packets=packets & takeable_packets, facts=facts & takeable_facts)

    def _takeable(self, at: int) -> tuple[int, int]:
        """Returns the packets and facts that a rank may take now or later, of those that have come up."""
        num_known = len(self.packets.values) + len(self.facts.values)
        known = self._relevant.get((at, num_known))
        if known is None:
            rank, has_epochs = self.ranks.values[at], self.setting.carries_epochs
            epoch, step = rank.machine.epoch, rank.step
            packets = facts = 0
            if rank.status is Status.RUNS:
                for number, packet in enumerate(self.packets.values):
                    what = packet.what
                    is_declared = isinstance(what, EpochDeclared) and what.epoch <= epoch
                    is_dropped = isinstance(what, PeerNote) and what.epoch < epoch and has_epochs
                    packets |= (packet.rank == rank.rank and not is_declared and not is_dropped) << number
                for number, fact in enumerate(self.facts.values):
                    is_now = fact.epoch >= epoch or not has_epochs or fact.what is Phase.HOLD
                    facts |= (fact.step >= step and is_now) << number
            known = self._relevant[at, num_known] = packets, facts
        return known

    def _step_rank(self, at: int, happening: Happening) -> Outcome:
        key = at, type(happening), happening  # tuples of other types may be equal
        known = self._rank_steps.get(key)
        if known is None:
            rank = _copied(self.ranks.values[at])
            sent = rank.handle(happening)
            after = self._number_rank(rank)
            # A note that is kept is kept twice, and changes nothing when it is heard for the second time.
            is_kept = isinstance(happening, PeerNote) and rank.machine.admits(happening.epoch) is Admission.KEEP
            if isinstance(happening, PeerNote | EpochDeclared) and self.setting.carries_epochs and not is_kept:
                again = _copied(rank)
                if any(again.handle(happening)) or self._number_rank(again) != after:
                    raise MembershipFault(f"{happening} changes rank {rank.rank} when it comes twice")
            known = Outcome(after, self.packets.bits(sent.packets), self.facts.bits(sent.facts), tuple(sent.to_head))
            self._rank_steps[key] = known
        return known

    def _step_head(self, at: int, event: HeadEvent) -> Outcome:
        key = at, type(event), event
        known = self._head_steps.get(key)
        if known is None:
            head = copy(self.heads.values[at])
            packets: list[Packet] = []
            for instruction in head.handle(event):
                match instruction:
                    case DeclareEpoch(ranks, epoch, living, _, reason):
                        packets += [Packet(rank, EpochDeclared(epoch, living, reason)) for rank in ranks]
                    case DeclareCompleted(ranks):
                        packets += [Packet(rank, RunCompleted()) for rank in ranks]
                    case ReleaseHolds(ranks, step):
                        packets += [Packet(rank, HoldReleased(step)) for rank in ranks]
                    case FetchState(ranks, step):
                        packets += [Packet(rank, FetchState((rank,), step)) for rank in ranks]
            known = self._head_steps[key] = Outcome(self._number_head(head), self.packets.bits(packets))
        return known

    def _number_rank(self, rank: Rank) -> int:
        return self.ranks.number(rank, (rank.rank, rank.key()))

    def _number_head(self, head: HeadMembership) -> int:
        newcomers, holding = (frozenset(each.items()) for each in (head.newcomers, head._holding))
        return self.heads.number(head, (head.epoch, head.living, head.is_completed, newcomers, holding, head._released))

    # -- judging -----------------------------------------------------------------------------------------------------

    def _check(self, state: State) -> None:
        ranks = [self.ranks.values[at] for at in state.ranks]
        owners: dict[int, tuple[int, ...]] = {}
        for rank in ranks:
            machine = rank.machine
            runs = rank.status is Status.RUNS and rank.has_come
            if runs and owners.setdefault(machine.epoch, machine.living) != machine.living:
                self._fail(state, f"ranks disagree on who lives in epoch {machine.epoch}")
            trained = [step for step in range(rank.step) if step not in self.setting.evaluates]
            if [step for step, _ in rank.updates] != trained:
                self._fail(state, f"rank {rank.rank} in step {rank.step} has updates {rank.updates}")

    def _check_end(self, state: State) -> None:
        setting, head = self.setting, self.heads.values[state.head]
        ranks = [self.ranks.values[at] for at in state.ranks]
        for rank in ranks:
            if rank.rank not in head.living and rank.status is Status.RUNS and rank.has_come:
                self._fail(state, f"rank {rank.rank} was declared lost and goes on")
        num_faults = setting.deaths - state.deaths + setting.suspicions - state.suspicions
        num_faults += setting.dies_first is not None
        if not head.living and num_faults < setting.num_replicas:
            self._fail(state, f"the run was ended after {num_faults} losses")
        survivors = [rank for rank in ranks if rank.rank in head.living and rank.status is not Status.DEAD]
        self.num_ends_with_newcomers += any(rank.fetched is not None for rank in survivors)
        for rank in survivors:
            self._check_survivor(state, rank, survivors[0])
        for rank in ranks:
            if rank.status is Status.ENDED and survivors:
                alike = [one == other for one, other in zip(rank.updates, survivors[0].updates, strict=False)]
                if alike.count(False) > 1 or False in alike[:-1]:
                    self._fail(state, f"rank {rank.rank} went on by itself: {rank.updates}")

    def _check_survivor(self, state: State, rank: Rank, first: Rank) -> None:
        setting, who = self.setting, f"rank {rank.rank}"
        if rank.step != setting.num_steps:
            self._fail(state, f"deadlock: {who} stays in step {rank.step}, before {rank.phase}")
        if rank.updates != first.updates:
            self._fail(state, f"{who} has updates {rank.updates}, rank {first.rank} {first.updates}")
        if setting.gatherings and rank.status is not Status.LEFT:
            self._fail(state, f"deadlock: {who} stays in gathering {len(rank.results) + 1}")
        # The last one ends the run, and has no result of which anybody makes use.
        if len(rank.results) < len(setting.gatherings) - 1:
            self._fail(state, f"{who} left after {len(rank.results)} gatherings")
        for one, other in zip(rank.results[: len(setting.gatherings) - 1], first.results, strict=False):
            if one != other and None not in (one, other):  # A newcomer has none of those before it came.
                self._fail(state, f"{who} has the result {one}, rank {first.rank} {other}")

    def _fail(self, state: State, what: str) -> None:
        raise MembershipFault("\n".join([what, *self.story(state)]))


def _copied(rank: Rank) -> Rank:
    twin = copy(rank)
    twin.machine = copy(rank.machine)
    return twin


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, tuple) and value and isinstance(value[0], PeerNote):
        return frozenset(value)
    return value
