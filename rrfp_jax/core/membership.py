"""Membership: which ranks live, and how the survivors of a loss go on together. Events in, instructions out.

One half for each rank (:class:`RankMembership`), one for the head (:class:`HeadMembership`), which lives in the
launcher and is the only one that declares losses. Like an arbiter, neither knows clocks, threads or sockets. Messages
may come in any order and more than once; they are lost only where their sender or their receiver is.

Rules
-----
1. *Declarations.* Each loss makes a new **epoch**: a number and the ranks that live in it. The head counts epochs up
   and tells all ranks each of them, so an epoch's number stands for its ranks. A rank that suspects another tells the
   head; a rank that hears of an epoch without itself ends. A rank may skip epochs. An epoch with no rank ends the run:
   some stage has no replica left.
2. *Freezing.* A rank that comes to an epoch freezes at once: from then on it drops all messages of earlier epochs, and
   its arbiters get no event. Messages of later epochs are kept until it has come there, and data of its own epoch until
   it goes on. So each verdict and each result belongs to one epoch and was made by all of its ranks.
3. *The newest verdict counts.* Each rank tells the first rank of the epoch the newest step whose verdict it knows, with
   the verdict. Once all have, the first one answers with the newest of all: 2 (N - 1) messages. A rank that did not
   know this verdict finishes the step with it; then all start the step that follows, with owners that follow from the
   living ranks. A rank keeps the frozen step, with its sums, until that answer comes.
4. *A gathering has the result that any survivor has.* Each rank brings its data to the first rank of the epoch, which
   answers all once it has everybody's. After a loss each rank tells, with its newest verdict, how many gatherings have
   ended for it. Where some have one more than others, the lowest of them passes the result on. All others bring their
   data once more, to the first rank of the new epoch.
5. *Ranks come back between steps.* A new process of a lost rank is a **newcomer**. All living ranks **hold**: each has
   finished step n - 1, waits for no gathering, begins neither step n nor a gathering, and tells the head so. A newcomer
   makes the state after step n - 1 its own, from a checkpoint that all ranks of some epoch have made in gatherings, so
   that all of them know the verdict of step n - 1, and tells the head. Once all ranks of the epoch hold and some
   newcomer has that state, the head declares an epoch with it, and all go on by rule 3. Where the last newcomer is
   gone, the head lets all go on without one, and nobody may hold for step n any more.

Why survivors never disagree
----------------------------
Let a *survivor* be a rank of the latest epoch E.

*Verdicts.* A verdict of step n that was made in epoch e needs the reports of all ranks of e, and a rank reports step n
of epoch e only when it runs in e, has finished step n - 1, and has all sums of step n. By rule 2 nobody reports after
it has come to a later epoch. Assume that some survivors know a verdict of step n, made in epoch e, and n is the newest
that any of them knows. Assume first that no epoch after e has a newcomer. Each survivor lived in e, for such epochs
only shrink, so it had reported n in e. Hence it has finished step n - 1, and it has the sums of step n that belong to
e:

* It cannot have begun step n anew in an epoch after e. That takes an answer in which nobody of that epoch knew the
  verdict; but the survivors that know it lived there too, and each knew it since e, because it learnt it while it ran
  in e or from an answer that counted it (rule 3).
* The verdict is the same for all of them. Two verdicts of step n would be of epochs e < f, and to make the second one
  all ranks of f had begun n anew, which contradicts the point before.

So each survivor can finish step n by itself, since an update needs nothing but sums and verdict, and none has more than
one step to finish. If no survivor knows a verdict of step n, none has updated, for updates come after verdicts: all do
it again. Nothing is lost: a verdict that only lost ranks knew was applied by no survivor. Nothing is applied twice: a
step is done anew only where nobody who lives knew its verdict. Steps that evaluate are the same without updates.

*Newcomers.* Let g be the first epoch after e with a newcomer. All ranks of the epoch before g held in that epoch, for
the same step m, and held until they came to g: the head takes nobody in for a step for which it has let anybody go on.
So m - 1 is the newest verdict that any of them knew, and all had finished it, as had the newcomer by its checkpoint.
Hence n < m, all survivors have finished step n, and there is nothing to show. They waited for no gathering either, so
all had the results of the same ones. The newcomer takes over their numbers from the answer of rule 3, and nobody will
ask it for a result that came before.

*Two groups cannot both go on.* A lost rank that lives still, stopped or cut off, makes no verdict without the reports
of all ranks of its epoch, and these give none once they have come to a later one. It can at most learn the verdict of
the step that they had reported before; the survivors do that step again, and it hears of its loss and ends.

*Gatherings.* The argument is that of verdicts with "has brought" for "has reported": result number n of an epoch needs
data number n of all its ranks, so each survivor has result n - 1, at least, and waits for n.

*No deadlock.* In the latest epoch nobody is lost, so all its ranks come to it, tell, get the answer and go on. A
suspicion is repeated until it is answered by an epoch in which one of the two is missing. All ranks hold for the same
steps, so either all tell the head, or one of them is lost and the others tell it in the next epoch. What a rank told in
an earlier epoch counts for nothing, and one that holds for a step for which the head has let others go on is let go on
too.

Who goes
--------
A rank whose process has ended is lost. Where one rank suspects another, the head cannot know which of them is to blame.
The suspected one goes, unless its stage would have no replica left without it and the accuser can be spared. So of two
that accuse each other the one accused first goes; the accusation by a rank that is lost counts for nothing.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from rrfp_jax.core.explain import IllegalTransition

# -- what ranks tell each other ------------------------------------------------------------------------------------


class NewestVerdict(NamedTuple):
    """To the first rank of the epoch: how far the sender has come."""

    step: int
    """The newest step whose verdict it knows."""
    verdict: Any
    gathered: tuple[tuple[str, int], ...]
    """For each lane the number of gatherings that have ended, where any has."""


class PassOn(NamedTuple):
    """A rank is asked to pass the newest result of a lane on to ranks that lack it."""

    lane: str
    number: int
    holder: int
    lacking: tuple[int, ...]


class Recovered(NamedTuple):
    """From the first rank of the epoch to all: the newest verdict of all, and the results that some lack."""

    step: int
    verdict: Any
    results: tuple[PassOn, ...]


class BroughtData(NamedTuple):
    """To the first rank of the epoch: the sender's data for a gathering."""

    lane: str
    number: int
    data: Any


