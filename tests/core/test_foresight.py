"""Foresight, rule by rule, with numbers made by hand; times are seconds of the stage's own clock."""

from dataclasses import replace

import pytest

from rrfp_jax.core import (
    HINTS,
    Announce,
    ClockTick,
    DecideNow,
    Estimates,
    ForesightRules,
    GroupProtocol,
    InputArrived,
    Message,
    MessageKind,
    RunTask,
    StageArbiter,
    StageSetup,
    StepStarted,
    TaskAnnounced,
    TaskFinished,
    WakeAt,
    group_arbiter,
    ready,
    schedule_hint,
    strict,
)
from rrfp_jax.core.snapshot import rebuild, save_arbiter
from rrfp_jax.schedules import Task, TaskKind, chain, linear
from rrfp_jax.schedules.timeline import IdleReason
from tests.model_checker.catalogue import PIPELINE_ONLY

RULES = ForesightRules(fit=1.0, kept=1.0, worth=0.3)
"""Averages that are known stay as they are, so that the numbers of a test are the whole story."""
GRADIENT, ACTIVATION = (MessageKind.GRADIENT, 1, 0), (MessageKind.ACTIVATION, 0, 1)
F0, B0, I0, W0 = ((kind, 0) for kind in (TaskKind.F, TaskKind.B, TaskKind.I, TaskKind.W))
FUSED = "0F0 0B0 0F1 0B1 0F2 0B2"
"""After 0F0 the next entry is 0B0, which waits for its gradient, and the best ready task is 0F1."""
SPLIT = "0F0 0F1 0I0 0I1 0F2 0W0 0I2 0W1 0W2"


def setup_of(row, *, rules=RULES, split=False, window=8, **more):
    graph = chain(2, 3, split=split)
    consumption = ready(schedule_hint(tuple(map(Task.parse, row.split()))))
    more = {"consumption": consumption, "window": window, "rules": PIPELINE_ONLY, "foresight": rules, **more}
    return StageSetup(graph, linear(2), 0, **more)


def last_setup(row, *, window=8):
    """Stage 1, the last one."""
    consumption = ready(schedule_hint(tuple(map(Task.parse, row.split()))))
    return replace(setup_of(FUSED, window=window), stage=1, consumption=consumption)


def knowing(*, durations=None, lead=None, notice=None):
    """Estimates: usual durations by kind and chunk, the lead of gradients, and what waits for them were worth."""
    return Estimates(
        durations_s=dict(durations or {}),
        leads_s={} if lead is None else {GRADIENT: lead},
        notices={} if notice is None else {GRADIENT: notice},
    )


class Clocked:
    """Stage 0 of two, event by event; what it answers in words, announcements apart."""

    def __init__(self, row=FUSED, estimates=None, *, step=0, **more):
        arbiter = StageArbiter(setup_of(row, **more))
        self.arbiter = arbiter.fresh(step - 1 if step else None, estimates or Estimates())
        self.step, self.announced = step, []

    def handle(self, event):
        out = self.arbiter.handle(event)
        self.arbiter.validate()
        self.announced += [i for i in out if isinstance(i, Announce)]
        told = {RunTask: lambda i: f"run {i.task}", WakeAt: lambda i: f"wake {i.time_s:g}"}
        return [told[type(i)](i) for i in out if type(i) in told]

    def start(self, time_s=0.0):
        return self.handle(StepStarted(self.step, time_s))

    def finish(self, time_s, text):
        return self.handle(TaskFinished(self.step, time_s, Task.parse(text)))

    def decide(self, time_s, text):
        return self.handle(DecideNow(self.step, time_s, Task.parse(text)))

    def announce(self, time_s, microbatch, step=None):
        step = self.step if step is None else step
        return self.handle(TaskAnnounced(step, time_s, Message(*GRADIENT, microbatch)))

    def gradient(self, time_s, microbatch, step=None):
        step = self.step if step is None else step
        return self.handle(InputArrived(step, time_s, Message(*GRADIENT, microbatch)))

    def tick(self, time_s):
        return self.handle(ClockTick(self.step, time_s))

    @property
    def learnt(self):
        return self.arbiter.estimates()


