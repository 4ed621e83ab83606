"""Groups broken in one way each must be caught: by complete exploration, and by random walks over their parts."""

import pytest

from rrfp_jax.arbitration import HINTS, GroupProtocol, RunTask, TellGroup, group_arbiter
from rrfp_jax.arbitration.group_leader import FollowingMember, LeadingMember
from rrfp_jax.arbitration.group_rounds import ProposingMember
from rrfp_jax.checking import CheckError, Setting, explore, replay
from rrfp_jax.checking.catalogue import PIPELINE_ONLY
from rrfp_jax.checking.random_walk import random_walk
from rrfp_jax.tasks import chain, linear

LEADER, PROPOSE, _ = GroupProtocol


def broken_group(broken):
    """Makes groups in which the class that ``broken`` derives from is replaced by it."""

    def make(*args, **more):
        member = group_arbiter(*args, **more)
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


class LeadsAlone(LeadingMember):
    """Chooses from what is ready on itself. Followers start what they were told all the same: slower, not wrong."""

    def _everyone_has(self, step, note, member):
        return True

    def _has_started_everywhere(self):
        return True


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
    def _dispatch(self, out):
        LeadingMember.__bases__[0].__bases__[0]._dispatch(self, out)

    def validate(self):
        pass


class FollowsWithoutLooking(FollowingMember):
    """Starts what it was told, ready or not."""

    def _can_start(self, note):
        node = self._ranked.plan.index[note.task]
        if self._waiting[node]:
            self._waiting[node] = 0
            self._ready.add(self._ranked.plan.lanes[node], self._ranked.position[node])
        return True

    def validate(self):
        pass


class IgnoresItsWindow(FollowingMember):
    def _can_start(self, note):
        return not self._waiting[self._ranked.plan.index[note.task]]

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


class RunsItsOwnProposal(ProposingMember):
    """Takes a round for won as soon as it has a proposal of its own."""

    def _settle(self, proposals, out):
        own = proposals[self.member]
        super()._settle([own] * self.num_members, out)


class AnswersWithoutNews(ProposingMember):
    """Gives the old answer to a new round."""

    def _candidate(self):
        return self._refused or super()._candidate()


class MovesOnAlone(ProposingMember):
    """Lets the hint's state advance in a round that failed."""

    def _settle(self, proposals, out):
        super()._settle(proposals, out)
        self._hint_state = proposals[self.member].hint_state


class WaitsToBeAsked(ProposingMember):
    def _candidate(self):
        kept = self._kept.get(self.step, {})
        return super()._candidate() if any(r == self._round for r, _ in kept) else None


BROKEN = {
    TellsNobody: "deadlock: ",
    NumbersFromOne: "deadlock: ",
    ChoosesAgain: "deadlock: |not expected",
    TellsTwice: "member 0 of stage 0 tells member 1 TaskChosen.* twice",
    ForgetsEarlyNotes: "deadlock: ",
    FollowsItsOwnMind: "members of stage . diverge",
    FollowsWithoutLooking: "runs 1B0 before 1F0|beside|before",
    StartsInOrderOfArrival: "members of stage . diverge",
    KeepsSilent: "deadlock: ",
    NeverRetries: "deadlock: ",
    RunsItsOwnProposal: "members of stage . diverge",
    AnswersWithoutNews: "deadlock: ",
    MovesOnAlone: "deadlock: |diverge",
    WaitsToBeAsked: "deadlock: ",
}