class GatheredResult(NamedTuple):
    """The result of a gathering: pairs of rank and data, ascending by rank."""

    lane: str
    number: int
    result: tuple[tuple[int, Any], ...]


MemberNote = NewestVerdict | Recovered | BroughtData | GatheredResult


# -- events of a rank ----------------------------------------------------------------------------------------------


class RankSuspected(NamedTuple):
    """The failure detector of this rank suspects another rank."""

    rank: int
    reason: str


class HeadReached(NamedTuple):
    """The connection to the head is there again: tell it everything once more."""


class EpochDeclared(NamedTuple):
    """The head has declared an epoch."""

    epoch: int
    living: tuple[int, ...]
    """The ranks that live, those first that have been there longest; empty: the run ends."""
    reason: str
    """Why the ranks that are missing were lost."""


class RunCompleted(NamedTuple):
    """The head says that a rank has left in good order, so all ranks have come to the end of the run."""


class HoldCalled(NamedTuple):
    """This rank holds: it begins neither this step nor a gathering until it may go on. All ranks hold for the same
    steps. A hold ends with the epoch, and is called again in the next one if that has no newcomer."""

    step: int


class HoldReleased(NamedTuple):
    """The head lets ranks go on that hold for this step or an earlier one."""

    step: int


class StepDecided(NamedTuple):
    """This rank has learnt or made the verdict of a step. Comes before any update; a rank of several units may say so
    for each of them."""

    step: int
    verdict: Any


class PeerNote(NamedTuple):
    """A note from another rank, with the epoch in which that rank was."""

    sender: int
    epoch: int
    note: MemberNote


class GatherCalled(NamedTuple):
    """This rank takes part in the next gathering of a lane. Lanes are independent of each other; within one, all ranks
    call the same gatherings in the same order, and each call comes after the end of the one before."""

    lane: str
    data: Any


MembershipEvent = (
    RankSuspected
    | HeadReached
    | EpochDeclared
    | RunCompleted
    | HoldCalled
    | HoldReleased
    | StepDecided
    | PeerNote
    | GatherCalled
)


