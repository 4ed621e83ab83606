"""The members of a group, event by event: the second of two stages, spread over two processes unless said otherwise."""

from dataclasses import replace

import pytest

from rrfp_jax.core import (
    HINTS,
    FinishStep,
    GroupHeard,
    GroupProtocol,
    IllegalTransition,
    InputArrived,
    MemberReceived,
    MemberStarted,
    Message,
    MessageKind,
    RunTask,
    Send,
    StageArbiter,
    StageSetup,
    StepRules,
    StepStarted,
    TaskChosen,
    TaskFinished,
    TaskProposed,
    group_arbiter,
    ready,
    strict,
)
from rrfp_jax.schedules import Task, absences, chain, linear
from rrfp_jax.schedules.timeline import IdleReason
from tests.model_checker.catalogue import PIPELINE_ONLY

ACTIVATION, GRADIENT = MessageKind.ACTIVATION, MessageKind.GRADIENT


class Group:
    """All members of a stage; notes between them wait in ``notes`` until they are delivered. Validated throughout."""

    def __init__(self, protocol, num_members=2, *, graph=None, stage=1, hint="bf", window=4, **more):
        more.setdefault("consumption", ready(HINTS[hint]))
        more.setdefault("rules", PIPELINE_ONLY)
        graph = graph or chain(2, 3)
        self.members = [
            group_arbiter(
                protocol,
                StageSetup(
                    graph,
                    linear(graph.num_chunks),
                    stage,
                    window=window,
                    **more,
                ),
                member,
                num_members,
            )
            for member in range(num_members)
        ]
        self.notes = []

    def handle(self, member, event):
        """What a member answers, in words; its notes wait."""
        arbiter = self.members[member]
        out = arbiter.handle(event)
        arbiter.validate()
        assert arbiter.copy().key() == arbiter.key()
        told = []
        for i in out:
            if isinstance(i, RunTask):
                told.append(f"run {i.task}")
            elif isinstance(i, Send):
                told.append(f"send {i.message.kind} {i.message.microbatch}")
            elif isinstance(i, FinishStep):
                told.append("end")
            else:
                self.notes.append((i.member, GroupHeard(i.step, 0.0, member, i.note)))
        return told

    def deliver(self, *, twice=False):
        """Deliver all notes, also those that they cause; tells per member what it answered."""
        told = {}
        while self.notes:
            member, event = self.notes.pop()
            for _ in range(1 + twice):
                told.setdefault(member, []).extend(self.handle(member, event))
        return {member: answers for member, answers in told.items() if answers}

    def start(self, member, step=0, absent=()):
        return self.handle(member, StepStarted(step, 0.0, absences(absent)))

    def start_all(self):
        for member in range(len(self.members)):
            assert self.start(member) == []
        return self.deliver()

    def activation(self, member, microbatch, step=0):
        return self.handle(member, InputArrived(step, 0.0, Message(ACTIVATION, 0, 1, microbatch)))

    def finish(self, member, text, step=0):
        return self.handle(member, TaskFinished(step, 0.0, Task.parse(text)))

    def idle_reasons(self):
        return [arbiter.idle_reason() for arbiter in self.members]


def with_backward_at_one_and_forward_at_both(protocol):
    """{B0, F1} ready on member 0 and {F1} on member 1; nothing runs, and the hint's state says backward next."""
    group = Group(protocol, graph=chain(3, 2))
    group.start_all()
    for member in (0, 1):
        group.activation(member, 0)
    group.deliver()
    for member in (0, 1):
        group.finish(member, "1F0")
    group.deliver()
    group.handle(0, InputArrived(0, 0.0, Message(GRADIENT, 2, 1, 0)))
    told = [group.activation(0, 1), group.activation(1, 1)]
    return group, told, group.deliver()


def test_a_leader_runs_what_is_ready_on_all():
    _, told, delivered = with_backward_at_one_and_forward_at_both("leader")
    assert told == [[], []]
    assert delivered == {0: ["run 1F1"], 1: ["run 1F1"]}


def test_proposals_differ_until_the_best_task_is_ready_on_all():
    """The weakness that the paper names: F1 is ready on both and does not run."""
    group, told, delivered = with_backward_at_one_and_forward_at_both("propose")
    assert (told, delivered) == ([[], []], {})
    assert group.idle_reasons() == [IdleReason.AGREEMENT] * 2
    group.handle(1, InputArrived(0, 0.0, Message(GRADIENT, 2, 1, 0)))
    assert group.deliver() == {0: ["run 1B0"], 1: ["run 1B0"]}


