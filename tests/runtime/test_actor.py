"""The actor carries out what its arbiter answers, the most urgent first."""

from collections import deque
from functools import partial
from typing import Any

from rrfp_jax.core import (
    HINTS,
    Announce,
    ClockTick,
    Event,
    Instruction,
    Message,
    MessageKind,
    RunPair,
    RunTask,
    Send,
    StageArbiter,
    StageSetup,
    StepRules,
    TaskAnnounced,
    TaskFinished,
    WakeAt,
    ready,
)
from rrfp_jax.runtime.actor import StageActor
from rrfp_jax.runtime.stage_threads import Launched, StageOutcome
from rrfp_jax.schedules import Pair, Task, chain, linear


class Journal:
    """Executor, thread, host and transport of one stage; writes down what it is asked for, and keeps calls for
    later."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.timers: list[Any] = []
        self.transport: Any = self
        self.steps: Any = self
        self.peers = None

    def begin(self, step: int, batch: Any, graph: Any) -> None:
        self.lines.append("begin")

    def launch(self, step: int, task: Task) -> Launched:
        raise AssertionError("tasks run on the compute thread")

    def accept(self, step: int, message: Message, payload: Any) -> None:
        self.lines.append(f"accept {message.kind} {message.microbatch}")

    def payload(self, step: int, message: Message) -> Any:
        self.lines.append(f"payload {message.kind} {message.microbatch}")
        return message.microbatch

    def finish(self, step: int) -> StageOutcome:
        self.lines.append("finish")
        return StageOutcome()

    def send_array(self, payload: Any, stage: int, message: Message) -> Any:
        return payload

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        self.lines.append(f"send {payload} to stage {stage}")

    def submit(self, instruction: RunTask) -> None:
        self.lines.append(f"run {instruction.task}")

    def announce(self, stage: int, step: int, message: Message) -> None:
        self.lines.append(f"announce {message.kind} to stage {stage}")

    def wake_later(self, at_s: float, call: Any) -> bool:
        """As a thread it never can; as a host it sets a timer."""
        if isinstance(call, partial) and call.func == self.run_serially:
            return False
        self.timers.append(call)
        return True

    def run_serially(self, call: Any) -> None:
        raise AssertionError("only a thread that wakes by itself has calls made")

    def stage_ended(self, *_: Any, **__: Any) -> None:
        pass

    def taken(self) -> list[str]:
        taken, self.lines = self.lines, []
        return taken


class HoldingArbiter(StageArbiter):
    """Answers as it is told."""

    answers: deque[list[Instruction]]

    def handle(self, event: Event) -> list[Instruction]:
        self.told = [*getattr(self, "told", []), event]
        return self.answers.popleft()


def test_data_go_before_announcements_and_a_task_ends_the_hold() -> None:
    journal = Journal()
    arbiter = HoldingArbiter(StageSetup(chain(2, 2), linear(2), 0, consumption=ready(HINTS["bf"]), window=2))
    activation = Message(MessageKind.ACTIVATION, 0, 1, 0)
    first, second = (RunTask(0, Task.parse(f"0F{number}")) for number in range(2))
    arbiter.answers = deque([[WakeAt(0, 1.0)], [WakeAt(0, 2.0)], [WakeAt(0, 3.0)]])
    arbiter.answers.append([first, Announce(0, activation, 1), Send(0, activation, 1)])
    arbiter.answers.append([second])
    actor = StageActor(
        arbiter,
        journal,
        journal,  # type: ignore[arg-type]
        journal,
        log_steps=1,
    )
    actor.observe(TaskAnnounced, 0, activation)
    actor.observe(TaskAnnounced, 0, activation)
    journal.timers[0]()
    assert len(arbiter.told) == 2, "only the latest end of a hold counts"
    journal.timers[1]()
    assert isinstance(arbiter.told[-1], ClockTick)
    assert arbiter.told[-1].time_s >= 2.0
    journal.timers[1]()
    assert len(arbiter.told) == 3, "it rings once"
    actor.observe(TaskAnnounced, 0, activation)
    journal.timers[2]()
    assert len(arbiter.told) == 4, "the task that started has ended the hold"
    assert journal.taken() == [
        "run 0F0",
        "payload activation 0",
        "send 0 to stage 1",
        "announce activation to stage 1",
    ]
    actor.observe(TaskAnnounced, 0, activation)
    assert (journal.taken(), len(journal.timers)) == (["run 0F1"], 3)


def test_a_payload_is_taken_before_the_next_task_is_handed_over_and_sent_after_it() -> None:
    """The next task may replace what is sent; and the stage should not wait while it is being sent."""
    journal = Journal()
    arbiter = StageArbiter(
        StageSetup(chain(2, 2), linear(2), 0, consumption=ready(HINTS["bf"]), window=2, rules=StepRules(updates=False))
    )
    actor = StageActor(
        arbiter,
        journal,
        journal,  # type: ignore[arg-type]
        journal,
        log_steps=1,
    )
    actor.start_step(0, {}, arbiter.graph, arbiter.plan_without(()))
    assert journal.taken() == ["begin", "run 0F0"]
    actor.completed(RunTask(0, Task.parse("0F0")), 0.0, 1.0)
    assert journal.taken() == ["payload activation 0", "run 0F1", "send 0 to stage 1"]
    actor.completed(RunTask(0, Task.parse("0F1")), 1.0, 2.0)
    assert journal.taken() == ["payload activation 1", "send 1 to stage 1"]


def test_both_tasks_of_a_pair_end_one_right_after_the_other_and_share_its_time() -> None:
    journal = Journal()
    arbiter = HoldingArbiter(StageSetup(chain(2, 2), linear(2), 0, consumption=ready(HINTS["bf"]), window=2))
    pair = RunPair(0, Pair(Task.parse("0F1"), Task.parse("0B0")))
    activation = Message(MessageKind.ACTIVATION, 0, 1, 1)
    arbiter.answers = deque([[WakeAt(0, 1.0)], [pair], [Send(0, activation, 1)], []])
    actor = StageActor(
        arbiter,
        journal,
        journal,  # type: ignore[arg-type]
        journal,
        log_steps=1,
    )
    for _ in range(2):
        actor.observe(TaskAnnounced, 0, activation)
    journal.timers[0]()
    assert len(arbiter.told) == 2, "the pair that started has ended the hold"
    actor.completed(pair, 2.0, 4.0)
    assert journal.taken() == ["run 0F1+0B0", "payload activation 1", "send 1 to stage 1"]
    ends = [event for event in arbiter.told if isinstance(event, TaskFinished)]
    assert [event.task for event in ends] == [pair.task.first, pair.task.second]
    spans = actor._recorder.take().spans
    assert [(str(span.task), span.start_s, span.end_s) for span in spans] == [("0F1", 2.0, 3.0), ("0B0", 3.0, 4.0)]