# -- instructions to a rank ----------------------------------------------------------------------------------------


class TellHead(NamedTuple):
    """Tell the head the epoch of this rank, and the living ranks that it suspects, with reasons."""

    epoch: int
    accusations: tuple[tuple[int, str], ...]
    holds: int | None = None
    """The step for which this rank holds, once it waits for no gathering."""


class TellRank(NamedTuple):
    """Give another rank this note, where it becomes :class:`PeerNote`."""

    rank: int
    epoch: int
    note: MemberNote


class FreezeStep(NamedTuple):
    """Hand no further event to the arbiters, and keep the step under way with its sums and its futures. An update that
    has begun is finished."""

    epoch: int
    living: tuple[int, ...]
    reason: str


class FinishDecided(NamedTuple):
    """Finish the frozen step with this verdict: the update, by all units of this rank, or the result of an
    evaluation."""

    step: int
    verdict: Any


class ResumeFrom(NamedTuple):
    """Drop frozen steps from this one on, and run it and its followers with the owners that these ranks have. Hand on
    the data of this epoch that was kept."""

    epoch: int
    living: tuple[int, ...]
    step: int


class GatheringEnded(NamedTuple):
    """The gathering of a lane has this result: pairs of rank and data, ascending by rank. Ranks that were lost before
    it ended may be missing."""

    lane: str
    result: tuple[tuple[int, Any], ...]


class HoldEnded(NamedTuple):
    """Go on: nobody comes back before this step."""


class EndRank(NamedTuple):
    """End this process: it is no part of the run any more."""

    reason: str


class LeaveRun(NamedTuple):
    """End this process in good order: there is nothing left to do."""


MembershipInstruction = (
    TellHead | TellRank | FreezeStep | FinishDecided | ResumeFrom | GatheringEnded | HoldEnded | EndRank | LeaveRun
)


class Admission(StrEnum):
    """How to treat data of some epoch that comes from another rank."""

    DROP = "drop"
    KEEP = "keep"
    """Ask again after the next :class:`ResumeFrom`."""
    TAKE = "take"


