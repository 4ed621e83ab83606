"""The arbiter, event by event."""

from dataclasses import replace

import pytest

from rrfp_jax.core import (
    HINTS,
    Agreement,
    DecideNow,
    FinishStep,
    IllegalTransition,
    InputArrived,
    Message,
    MessageKind,
    RunTask,
    Send,
    StageArbiter,
    StageSetup,
    StepRules,
    StepStarted,
    TaskFinished,
    ready,
    schedule_hint,
    strict,
)
from rrfp_jax.schedules import Edge, PipelineGraph, Placement, Task, absences, chain, linear, looped
from rrfp_jax.schedules.timeline import IdleReason
from tests.model_checker.catalogue import PIPELINE_ONLY

LOSS = StepRules(agreement=Agreement.LOSS)


class Stage:
    """An arbiter with short words for its events; validated after each."""

    def __init__(self, graph=None, placement=None, stage=0, *, hint="bf", window=4, rules=PIPELINE_ONLY, **more):
        more.setdefault("consumption", ready(HINTS[hint]))
        self.arbiter = StageArbiter(
            StageSetup(graph or chain(2, 2), placement or linear(2), stage, window=window, rules=rules, **more)
        )

    def handle(self, event):
        out = self.arbiter.handle(event)
        self.arbiter.validate()
        return [
            f"run {i.task}" if isinstance(i, RunTask) else f"send {i.message}" if isinstance(i, Send) else "end"
            for i in out
        ]

    def start(self, step=0, absent=()):
        return self.handle(StepStarted(step, 0.0, absences(absent)))

    def finish(self, text, step=0):
        return self.handle(TaskFinished(step, 0.0, Task.parse(text)))

    def decide(self, text, step=0):
        return self.handle(DecideNow(step, 0.0, Task.parse(text)))

    def activation(self, source, target, microbatch, step=0):
        return self.handle(InputArrived(step, 0.0, Message(MessageKind.ACTIVATION, source, target, microbatch)))

    def gradient(self, source, target, microbatch, step=0):
        return self.handle(InputArrived(step, 0.0, Message(MessageKind.GRADIENT, source, target, microbatch)))

    def control(self, kind, source, target, step=0):
        return self.handle(InputArrived(step, 0.0, Message(kind, source, target)))


def test_a_whole_step_of_the_first_stage():
    stage = Stage()
    assert stage.start() == ["run 0F0"]
    assert stage.finish("0F0") == ["send activation of microbatch 0 from chunk 0 to chunk 1", "run 0F1"]
    assert stage.gradient(1, 0, 0) == []
    assert stage.finish("0F1") == ["send activation of microbatch 1 from chunk 0 to chunk 1", "run 0B0"]
    assert stage.finish("0B0") == []
    assert stage.gradient(1, 0, 1) == ["run 0B1"]
    assert stage.finish("0B1") == ["end"]
    assert not stage.arbiter.is_active


def test_a_whole_step_of_the_last_stage_with_update():
    stage = Stage(chain(2, 1), stage=1, rules=StepRules())
    assert stage.start() == []
    assert stage.activation(0, 1, 0) == ["run 1F0"]
    assert stage.finish("1F0") == ["run 1B0"]
    assert stage.finish("1B0") == ["send gradient of microbatch 0 from chunk 1 to chunk 0", "run 1R"]
    assert stage.finish("1R") == ["send report from stage 1 to stage 0"]
    assert stage.control(MessageKind.VERDICT, 0, 1) == ["run 1U"]
    assert stage.finish("1U") == ["end"]


@pytest.mark.parametrize("lockstep", [False, True])
def test_r_of_a_chunk_fills_the_wait_for_another_and_does_not_hold_it_up(lockstep):
    """Chunks 0 and 2 of four; the last backward of 2 comes two hops before that of 0."""
    stage = Stage(chain(4, 1), looped(2, 2), 0, rules=StepRules(lockstep=lockstep))
    stage.start()
    stage.finish("0F0")
    stage.activation(1, 2, 0)
    stage.finish("2F0")
    stage.gradient(3, 2, 0)
    sent = "send gradient of microbatch 0 from chunk 2 to chunk 1"
    assert stage.finish("2B0") == [sent, "run 2R"]
    assert stage.finish("2R") == []
    assert stage.gradient(1, 0, 0) == ["run 0B0"]
    assert stage.finish("0B0") == ["run 0R"]


