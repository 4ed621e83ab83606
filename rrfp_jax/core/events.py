"""Events that a stage's arbiter takes, instructions that it returns, and messages between stages.

Every event carries its step and its time in seconds; the arbiter reads no clock. All records are plain tuples, so that
they can be logged, compared and replayed. Notes travel between the members of one stage's group
(:mod:`rrfp_jax.core.groups`); like messages they may be delivered in any order and more than once.
"""

from enum import StrEnum
from typing import NamedTuple

from rrfp_jax.core.replicas import StepOwners
from rrfp_jax.schedules import NO_MICROBATCH, Absences, Pair, Task

BESIDE = 1 << 40
"""The numbers of evaluations in idle time begin here: they have a sequence of their own beside that of all steps."""


class MessageKind(StrEnum):
    """The content of a message between two stages."""

    ACTIVATION = "activation"
    """The output of chunk ``source`` for chunk ``target``."""
    GRADIENT = "gradient"
    """The gradient of an input of chunk ``source`` for its predecessor, chunk ``target``."""
    SHARED = "shared"
    """The accumulated gradients of the parameters that chunk ``source`` shares with chunk ``target``."""
    PIECE = "piece"
    """A piece of the accumulated gradients of chunk ``source``, for the replica that adds it up for chunk ``target``:
    its copy, or a chunk that shares parameters with that one. ``microbatch`` is the number of the piece."""
    SUM = "sum"
    """A piece of the gradients of a chunk, added up over all replicas by the copy ``source``, for the copy ``target``.
    ``microbatch`` is the number of the piece."""
    REPORT = "report"
    """The contribution of stage ``source``, and of the stages below it, to the step's agreement. For stage
    ``target``."""
    VERDICT = "verdict"
    """The outcome of the step's agreement, from stage ``source`` for stage ``target``, which is below it."""
    TAKEN = "receipt"
    """A receipt: the F of chunk ``source`` has used the output of chunk ``target``, which runs F only."""
    SHARE = "share"
    """A share of a chunk's parameters, updated by the copy ``source``, for the copy ``target``, which does not hold the
    share's optimizer state. ``microbatch`` is the number of the share."""


class Message(NamedTuple):
    """The identity of a message within a step; deliveries may come in any order and more than once."""

    kind: MessageKind
    source: int
    target: int
    microbatch: int = NO_MICROBATCH

    def __str__(self) -> str:
        counted = "of microbatch"
        if self.kind in (MessageKind.PIECE, MessageKind.SUM, MessageKind.SHARE):
            counted = "number"
        of = "" if self.microbatch < 0 else f" {counted} {self.microbatch}"
        place = "stage" if self.kind in (MessageKind.REPORT, MessageKind.VERDICT) else "chunk"
        return f"{self.kind}{of} from {place} {self.source} to {place} {self.target}"


class StepStarted(NamedTuple):
    """A step's batch is here.

    ``absent`` holds the pairs of chunk and microbatch that it lacks beyond those of the graph. ``weights`` holds the
    weight of each microbatch while the stage holds it, from the stage's first microbatch on (empty: microbatches are
    counted). ``evaluates`` is true for a step of forwards alone (:mod:`rrfp_jax.core.stage_setup`). ``owners`` says
    which replica runs each microbatch where these are not the blocks of every replica; ``absent`` has the chunks of
    these owners then.
    """

    step: int
    time_s: float
    absent: Absences = ()
    weights: tuple[int, ...] = ()
    evaluates: bool = False
    owners: StepOwners | None = None


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


class DecideNow(NamedTuple):
    """``task``, the last one handed over, is about to end on a device that runs its queue in order: choose the next.

    A driver that posts these events hides the host's latency behind the end of each task. The driver decides when to
    post them. One that comes too late, or twice, changes nothing.
    """

    step: int
    time_s: float
    task: Task


class TaskAnnounced(NamedTuple):
    """Another stage has started the task that will send this message; it may belong to a later step.

    Nothing depends on an announcement: it may be lost, late, doubled or false, and costs no more than time then.
    ``time_s`` is the time at which it is heard. A driver that knows it ahead, as a simulation does, may deliver it to a
    stage that holds nothing before that time, and it counts from that time on.
    """

    step: int
    time_s: float
    message: Message


class InputPromised(NamedTuple):
    """The task that makes this input was handed to its device. A task that is handed over now may take the input as a
    future: the device waits for it by itself.

    The event may belong to a later step, be lost, late or doubled, but must not be false. It counts as an announcement
    too. :mod:`rrfp_jax.core.foresight` describes the consequences.
    """

    step: int
    time_s: float
    message: Message


class ClockTick(NamedTuple):
    """The time that :class:`WakeAt` asked for has come. Ticks may come early or in vain, but the one in time must come.

    ``time_s`` is never before that time, even where a clock rounds down.
    """

    step: int
    time_s: float


class MemberStarted(NamedTuple):
    """To the leader: the step's batch is here too. The fields are those of :class:`StepStarted`."""

    absent: Absences
    weights: tuple[int, ...] = ()
    evaluates: bool = False
    owners: StepOwners | None = None


class MemberReceived(NamedTuple):
    """To the leader: this message is here too."""

    message: Message


class TaskChosen(NamedTuple):
    """From the leader: ``task`` is the step's task number ``number``, counted from 0 over all lanes and partners."""

    number: int
    task: Task
    hint_state: int
    """The state of the hint after this choice."""
    partner: Task | None = None
    """The task that runs in one program with it, which has the next number."""


class TaskProposed(NamedTuple):
    """To every other member, once per round: the sender's best candidate, or None."""

    round: int
    """Counted from 0 in each step."""
    task: Task | None
    hint_state: int
    """The state of the hint after the candidate's dispatch."""


Note = MemberStarted | MemberReceived | TaskChosen | TaskProposed


class GroupHeard(NamedTuple):
    """A note from another member of the group is here; it may belong to a step that has not started on this one."""

    step: int
    time_s: float
    member: int
    note: Note


Event = StepStarted | InputArrived | TaskFinished | DecideNow | TaskAnnounced | InputPromised | ClockTick | GroupHeard


class RunTask(NamedTuple):
    """Start this task now; report back with :class:`TaskFinished`."""

    step: int
    task: Task


class RunPair(NamedTuple):
    """Start two tasks now, as one program; report back with :class:`TaskFinished` for each of them, in order."""

    step: int
    task: Pair


class Send(NamedTuple):
    """Send this message to another stage; the task or agreement that produces it is finished."""

    step: int
    message: Message
    stage: int


class Announce(NamedTuple):
    """Tell another stage that the task which will send it this message has started; nothing depends on it."""

    step: int
    message: Message
    stage: int


class WakeAt(NamedTuple):
    """Report back with :class:`ClockTick` at this time of the stage's own clock, and not before."""

    step: int
    time_s: float


class FinishStep(NamedTuple):
    """Nothing is left to do for this step on this stage."""

    step: int


class TellGroup(NamedTuple):
    """Give this note to a member of the group, where it becomes :class:`GroupHeard` from the member that told it."""

    step: int
    member: int
    note: Note


RunInstruction = RunTask | RunPair
"""The instructions that start tasks."""
Instruction = RunTask | RunPair | Send | Announce | WakeAt | TellGroup | FinishStep

# ``record(Send, (step, message, stage))`` equals ``Send(step, message, stage)`` in 0.36 of its time (0.31 us for 0.85
# us, measured), since it skips the constructor in Python that NamedTuple generates. Only the events and instructions
# that each single task causes are made so, here and in the simulator.
record = tuple.__new__