class RankMembership:
    """The membership of one rank.

    Args:
        rank: the number of this rank.
        num_ranks: the number of ranks, all of which live in epoch 0.
        first_step: the step that all begin with.
        is_newcomer: whether this rank comes to a run under way, with the state before ``first_step``; it lives in no
            epoch so far.
    """

    # Containers are replaced and never changed, so a shallow copy is a snapshot.
    __slots__ = (
        "_accused",
        "_brought",
        "_is_newcomer",
        "_kept",
        "_pending",
        "_results",
        "_told",
        "epoch",
        "has_ended",
        "holds",
        "is_frozen",
        "living",
        "newest",
        "rank",
        "verdict",
    )

    def __init__(self, rank: int, num_ranks: int, *, first_step: int = 0, is_newcomer: bool = False) -> None:
        self.rank = rank
        self.epoch = 0
        self.living = () if is_newcomer else tuple(range(num_ranks))
        """The ranks of the epoch, those first that have been there longest."""
        self._is_newcomer = is_newcomer
        """Whether this rank has not gone on with the others yet."""
        self.holds: int | None = None
        """The step for which this rank holds."""
        self.is_frozen = is_newcomer
        """Whether this rank has come to an epoch in which it has not gone on yet."""
        self.has_ended = False
        self.newest = first_step - 1
        """The newest step whose verdict this rank knows."""
        self.verdict: Any = None
        self._accused: dict[int, str] = {}
        """Living ranks that this one suspects, with the reasons."""
        self._told: dict[int, NewestVerdict] = {}
        """On the first rank of the epoch: how far the others have come."""
        self._brought: dict[tuple[str, int], dict[int, Any]] = {}
        """On the first rank of the epoch: data of gatherings that have not ended, by lane and number."""
        self._results: dict[str, tuple[int, tuple[tuple[int, Any], ...]]] = {}
        """The number and the result of the last gathering of each lane that has ended here."""
        self._pending: dict[str, tuple[int, Any]] = {}
        """The number and this rank's data of each gathering that it waits for, by lane."""
        self._kept: tuple[PeerNote, ...] = ()
        """Notes that came too early."""

    @property
    def first(self) -> int:
        """The first rank of the epoch, which the others tell and which answers."""
        return self.living[0]

    @property
    def is_gathering(self) -> bool:
        """Whether this rank waits for the result of a gathering."""
        return bool(self._pending)

    @property
    def suspected(self) -> Mapping[int, str]:
        """The living ranks that this one suspects, with the reasons."""
        return MappingProxyType(self._accused)

    def admits(self, epoch: int) -> Admission:
        """Returns how to treat data that another rank has sent in this epoch."""
        if epoch < self.epoch or self.has_ended:
            return Admission.DROP
        return Admission.KEEP if epoch > self.epoch or self.is_frozen else Admission.TAKE

    def handle(self, event: MembershipEvent) -> list[MembershipInstruction]:
        """Takes an event and returns the instructions that follow from it, to be carried out in their order.

        Raises IllegalTransition for a verdict that cannot be, and for a gathering before the end of the one before.
        """
        out: list[MembershipInstruction] = []
        if self.has_ended:
            return out
        match event:
            case PeerNote():
                self._hear(event, out)
            case StepDecided(step, verdict):
                self._decide(step, verdict)
            case GatherCalled(lane, data):
                self._call(lane, data, out)
            case EpochDeclared():
                self._come_to(event, out)
            case RankSuspected(rank, reason) if rank in self.living and rank != self.rank and rank not in self._accused:
                self._accused = {**self._accused, rank: reason}
                self._tell_head(out)
            case HeadReached():
                self._tell_head(out)
            case HoldCalled(step):
                self._hold(step, out)
            case HoldReleased(step) if self.holds is not None and self.holds <= step:
                self.holds = None
                out.append(HoldEnded())
            case RunCompleted():
                self.has_ended = True
                out.append(LeaveRun())
        return out

    def _tell_head(self, out: list[MembershipInstruction]) -> None:
        holds = None if self._pending else self.holds
        out.append(TellHead(self.epoch, tuple(sorted(self._accused.items())), holds))

    def _hold(self, step: int, out: list[MembershipInstruction]) -> None:
        if self.is_frozen or step != self.newest + 1:
            raise IllegalTransition(f"rank {self.rank} holds for step {step}; it knows the verdict of {self.newest}")
        self.holds = step
        self._tell_hold(out)

    def _tell_hold(self, out: list[MembershipInstruction]) -> None:
        if self.holds is not None and not self._pending:
            self._tell_head(out)

    def _decide(self, step: int, verdict: Any) -> None:
        if step == self.newest and not self.is_frozen:
            return  # another unit of this rank
        if self.is_frozen or step != self.newest + 1:
            frozen = ", and is frozen" if self.is_frozen else ""
            raise IllegalTransition(
                f"rank {self.rank} learns the verdict of step {step}; it knows that of {self.newest}{frozen}"
            )
        self.newest, self.verdict = step, verdict

    def _call(self, lane: str, data: Any, out: list[MembershipInstruction]) -> None:
        if lane in self._pending:
            raise IllegalTransition(f"rank {self.rank} calls a gathering of lane {lane} before the last one has ended")
        number = self._results[lane][0] + 1 if lane in self._results else 1
        self._pending = {**self._pending, lane: (number, data)}
        if not self.is_frozen:
            self._tell(self.first, BroughtData(lane, number, data), out)

    # -- a new epoch -------------------------------------------------------------------------------------------------

    def _come_to(self, event: EpochDeclared, out: list[MembershipInstruction]) -> None:
        if event.epoch <= self.epoch:
            return
        self.epoch, self.living = event.epoch, event.living
        if self.rank not in event.living:
            self.has_ended = True
            out.append(EndRank(event.reason))
            return
        self.is_frozen, self.holds = True, None
        self._accused = {rank: reason for rank, reason in self._accused.items() if rank in event.living}
        self._told, self._brought = {}, {}
        out.append(FreezeStep(event.epoch, event.living, event.reason))
        gathered = tuple((lane, number) for lane, (number, _) in sorted(self._results.items()))
        self._tell(self.first, NewestVerdict(self.newest, self.verdict, gathered), out)
        self._hear_kept(out)

    def _recover(self) -> Recovered:
        """Returns the answer to all, once all have told."""
        newest = max(self._told.values(), key=lambda told: told.step)
        ended = {rank: dict(told.gathered) for rank, told in self._told.items()}
        results = []
        for lane in sorted({lane for of_rank in ended.values() for lane in of_rank}):
            number = max(of_rank.get(lane, 0) for of_rank in ended.values())
            holder = min(rank for rank, of_rank in ended.items() if of_rank.get(lane, 0) == number)
            lacking = tuple(rank for rank in self.living if ended[rank].get(lane, 0) < number)
            if lacking:
                results.append(PassOn(lane, number, holder, lacking))
        return Recovered(newest.step, newest.verdict, tuple(results))

    def _go_on(self, answer: Recovered, out: list[MembershipInstruction]) -> None:
        self.is_frozen = False
        if answer.step > self.newest:
            self.newest, self.verdict = answer.step, answer.verdict
            out.append(FinishDecided(answer.step, answer.verdict))
        out.append(ResumeFrom(self.epoch, self.living, self.newest + 1))
        passed_on = set()
        for lane, number, holder, lacking in answer.results:
            if self._is_newcomer:
                self._results = {**self._results, lane: (number, ())}
            if self.rank == holder:
                for rank in lacking:
                    self._tell(rank, GatheredResult(lane, *self._results[lane]), out)
            passed_on.add((lane, number))
        self._is_newcomer = False
        # A copy: where this rank is the only one left, its own data ends the gathering at once.
        for lane, (number, data) in sorted(self._pending.items()):
            if (lane, number) not in passed_on:
                self._tell(self.first, BroughtData(lane, number, data), out)
        self._hear_kept(out)

    # -- notes -------------------------------------------------------------------------------------------------------

    def _tell(self, rank: int, note: MemberNote, out: list[MembershipInstruction]) -> None:
        if rank == self.rank:
            self._take(rank, note, out)
        else:
            out.append(TellRank(rank, self.epoch, note))

    def _hear(self, event: PeerNote, out: list[MembershipInstruction]) -> None:
        # Recovery itself is what a frozen rank waits for; gatherings go on after it.
        is_recovery = event.epoch == self.epoch and isinstance(event.note, NewestVerdict | Recovered)
        admission = Admission.TAKE if is_recovery else self.admits(event.epoch)
        if admission is Admission.KEEP:
            self._kept = (*self._kept, event)
        elif admission is Admission.TAKE:
            self._take(event.sender, event.note, out)

    def _hear_kept(self, out: list[MembershipInstruction]) -> None:
        kept, self._kept = self._kept, ()
        for event in kept:
            self._hear(event, out)

    def _take(self, sender: int, note: MemberNote, out: list[MembershipInstruction]) -> None:
        match note:
            case NewestVerdict():
                if not self.is_frozen:
                    return  # answered already
                self._told = {**self._told, sender: note}
                if len(self._told) == len(self.living):
                    answer = self._recover()
                    for rank in reversed(self.living):  # itself last: what it does then comes after the answer
                        self._tell(rank, answer, out)
            case Recovered():
                if self.is_frozen:
                    self._go_on(note, out)
            case BroughtData(lane, number, data):
                if lane in self._results and number <= self._results[lane][0]:
                    return  # answered already
                brought = {**self._brought.get((lane, number), {}), sender: data}
                self._brought = {**self._brought, (lane, number): brought}
                if len(brought) == len(self.living):
                    self._brought = {key: value for key, value in self._brought.items() if key != (lane, number)}
                    result = GatheredResult(lane, number, tuple(sorted(brought.items())))
                    for rank in self.living:
                        self._tell(rank, result, out)
            case GatheredResult(lane, number, result):
                if lane in self._pending and self._pending[lane][0] == number:
                    self._pending = {name: value for name, value in self._pending.items() if name != lane}
                    self._results = {**self._results, lane: (number, result)}
                    out.append(GatheringEnded(lane, result))
                    self._tell_hold(out)

    # -- for tests -----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Checks the invariants of the state. For tests."""
        if self.has_ended:
            return
        if not self.living:
            assert self._is_newcomer
            assert self.is_frozen
            return
        assert self.rank in self.living
        assert self.holds is None or (self.holds == self.newest + 1 and not self.is_frozen)
        assert set(self._accused) <= set(self.living) - {self.rank}
        assert set(self._told) <= set(self.living)
        assert self.rank == self.first or not (self._told or self._brought)
        assert not self.is_frozen or not self._brought
        assert len(self._told) < len(self.living) or not self.is_frozen
        for (lane, number), brought in self._brought.items():
            assert 0 < len(brought) < len(self.living)
            # Somebody whose gathering has ended may call the next one before the result is passed on to this rank.
            assert 1 <= number - (self._results[lane][0] if lane in self._results else 0) <= 2
        for lane, (number, _) in self._pending.items():
            assert number == (self._results[lane][0] if lane in self._results else 0) + 1
        assert all(kept.epoch >= self.epoch for kept in self._kept)


