"""The actor carries out what its arbiter answers, the most urgent first."""

from typing import Any

from rrfp_jax.arbitration import HINTS, Message, RunTask, StageArbiter, StageSetup, StepRules, ready
from rrfp_jax.runtime.actor import StageActor
from rrfp_jax.runtime.executor import Launched, StageOutcome
from rrfp_jax.tasks import Task, chain, linear


class Journal:
    """Executor and transport of one stage; writes down what it is asked for."""

    def __init__(self) -> None:
        self.lines: list[str] = []

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

    def ship(self, payload: Any, stage: int, message: Message) -> Any:
        return payload

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        self.lines.append(f"send {payload} to stage {stage}")

    def submit(self, instruction: RunTask) -> None:
        self.lines.append(f"run {instruction.task}")

    def taken(self) -> list[str]:
        taken, self.lines = self.lines, []
        return taken


def test_a_payload_is_taken_before_the_next_task_is_handed_over_and_sent_after_it() -> None:
    """The next task may replace what is sent; and the stage should not wait while it is being sent."""
    journal = Journal()
    arbiter = StageArbiter(
        StageSetup(chain(2, 2), linear(2), 0, consumption=ready(HINTS["bf"]), window=2, rules=StepRules(updates=False))
    )
    actor = StageActor(
        arbiter,
        journal,
        journal,
        submit=journal.submit,
        ended=lambda *_: None,
        announce=lambda *_: None,
        wake_later=lambda *_: None,
        log_steps=1,
    )
    actor.start_step(0, {}, arbiter.graph, arbiter.plan_without(()))
    assert journal.taken() == ["begin", "run 0F0"]
    actor.completed(RunTask(0, Task.parse("0F0")), 0.0, 1.0)
    assert journal.taken() == ["payload activation 0", "run 0F1", "send 0 to stage 1"]
    actor.completed(RunTask(0, Task.parse("0F1")), 1.0, 2.0)
    assert journal.taken() == ["payload activation 1", "send 1 to stage 1"]
