"""The story of one microbatch on one stage: what the log says of it, and where it stood at the end."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rrfp_jax.core.story import of_event, of_instruction
from rrfp_jax.runtime.log_file.replaying import StageReplay


class Happening(NamedTuple):
    """Something that the log says of a microbatch."""

    time_s: float
    what: str


def happenings(replay: StageReplay, microbatch: int, step: int) -> Iterator[Happening]:
    """What happened to a microbatch in a step, in order; -1 stands for what happens once per step."""
    for segment in replay.log.segments:
        for event, instructions in segment.entries:
            if event.step == step and microbatch in _microbatches(event):
                yield Happening(event.time_s, of_event(event))
            for instruction in instructions:
                if instruction.step == step and microbatch in _microbatches(instruction):
                    yield Happening(event.time_s, of_instruction(instruction))


def standing(replay: StageReplay, microbatch: int, step: int) -> str:
    """Where the microbatch stood at the log's end, one line per task."""
    present = replay.arbiter.step
    if present == step:
        return replay.arbiter.tell(microbatch)
    if present is None or present < step:
        return f"  step {step} had not begun here"
    return f"  step {step} had ended here"


def _microbatches(record: Any) -> Iterator[int]:
    """The microbatch of the task or message that an event, an instruction or a note is about, if it is about one."""
    for name in ("task", "message"):
        if (subject := getattr(record, name, None)) is not None:
            yield subject.microbatch
    if (note := getattr(record, "note", None)) is not None:
        yield from _microbatches(note)
