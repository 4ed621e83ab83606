"""Groups broken in one way each must be caught, by complete exploration and by random walks."""

from random import Random

import pytest

from rrfp_jax.core import HINTS, GroupProtocol, RunTask, StageArbiter, TellGroup, group_arbiter
from rrfp_jax.core.groups import GROUP_DEGREE, FollowingMember, LeadingMember, ProposingMember
from rrfp_jax.schedules import chain, linear
from tests.model_checker import CheckError, Setting, explore, replay
from tests.model_checker.catalogue import PIPELINE_ONLY
from tests.model_checker.random_walk import random_walk

LEADER, PROPOSE, _ = GroupProtocol


def broken_group(broken):
    """Makes groups in which the class that ``broken`` derives from is replaced by it."""

    def make(*args, **more):
        member = group_arbiter(*args, **more, degree=getattr(broken, "degree", GROUP_DEGREE))
        if isinstance(member, broken.__bases__[0]):
            member.__class__ = broken
        return member

    return make


def setting(broken, **more):
    protocol = PROPOSE if issubclass(broken, ProposingMember) else LEADER
    common = {
        "graph": chain(2, 2),
        "placement": linear(2),
        "windows": (2, 2),
        "policies": (HINTS["bf"],) * 2,
        "rules": PIPELINE_ONLY,
        "groups": (2, 2),
        "protocol": protocol,
    }
    return Setting(**{**common, **more}, make_member=broken_group(broken))


class TellsNobody(LeadingMember):
    def _start(self, node, position, out):
        super()._start(node, position, out)
        out[:] = [i for i in out if not isinstance(i, TellGroup)]


class TellsOnlyTheFirstFollower(LeadingMember):
    def _start(self, node, position, out):
        super()._start(node, position, out)
        out[:] = [i for i in out if not (isinstance(i, TellGroup) and i.member > 1)]


class NumbersFromOne(LeadingMember):
    def _start(self, node, position, out):
        super()._start(node, position, out)
        out[:] = [
            i._replace(note=i.note._replace(number=i.note.number + 1)) if isinstance(i, TellGroup) else i for i in out
        ]


class ChoosesAgain(LeadingMember):
    """Forgets that it has chosen: tells the second task as the first."""

    def _start(self, node, position, out):
        super()._start(node, position, out)
        out[:] = [i._replace(note=i.note._replace(number=0)) if isinstance(i, TellGroup) else i for i in out]


class TellsTwice(LeadingMember):
    def _start(self, node, position, out):
        super()._start(node, position, out)
        out += [i for i in out if isinstance(i, TellGroup)]


class ForgetsEarlyNotes(LeadingMember):
    """Loses what it is told of a step that has not started on itself."""

    def _take(self, event, out):
        if not self._is_current(event.step) and hasattr(event, "note"):
            return False
        return super()._take(event, out)


class FollowsItsOwnMind(FollowingMember):
    """Tells the leader everything, and chooses for itself."""

    def _dispatch(self, out):
        StageArbiter._dispatch(self, out)

    def validate(self):
        pass


class StartsInOrderOfArrival(FollowingMember):
    def _hear(self, event):
        number = self._num_started + len(self._kept.get(event.step, {}))
        return super()._hear(event._replace(note=event.note._replace(number=number)))

    def validate(self):
        pass


class KeepsSilent(FollowingMember):
    """Does not tell of messages that come while a task runs."""

    def _take(self, event, out):
        ready = super()._take(event, out)
        if self._running and not any(isinstance(i, RunTask) for i in out):
            out[:] = [i for i in out if not isinstance(i, TellGroup)]
        return ready


class NeverRetries(ProposingMember):
    """Opens no further round when one has failed."""

    def _has_proposed(self, out):
        if self._refused is not None and not any(r == self._round for r, _ in self._kept.get(self.step, {})):
            return False
        return super()._has_proposed(out)


class KeepsChoicesToItself(FollowingMember):
    """Does not tell its children what the leader chose."""

    degree = 1

    def _hear_in_tree(self, event, out):
        may_start = super()._hear_in_tree(event, out)
        out[:] = [i for i in out if not (isinstance(i, TellGroup) and i.member in self.children)]
        return may_start


class SpeaksForItself(FollowingMember):
    """Does not tell its parent what its children have."""

    degree = 1

    def _all_below_have(self, step, note, member):
        return member in self.children and super()._all_below_have(step, note, member)