def after_f0(estimates, *, heard_s=None, **more):
    """0F0 has ended at 2 s; 0B0, the next entry, was announced at that time, or not. Returns stage and answer."""
    stage = Clocked(more.pop("row", FUSED), estimates, **more)
    assert stage.start() == ["run 0F0"]
    if heard_s is not None:
        assert stage.announce(heard_s, 0) == []
    return stage, stage.finish(2.0, "0F0")


# -- rule 1 ------------------------------------------------------------------------------------------------------------


def test_the_next_entry_runs_at_once():
    stage = Clocked("0F0 0F1 0B0 0F2 0B1 0B2", knowing(durations={F0: 2}, lead=1))
    assert stage.start() == ["run 0F0"]
    assert stage.finish(2.0, "0F0") == ["run 0F1"]


def test_nothing_waits_for_an_entry_that_is_not_admissible():
    """The window is full of microbatch 0, so 1F1, the next entry, could not run if it were there."""
    known = Estimates(durations_s={(TaskKind.F, 1): 2.0}, leads_s={ACTIVATION: 0.5})
    arbiter = StageArbiter(last_setup("1F0 1F1 1B0 1B1 1F2 1B2", window=1)).fresh(None, known)
    arbiter.handle(StepStarted(0, 0.0))
    arbiter.handle(InputArrived(0, 0.0, Message(*ACTIVATION, 0)))
    arbiter.handle(TaskAnnounced(0, 1.0, Message(*ACTIVATION, 1)))
    assert RunTask(0, Task.parse("1B0")) in arbiter.handle(TaskFinished(0, 2.0, Task.parse("1F0")))


def test_nothing_waits_for_an_entry_that_lacks_something_of_the_stage():
    """0B1 stands before its own forward."""
    stage = Clocked("0F0 0B1 0B0 0F1 0F2 0B2", knowing(durations={F0: 2}, lead=1))
    stage.start()
    assert stage.announce(1.0, 1) == []
    assert stage.finish(2.0, "0F0") == ["run 0F1"]


# -- rule 2 ------------------------------------------------------------------------------------------------------------


def test_what_ends_before_the_arrival_runs():
    _, answer = after_f0(knowing(durations={F0: 2}, lead=3), heard_s=1.0)
    assert answer == ["run 0F1"]


def test_what_does_not_is_held_until_the_arrival():
    stage, answer = after_f0(knowing(durations={F0: 2}, lead=2.5), heard_s=1.0)
    assert answer == ["wake 8"]  # patience 3 times the usual 2 s of 0F1
    assert stage.arbiter.idle_reason() is IdleReason.HOLD
    assert stage.gradient(3.5, 0) == ["run 0B0"]
    assert stage.learnt.leads_s[GRADIENT] == 2.5


def test_fit_takes_ties_whatever_rounding_does():
    tie = knowing(durations={F0: 2}, lead=2.97)
    assert after_f0(tie, heard_s=1.0)[1] == ["wake 8"]
    assert after_f0(tie, heard_s=1.0, rules=ForesightRules())[1] == ["run 0F1"]


def test_a_shorter_task_fills_the_wait():
    stage = Clocked(SPLIT, knowing(durations={F0: 2, I0: 2, W0: 1}, lead=2.5), split=True)
    stage.start()
    stage.finish(2.0, "0F0")
    stage.gradient(3.0, 0)
    assert stage.finish(4.0, "0F1") == ["run 0I0"]
    stage.announce(5.0, 1)
    assert stage.finish(6.0, "0I0") == ["run 0W0"]  # 0F2 ranks before it and would end after 7.5
    assert stage.gradient(6.9, 1) == []
    assert stage.finish(7.0, "0W0") == ["run 0I1"]


def test_an_arrival_that_is_overdue_is_held_for_until_patience_ends():
    stage, answer = after_f0(knowing(durations={F0: 2}, lead=0.5), heard_s=1.0, rules=replace(RULES, patience=1.0))
    assert answer == ["wake 4"]
    assert stage.tick(4.0) == ["run 0F1"]


