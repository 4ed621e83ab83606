"""Arbiters that are broken in their memory, their announcements or their holds must be caught."""

from dataclasses import replace
from random import Random

import pytest

from rrfp_jax.core import Announce, ClockTick, StageArbiter, WakeAt
from rrfp_jax.core.groups import FollowingMember, LeadingMember
from rrfp_jax.core.memory import Footprint
from rrfp_jax.schedules import ScheduleRequest, Task, build_schedule, chain, linear, looped
from tests.checking.guided import by_table, guided, random_rows
from tests.model_checker import CheckError, explore, replay


class Broken(StageArbiter):
    def validate(self):
        """What is broken may show in it too; here the checks from outside are tested."""


class Answers(Broken):
    """Broken in what it answers: ``spoil`` changes the instructions."""

    def handle(self, event):
        return self.spoil(super().handle(event))


class HoldsUnasked(Answers):
    def spoil(self, out):
        return [i for i in out if not isinstance(i, WakeAt)]


class IgnoresTicks(Broken):
    def _take(self, event, out):
        return not isinstance(event, ClockTick) and super()._take(event, out)


class HoldsOnAndOn(Broken):
    """Takes the end of one hold for the beginning of the next."""

    def handle(self, event):
        if isinstance(event, ClockTick) and self._foresight.held_since_s is not None and event[:2] == (self.step, 1.0):
            return [WakeAt(self.step, event.time_s + 1)]
        return super().handle(event)


class WakesInVain(Answers):
    """Asks for a tick whenever it starts a task."""

    def spoil(self, out):
        return [*out, WakeAt(self.step, 1.0)] if self._running and self.is_active else out


class EndsHoldsByAnyTick(Broken):
    """Runs the best task when a tick comes, in time or not."""

    def _look_ahead(self, foresight, best, heads, out):
        return best if self.is_ticked else super()._look_ahead(foresight, best, heads, out)

    def handle(self, event):
        self.is_ticked = isinstance(event, ClockTick)
        return super().handle(event)


class BelievesAnnouncements(Broken):
    """Takes what is announced for what is here."""

    def _hear_announcement(self, event):
        if self.is_active and event.step == self.step and event.message in self._ranked.plan.arrivals:
            self._arrive(event, [])
            return True
        return super()._hear_announcement(event)


class HoldsForItself(Broken):
    """Holds for an entry that waits for a task of its own stage."""

    def _missing(self, position):
        numbers = self._ranked.arrival_table.inputs_of[self._ranked.at[position]]
        return [number for number in numbers if number not in self._arrived]


class HoldsForTheInadmissible(Broken):
    """Holds for a forward for which there is no memory."""

    is_asked = False

    def _missing(self, position):
        self.is_asked = True
        missing = super()._missing(position)
        self.is_asked = False
        return missing

    def _admits(self, position):
        return self.is_asked or super()._admits(position)


class AnnouncesTwice(Answers):
    def spoil(self, out):
        return [i for i in out for _ in range(1 + isinstance(i, Announce))]


class AnnouncesToTheWrongStage(Answers):
    def spoil(self, out):
        return [i._replace(stage=i.stage + 1) if isinstance(i, Announce) else i for i in out]


class NeverAnnouncesGradients(Answers):
    def spoil(self, out):
        return [i for i in out if not (isinstance(i, Announce) and i.message.kind == "gradient")]


class AnnouncesAtTheEnd(Answers):
    def spoil(self, out):
        return [i for i in out if not isinstance(i, Announce)]

    def _finish_task(self, task, out):
        super()._finish_task(task, out)
        node = self._ranked.plan.index[task]
        out += [Announce(self.step, *send) for send in self._ranked.plan.sends[node]]


class AnnouncesOnceMoreAtTheEnd(Broken):
    def _finish_task(self, task, out):
        super()._finish_task(task, out)
        node = self._ranked.plan.index[task]
        out += [Announce(self.step, *send) for send in self._ranked.plan.sends[node]]


class HoldsOneMore(Broken):
    def __init__(self, setup):
        super().__init__(replace(setup, footprint=setup.footprint + 1))


class HoldsOneLess(Broken):
    """Has less memory than it was given, though no less than its row takes."""

    def __init__(self, setup):
        super().__init__(replace(setup, footprint=setup.footprint - 1))


class CountsWhatItHolds(Footprint):
    """Asks whether there is memory now, and not what the row needs of it."""

    __slots__ = ()

    def admits(self, position, waiting, due=None):
        return self.held + self._row.takes[position] <= self.limit


class IgnoresTheRow(Broken):
    def _begin(self, ranked):
        super()._begin(ranked)
        self._footprint.__class__ = CountsWhatItHolds


class AsksTheFirstOnly(Footprint):
    """Looks one entry back in the row, and no further."""

    __slots__ = ()

    def admits(self, position, waiting, due=None):
        held = self.held + self._row.takes[position]
        place = self._row.place[position]
        before, change = self._row.entries[place - 1]
        if place and waiting[before] >= 0:
            held += max(0, change)
        return held <= self.limit


class LooksOneBack(Broken):
    def _begin(self, ranked):
        super()._begin(ranked)
        self._footprint.__class__ = AsksTheFirstOnly


class FreesAtTheInputGradient(Broken):
    """Counts an activation as freed by I, though W still needs it."""

    def _finish_task(self, task, out):
        if task.kind == "I":
            self._footprint.held -= 1
        super()._finish_task(task, out)
        if task.kind == "W":
            self._footprint.held += 1