class PassesOnTwice(FollowingMember):
    """Tells its children again what they have heard."""

    degree = 1

    def _hear_in_tree(self, event, out):
        may_start = super()._hear_in_tree(event, out)
        out += [i for i in out if isinstance(i, TellGroup) and i.member in self.children]
        return may_start


class RunsItsOwnProposal(ProposingMember):
    """Takes a round for won as soon as it has a proposal of its own."""

    def _settle(self, proposals, out):
        own = proposals[self.member]
        super()._settle([own] * self.num_members, out)


class AnswersWithoutNews(ProposingMember):
    """Gives the old answer to a new round."""

    def _candidate(self):
        return self._refused or super()._candidate()


class ForgetsItsTurn(ProposingMember):
    """Does not take over the hint's state from the round that it has won."""

    def _settle(self, proposals, out):
        state = self._hint_state
        super()._settle(proposals, out)
        if self.member:
            self._hint_state = state


class WaitsToBeAsked(ProposingMember):
    def _candidate(self):
        kept = self._kept.get(self.step, {})
        return super()._candidate() if any(r == self._round for r, _ in kept) else None


NOBODY_AHEAD, AHEAD = {}, {"certain_ahead": True, "policies": (HINTS["f-priority"],) * 2}
BROKEN = [
    (TellsNobody, NOBODY_AHEAD, "deadlock: .*member 1 of stage 0"),
    (TellsOnlyTheFirstFollower, {"groups": (1, 3)}, "deadlock: .*member 2 of stage 1"),
    (NumbersFromOne, NOBODY_AHEAD, "deadlock: "),
    (ChoosesAgain, NOBODY_AHEAD, "deadlock: "),
    (ChoosesAgain, AHEAD, "members of stage 0 diverge: task 0 is 0F0 on member 0, 0F1 on member 1"),
    (TellsTwice, NOBODY_AHEAD, "member 0 of stage 0 tells member 1 TaskChosen.* twice"),
    (ForgetsEarlyNotes, NOBODY_AHEAD, "order of arrivals shows"),
    (FollowsItsOwnMind, NOBODY_AHEAD, "members of stage 1 diverge"),
    (StartsInOrderOfArrival, AHEAD, "members of stage 0 diverge"),
    (StartsInOrderOfArrival, {"collective": False}, "members of stage 0 diverge"),
    (KeepsChoicesToItself, {"groups": (1, 3)}, "deadlock: .*member 2 of stage 1"),
    (SpeaksForItself, {"groups": (1, 3)}, "deadlock: "),
    (PassesOnTwice, {"groups": (1, 3)}, "member 1 of stage 1 tells member 2 TaskChosen.* twice"),
    (KeepsSilent, NOBODY_AHEAD, "deadlock: "),
    (NeverRetries, NOBODY_AHEAD, "deadlock: "),
    (RunsItsOwnProposal, NOBODY_AHEAD, "members of stage 1 diverge"),
    (AnswersWithoutNews, NOBODY_AHEAD, "deadlock: "),
    (ForgetsItsTurn, {"policies": (HINTS["fb"],) * 2}, "deadlock: "),
    (WaitsToBeAsked, NOBODY_AHEAD, "deadlock: "),
]


@pytest.mark.parametrize(("broken", "more", "what"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_group_is_caught(broken, more, what):
    with pytest.raises(CheckError, match=what) as error:
        explore(setting(broken, **more))
    assert f"{len(error.value.trace):4}. " in str(error.value)
    assert [stimulus for stimulus, _ in replay(error.value.setting, error.value.trace)] == list(error.value.trace)


@pytest.mark.parametrize(("broken", "more"), [case[:2] for case in BROKEN], ids=lambda v: getattr(v, "__name__", ""))
def test_random_walks_find_it_too(broken, more):
    with pytest.raises(CheckError):
        walk(setting(broken, **more, graph=chain(2, 4)), times=200)


def walk(walked, *, times):
    for seed in range(times):
        random_walk(walked, Random(seed).randrange)


def test_the_same_groups_in_one_piece_pass():
    class Whole(FollowingMember):
        pass

    class WholeProposing(ProposingMember):
        pass

    for whole in (Whole, WholeProposing):
        explore(setting(whole))
        walk(setting(whole), times=5)