def test_a_backward_that_is_ready_goes_before_r():
    stage = Stage(chain(2, 1), Placement((0, 0)), 0, rules=StepRules())
    stage.start()
    stage.finish("0F0")
    stage.finish("1F0")
    assert stage.finish("1B0") == ["run 0B0"]
    assert stage.finish("0B0") == ["run 1R"]


def test_the_coordinator_sends_its_verdict_when_all_reports_are_in():
    stage = Stage(chain(2, 1), rules=StepRules())
    stage.start()
    stage.finish("0F0")
    stage.gradient(1, 0, 0)
    stage.finish("0B0")
    assert stage.finish("0R") == []
    assert stage.control(MessageKind.REPORT, 1, 0) == ["send verdict from stage 0 to stage 1", "run 0U"]
    assert stage.finish("0U") == ["end"]


def test_the_loss_is_agreed_on_while_backwards_still_run():
    stage = Stage(chain(2, 2), stage=1, rules=LOSS)
    stage.start()
    stage.activation(0, 1, 0)
    stage.activation(0, 1, 1)
    assert stage.finish("1F0") == ["run 1B0"]
    assert stage.finish("1B0")[-1] == "run 1F1"
    assert stage.finish("1F1") == ["send report from stage 1 to stage 0", "run 1B1"]
    assert stage.control(MessageKind.VERDICT, 0, 1) == []


def test_without_a_loss_a_stage_reports_as_the_step_begins():
    assert Stage(chain(2, 2), stage=1, rules=StepRules(agreement=Agreement.NONE)).start() == []
    middle = Stage(chain(3, 1), linear(3), stage=1, rules=LOSS)
    assert middle.start() == ["send report from stage 1 to stage 0"]


def test_no_update_no_agreement_ends_after_the_last_backward():
    stage = Stage(chain(1, 1), linear(1))
    assert stage.start() == ["run 0F0"]
    assert stage.finish("0F0") == ["run 0B0"]
    assert stage.finish("0B0") == ["end"]


# -- readiness ---------------------------------------------------------------------------------------------------------


def test_messages_may_come_in_any_order():
    stage = Stage(chain(2, 3), stage=1)
    stage.start()
    assert stage.activation(0, 1, 2) == ["run 1F2"]
    stage.activation(0, 1, 1)
    stage.activation(0, 1, 0)
    assert stage.finish("1F2") == ["run 1B2"]
    assert stage.finish("1B2")[-1] == "run 1F0"


def test_a_second_delivery_changes_nothing():
    stage = Stage(stage=1)
    stage.start()
    stage.activation(0, 1, 0)
    before = stage.arbiter.key()
    assert stage.activation(0, 1, 0) == []
    assert stage.arbiter.key() == before
    for text in ("1F0", "1B0"):
        stage.finish(text)
    assert stage.activation(0, 1, 0) == []
    assert stage.activation(0, 1, 1) == ["run 1F1"]


def test_late_deliveries_after_the_step_are_ignored():
    stage = Stage(chain(2, 1), stage=1)
    stage.start()
    stage.activation(0, 1, 0)
    stage.finish("1F0")
    stage.finish("1B0")
    assert stage.activation(0, 1, 0) == []
    assert stage.start(1) == []
    assert stage.activation(0, 1, 0, step=0) == []
    assert stage.activation(0, 1, 0, step=1) == ["run 1F0"]


def test_the_window_holds_forwards_back_and_nothing_else():
    stage = Stage(chain(2, 3), window=1)
    stage.start()
    stage.finish("0F0")
    assert stage.arbiter.idle_reason() is IdleReason.WINDOW
    assert stage.arbiter.held() == {0}
    assert stage.gradient(1, 0, 0) == ["run 0B0"]
    assert stage.finish("0B0") == ["run 0F1"]


def test_the_last_slot_is_kept_for_the_oldest_microbatch():
    stage = Stage(chain(2, 3), stage=1, window=2)
    stage.start()
    assert stage.activation(0, 1, 1) == ["run 1F1"]
    stage.activation(0, 1, 2)
    stage.finish("1F1")
    assert stage.arbiter.running() == (Task.parse("1B1"),)
    other = Stage(chain(2, 3), stage=1, window=1)
    other.start()
    assert other.activation(0, 1, 1) == []
    assert other.activation(0, 1, 0) == ["run 1F0"]


