"""Membership, event by event."""

import pytest

from rrfp_jax.core import IllegalTransition
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
    GatheredResult,
    GatheringEnded,
    HeadMembership,
    HeadReached,
    HoldCalled,
    HoldEnded,
    HoldReleased,
    LeaveRun,
    NewcomerTold,
    NewestVerdict,
    PassOn,
    PeerNote,
    RankGone,
    RankLeft,
    RankMembership,
    RankSuspected,
    RankTold,
    Recovered,
    ReleaseHolds,
    ResumeFrom,
    RunCompleted,
    StepDecided,
    TellHead,
    TellRank,
)

WITHOUT_1 = EpochDeclared(1, (0, 2, 3), "rank 1 was killed")


def rank(number, *, decided=-1, **more):
    machine = RankMembership(number, 4, **more)
    for step in range(decided + 1):
        assert not machine.handle(StepDecided(step, f"verdict {step}"))
    return machine


def handle(machine, *events):
    out = []
    for event in events:
        out += machine.handle(event)
        machine.validate()
    return out


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_a_loss_freezes_and_the_newest_verdict_is_finished_by_all() -> None:
    first = rank(0, decided=4)
    told = NewestVerdict(5, "verdict 5", ())
    assert handle(first, WITHOUT_1) == [FreezeStep(1, (0, 2, 3), "rank 1 was killed")]
    assert handle(first, PeerNote(2, 1, told._replace(step=4, verdict="verdict 4"))) == []
    answer = Recovered(5, "verdict 5", ())
    assert handle(first, PeerNote(3, 1, told)) == [
        TellRank(3, 1, answer),
        TellRank(2, 1, answer),
        FinishDecided(5, "verdict 5"),
        ResumeFrom(1, (0, 2, 3), 6),
    ]
    assert not first.is_frozen
    assert first.handle(PeerNote(3, 1, told)) == []


def test_a_rank_that_knows_the_verdict_only_goes_on() -> None:
    other = rank(3, decided=5)
    assert handle(other, WITHOUT_1)[1:] == [TellRank(0, 1, NewestVerdict(5, "verdict 5", ()))]
    answer = PeerNote(0, 1, Recovered(5, "verdict 5", ()))
    assert handle(other, answer) == [ResumeFrom(1, (0, 2, 3), 6)]
    assert handle(other, answer) == []
    handle(other, StepDecided(6, ""), StepDecided(6, "from another unit"))
    assert other.newest == 6


def test_a_run_may_begin_with_any_step() -> None:
    machine = rank(3, first_step=7)
    assert handle(machine, WITHOUT_1)[1] == TellRank(0, 1, NewestVerdict(6, None, ()))
    assert handle(machine, PeerNote(0, 1, Recovered(6, None, ()))) == [ResumeFrom(1, (0, 2, 3), 7)]


def test_notes_that_are_too_early_are_kept_and_late_ones_dropped() -> None:
    first = rank(0)
    early = [PeerNote(other, 2, NewestVerdict(-1, None, ())) for other in (2, 3)]
    assert handle(first, *early) == []
    assert handle(first, WITHOUT_1, PeerNote(2, 0, BroughtData("main", 1, "late"))) == [
        FreezeStep(1, (0, 2, 3), WITHOUT_1.reason)
    ]
    answered = handle(first, EpochDeclared(2, (0, 2, 3), "told anew"))
    assert answered[-1] == ResumeFrom(2, (0, 2, 3), 0)


def test_a_death_during_recovery_starts_it_anew() -> None:
    other = rank(3, decided=5)
    handle(other, WITHOUT_1)
    told = handle(other, EpochDeclared(2, (2, 3), "rank 0 was killed"))
    assert told == [FreezeStep(2, (2, 3), "rank 0 was killed"), TellRank(2, 2, NewestVerdict(5, "verdict 5", ()))]
    assert handle(other, PeerNote(0, 1, Recovered(5, "verdict 5", ()))) == []
    assert other.is_frozen


@pytest.mark.parametrize("living", [(0, 1, 2), ()], ids=str)
def test_a_rank_that_is_declared_lost_ends_and_does_nothing_more(living) -> None:
    machine = rank(3)
    assert handle(machine, EpochDeclared(4, living, "rank 3 was silent")) == [EndRank("rank 3 was silent")]
    assert handle(machine, StepDecided(0, ""), GatherCalled("main", 1), HeadReached(), RunCompleted()) == []
    assert machine.admits(4) is Admission.DROP