def test_what_was_waited_for_in_vain_is_given_up():
    stage, answer = after_f0(knowing(durations={F0: 2}, lead=2.5), heard_s=1.0)
    assert answer == ["wake 8"]
    assert stage.tick(8.0) == ["run 0F1"]
    assert stage.finish(10.0, "0F1") == ["run 0F2"]  # though 0B0 is still in sight, and overdue


def test_without_patience_nothing_is_held():
    rules = replace(RULES, patience=0.0, notice=0.0)
    assert after_f0(knowing(durations={F0: 2}, lead=2.5), heard_s=1.0, rules=rules)[1] == ["run 0F1"]


def test_a_tick_that_comes_early_asks_again():
    stage, _ = after_f0(knowing(durations={F0: 2}, lead=2.5), heard_s=1.0)
    assert stage.tick(5.0) == ["wake 8"]
    assert stage.tick(7.99) == ["wake 8"]
    assert stage.tick(9.0) == ["run 0F1"]  # late, which is no harm
    assert stage.tick(8.0) == []


def test_an_event_that_changes_nothing_asks_for_no_second_tick():
    stage, _ = after_f0(knowing(durations={F0: 2}, lead=2.5), heard_s=1.0)
    assert stage.announce(2.5, 0) == []
    assert stage.announce(2.5, 2) == []


# -- rule 3 ------------------------------------------------------------------------------------------------------------


def test_a_long_task_waits_for_an_announcement():
    stage, answer = after_f0(knowing(durations={F0: 4}, lead=1))
    assert answer == ["wake 5"]  # 2 s and what 0F1 takes longer than the lead
    assert stage.tick(5.0) == ["run 0F1"]
    assert stage.learnt.notices[GRADIENT] == pytest.approx(0.7)


def test_an_announcement_in_time_leads_to_rule_2():
    stage, _ = after_f0(knowing(durations={F0: 4}, lead=1, notice=0.5))
    assert stage.announce(3.0, 0) == ["wake 14"]
    assert stage.learnt.notices[GRADIENT] == pytest.approx(0.65)
    assert stage.gradient(4.0, 0) == ["run 0B0"]


def test_the_hold_counts_from_when_the_stage_became_free():
    """An announcement during it makes it longer, as patience has it, and no second one starts from there."""
    stage, _ = after_f0(knowing(durations={F0: 4}, lead=1), rules=replace(RULES, patience=1.0))
    assert stage.announce(4.5, 0) == ["wake 6"]
    assert stage.tick(6.0) == ["run 0F1"]


def test_an_arrival_without_an_announcement_was_a_wait_in_vain():
    stage, _ = after_f0(knowing(durations={F0: 4}, lead=1))
    assert stage.gradient(3.0, 0) == ["run 0B0"]
    assert stage.learnt.notices[GRADIENT] == pytest.approx(0.7)
    assert stage.learnt.leads_s[GRADIENT] == 1


def test_part_of_the_notice_may_be_taken():
    assert after_f0(knowing(durations={F0: 4}, lead=1), rules=replace(RULES, notice=0.5))[1] == ["wake 3.5"]


def test_a_task_no_longer_than_the_lead_runs():
    assert after_f0(knowing(durations={F0: 4}, lead=4))[1] == ["run 0F1"]


def test_where_nothing_was_ever_announced_nothing_is_waited_for():
    assert after_f0(knowing(durations={F0: 4}))[1] == ["run 0F1"]


def test_a_new_edge_is_expected_to_lead_like_the_shortest_of_its_kind():
    known = knowing(durations={F0: 4})
    known.leads_s |= {(MessageKind.GRADIENT, 3, 2): 3.0, (MessageKind.GRADIENT, 5, 4): 2.0, ACTIVATION: 0.5}
    assert after_f0(known)[1] == ["wake 4"]
    known.leads_s = {ACTIVATION: 0.5}
    assert after_f0(known)[1] == ["wake 6"]  # none of its kind: no lead at all


