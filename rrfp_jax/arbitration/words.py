"""Events and instructions in words."""

from rrfp_jax.arbitration.events import (
    Event,
    GroupHeard,
    InputArrived,
    Instruction,
    MemberReceived,
    Note,
    RunTask,
    Send,
    StepStarted,
    TaskChosen,
    TaskProposed,
    TellGroup,
)


def of_event(event: Event) -> str:
    """What happened."""
    if isinstance(event, StepStarted):
        return f"step {event.step} started"
    if isinstance(event, InputArrived):
        return f"the {event.message} arrived"
    if isinstance(event, GroupHeard):
        return f"member {event.member} said: {_note(event.note)}"
    return f"{event.task} finished"


def of_instruction(instruction: Instruction) -> str:
    """What was done."""
    if isinstance(instruction, RunTask):
        return f"{instruction.task} was dispatched"
    if isinstance(instruction, Send):
        return f"the {instruction.message} was sent"
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