# -- the head ------------------------------------------------------------------------------------------------------


class RankTold(NamedTuple):
    """A rank has told the head its epoch, the ranks that it suspects, and whether it holds (:class:`TellHead`)."""

    rank: int
    epoch: int
    accusations: tuple[tuple[int, str], ...]
    holds: int | None = None


class RankGone(NamedTuple):
    """The process of a rank, perhaps of a newcomer, has ended, before it had left in good order."""

    rank: int
    reason: str


class NewcomerTold(NamedTuple):
    """A new process of a lost rank is prepared."""

    rank: int
    step: int | None
    """The step before which it has the state; None: it has none yet."""


class RankLeft(NamedTuple):
    """A rank has come to the end of the run, where all ranks meet, and leaves."""

    rank: int


HeadEvent = RankTold | RankGone | RankLeft | NewcomerTold


class DeclareEpoch(NamedTuple):
    """Tell these ranks, each of which may live, of an epoch (:class:`EpochDeclared`). A process of a rank that is
    ``lost`` and still runs must be ended: it may be stopped, and not hear. A newcomer hears of none before its own."""

    ranks: tuple[int, ...]
    epoch: int
    living: tuple[int, ...]
    lost: tuple[int, ...]
    """The ranks that this epoch is the first to lack; empty where an epoch is told once more."""
    reason: str