def test_waits_that_keep_being_in_vain_are_given_up_and_taken_up_again():
    stage, answer = after_f0(knowing(durations={F0: 4}, lead=1, notice=0.29))
    assert answer == ["run 0F1"]
    assert stage.announce(3.0, 0) == []  # within the notice that was not taken: it would have been worth it
    stage.gradient(4.0, 0)
    assert stage.learnt.notices[GRADIENT] == pytest.approx(0.29 + 0.3 * 0.71)
    late, _ = after_f0(knowing(durations={F0: 4}, lead=1, notice=0.29))
    assert late.announce(5.5, 0) == []
    late.gradient(5.9, 0)
    assert late.learnt.notices[GRADIENT] == pytest.approx(0.29 * 0.7)


def test_an_announcement_told_ahead_counts_from_its_time_on():
    estimates = knowing(durations={F0: 4}, lead=1)
    stage, answer = after_f0(estimates, heard_s=3.5)
    assert answer == ["wake 3.5"]  # not in sight yet, and rule 3 would wait until 5
    assert stage.tick(3.5) == ["wake 14"]
    ahead, answer = after_f0(estimates, heard_s=6.0)
    assert answer == ["wake 5"]
    assert ahead.tick(5.0) == ["run 0F1"]


def test_what_arrives_before_its_announcement_teaches_no_lead():
    stage, _ = after_f0(knowing(durations={F0: 4}, lead=1, notice=0.29), heard_s=6.0)
    stage.gradient(2.5, 0)
    assert stage.learnt.leads_s == {GRADIENT: 1}
    assert stage.learnt.notices[GRADIENT] == pytest.approx(0.29 * 0.7)


def test_four_waits_in_vain_are_enough():
    worth = 1.0
    for _ in range(4):
        stage, answer = after_f0(knowing(durations={F0: 4}, lead=1, notice=worth))
        assert answer == ["wake 5"]
        stage.tick(5.0)
        worth = stage.learnt.notices[GRADIENT]
    assert after_f0(knowing(durations={F0: 4}, lead=1, notice=worth))[1] == ["run 0F1"]


# -- rule 4, and what is not known -------------------------------------------------------------------------------------


def test_nothing_is_held_before_anything_has_run():
    """1F0 is there, 1F1, which the row has first, is announced; nobody knows how long a task takes."""
    arbiter = StageArbiter(last_setup("1F1 1F0 1F2 1B1 1B0 1B2"))
    arbiter.handle(StepStarted(0, 0.0))
    arbiter.handle(TaskAnnounced(0, 0.0, Message(*ACTIVATION, 1)))
    assert RunTask(0, Task.parse("1F0")) in arbiter.handle(InputArrived(0, 0.0, Message(*ACTIVATION, 0)))


def test_a_kind_that_has_not_run_is_expected_to_take_as_long_as_the_longest():
    """0W0 may take 3 s, so it does not fit into 2.5 s."""
    stage = Clocked("0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2", knowing(durations={I0: 3}, lead=2.5), split=True)
    stage.start()
    for at_s, text in [(1.0, "0F0"), (2.0, "0F1"), (3.0, "0F2")]:
        stage.finish(at_s, text)
    assert stage.gradient(4.0, 0) == ["run 0I0"]
    stage.announce(7.0, 1)
    assert stage.finish(7.0, "0I0") == ["wake 16"]
    assert stage.gradient(9.5, 1) == ["run 0I1"]
    assert stage.finish(12.5, "0I1") == ["run 0W0"]


# -- handing over before the end ---------------------------------------------------------------------------------------


def test_a_decision_counts_from_the_end_that_is_expected():
    """0F0 will end at 2 s; the gradient is expected at 3.5 s, so 0F1 would not end before it."""
    stage = Clocked(FUSED, knowing(durations={F0: 2}, lead=2.5))
    stage.start()
    stage.announce(1.0, 0)
    assert stage.decide(1.9, "0F0") == ["wake 8"]
    assert stage.finish(2.0, "0F0") == []
    assert stage.gradient(3.5, 0) == ["run 0B0"]


def test_a_due_task_may_be_followed_by_what_fits():
    stage = Clocked(FUSED, knowing(durations={F0: 2}, lead=3))
    stage.start()
    stage.announce(1.0, 0)
    assert stage.decide(1.9, "0F0") == ["run 0F1"]