def test_data_waits_until_this_rank_runs_in_its_epoch() -> None:
    machine = rank(3)
    assert [machine.admits(epoch) for epoch in (0, 1)] == [Admission.TAKE, Admission.KEEP]
    handle(machine, WITHOUT_1)
    assert [machine.admits(epoch) for epoch in (0, 1, 2)] == [Admission.DROP, Admission.KEEP, Admission.KEEP]
    handle(machine, PeerNote(0, 1, Recovered(-1, None, ())))
    assert [machine.admits(epoch) for epoch in (0, 1, 2)] == [Admission.DROP, Admission.TAKE, Admission.KEEP]


def test_suspicions_are_told_until_they_are_answered() -> None:
    machine = rank(0)
    assert handle(machine, RankSuspected(1, "silent")) == [TellHead(0, ((1, "silent"),))]
    assert handle(machine, RankSuspected(1, "again"), RankSuspected(0, "itself"), RankSuspected(7, "nobody")) == []
    assert handle(machine, RankSuspected(3, "gone"))[0] == TellHead(0, ((1, "silent"), (3, "gone")))
    handle(machine, WITHOUT_1)
    assert handle(machine, HeadReached()) == [TellHead(1, ((3, "gone"),))]


@pytest.mark.parametrize("step", [0, 3])
def test_verdicts_come_one_after_the_other(step) -> None:
    with pytest.raises(IllegalTransition, match=f"rank 2 learns the verdict of step {step}; it knows that of 1"):
        rank(2, decided=1).handle(StepDecided(step, ""))


def test_no_verdict_is_learnt_while_frozen() -> None:
    machine = rank(2, decided=1)
    handle(machine, WITHOUT_1)
    with pytest.raises(IllegalTransition, match="and is frozen"):
        machine.handle(StepDecided(2, ""))


# -- gatherings --------------------------------------------------------------------------------------------------------


def test_a_gathering_ends_with_the_data_of_all() -> None:
    first, other = rank(0), rank(2)
    assert handle(first, GatherCalled("main", "a")) == []
    (told,) = handle(other, GatherCalled("main", "c"))
    assert told == TellRank(0, 0, BroughtData("main", 1, "c"))
    brought = [PeerNote(sender, 0, BroughtData("main", 1, data)) for sender, data in ((2, "c"), (1, "b"), (3, "d"))]
    result = ((0, "a"), (1, "b"), (2, "c"), (3, "d"))
    answer = GatheredResult("main", 1, result)
    assert handle(first, *brought) == [GatheringEnded("main", result), *(TellRank(r, 0, answer) for r in (1, 2, 3))]
    assert handle(first, *brought) == []
    assert handle(other, PeerNote(0, 0, answer)) == [GatheringEnded("main", result)]
    assert handle(other, PeerNote(0, 0, answer)) == []


def test_lanes_are_independent() -> None:
    machine = rank(2)
    assert [told.note.number for told in handle(machine, GatherCalled("main", 1), GatherCalled("save", 2))] == [1, 1]
    with pytest.raises(IllegalTransition, match="a gathering of lane save before the last one has ended"):
        machine.handle(GatherCalled("save", 3))


def test_after_a_loss_data_is_brought_once_more() -> None:
    machine = rank(2)
    handle(machine, GatherCalled("main", "c"), EpochDeclared(1, (1, 2, 3), "rank 0 was killed"))
    resumed = handle(machine, PeerNote(1, 1, Recovered(-1, None, ())))
    assert resumed == [ResumeFrom(1, (1, 2, 3), 0), TellRank(1, 1, BroughtData("main", 1, "c"))]


def test_what_is_gathered_while_frozen_is_brought_afterwards() -> None:
    machine = rank(2)
    assert handle(machine, WITHOUT_1, GatherCalled("main", "c"))[2:] == []
    assert handle(machine, PeerNote(0, 1, Recovered(-1, None, ())))[1:] == [TellRank(0, 1, BroughtData("main", 1, "c"))]


