"""What goes into a stage's arbiter and what comes out: events, instructions and the messages between stages.

Every event carries its step and its time in seconds; the arbiter reads no clock. All records are plain tuples, so that
they can be logged, compared and replayed.
"""

from enum import StrEnum
from typing import NamedTuple

from rrfp_jax.tasks import NO_MICROBATCH, Task


class MessageKind(StrEnum):
    """What a message between two stages carries."""

    ACTIVATION = "activation"
    """The output of chunk ``source`` for chunk ``target``."""
    GRADIENT = "gradient"
    """The gradient of an input of chunk ``source`` for its predecessor, chunk ``target``."""
    SHARED = "shared"
    """The accumulated gradients of the parameters that chunk ``source`` shares with chunk ``target``."""
    REPORT = "report"
    """What stage ``source`` contributes to the step's agreement, for the coordinator, stage ``target``."""
    VERDICT = "verdict"
    """What the stages agreed on, from the coordinator, stage ``source``, for stage ``target``."""


class Message(NamedTuple):
    """The identity of a message within a step; deliveries may come in any order and more than once."""

    kind: MessageKind
    source: int
    target: int
    microbatch: int = NO_MICROBATCH

    def __str__(self) -> str:
        of = "" if self.microbatch < 0 else f" of microbatch {self.microbatch}"
        place = "stage" if self.kind in (MessageKind.REPORT, MessageKind.VERDICT) else "chunk"
        return f"{self.kind}{of} from {place} {self.source} to {place} {self.target}"


class StepStarted(NamedTuple):
    """A step's batch is here. ``absent`` names (chunk, microbatch) pairs that it lacks, beyond those of the graph."""

    step: int
    time_s: float
    absent: frozenset[tuple[int, int]] = frozenset()


class InputArrived(NamedTuple):
    """A message from another stage is here; it may belong to a step that has not started on this stage."""

    step: int
    time_s: float
    message: Message


class TaskFinished(NamedTuple):
    """The task that the stage was told to run has finished."""

    step: int
    time_s: float
    task: Task


Event = StepStarted | InputArrived | TaskFinished


class RunTask(NamedTuple):
    """Start this task now; report back with :class:`TaskFinished`."""

    step: int
    task: Task


class Send(NamedTuple):
    """Send this message to another stage; the task or agreement that produces it is finished."""

    step: int
    message: Message
    stage: int


class FinishStep(NamedTuple):
    """Nothing is left to do for this step on this stage."""

    step: int


Instruction = RunTask | Send | FinishStep
