"""Deciding before the end of a task: what counts as done by then on the stage itself, and what waits for the end."""

import pytest

from rrfp_jax.core import (
    DecideNow,
    IllegalTransition,
    MessageKind,
    StepRules,
    strict,
)
from rrfp_jax.schedules import Task, chain, linear, looped
from rrfp_jax.schedules.timeline import IdleReason
from tests.core.test_arbiter import Stage
from tests.core.test_groups import Group

SENDS_F0 = "send activation of microbatch 0 from chunk 0 to chunk 1"
SENDS_B0 = "send gradient of microbatch 0 from chunk 1 to chunk 0"


def decide(stage, text, step=0):
    return stage.handle(DecideNow(step, 0.0, Task.parse(text)))


def last_stage(num_microbatches=2, **more):
    """The last of two stages with all activations there; it runs 1F0."""
    stage = Stage(chain(2, num_microbatches), stage=1, **more)
    stage.start()
    for microbatch in range(num_microbatches):
        stage.activation(0, 1, microbatch)
    return stage


def test_the_successor_follows_at_once_and_messages_at_the_end():
    stage = Stage()
    assert stage.start() == ["run 0F0"]
    assert decide(stage, "0F0") == ["run 0F1"]
    assert stage.arbiter.running() == (Task.parse("0F0"), Task.parse("0F1"))
    assert stage.finish("0F0") == [SENDS_F0]


def test_a_backward_follows_the_forward_that_it_waits_for():
    early = last_stage()
    assert decide(early, "1F0") == ["run 1B0"]
    assert early.finish("1F0") == []
    assert decide(early, "1B0") == ["run 1F1"]
    assert early.finish("1B0") == [SENDS_B0]


def test_w_follows_its_i():
    stage = Stage(chain(2, 1, split=True), stage=1, hint="bfw")
    stage.start()
    stage.activation(0, 1, 0)
    assert decide(stage, "1F0") == ["run 1I0"]
    stage.finish("1F0")
    assert decide(stage, "1I0") == ["run 1W0"]
    assert stage.finish("1I0") == [SENDS_B0]


def test_the_window_slot_of_a_due_task_is_free():
    stage = last_stage(window=1)
    decide(stage, "1F0")
    stage.finish("1F0")
    assert stage.arbiter.held() == {0}
    assert decide(stage, "1B0") == ["run 1F1"]
    assert stage.arbiter.held() == {1}
    assert stage.finish("1B0") == [SENDS_B0]
    assert stage.arbiter.held() == {1}


def test_a_slot_of_several_chunks_is_freed_once():
    """0B0 is the last but one task of microbatch 0 on the stage; a slot freed twice would admit microbatch 1 early."""
    stage = Stage(chain(4, 2), looped(2, 2), window=1, hint="bf-deep")
    stage.start()
    stage.finish("0F0")
    stage.activation(1, 2, 0)
    assert decide(stage, "2F0") == []
    assert stage.finish("2F0") == ["send activation of microbatch 0 from chunk 2 to chunk 3"]
    assert stage.gradient(3, 2, 0) == ["run 2B0"]
    assert decide(stage, "2B0") == []
    assert stage.finish("2B0") == ["send gradient of microbatch 0 from chunk 2 to chunk 1"]
    assert stage.arbiter.held() == {0}
    assert stage.gradient(1, 0, 0) == ["run 0B0"]
    assert decide(stage, "0B0") == ["run 0F1"]


def test_the_permission_stays_until_the_end():
    stage = Stage(chain(2, 2), stage=1)
    stage.start()
    stage.activation(0, 1, 0)
    decide(stage, "1F0")
    stage.finish("1F0")
    assert decide(stage, "1B0") == []
    assert stage.activation(0, 1, 1) == ["run 1F1"]
    assert stage.arbiter.running() == (Task.parse("1B0"), Task.parse("1F1"))
    assert stage.finish("1B0") == [SENDS_B0]
    assert stage.finish("1F1") == ["run 1B1"]