def test_a_split_backward_holds_its_microbatch_until_its_weight_gradient():
    stage = Stage(chain(2, 2, split=True), stage=1, window=1, hint="b-priority")
    stage.start()
    stage.activation(0, 1, 0)
    stage.activation(0, 1, 1)
    stage.finish("1F0")
    assert stage.finish("1I0")[-1] == "run 1W0"
    assert stage.arbiter.held() == {0}
    assert stage.finish("1W0") == ["run 1F1"]


def test_forwards_of_a_held_microbatch_pass_a_full_window():
    stage = Stage(chain(2, 2), Placement((0, 0)), window=1, hint="f-priority")
    stage.start()
    assert stage.finish("0F0") == ["run 1F0"]


def test_a_table_hint_ranks_but_never_waits():
    rows = [Task.parse(t) for t in ("0F1", "0F0", "0B1", "0B0")]
    stage = Stage(consumption=ready(schedule_hint(rows)))
    assert stage.start() == ["run 0F1"]
    stage.finish("0F1")
    assert stage.gradient(1, 0, 0) == []
    assert stage.finish("0F0")[-1] == "run 0B0"


def test_strict_consumption_waits_and_ignores_the_window():
    rows = tuple(Task.parse(t) for t in ("0F0", "0F1", "0B1", "0B0"))
    stage = Stage(consumption=strict(rows), window=1)
    stage.start()
    assert stage.finish("0F0")[-1] == "run 0F1"
    stage.finish("0F1")
    assert stage.gradient(1, 0, 0) == []
    assert stage.arbiter.idle_reason() is IdleReason.ORDER
    assert stage.gradient(1, 0, 1) == ["run 0B1"]


# -- graphs and absent pairs -------------------------------------------------------------------------------------------

TWO_ENCODERS = PipelineGraph(3, 2, (Edge(0, 2), Edge(1, 2)))


def test_a_join_waits_for_both_inputs():
    stage = Stage(TWO_ENCODERS, linear(3), 2)
    stage.start()
    assert stage.activation(0, 2, 0) == []
    assert stage.activation(1, 2, 0) == ["run 2F0"]


def test_pairs_may_be_absent_in_one_step_only():
    stage = Stage(TWO_ENCODERS, linear(3), 2)
    stage.start(0, absent={(1, 0), (0, 1)})
    assert stage.activation(0, 2, 0) == ["run 2F0"]
    stage.finish("2F0")
    assert stage.finish("2B0") == ["send gradient of microbatch 0 from chunk 2 to chunk 0"]
    stage.activation(1, 2, 1)
    stage.finish("2F1")
    assert stage.finish("2B1") == ["send gradient of microbatch 1 from chunk 2 to chunk 1", "end"]
    stage.start(1)
    assert stage.activation(0, 2, 0, step=1) == []


def test_a_stage_without_work_ends_its_step_at_once():
    stage = Stage(TWO_ENCODERS, linear(3), 1)
    assert stage.start(0, absent={(1, 0), (1, 1)}) == ["end"]
    assert stage.arbiter.idle_reason() is IdleReason.DRAIN
    agreeing = Stage(TWO_ENCODERS, linear(3), 1, rules=StepRules(updates=False))
    assert agreeing.start(0, absent={(1, 0), (1, 1)}) == ["send report from stage 1 to stage 0"]


# -- steps -------------------------------------------------------------------------------------------------------------


def test_messages_may_come_before_their_step():
    stage = Stage(stage=1)
    assert stage.activation(0, 1, 1) == []
    assert stage.activation(0, 1, 0) == []
    assert stage.start() == ["run 1F0"]


def test_the_next_step_starts_after_the_present_one_has_ended():
    stage = Stage(chain(2, 1))
    stage.start()
    with pytest.raises(IllegalTransition, match="step 1 was started within step 0"):
        stage.start(1)
    stage.finish("0F0")
    stage.gradient(1, 0, 0)
    assert stage.finish("0B0") == ["end"]
    assert stage.start(1) == ["run 0F0"]
    assert stage.arbiter.step == 1