class DeclareCompleted(NamedTuple):
    """Tell these ranks that the run is completed (:class:`RunCompleted`)."""

    ranks: tuple[int, ...]


class ReleaseHolds(NamedTuple):
    """Tell these ranks to go on (:class:`HoldReleased`)."""

    ranks: tuple[int, ...]
    step: int


class FetchState(NamedTuple):
    """Tell these newcomers that all others hold for this step: each may fetch the state, and tell."""

    ranks: tuple[int, ...]
    step: int


HeadInstruction = DeclareEpoch | DeclareCompleted | ReleaseHolds | FetchState


class HeadMembership:
    """The head's half: declares epochs, in one order for all.

    Args:
        units_of: the units of each rank, by rank. A unit that spans several ranks is lost with any of them.
        num_stages: the number of stages; unit ``u`` is a replica of stage ``u % num_stages``.
    """

    __slots__ = (
        "_holding",
        "_num_stages",
        "_reason",
        "_released",
        "_units_of",
        "epoch",
        "is_completed",
        "living",
        "newcomers",
    )

    def __init__(self, units_of: Sequence[Sequence[int]], num_stages: int) -> None:
        self._units_of, self._num_stages = tuple(map(tuple, units_of)), num_stages
        self.epoch = 0
        self.living = tuple(range(len(units_of)))
        """The ranks that live, those first that have been there longest; empty: the run has ended, for a stage has no
        replica left."""
        self.newcomers: Mapping[int, int | None] = {}
        """The ranks that are prepared to come back, and the steps before which they have the state."""
        self._holding: dict[int, int] = {}
        self._released = -1
        """The latest step for which nobody may hold any more."""
        self.is_completed = False
        self._reason = ""

    def handle(self, event: HeadEvent) -> list[HeadInstruction]:
        """Takes an event and returns the instructions that follow from it."""
        out: list[HeadInstruction] = []
        match event:
            case RankLeft():
                if not self.is_completed:
                    self.is_completed = True
                    out.append(DeclareCompleted(self.living))
            case RankGone(rank, reason):
                if rank in self.living and not self.is_completed:
                    self._declare(rank, f"rank {rank} {reason}", out)
                elif rank in self.newcomers:
                    self._forget(rank)
                    self._take_back(out)
            case RankTold():
                self._hear(event, out)
            case NewcomerTold(rank, step):
                if rank in self.living:
                    out.append(DeclareEpoch((rank,), self.epoch, self.living, (), self._reason))
                elif self.living:
                    self.newcomers = {**self.newcomers, rank: step}
                    self._take_back(out)
        return out

    def _hear(self, told: RankTold, out: list[HeadInstruction]) -> None:
        rank, epoch, accusations, holds = told
        self._judge(rank, accusations, out)
        if self.is_completed:
            out.append(DeclareCompleted((rank,)))
        elif epoch < self.epoch and not out:
            out.append(DeclareEpoch((rank,), self.epoch, self.living, (), self._reason))
        elif holds is not None and epoch == self.epoch and rank in self.living:
            if holds <= self._released:
                out.append(ReleaseHolds((rank,), self._released))
            else:
                self._holding = {**self._holding, rank: holds}
                self._take_back(out)

    # -- newcomers ---------------------------------------------------------------------------------------------------

    @property
    def holding(self) -> Mapping[int, int]:
        """The ranks that hold in this epoch, and for which steps."""
        return MappingProxyType(self._holding)

    def _forget(self, newcomer: int) -> None:
        self.newcomers = {rank: step for rank, step in self.newcomers.items() if rank != newcomer}

    def _take_back(self, out: list[HeadInstruction]) -> None:
        """Declares an epoch with the newcomers that have the state, once all hold; lets all go on if there are none."""
        if not self._holding:
            return
        step = max(self._holding.values())
        if not self.newcomers:
            out.append(ReleaseHolds(tuple(self._holding), step))
            self._released, self._holding = step, {}
        elif len(self._holding) == len(self.living):
            if not (ready := tuple(rank for rank, state in self.newcomers.items() if state == step)):
                out.append(FetchState(tuple(self.newcomers), step))
                return
            for rank in ready:
                self._forget(rank)
            self._released = step
            self._begin((*self.living, *ready), (), f"{_named(ready)} back", out)

    # -- losses ------------------------------------------------------------------------------------------------------

    def _judge(self, accuser: int, accusations: Sequence[tuple[int, str]], out: list[HeadInstruction]) -> None:
        for suspect, reason in accusations:
            # One after the other: after each, the accuser itself may be lost, or the run be over.
            if self.is_completed or accuser not in self.living or suspect not in self.living:
                continue
            goes = suspect if self._can_spare(suspect) or not self._can_spare(accuser) else accuser
            self._declare(goes, f"rank {accuser} suspects rank {suspect}: {reason}", out)

    def _can_spare(self, rank: int) -> bool:
        return self.missing_stage([other for other in self.living if other != rank]) is None

    def missing_stage(self, living: Sequence[int]) -> int | None:
        """Returns the first stage that has no replica on these ranks alone; None: each has one."""
        lost = {unit for rank, units in enumerate(self._units_of) if rank not in living for unit in units}
        left = {unit % self._num_stages for rank in living for unit in self._units_of[rank] if unit not in lost}
        return next((stage for stage in range(self._num_stages) if stage not in left), None)

    def _declare(self, rank: int, reason: str, out: list[HeadInstruction]) -> None:
        before = self.living
        living = tuple(other for other in before if other != rank)
        stage = self.missing_stage(living)
        if stage is not None:
            living, reason = (), f"{reason}; stage {stage} has no replica left"
        self._begin(living, tuple(other for other in before if other not in living), reason, out)

    def _begin(self, living: tuple[int, ...], lost: tuple[int, ...], reason: str, out: list[HeadInstruction]) -> None:
        self.epoch, self.living, self._reason = self.epoch + 1, living, reason
        self._holding = {}
        told = tuple(rank for rank in range(len(self._units_of)) if rank not in self.newcomers)
        out.append(DeclareEpoch(told, self.epoch, living, lost, reason))


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