def test_the_permission_ends_with_the_task():
    stage = Stage(chain(2, 2), stage=1)
    stage.start()
    stage.activation(0, 1, 0)
    stage.finish("1F0")
    assert decide(stage, "1B0") == []
    stage.finish("1B0")
    assert stage.activation(0, 1, 1) == ["run 1F1"]
    assert stage.arbiter.running() == (Task.parse("1F1"),)


def test_one_that_is_late_or_twice_changes_nothing():
    stage = last_stage(3)
    assert decide(stage, "1F0") == ["run 1B0"]
    key = stage.arbiter.key()
    assert decide(stage, "1F0") == []
    assert decide(stage, "1B0") == []
    assert stage.arbiter.key() == key
    stage.finish("1F0")
    key = stage.arbiter.key()
    assert decide(stage, "1F0") == []
    assert stage.arbiter.key() == key


def test_one_of_a_step_that_has_ended_changes_nothing():
    stage = Stage(chain(1, 1), linear(1))
    stage.start()
    stage.finish("0F0")
    assert stage.finish("0B0") == ["end"]
    key = stage.arbiter.key()
    assert decide(stage, "0B0") == []
    assert stage.arbiter.key() == key
    assert stage.start(1) == ["run 0F0"]
    assert decide(stage, "0F0", step=0) == []
    assert stage.arbiter.running() == (Task.parse("0F0"),)


def test_strict_rows_go_on_early_too():
    row = tuple(map(Task.parse, ("1F0", "1B0", "1F1", "1B1")))
    stage = last_stage(consumption=strict(row))
    assert decide(stage, "1F0") == ["run 1B0"]
    stage.finish("1F0")
    assert decide(stage, "1B0") == ["run 1F1"]


def test_in_microbatch_order_the_next_accumulation_follows():
    stage = last_stage(2, hint="f-priority", rules=StepRules(ordered=True))
    decide(stage, "1F0")
    stage.finish("1F0")
    assert decide(stage, "1F1") == ["run 1B0"]
    stage.finish("1F1")
    assert decide(stage, "1B0") == ["run 1B1"]


def test_gates_wait_for_the_end_and_r_does_not():
    stage = Stage(chain(1, 1), linear(1), rules=StepRules())
    stage.start()
    stage.finish("0F0")
    assert decide(stage, "0B0") == ["run 0R"]
    assert stage.finish("0B0") == []
    assert decide(stage, "0R") == []
    assert stage.finish("0R") == ["run 0U"]
    assert decide(stage, "0U") == []
    assert stage.finish("0U") == ["end"]


def test_the_report_leaves_at_the_end():
    stage = Stage(chain(2, 1), stage=1, rules=StepRules())
    stage.start()
    stage.activation(0, 1, 0)
    for text, out in (("1F0", ["run 1B0"]), ("1B0", ["run 1R"]), ("1R", [])):
        assert decide(stage, text) == out
        sent = stage.finish(text)
    assert sent == ["send report from stage 1 to stage 0"]
    assert stage.control(MessageKind.VERDICT, 0, 1) == ["run 1U"]


@pytest.mark.parametrize(
    ("decided", "what"),
    [
        ("1F1", "1F1 was about to end without having been started; the story of 1F1"),
        ("1B0", "1B0 was about to end without having been started"),
        ("0F0", "0F0 was about to end without having been started"),
    ],
)
def test_a_task_that_never_ran_is_about_to_end_nowhere(decided, what):
    stage = last_stage()
    with pytest.raises(IllegalTransition, match=f"stage 1, step 0: {what}"):
        decide(stage, decided)


def test_nor_is_one_that_the_step_lacks_or_one_of_a_later_step():
    stage = Stage(chain(1, 2), linear(1))
    stage.start(absent={(0, 1)})
    with pytest.raises(IllegalTransition, match="0F1 was about to end without having been started"):
        decide(stage, "0F1")
    with pytest.raises(IllegalTransition, match="0F0 of step 1 was about to end, but the stage is in step 0"):
        decide(stage, "0F0", step=1)
    with pytest.raises(IllegalTransition, match="0F0 of step 0 was about to end, but the stage is done with step None"):
        decide(Stage(), "0F0")