def test_without_agreement_members_run_different_tasks():
    group = Group("off")
    assert [type(arbiter) for arbiter in group.members] == [StageArbiter] * 2
    group.start_all()
    assert group.activation(0, 0) == ["run 1F0"]
    assert group.activation(1, 1) == ["run 1F1"]


@pytest.mark.parametrize("protocol", ["leader", "propose"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("num_members", [2, 3])
def test_members_run_the_same_tasks_in_the_same_order(protocol, twice, num_members):
    group = Group(protocol, num_members)
    members = range(num_members)
    ran = [[] for _ in members]

    def note(told):
        for member, answers in told.items():
            ran[member] += [answer for answer in answers if answer.startswith("run")]

    group.start_all()
    for member in members:
        for microbatch in range(3):
            note({member: group.activation(member, (microbatch + member) % 3)})
    note(group.deliver(twice=twice))
    for turn in range(6):
        for member in members:
            note({member: group.finish(member, ran[member][turn].removeprefix("run "))})
        note(group.deliver(twice=twice))
    assert ran == [ran[0]] * num_members
    assert sorted(ran[0]) == [f"run 1{kind}{m}" for kind in "BF" for m in range(3)]
    assert not any(arbiter.is_active for arbiter in group.members)


# -- leader ----------------------------------------------------------------------------------------------------------


def test_followers_tell_at_once_and_nothing_twice():
    group = Group("leader")
    group.start(1)
    assert group.notes == [(0, GroupHeard(0, 0.0, 1, MemberStarted(())))]
    group.notes.clear()
    group.activation(1, 0)
    group.activation(1, 0)
    group.activation(1, 2, step=1)
    group.activation(1, 2, step=1)
    received = [MemberReceived(Message(ACTIVATION, 0, 1, m)) for m in (0, 2)]
    assert group.notes == [(0, GroupHeard(step, 0.0, 1, note)) for step, note in enumerate(received)]


def test_a_follower_may_start_the_next_step_before_its_leader_has():
    group = Group("leader", graph=chain(2, 1))
    group.start_all()
    for member in (0, 1):
        group.activation(member, 0)
    group.deliver()
    for task in ("1F0", "1B0"):
        for member in (0, 1):
            group.finish(member, task)
        group.deliver()
    group.start(1, step=1)
    assert [note for _, (_, _, _, note) in group.notes] == [MemberStarted(())]
    group.deliver()
    assert [(arbiter.step, arbiter.is_active) for arbiter in group.members] == [(0, False), (1, True)]
    for member in (0, 1):
        group.activation(member, 0, step=1)
    group.deliver()
    assert group.start(0, step=1) == ["run 1F0"]


def test_nothing_runs_before_the_step_has_started_on_all():
    group = Group("leader", stage=0)
    assert group.start(0) == []
    assert group.idle_reasons() == [IdleReason.AGREEMENT, IdleReason.DRAIN]
    assert group.start(1) == []
    assert group.idle_reasons() == [IdleReason.AGREEMENT] * 2
    assert group.deliver() == {0: ["run 0F0"], 1: ["run 0F0"]}


def test_a_message_counts_once_all_members_have_it():
    group = Group("leader", num_members=3)
    group.start_all()
    assert group.activation(1, 0) == []
    assert group.activation(0, 0) == []
    assert group.deliver() == {}
    assert str(group.members[0].waiting()[0]) == "1F0 waits for activation of microbatch 0 from chunk 0 to chunk 1"
    assert group.idle_reasons() == [IdleReason.FILL, IdleReason.AGREEMENT, IdleReason.FILL]
    group.activation(2, 0)
    assert group.deliver() == {m: ["run 1F0"] for m in range(3)}


def test_notes_of_a_later_step_are_kept():
    group = Group("leader", graph=chain(2, 1))
    group.start(1)
    group.activation(1, 0)
    group.deliver()
    group.activation(0, 0)
    assert group.start(0) == ["run 1F0"]
    assert group.deliver() == {1: ["run 1F0"]}


def test_choices_that_overtake_each_other_are_started_in_their_order():
    group = Group("leader", hint="f-priority", certain_ahead=True)
    group.start_all()
    for microbatch in range(2):
        group.activation(1, microbatch)
    group.deliver()
    assert [group.activation(0, microbatch) for microbatch in range(2)] == [["run 1F0"], ["run 1F1"]]
    first, second = group.notes
    assert [note.number for _, (_, _, _, note) in (first, second)] == [0, 1]
    assert group.handle(*second) == []
    assert group.members[1].running() == ()
    assert group.handle(*first) == ["run 1F0", "run 1F1"]
    assert group.handle(*first) == group.handle(*second) == []


def test_a_follower_that_is_behind_keeps_to_its_window():
    """The leader ended B0 and holds microbatch 1 in its place; the follower still runs B0."""
    group = Group("leader", window=1)
    group.start_all()
    for member in (0, 1):
        group.activation(member, 0)
        group.activation(member, 1)
    group.deliver()
    for member in (0, 1):
        group.finish(member, "1F0")
    group.deliver()
    assert [arbiter.running() for arbiter in group.members] == [(Task.parse("1B0"),)] * 2
    assert group.finish(0, "1B0") == ["send gradient 0", "run 1F1"]
    assert group.deliver() == {}
    assert group.finish(1, "1B0") == ["send gradient 0", "run 1F1"]


def test_every_member_sends_its_own_share_and_ends_its_own_step():
    group = Group("leader", graph=chain(2, 1), rules=StepRules())
    group.start_all()
    for member in (0, 1):
        group.activation(member, 0)
    group.deliver()
    for task in ("1F0", "1B0", "1R"):
        ends = [group.finish(member, task) for member in (0, 1)]
        group.deliver()
    assert ends == [["send report -1"]] * 2
    for member in (0, 1):
        group.handle(member, InputArrived(0, 0.0, Message(MessageKind.VERDICT, 0, 1)))
    assert group.deliver() == {0: ["run 1U"], 1: ["run 1U"]}
    assert group.finish(1, "1U") == group.finish(0, "1U") == ["end"]


def test_members_with_different_batches_are_told_apart():
    group = Group("leader")
    group.start(0)
    group.start(1, absent={(0, 2), (1, 2)})
    with pytest.raises(
        IllegalTransition, match=r"started on member 1 without \[\(0, 2\), \(1, 2\)\], elsewhere without \[\]"
    ):
        group.deliver()


def test_a_strict_leader_waits_for_its_row():
    row = tuple(map(Task.parse, ("1F1", "1B1", "1F0", "1B0", "1F2", "1B2")))
    group = Group("leader", consumption=strict(row))
    group.start_all()
    for member in (0, 1):
        group.activation(member, 0)
    assert group.deliver() == {}
    assert group.idle_reasons() == [IdleReason.ORDER] * 2
    for member in (0, 1):
        group.activation(member, 1)
    assert group.deliver() == {0: ["run 1F1"], 1: ["run 1F1"]}


# -- proposals -------------------------------------------------------------------------------------------------------


def test_a_member_proposes_only_when_it_has_something_or_is_asked():
    group = Group("propose")
    assert group.start_all() == {}
    group.activation(1, 0)
    assert group.notes == [(0, GroupHeard(0, 0.0, 1, TaskProposed(0, Task.parse("1F0"), 0)))]
    group.handle(*group.notes.pop())
    assert group.notes == [(1, GroupHeard(0, 0.0, 0, TaskProposed(0, None, 0)))]
    group.deliver()
    assert not group.notes
    group.activation(0, 0)
    assert group.deliver() == {0: ["run 1F0"], 1: ["run 1F0"]}


def test_no_new_round_while_no_candidate_changes():
    group = Group("propose")
    group.start_all()
    group.activation(1, 0)
    group.deliver()
    group.activation(1, 1)
    assert not group.notes
    group.activation(0, 1)
    assert group.notes
    assert group.deliver() == {}


def test_a_busy_member_answers_when_it_is_idle():
    group = Group("propose")
    group.start_all()
    for microbatch in (0, 1):
        for member in (0, 1):
            group.activation(member, microbatch)
    group.deliver()
    assert group.finish(0, "1F0") == []
    assert group.deliver() == {}
    assert group.finish(1, "1F0") == ["run 1B0"]
    assert group.deliver() == {0: ["run 1B0"]}


def test_a_refused_round_leaves_the_hints_state_alone():
    group, _, _ = with_backward_at_one_and_forward_at_both("propose")
    states = [arbiter._hint_state for arbiter in group.members]
    assert states[0] == states[1] == HINTS["bf"].initial


# -- errors and the factory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "member", "note"),
    [
        ("leader", 0, TaskChosen(0, Task.parse("1F0"), 0)),
        ("leader", 1, MemberStarted(())),
        ("leader", 1, TaskProposed(0, None, 0)),
        ("propose", 0, TaskChosen(0, Task.parse("1F0"), 0)),
        ("off", 0, MemberStarted(())),
    ],
)
@pytest.mark.parametrize("step", [0, 1])
def test_unexpected_notes_are_refused(protocol, member, note, step):
    group = Group(protocol)
    group.start_all()
    with pytest.raises(IllegalTransition, match=f"step {step}: member 0 said .*, which is not expected"):
        group.handle(member, GroupHeard(step, 0.0, 0, note))


def test_contradicting_notes_are_refused():
    chosen = TaskChosen(0, Task.parse("1F0"), 0)
    group = Group("leader")
    group.start_all()
    group.handle(1, GroupHeard(0, 0.0, 0, chosen))
    with pytest.raises(IllegalTransition, match="not expected"):
        group.handle(1, GroupHeard(0, 0.0, 0, chosen._replace(task=Task.parse("1F1"))))
    proposing = Group("propose")
    proposing.handle(1, GroupHeard(0, 0.0, 0, TaskProposed(0, None, 0)))
    with pytest.raises(IllegalTransition, match="not expected"):
        proposing.handle(1, GroupHeard(0, 0.0, 0, TaskProposed(0, Task.parse("1F1"), 0)))


def test_a_choice_that_cannot_be_is_refused_with_its_story():
    group = Group("leader")
    group.start_all()
    with pytest.raises(IllegalTransition, match="chose 0F0 as number 0, which cannot be started here"):
        group.handle(1, GroupHeard(0, 0.0, 0, TaskChosen(0, Task.parse("0F0"), 0)))


def test_a_message_that_nobody_waits_for_is_refused_by_the_leader_too():
    group = Group("leader")
    group.start_all()
    with pytest.raises(IllegalTransition, match="nothing here waits for it"):
        group.activation(0, 7)


@pytest.mark.parametrize("protocol", ["leader", "propose"])
def test_notes_of_a_step_that_is_over_change_nothing(protocol):
    group = Group(protocol, graph=chain(2, 1))
    group.start_all()
    for member in (0, 1):
        group.activation(member, 0)
    late = list(group.notes)
    group.deliver()
    for task in ("1F0", "1B0"):
        for member in (0, 1):
            group.finish(member, task)
        late += group.notes
        group.deliver()
    keys = [arbiter.key() for arbiter in group.members]
    assert late
    assert all(group.handle(*note) == [] for note in late)
    assert [arbiter.key() for arbiter in group.members] == keys


@pytest.mark.parametrize("protocol", GroupProtocol)
def test_a_single_process_needs_no_group(protocol):
    (arbiter,) = Group(protocol, num_members=1).members
    assert type(arbiter) is StageArbiter


def test_copies_share_nothing_that_changes():
    for protocol in ("leader", "propose"):
        group = Group(protocol)
        group.start_all()
        for member in (0, 1):
            before, twin = group.members[member].key(), group.members[member].copy()
            twin.handle(InputArrived(0, 0.0, Message(ACTIVATION, 0, 1, 0)))
            twin.handle(InputArrived(1, 0.0, Message(ACTIVATION, 0, 1, 0)))
            assert twin.key() != before == group.members[member].key()


def test_wrong_members_and_protocols_are_named():
    made = {"consumption": ready(HINTS["bf"]), "window": 1, "rules": replace(StepRules(), updates=False)}
    with pytest.raises(ValueError, match="member 2 of a group of 2: members are numbered from 0 to one less"):
        group_arbiter("leader", StageSetup(chain(1, 1), linear(1), 0, **made), 2, 2)
    with pytest.raises(ValueError, match="protocol 'vote' is unknown: choose one of leader, propose, off"):
        group_arbiter("vote", StageSetup(chain(1, 1), linear(1), 0, **made), 0, 2)
