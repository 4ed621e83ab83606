"""Explaining a stage to people: events and instructions in words, what each task waits for, illegal transitions."""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from rrfp_jax.core.events import (
    Announce,
    ClockTick,
    DecideNow,
    Event,
    GroupHeard,
    InputArrived,
    InputPromised,
    Instruction,
    MemberReceived,
    Message,
    Note,
    RunTask,
    Send,
    StepStarted,
    TaskAnnounced,
    TaskChosen,
    TaskProposed,
    TellGroup,
    WakeAt,
)
from rrfp_jax.core.plan import FINISHED, StagePlan, follows_in_queue
from rrfp_jax.schedules import Task

RUNNING = -1
"""In place of what a task waits for, once it has been dispatched."""
DUE = -3
"""In place of what a task waits for, once it is about to end and its successor may be dispatched."""


class Waiting(NamedTuple):
    """A task or gate that has not run, and what it still waits for (empty: it is ready)."""

    what: str
    microbatch: int
    missing_messages: tuple[Message, ...]
    missing_local: tuple[str, ...]

    def __str__(self) -> str:
        missing = [*map(str, self.missing_messages), *self.missing_local]
        return f"{self.what} waits for {', '.join(missing)}" if missing else f"{self.what} is ready"


class IllegalTransition(RuntimeError):
    """An event that cannot happen in the arbiter's state; its text tells the story of the microbatch concerned."""


def waiting_nodes(
    plan: StagePlan, waiting: Sequence[int], arrived: Set[int], restrained: Mapping[int, tuple[Message, ...]]
) -> list[Waiting]:
    """Every unfinished node of a stage with what it lacks, in the plan's order.

    ``arrived``: the numbers of the messages that are here; ``restrained``: ready tasks that may not start before some
    of these messages.
    """
    nodes = (describe(plan, node, waiting, arrived) for node in range(plan.num_nodes) if waiting[node] >= 0)
    if not restrained:
        return list(nodes)
    words = {plan.name(node): messages for node, messages in restrained.items()}
    return [node._replace(missing_messages=words.get(node.what, node.missing_messages)) for node in nodes]


def describe(plan: StagePlan, node: int, waiting: Sequence[int], arrived: Set[int]) -> Waiting:
    """What one node still waits for."""
    messages, local = [], []
    for prerequisite in plan.prerequisites(node):
        if isinstance(prerequisite, Message):
            if plan.arrivals[prerequisite] not in arrived:
                messages.append(prerequisite)
        elif not is_done(plan, prerequisite, node, waiting):
            local.append(plan.name(prerequisite))
    microbatch = plan.tasks[node].microbatch if node < len(plan.tasks) else -1
    return Waiting(plan.name(node), microbatch, tuple(messages), tuple(local))


def is_done(plan: StagePlan, prerequisite: int, node: int, waiting: Sequence[int]) -> bool:
    """Whether ``node`` need not wait for another node any more: a task follows on one that is due, a gate does not."""
    left = waiting[prerequisite]
    return left == FINISHED or (left == DUE and follows_in_queue(plan, node))


def tell(plan: StagePlan, waiting: Sequence[int], arrived: Set[int], microbatch: int) -> str:
    """The story of one microbatch on this stage, one line per task; -1 tells of the tasks of the step's end."""
    lines = []
    for node, task in plan.present():
        if task.microbatch != microbatch:
            continue
        if waiting[node] == FINISHED:
            lines.append(f"  {task} has finished")
        elif waiting[node] == RUNNING:
            lines.append(f"  {task} is running")
        elif waiting[node] == DUE:
            lines.append(f"  {task} is about to end")
        else:
            lines.append(f"  {describe(plan, node, waiting, arrived)}")
    return "\n".join(lines) or "  this stage has no task with it"


def illegal(what: str, stage: int, step: int | None, task: Task | Message, story: str) -> IllegalTransition:
    return IllegalTransition(f"stage {stage}, step {step}: {what}; the story of {task} so far:\n{story}")


def of_event(event: Event) -> str:
    """What happened."""
    if isinstance(event, StepStarted):
        return f"step {event.step} started{' to evaluate' if event.evaluates else ''}"
    if isinstance(event, InputArrived):
        return f"the {event.message} arrived"
    if isinstance(event, GroupHeard):
        return f"member {event.member} said: {_note(event.note)}"
    if isinstance(event, TaskAnnounced | InputPromised):
        return f"the {event.message} was {'promised' if isinstance(event, InputPromised) else 'announced'}"
    if isinstance(event, ClockTick):
        return "the clock ticked"
    return f"{event.task} was about to end" if isinstance(event, DecideNow) else f"{event.task} finished"


def of_instruction(instruction: Instruction) -> str:
    """What was done."""
    if isinstance(instruction, RunTask):
        return f"{instruction.task} was dispatched"
    if isinstance(instruction, Send):
        return f"the {instruction.message} was sent"
    if isinstance(instruction, Announce):
        return f"the {instruction.message} was announced"
    if isinstance(instruction, WakeAt):
        return f"a tick was asked for at {instruction.time_s} s"
    if isinstance(instruction, TellGroup):
        return f"member {instruction.member} was told: {_note(instruction.note)}"
    return f"step {instruction.step} ended"


def _note(note: Note) -> str:
    if isinstance(note, TaskChosen):
        return f"task {note.number} is {note.task}"
    if isinstance(note, TaskProposed):
        return f"round {note.round}, {note.task or 'nothing'}"
    if isinstance(note, MemberReceived):
        return f"the {note.message} is here"
    return "the step has started here"