def test_messages_of_the_next_step_wait_for_it():
    stage = Stage(chain(2, 1), stage=1)
    stage.start()
    stage.activation(0, 1, 0, step=1)
    stage.activation(0, 1, 0)
    stage.finish("1F0")
    assert stage.finish("1B0") == ["send gradient of microbatch 0 from chunk 1 to chunk 0", "end"]
    assert stage.start(1) == ["run 1F0"]


def test_a_step_without_work_here_ends_as_it_starts():
    stage = Stage(TWO_ENCODERS, linear(3), 1)
    assert stage.start(0, absent={(1, 0), (1, 1)}) == ["end"]
    assert stage.start(1, absent={(1, 0), (1, 1)}) == ["end"]
    assert stage.start(2) == ["run 1F0"]


def test_what_was_prepared_changes_no_answer():
    stage = Stage(TWO_ENCODERS, linear(3), 1)
    stage.arbiter.prepare(stage.arbiter.plan_without(absences({(1, 0)})))
    assert stage.start(0, absent={(1, 1)}) == ["run 1F0"]


def test_a_run_may_begin_at_any_step():
    stage = Stage()
    assert stage.start(7) == ["run 0F0"]


def test_instructions_carry_their_step():
    arbiter = Stage(chain(1, 1), linear(1)).arbiter
    assert arbiter.handle(StepStarted(3, 0.0)) == [RunTask(3, Task.parse("0F0"))]
    arbiter.handle(TaskFinished(3, 1.0, Task.parse("0F0")))
    assert arbiter.handle(TaskFinished(3, 2.0, Task.parse("0B0"))) == [FinishStep(3)]


# -- illegal transitions -----------------------------------------------------------------------------------------------


def test_an_end_without_a_start_tells_the_story():
    stage = Stage()
    stage.start()
    stage.finish("0F0")
    with pytest.raises(IllegalTransition) as error:
        stage.finish("0B0")
    assert str(error.value) == (
        "stage 0, step 0: 0B0 finished without having been started; the story of 0B0 so far:\n"
        "  0F0 has finished\n"
        "  0B0 waits for gradient of microbatch 0 from chunk 1 to chunk 0"
    )


def test_a_message_that_nobody_needs_tells_the_story():
    stage = Stage(stage=1)
    stage.start()
    with pytest.raises(
        IllegalTransition, match="gradient of microbatch 0 from chunk 3 to chunk 1 arrived, and nothing"
    ):
        stage.gradient(3, 1, 0)
    with pytest.raises(IllegalTransition, match="this stage has no task with it"):
        stage.activation(0, 1, 9)


def test_a_running_task_cannot_finish_twice():
    stage = Stage()
    stage.start()
    stage.finish("0F0")
    with pytest.raises(IllegalTransition, match="0F0 finished without having been started"):
        stage.finish("0F0")
    with pytest.raises(IllegalTransition, match="5F0 finished without having been started"):
        stage.finish("5F0")


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ([StepStarted(0, 0.0), StepStarted(0, 0.0)], "stage 0: step 0 was started twice"),
        ([TaskFinished(0, 0.0, Task.parse("0F0"))], "0F0 of step 0 finished, but the stage is done with step None"),
        (
            [StepStarted(0, 0.0), TaskFinished(1, 0.0, Task.parse("0F0"))],
            "0F0 of step 1 finished, but the stage is in step 0",
        ),
    ],
)
def test_impossible_events(events, what):
    arbiter = Stage().arbiter
    for event in events[:-1]:
        arbiter.handle(event)
    with pytest.raises(IllegalTransition, match=what):
        arbiter.handle(events[-1])


def test_steps_are_neither_repeated_nor_skipped():
    stage = Stage(TWO_ENCODERS, linear(3), 1)
    stage.start(4, absent={(1, 0), (1, 1)})
    with pytest.raises(IllegalTransition, match="stage 1: step 4 was started again after its end"):
        stage.start(4)
    with pytest.raises(IllegalTransition, match="stage 1: step 6 was started after step 4"):
        stage.start(6)


# -- looking inside ----------------------------------------------------------------------------------------------------