def test_a_task_cannot_end_before_the_due_one_in_front_of_it():
    stage = last_stage()
    decide(stage, "1F0")
    what = "1B0 finished before 1F0, behind which it was handed over.*\n  1F0 is about to end\n  1B0 is running"
    with pytest.raises(IllegalTransition, match=what):
        stage.finish("1B0")


def test_reports_to_people_count_a_due_task_as_done_for_tasks_alone():
    stage = Stage(chain(2, 1), stage=1, rules=StepRules())
    stage.start()
    stage.activation(0, 1, 0)
    decide(stage, "1F0")
    stage.finish("1F0")
    decide(stage, "1B0")
    told = [str(waiting) for waiting in stage.arbiter.waiting()]
    assert "report waits for 1B0, 1R" in told
    assert stage.arbiter.tell(0).splitlines()[1:] == ["  1B0 is about to end"]
    assert stage.arbiter.idle_reason() is None
    stage.finish("1B0")
    decide(stage, "1R")
    stage.finish("1R")
    assert stage.arbiter.idle_reason() is IdleReason.DRAIN


def test_the_state_tells_a_due_task_from_a_running_one_and_copies_it():
    stage, plain = Stage(chain(2, 1), stage=1), Stage(chain(2, 1), stage=1)
    for one in (stage, plain):
        one.start()
        one.activation(0, 1, 0)
        one.finish("1F0")
    decide(stage, "1B0")
    assert stage.arbiter.key() != plain.arbiter.key()
    twin = stage.arbiter.copy()
    stage.finish("1B0")
    twin.validate()
    assert twin.running() == (Task.parse("1B0"),)
    fresh = twin.fresh(3)
    fresh.validate()
    assert fresh.key() == Stage(chain(2, 1), stage=1).arbiter.fresh(3).key()


def test_a_step_ends_and_the_next_one_decides_early_again():
    stage = Stage(chain(1, 1), linear(1), rules=StepRules())
    for step in range(2):
        assert stage.start(step) == ["run 0F0"]
        for text, out in (("0F0", ["run 0B0"]), ("0B0", ["run 0R"]), ("0R", [])):
            assert decide(stage, text, step) == out
            stage.finish(text, step)
        assert stage.finish("0U", step) == ["end"]


# -- groups ----------------------------------------------------------------------------------------------------------


def group_with_inputs(protocol, **more):
    group = Group(protocol, **more)
    group.start_all()
    for microbatch in range(2):
        for member in range(len(group.members)):
            group.activation(member, microbatch)
        group.deliver()
    assert [arbiter.running() for arbiter in group.members] == [(Task.parse("1F0"),)] * len(group.members)
    return group


def decide_on(group, member, text):
    return group.handle(member, DecideNow(0, 0.0, Task.parse(text)))


def test_a_leader_chooses_early_and_each_follower_starts_it_when_its_own_task_is_due_or_has_ended():
    group = group_with_inputs("leader", num_members=3)
    assert decide_on(group, 0, "1F0") == ["run 1B0"]
    assert group.deliver() == {}
    assert decide_on(group, 1, "1F0") == ["run 1B0"]
    assert group.finish(0, "1F0") == []
    assert group.finish(2, "1F0") == ["run 1B0"]


def test_a_follower_that_may_decide_waits_for_the_leader():
    group = group_with_inputs("leader")
    assert decide_on(group, 1, "1F0") == []
    assert group.deliver() == {}
    assert decide_on(group, 0, "1F0") == ["run 1B0"]
    assert group.deliver() == {1: ["run 1B0"]}


def test_proposals_come_early():
    group = group_with_inputs("propose")
    assert decide_on(group, 0, "1F0") == []
    assert group.deliver() == {}
    assert decide_on(group, 1, "1F0") == ["run 1B0"]
    assert group.deliver() == {0: ["run 1B0"]}


def test_a_task_may_end_while_others_have_yet_to_answer_its_members_proposal():
    group = group_with_inputs("propose")
    decide_on(group, 0, "1F0")
    group.finish(0, "1F0")
    assert group.deliver() == {}
    assert group.finish(1, "1F0") == ["run 1B0"]
    assert group.deliver() == {0: ["run 1B0"]}