def test_a_result_that_one_survivor_has_is_passed_on() -> None:
    """Rank 0 has answered rank 3 alone before it died; ranks 1 and 2 still wait."""
    result = ((0, "a"), (1, "b"), (2, "c"), (3, "d"))
    without_0 = EpochDeclared(1, (1, 2, 3), "rank 0 was killed")
    first, holder = rank(1), rank(3)
    handle(holder, GatherCalled("main", "d"), PeerNote(0, 0, GatheredResult("main", 1, result)))
    handle(first, GatherCalled("main", "b"), without_0, PeerNote(2, 1, NewestVerdict(-1, None, ())))
    (told,) = (out for out in handle(holder, without_0) if isinstance(out, TellRank))
    assert told.note == NewestVerdict(-1, None, (("main", 1),))
    answer = Recovered(-1, None, (PassOn("main", 1, 3, (1, 2)),))
    resumed = [ResumeFrom(1, (1, 2, 3), 0)]
    assert handle(first, PeerNote(3, 1, told.note)) == [TellRank(3, 1, answer), TellRank(2, 1, answer), *resumed]
    passed_on = [TellRank(other, 1, GatheredResult("main", 1, result)) for other in (1, 2)]
    assert handle(holder, PeerNote(1, 1, answer)) == [*resumed, *passed_on]
    # The holder may be in its next gathering before the first rank has the result of this one.
    (early,) = handle(holder, GatherCalled("main", "next"))
    assert handle(first, PeerNote(3, 1, early.note)) == []
    assert handle(first, PeerNote(3, 1, passed_on[0].note)) == [GatheringEnded("main", result)]


def test_the_last_survivor_goes_on_at_once() -> None:
    machine = RankMembership(1, 2)
    handle(machine, GatherCalled("main", "b"))
    assert handle(machine, EpochDeclared(1, (1,), "rank 0 was killed")) == [
        FreezeStep(1, (1,), "rank 0 was killed"),
        ResumeFrom(1, (1,), 0),
        GatheringEnded("main", ((1, "b"),)),
    ]


def test_a_completed_run_is_left() -> None:
    machine = rank(2)
    handle(machine, GatherCalled("main", None))
    assert handle(machine, RunCompleted()) == [LeaveRun()]


# -- the head ----------------------------------------------------------------------------------------------------------

EVERYONE = (0, 1, 2, 3)


def head(num_stages=2, units_of=((0,), (1,), (2,), (3,))):
    """Ranks 0 and 2 hold stage 0, ranks 1 and 3 stage 1, where there are two stages."""
    return HeadMembership(units_of, num_stages)


def accuse(accuser, *suspects, epoch=0):
    return RankTold(accuser, epoch, tuple((suspect, "silent") for suspect in suspects))


def test_the_head_declares_one_epoch_for_each_loss() -> None:
    machine = head()
    assert machine.handle(RankGone(3, "was killed")) == [
        DeclareEpoch(EVERYONE, 1, (0, 1, 2), (3,), "rank 3 was killed")
    ]
    assert machine.handle(RankGone(3, "was killed")) == []
    (declared,) = machine.handle(accuse(1, 0))
    assert declared == DeclareEpoch(EVERYONE, 2, (1, 2), (0,), "rank 1 suspects rank 0: silent")


def test_a_stage_without_replica_ends_the_run() -> None:
    machine = head()
    machine.handle(RankGone(3, "was killed"))
    (declared,) = machine.handle(RankGone(1, "was killed"))
    why = "rank 1 was killed; stage 1 has no replica left"
    assert declared == DeclareEpoch(EVERYONE, 2, (), (0, 1, 2), why)
    assert machine.handle(RankGone(0, "has ended")) == machine.handle(accuse(2, 0, epoch=2)) == []


def test_of_two_that_accuse_each_other_one_goes() -> None:
    machine = head()
    assert machine.handle(accuse(1, 0))[0].lost == (0,)
    assert [(each.epoch, each.living, each.lost) for each in machine.handle(accuse(0, 1))] == [(1, (1, 2, 3), ())]


def test_a_rank_that_cannot_be_spared_stays_if_its_accuser_can_go() -> None:
    machine = head()
    machine.handle(RankGone(3, "was killed"))
    assert machine.handle(accuse(2, 1, epoch=1))[0].lost == (2,)
    assert machine.handle(accuse(0, 1, epoch=2))[0].living == ()


def test_who_has_missed_an_epoch_is_told_it_again() -> None:
    machine = head()
    machine.handle(RankGone(3, "was killed"))
    again = DeclareEpoch((3,), 1, (0, 1, 2), (), "rank 3 was killed")
    assert machine.handle(accuse(3, 0)) == [again]
    assert machine.handle(accuse(0)) == [again._replace(ranks=(0,))]
    assert machine.handle(accuse(0, epoch=1)) == []


def test_after_the_end_nobody_is_lost() -> None:
    machine = head()
    assert machine.handle(RankLeft(2)) == [DeclareCompleted(EVERYONE)]
    assert machine.handle(RankLeft(1)) == machine.handle(RankGone(3, "was killed")) == []
    assert machine.handle(accuse(3, 0)) == [DeclareCompleted((3,))]