def table(name, num_stages=2, num_microbatches=3, per_stage=None):
    return build_schedule(
        name, ScheduleRequest(num_stages=num_stages, num_microbatches=num_microbatches, chunks_per_stage=per_stage)
    )


LINEAR = by_table(table("1f1b"))
ROOMY = by_table(table("1f1b"), extra=1)
SPLIT = by_table(table("zb-h1"))
IN_A_CIRCLE = guided(
    chain(2, 2),
    linear(2),
    tuple(tuple(map(Task.parse, row.split())) for row in ("0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1")),
    footprint=False,
)
"""Consumed strictly it deadlocks; and rows that name a backward before its own forward."""
BACKWARDS = guided(
    chain(2, 2),
    linear(2),
    tuple(tuple(map(Task.parse, row.split())) for row in ("0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1")),
    footprint=False,
)
NARROW = by_table(table("gpipe"), footprint=False, window=1)

BROKEN = [
    (HoldsUnasked, LINEAR, "stage 0 holds 0B1 and has not asked to be woken"),
    (IgnoresTicks, LINEAR, "stage . goes on holding after the tick that it asked for"),
    (HoldsOnAndOn, LINEAR, "stage . goes on holding after the tick that it asked for"),
    (WakesInVain, LINEAR, "stage 0 asks for a tick and has nothing to hold"),
    (EndsHoldsByAnyTick, LINEAR, "a tick that comes early or in vain changes something"),
    (BelievesAnnouncements, LINEAR, "an announcement changes something"),
    (HoldsForItself, BACKWARDS, "asks for a tick and has nothing to hold"),
    (HoldsForTheInadmissible, NARROW, "asks for a tick and has nothing to hold"),
    (AnnouncesTwice, LINEAR, "stage 0 announces 2 times activation of microbatch 0 .* as it starts 0F0"),
    (AnnouncesToTheWrongStage, LINEAR, "announce activation of microbatch 0 .* to stage|announces activation"),
    (NeverAnnouncesGradients, LINEAR, "stage 1 does not announce gradient of microbatch 0 .* to stage 0 as it starts"),
    (AnnouncesAtTheEnd, LINEAR, "stage 0 does not announce activation of microbatch 0 .* as it starts 0F0"),
    (AnnouncesOnceMoreAtTheEnd, LINEAR, "stage 0 announces activation of microbatch 0 .*"),
    (HoldsOneMore, replace(LINEAR, foresight=None), "stage 0 runs 0F2 and holds 3 activations of 2"),
    (HoldsOneLess, replace(ROOMY, foresight=None), "stage . idles although .F. is ready and admissible"),
    (FreesAtTheInputGradient, SPLIT, "and holds . activations of ."),
]


@pytest.mark.parametrize(("broken", "one", "what"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("reduced", [True, False])
def test_a_broken_arbiter_is_caught(broken, one, what, reduced):
    with pytest.raises(CheckError, match=what) as error:
        explore(replace(one, arbiter=broken), reduced=reduced)
    events = [stimulus for stimulus, _ in replay(error.value.setting, error.value.trace)]
    assert events == list(error.value.trace)
    assert f"{len(events):4}. stage" in str(error.value)


@pytest.mark.parametrize("broken", [IgnoresTheRow, LooksOneBack])
def test_a_footprint_that_does_not_follow_the_row_deadlocks(broken):
    """Forwards that this row has later take the memory that what it has first still needs."""
    graph, placement = chain(4, 3), looped(2, 2)
    setting = guided(graph, placement, random_rows(graph, placement, Random(5)), foresight=False)
    explore(setting)
    with pytest.raises(CheckError, match="deadlock: stages"):
        explore(replace(setting, arbiter=broken), demand_work=False)


def test_the_same_settings_pass_with_a_sound_arbiter():
    for one in (LINEAR, ROOMY, SPLIT, IN_A_CIRCLE, BACKWARDS, NARROW):
        explore(one)


def test_a_rule_less_arbiter_that_holds_is_caught():
    """A stage without foresight may neither idle, nor announce, nor ask for ticks."""

    class Waits(Broken):
        def __init__(self, setup):
            super().__init__(replace(setup, foresight=LINEAR.foresight))

    with pytest.raises(CheckError, match="stage 0 announces activation"):
        explore(replace(LINEAR, foresight=None, arbiter=Waits))


def test_a_follower_that_announces_too_is_caught():
    def make(protocol, setup, member, num_members):
        return (LeadingMember if member == 0 else FollowingMember)(setup, member, num_members)

    setting = guided(chain(2, 2), linear(2), table("1f1b", num_microbatches=2).orders, groups=(2, 1), make_member=make)
    with pytest.raises(CheckError, match="member 1 of stage 0 announces activation"):
        explore(setting)


def test_a_leader_that_never_asks_for_ticks_leaves_its_group_stuck():
    class Leader(LeadingMember):
        def handle(self, event):
            return [i for i in super().handle(event) if not isinstance(i, WakeAt)]

    def make(protocol, setup, member, num_members):
        if member:
            return FollowingMember(replace(setup, foresight=None), member, num_members)
        return Leader(setup, member, num_members)

    setting = replace(IN_A_CIRCLE, groups=(2, 2))
    explore(setting)
    with pytest.raises(CheckError, match="deadlock"):
        explore(replace(setting, make_member=make))