# -- what is learnt ----------------------------------------------------------------------------------------------------


def test_durations_and_leads_are_moving_averages():
    stage = Clocked("0F0 0F1 0B0 0F2 0B1 0B2", rules=replace(RULES, kept=0.9))
    stage.start()
    stage.finish(2.0, "0F0")
    assert stage.learnt.durations_s == {F0: 2.0}
    stage.announce(2.5, 0)
    stage.finish(7.0, "0F1")
    assert stage.learnt.durations_s == {F0: pytest.approx(2.3)}
    stage.gradient(8.5, 0)
    assert stage.learnt.leads_s == {GRADIENT: 6.0}


def test_what_a_task_waited_behind_a_due_one_is_not_its_duration():
    stage = Clocked("0F0 0F1 0F2 0B0 0B1 0B2", rules=replace(RULES, kept=0.0))
    stage.start()
    assert stage.decide(3.0, "0F0") == ["run 0F1"]
    stage.finish(5.0, "0F0")
    stage.finish(6.0, "0F1")
    assert stage.learnt.durations_s == {F0: 1.0}


def test_idle_time_is_not_its_duration_either():
    stage = Clocked(rules=replace(RULES, kept=0.0), window=1)
    stage.start()
    stage.finish(1.0, "0F0")
    assert stage.gradient(9.0, 0) == ["run 0B0"]
    stage.finish(12.0, "0B0")
    assert stage.learnt.durations_s == {F0: 1.0, B0: 3.0}


def test_a_doubled_announcement_counts_from_the_first():
    stage = Clocked()
    stage.start()
    stage.announce(1.0, 0)
    stage.announce(1.5, 0)
    stage.gradient(2.0, 0)
    assert stage.learnt.leads_s == {GRADIENT: 1.0}
    stage.announce(2.5, 0)
    stage.gradient(3.0, 0)
    assert stage.learnt.leads_s == {GRADIENT: 1.0}


def test_announcements_of_what_does_not_exist_change_nothing():
    stage = Clocked()
    stage.start()
    before = stage.arbiter.key()
    for message in (Message(*GRADIENT, 7), Message(*ACTIVATION, 0), Message(MessageKind.SHARED, 1, 0)):
        assert stage.handle(TaskAnnounced(0, 1.0, message)) == []
    assert stage.arbiter.key() == before


# -- announcements of other steps --------------------------------------------------------------------------------------


def test_an_early_announcement_counts_when_its_step_begins():
    stage = Clocked(FUSED, knowing(durations={F0: 2}, lead=3), step=4)
    assert stage.announce(0.5, 0) == []
    assert stage.announce(0.7, 0) == []
    assert stage.announce(0.5, 0, step=5) == []
    assert stage.announce(0.5, 0, step=3) == []
    stage.start()
    assert stage.finish(2.0, "0F0") == ["wake 8"]  # expected at 3.5 s
    assert stage.gradient(3.5, 0) == ["run 0B0"]
    assert stage.learnt.leads_s == {GRADIENT: 3.0}


def test_what_is_here_early_is_not_announced_any_more():
    stage = Clocked()
    stage.gradient(1.0, 0)
    stage.announce(2.0, 0)
    stage.start(3.0)
    assert stage.learnt.leads_s == {}
    early = Clocked()
    early.announce(1.0, 0)
    early.gradient(2.5, 0)
    early.start(3.0)
    assert early.learnt.leads_s == {GRADIENT: 1.5}


# -- announcing --------------------------------------------------------------------------------------------------------


def test_a_task_announces_as_it_starts_what_it_will_send():
    stage = Clocked()
    stage.start()
    expected = Announce(0, Message(*ACTIVATION, 0), 1)
    assert stage.announced == [expected]
    stage.finish(2.0, "0F0")
    assert stage.announced[1:] == [Announce(0, Message(*ACTIVATION, 1), 1)]