def test_idle_reasons():
    stage = Stage(chain(2, 2), stage=1)
    assert stage.arbiter.idle_reason() is IdleReason.DRAIN
    stage.start()
    assert stage.arbiter.idle_reason() is IdleReason.FILL
    stage.activation(0, 1, 0)
    assert stage.arbiter.idle_reason() is None
    stage.finish("1F0")
    stage.finish("1B0")
    assert stage.arbiter.idle_reason() is IdleReason.INPUT
    stage.activation(0, 1, 1)
    stage.finish("1F1")
    stage.finish("1B1")
    assert stage.arbiter.idle_reason() is IdleReason.DRAIN


def test_waiting_for_the_agreement_is_drain():
    stage = Stage(chain(2, 1), stage=1, rules=StepRules())
    stage.start()
    stage.activation(0, 1, 0)
    for text in ("1F0", "1B0", "1R"):
        stage.finish(text)
    assert stage.arbiter.is_active
    assert stage.arbiter.idle_reason() is IdleReason.DRAIN


def test_waiting_names_what_is_missing():
    stage = Stage(chain(2, 1), stage=1, rules=StepRules())
    assert stage.arbiter.waiting() == []
    stage.start()
    assert list(map(str, stage.arbiter.waiting())) == [
        "1F0 waits for activation of microbatch 0 from chunk 0 to chunk 1",
        "1B0 waits for 1F0",
        "1R waits for 1B0",
        "1U waits for 1R, verdict",
        "verdict waits for verdict from stage 0 to stage 1",
        "report waits for 1F0, 1B0, 1R",
    ]
    assert stage.arbiter.waiting()[0].microbatch == 0
    assert stage.arbiter.waiting()[2].microbatch == -1
    assert stage.arbiter.waiting()[0].missing_messages == (Message(MessageKind.ACTIVATION, 0, 1, 0),)


def test_the_story_of_a_microbatch():
    stage = Stage(chain(2, 2), window=1)
    stage.start()
    assert stage.arbiter.tell(0).splitlines()[0] == "  0F0 is running"
    assert stage.arbiter.tell(1).splitlines()[0] == "  0F1 is ready"


def test_copies_are_independent():
    stage = Stage(chain(2, 3), window=2)
    stage.start()
    stage.activation(0, 1, 0, step=1)
    before = stage.arbiter.key()
    twin = stage.arbiter.copy()
    assert twin.key() == before
    twin.handle(TaskFinished(0, 0.0, Task.parse("0F0")))
    twin.handle(InputArrived(0, 0.0, Message(MessageKind.GRADIENT, 1, 0, 0)))
    twin.handle(InputArrived(2, 0.0, Message(MessageKind.GRADIENT, 1, 0, 0)))
    twin.validate()
    stage.arbiter.validate()
    assert stage.arbiter.key() == before
    assert stage.arbiter.held() == {0}


def test_copies_keep_their_class():
    class Special(StageArbiter):
        pass

    special = Special(StageSetup(chain(1, 1), linear(1), 0, consumption=ready(HINTS["bf"]), window=1))
    assert type(special.copy()) is Special


def test_equal_keys_for_different_histories():
    one, other = Stage(chain(2, 2), stage=1), Stage(chain(2, 2), stage=1)
    one.activation(0, 1, 0)
    one.activation(0, 1, 1)
    other.handle(InputArrived(0, 9.0, Message(MessageKind.ACTIVATION, 0, 1, 1)))
    other.activation(0, 1, 0)
    other.activation(0, 1, 0)
    assert one.arbiter.key() == other.arbiter.key()
    assert hash(one.arbiter.key()) == hash(other.arbiter.key())
    assert one.start() == other.start()
    assert one.arbiter.key() == other.arbiter.key()


def test_keys_tell_hint_states_steps_and_absent_pairs_apart():
    def after(*events, absent=(), step=0):
        stage = Stage(TWO_ENCODERS, linear(3), 2)
        stage.start(step, absent=absent)
        for event in events:
            stage.handle(event)
        return stage.arbiter.key()

    keys = [after(), after(step=1), after(absent={(0, 0)}), after(absent={(1, 0)}), after(absent={(0, 1)})]
    assert len(set(keys)) == len(keys)


def test_rules_default_to_updates_and_full_agreement():
    arbiter = StageArbiter(StageSetup(chain(1, 1), linear(1), 0, consumption=ready(HINTS["bf"]), window=1))
    assert arbiter.rules == StepRules(ordered=False, updates=True, agreement=Agreement.ALL)
    assert replace(arbiter.rules, ordered=True).ordered
