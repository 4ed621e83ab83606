"""Tasks that are handed over before their inputs are there, rule by rule."""

import pytest

from rrfp_jax.core import (
    Announce,
    ForesightRules,
    InputArrived,
    InputPromised,
    Message,
    MessageKind,
    RunTask,
    StageArbiter,
    StageSetup,
    StepStarted,
    TaskAnnounced,
    TaskFinished,
    ready,
    schedule_hint,
)
from rrfp_jax.schedules import Task, chain, linear
from rrfp_jax.schedules.timeline import IdleReason
from tests.core.test_foresight import B0, F0, GRADIENT, Clocked, knowing
from tests.model_checker.catalogue import PIPELINE_ONLY

ROW = "1F0 1F1 1B0 1B1"


class Middle:
    """Stage 1 of three, event by event."""

    def __init__(self, *, looks_ahead: bool = True) -> None:
        consumption = ready(schedule_hint(tuple(map(Task.parse, ROW.split()))))
        foresight = ForesightRules() if looks_ahead else None
        setup = StageSetup(
            chain(3, 2), linear(3), 1, consumption=consumption, window=2, rules=PIPELINE_ONLY, foresight=foresight
        )
        self.arbiter = StageArbiter(setup)

    def handle(self, event):
        out = self.arbiter.handle(event)
        self.arbiter.validate()
        return [str(i.task) if isinstance(i, RunTask) else type(i).__name__ for i in out]

    def start(self, step=0):
        return self.handle(StepStarted(step, 0.0))

    def promise(self, microbatch, step=0, time_s=1.0):
        return self.handle(InputPromised(step, time_s, activation(microbatch)))

    def arrive(self, microbatch, step=0, time_s=3.0):
        return self.handle(InputArrived(step, time_s, activation(microbatch)))

    def finish(self, text, time_s=5.0):
        return self.handle(TaskFinished(0, time_s, Task.parse(text)))


def activation(microbatch):
    return Message(MessageKind.ACTIVATION, 0, 1, microbatch)


def test_an_idle_stage_hands_over_what_it_waits_for_and_announces_as_the_input_comes():
    stage = Middle()
    task = Task.parse("1F0")
    assert stage.start() == []
    assert stage.promise(0) == ["1F0"]
    assert stage.arbiter.awaits_input(task)
    assert stage.arbiter.awaited_inputs(task) == [activation(0)]
    assert stage.arbiter.idle_reason() is IdleReason.INPUT
    assert str(stage.arbiter.waiting()[0]) == "1F0 waits for activation of microbatch 0 from chunk 0 to chunk 1"
    assert stage.arrive(0) == [Announce.__name__]
    assert stage.arbiter.idle_reason() is None
    assert not stage.arbiter.awaits_input(task)
    assert stage.finish("1F0") == ["Send"]
    assert stage.arbiter.estimates().durations_s[F0[0], 1] == 2.0, "the device waited until the input came"


def test_only_the_next_entry_is_handed_over_so():
    stage = Middle()
    stage.start()
    assert stage.promise(1) == []
    assert stage.promise(0) == ["1F0"]
    assert stage.arrive(0) == ["Announce"]
    assert sorted(stage.finish("1F0")) == ["1F1", "Send"]
    assert stage.arbiter.awaits_input(Task.parse("1F1"))


def test_a_hold_becomes_a_hand_over():
    known = knowing(durations={F0: 2.0, B0: 4.0}, lead=2.0)
    held, handed = Clocked(estimates=known), Clocked(estimates=known)
    for stage in (held, handed):
        assert stage.start() == ["run 0F0"]
    held.handle(TaskAnnounced(0, 1.5, Message(*GRADIENT, 0)))
    handed.handle(InputPromised(0, 1.5, Message(*GRADIENT, 0)))
    (answer,) = held.finish(2.0, "0F0")
    assert answer.startswith("wake")
    assert handed.finish(2.0, "0F0") == ["run 0B0"]
    assert handed.gradient(5.0, 0) == []
    assert handed.finish(9.0, "0B0") == ["run 0F1"]


def test_what_fits_before_the_input_still_runs_first():
    stage = Clocked(estimates=knowing(durations={F0: 2.0, B0: 4.0}, lead=4.0))
    stage.start()
    stage.handle(InputPromised(0, 1.5, Message(*GRADIENT, 0)))
    assert stage.finish(2.0, "0F0") == ["run 0F1"]


def test_early_doubled_and_late_promises():
    stage = Middle()
    stage.promise(0)
    stage.promise(1)
    assert stage.start() == ["1F0"]
    assert stage.promise(0) == []
    assert stage.arrive(0) == ["Announce"]
    assert stage.promise(0) == []
    assert sorted(stage.finish("1F0")) == ["1F1", "Send"], "it was promised before the step began"
    assert stage.arrive(1) == ["Announce"]


def test_what_has_arrived_early_is_promised_no_more():
    stage, other = Middle(), Middle()
    for each, events in ((stage, ("arrive", "promise")), (other, ("promise", "arrive"))):
        for event in events:
            assert getattr(each, event)(0, time_s=0.0) == []
    assert stage.start() == other.start() == ["1F0", "Announce"]


def test_an_end_may_be_heard_of_before_the_input():
    stage = Middle()
    stage.start()
    stage.promise(0)
    assert stage.finish("1F0") == ["Send"]
    assert stage.arrive(0) == []


def test_a_stage_without_foresight_waits():
    stage = Middle(looks_ahead=False)
    stage.start()
    assert stage.promise(0) == []
    assert stage.arrive(0) == ["1F0"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_copies_are_equal_and_independent(when):
    stage = Middle()
    stage.start()
    if when == "after":
        stage.promise(0)
    twin = stage.arbiter.copy()
    assert twin.key() == stage.arbiter.key()
    stage.promise(1)
    assert twin.key() != stage.arbiter.key()
    twin.validate()