def test_where_tasks_are_short_foresight_sleeps():
    """It neither announces nor holds in a step that begins so, and wakes up when tasks have become longer."""
    rules = replace(RULES, shortest_s=1.0)
    stage, answer = after_f0(knowing(durations={F0: 0.9}, lead=0.5), heard_s=1.0, rules=rules)
    assert (answer, stage.announced, stage.arbiter.looks_ahead) == (["run 0F1"], [], False)
    awake, answer = after_f0(knowing(durations={F0: 1.0}, lead=1.5), heard_s=1.0, rules=rules)
    assert (answer, len(awake.announced), awake.arbiter.looks_ahead) == (["wake 5"], 1, True)
    assert after_f0(knowing(lead=1.0), rules=rules)[0].arbiter.looks_ahead  # nothing is known yet


# -- copies, replays, groups -------------------------------------------------------------------------------------------

STEP = [
    ("start", 0.0),
    ("announce", 1.0, 0),
    ("finish", 2.0, "0F0"),
    ("tick", 2.5),
    ("gradient", 3.5, 0),
    ("finish", 6.0, "0B0"),
    ("announce", 7.0, 1),
    ("finish", 8.5, "0F1"),
    ("announce", 8.7, 2),
    ("tick", 40.0),
    ("gradient", 42.0, 1),
    ("finish", 43.0, "0F2"),
    ("finish", 47.0, "0B1"),
    ("gradient", 47.0, 2),
    ("finish", 50.0, "0B2"),
]


def play(stage, events):
    return [getattr(stage, name)(*arguments) for name, *arguments in events]


def drive(stage, from_s):
    """A whole step, in parts of a second: F takes 6 s and B 2 s; announcements and gradients come when they come."""
    answers, running_s, now_s = [stage.start(from_s)], {}, from_s
    while stage.arbiter.is_active:
        now_s += 0.25
        running = stage.arbiter.running()
        ended = [t for t in running if now_s >= running_s.setdefault(t, now_s) + (6 if t.kind is TaskKind.F else 2)]
        answers += [stage.finish(now_s, str(task)) for task in ended]
        for microbatch in range(3):
            if now_s == from_s + 7 + 9 * microbatch:
                answers.append(stage.announce(now_s, microbatch))
            if now_s == from_s + 10 + 9 * microbatch:
                answers.append(stage.gradient(now_s, microbatch))
        answers.append(stage.tick(now_s))
    return answers


def test_the_story_of_a_step():
    answers = play(Clocked(estimates=knowing(durations={F0: 2, B0: 3}, lead=2.5)), STEP)
    assert [answer for answer in answers if answer] == [
        ["run 0F0"],
        ["wake 8"],
        ["wake 8"],
        ["run 0B0"],
        ["run 0F1"],
        ["wake 14.5"],
        ["run 0F2"],
        ["run 0B1"],
        ["run 0B2"],
    ]


@pytest.mark.parametrize("cut", range(len(STEP)))
def test_a_copy_goes_on_as_the_original_does(cut):
    stage = Clocked(estimates=knowing(durations={F0: 2, B0: 3}, lead=2.5), rules=replace(RULES, kept=0.9))
    play(stage, STEP[:cut])
    twin = Clocked()
    twin.arbiter = stage.arbiter.copy()
    assert twin.arbiter.key() == stage.arbiter.key()
    ahead = play(stage, STEP[cut:])
    assert play(twin, STEP[cut:]) == ahead
    assert twin.arbiter.key() == stage.arbiter.key()


def test_a_later_step_is_replayed_from_what_was_learnt_before_it():
    stage = Clocked(rules=replace(RULES, kept=0.9))
    drive(stage, 0.0)
    learnt = stage.learnt
    assert all([learnt.durations_s, learnt.leads_s, learnt.notices])
    twin = Clocked()
    twin.arbiter = stage.arbiter.fresh(0, learnt)
    stage.step = twin.step = 1
    answers = drive(stage, 60.0)
    assert any(answer and answer[0].startswith("wake") for answer in answers)
    assert drive(twin, 60.0) == answers
    assert stage.learnt == twin.learnt
    ignorant = Clocked(step=1, rules=replace(RULES, kept=0.9))
    assert drive(ignorant, 60.0) != answers