def test_a_unit_is_lost_with_any_of_its_ranks() -> None:
    machine = head(1, ((0,), (0,), (1,), (1,)))
    machine.handle(RankGone(0, "was killed"))
    assert machine.missing_stage(machine.living) is None
    assert machine.missing_stage((1, 3)) == 0


# -- newcomers ---------------------------------------------------------------------------------------------------------


def held(head, *ranks, step=6, epoch=1):
    out = []
    for each in ranks:
        out += head.handle(RankTold(each, epoch, (), step))
    return out


def head_without_1():
    head = HeadMembership([(0,), (2,), (1,), (3,)], 2)
    head.handle(RankGone(1, "died"))
    return head


def test_a_newcomer_is_taken_in_once_all_hold_and_it_has_the_state() -> None:
    head = head_without_1()
    assert head.handle(NewcomerTold(1, None)) == []
    assert held(head, 0, 2) == []
    assert held(head, 3) == [FetchState((1,), 6)]
    assert head.handle(NewcomerTold(1, 5)) == [FetchState((1,), 6)], "it has the state before another step"
    back = DeclareEpoch((0, 1, 2, 3), 2, (0, 2, 3, 1), (), "rank 1 is back")
    assert head.handle(NewcomerTold(1, 6)) == [back]
    assert head.handle(NewcomerTold(1, 6)) == [back._replace(ranks=(1,))], "it has not heard"
    assert held(head, 2, epoch=2) == [ReleaseHolds((2,), 6)], "it has not heard either, or has come to another epoch"
    assert not head.newcomers


def test_all_go_on_where_nobody_comes() -> None:
    head = head_without_1()
    assert held(head, 2) == [ReleaseHolds((2,), 6)]
    assert head.handle(NewcomerTold(1, None)) == []
    assert held(head, 0) == [ReleaseHolds((0,), 6)], "all go on before the same step"
    assert held(head, 0, 2, step=7) == []
    assert head.handle(RankGone(1, "died")) == [ReleaseHolds((0, 2), 7)]


def test_who_held_before_a_loss_must_tell_again() -> None:
    head = head_without_1()
    head.handle(NewcomerTold(1, None))
    held(head, 0, 2)
    assert head.handle(RankGone(3, "died"))[0] == DeclareEpoch((0, 2, 3), 2, (0, 2), (3,), "rank 3 died")
    assert held(head, 0, 2, epoch=1)[-1].epoch == 2
    assert held(head, 0, 2, epoch=2) == [FetchState((1,), 6)]


def test_a_rank_holds_once_it_waits_for_no_gathering() -> None:
    machine = rank(2, decided=5)
    handle(machine, GatherCalled("main", "data"))
    assert handle(machine, HoldCalled(6)) == []
    assert handle(machine, HeadReached()) == [TellHead(0, ())]
    ended = PeerNote(0, 0, GatheredResult("main", 1, ((0, "data"),)))
    assert handle(machine, ended)[-1] == TellHead(0, (), 6)
    assert handle(machine, HoldReleased(5)) == []
    assert handle(machine, HoldReleased(6), HoldReleased(6)) == [HoldEnded()]


@pytest.mark.parametrize("step", [5, 7])
def test_a_rank_holds_for_its_next_step_only(step) -> None:
    with pytest.raises(IllegalTransition, match=f"rank 2 holds for step {step}; it knows the verdict of 5"):
        rank(2, decided=5).handle(HoldCalled(step))


def test_a_hold_ends_with_its_epoch() -> None:
    machine = rank(2, decided=5)
    handle(machine, HoldCalled(6), WITHOUT_1)
    assert machine.holds is None
    with pytest.raises(IllegalTransition, match="holds"):
        machine.handle(HoldCalled(6))


def test_a_newcomer_goes_on_with_the_numbers_of_the_others() -> None:
    machine = rank(1, first_step=6, is_newcomer=True)
    machine.validate()
    declared = handle(machine, EpochDeclared(2, (0, 2, 3, 1), "rank 1 is back"))
    assert declared[1:] == [TellRank(0, 2, NewestVerdict(5, None, ()))]
    answer = Recovered(5, "verdict 5", (PassOn("main", 7, 0, (1,)),))
    assert handle(machine, PeerNote(0, 2, answer)) == [ResumeFrom(2, (0, 2, 3, 1), 6)]
    assert handle(machine, GatherCalled("main", "data")) == [TellRank(0, 2, BroughtData("main", 8, "data"))]