def test_a_saved_arbiter_is_rebuilt_with_foresight_and_footprint():
    rules = ForesightRules(patience=2.0, notice=0.5)
    arbiter = StageArbiter(setup_of(FUSED, rules=rules, footprint=2))
    again = rebuild(save_arbiter(arbiter), arbiter.graph, arbiter.placement)
    assert (again.setup.foresight, again.setup.footprint, again._mode.limit) == (rules, 2, None)
    stages = [Clocked(), Clocked()]
    known = knowing(durations={F0: 2, B0: 3}, lead=2.5)
    for stage, made in zip(stages, (arbiter, again), strict=True):
        stage.arbiter = made.fresh(None, known)
    answers = [play(stage, STEP[:5]) for stage in stages]
    assert answers[0] == answers[1]
    assert ["wake 6"] in answers[0]


def test_of_a_group_only_the_leader_looks_ahead():
    setup = setup_of(FUSED, footprint=2)
    leader, follower = (group_arbiter(GroupProtocol.LEADER, setup, member, 2) for member in (0, 1))
    assert (leader.setup.foresight, follower.setup.foresight) == (RULES, None)
    assert leader.setup.footprint == follower.setup.footprint == 2
    for protocol in (GroupProtocol.PROPOSE, GroupProtocol.OFF):
        members = [group_arbiter(protocol, setup, member, 2) for member in (0, 1)]
        assert [member.setup.foresight for member in members] == [None, None]
    saved = [rebuild(save_arbiter(member), setup.graph, setup.placement) for member in (leader, follower)]
    assert [member.setup.foresight for member in saved] == [RULES, None]


def test_a_follower_hears_announcements_and_ticks_and_does_nothing():
    follower = group_arbiter(GroupProtocol.LEADER, setup_of(FUSED), 1, 2)
    follower.handle(StepStarted(0, 0.0))
    before = follower.key()
    for step in (0, 1):
        assert follower.handle(TaskAnnounced(step, 1.0, Message(*GRADIENT, 0))) == []
        assert follower.handle(ClockTick(step, 1.0)) == []
    assert follower.key() == before


def test_announcements_of_the_next_step_are_heard_while_a_step_without_foresight_runs():
    """An evaluation: the stage's state after it is that of a stage that has heard them between the steps."""
    states = []
    for heard_within in (True, False):
        stage = StageArbiter(setup_of(FUSED, evaluation_batches=1))
        stage.handle(StepStarted(0, 0.0, evaluates=True))
        announced = TaskAnnounced(1, 0.5, Message(*GRADIENT, 0))
        if heard_within:
            stage.handle(announced)
        for microbatch in range(3):
            stage.handle(TaskFinished(0, 1.0 + microbatch, Task(TaskKind.F, 0, microbatch)))
            stage.handle(InputArrived(0, 1.0 + microbatch, Message(MessageKind.TAKEN, 1, 0, microbatch)))
        stage.handle(InputArrived(0, 4.0, Message(MessageKind.REPORT, 1, 0)))
        assert not stage.is_active
        if not heard_within:
            stage.handle(announced)
        states.append(stage.key())
    assert states[0] == states[1]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fit", "patience", "notice", "shortest_s"])
@pytest.mark.parametrize("number", [-1.0, float("nan")])
def test_numbers_that_mean_nothing(name, number):
    with pytest.raises(ValueError, match=f"{name} is .*: give 0 or more"):
        ForesightRules(**{name: number})


@pytest.mark.parametrize("name", ["worth", "kept", "worth_kept"])
@pytest.mark.parametrize("number", [-0.1, 1.1, float("nan")])
def test_parts_that_are_none(name, number):
    with pytest.raises(ValueError, match=f"{name} is .*: give a part between 0 and 1"):
        ForesightRules(**{name: number})


@pytest.mark.parametrize("consumption", [ready(HINTS["bf"]), strict(tuple(map(Task.parse, FUSED.split())))])
def test_foresight_needs_a_table_that_ranks(consumption):
    with pytest.raises(ValueError, match="foresight and footprint need a table as hint"):
        replace(setup_of(FUSED), consumption=consumption)
