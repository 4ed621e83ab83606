"""The events that led to a failed check: readable, and replayable on fresh arbiters."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rrfp_jax.arbitration import (
    Event,
    FinishStep,
    IllegalTransition,
    InputArrived,
    Instruction,
    RunTask,
    Send,
    StageArbiter,
    StepStarted,
)
from rrfp_jax.checking.setting import Setting


class Stimulus(NamedTuple):
    """An event and the stage that it happens to."""

    stage: int
    event: Event


Trace = tuple[Stimulus, ...]


class Violation(Exception):
    """A stage did what it must not do; :class:`CheckError` adds how it came about."""


class CheckError(AssertionError):
    """A check failed. ``trace`` leads there from the start: :func:`replay` runs it again on fresh arbiters."""

    def __init__(self, what: str, setting: Setting, trace: Trace) -> None:
        self.what, self.setting, self.trace = what, setting, trace
        lines = [what, f"in: {setting}", "events that led there:", *tell(setting, trace), *_waiting(setting, trace)]
        super().__init__("\n".join(lines))


def replay(setting: Setting, trace: Iterable[Stimulus]) -> Iterator[tuple[Stimulus, list[Instruction]]]:
    """Drive fresh arbiters through a trace; yields every event with the instructions that answered it."""
    arbiters = [setting.make_arbiter(stage) for stage in range(setting.num_stages)]
    for stimulus in trace:
        yield stimulus, arbiters[stimulus.stage].handle(stimulus.event)


def tell(setting: Setting, trace: Trace) -> list[str]:
    """One numbered line per event with its instructions."""
    lines = []
    answers = replay(setting, trace)
    for number, stimulus in enumerate(trace, start=1):
        try:
            answer = ", ".join(_instruction(i) for i in next(answers)[1])
        except (IllegalTransition, AssertionError) as error:
            answer = f"refused: {error}"
        lines.append(f"{number:4}. stage {stimulus.stage}: {_event(stimulus.event)}{answer and ': ' + answer}")
    return lines


def _event(event: Event) -> str:
    if isinstance(event, StepStarted):
        return f"step {event.step} starts"
    if isinstance(event, InputArrived):
        return f"{event.message} arrives (step {event.step})"
    return f"{event.task} finishes"


def _instruction(instruction: Instruction) -> str:
    if isinstance(instruction, RunTask):
        return f"runs {instruction.task}"
    if isinstance(instruction, Send):
        return f"sends {instruction.message}"
    assert isinstance(instruction, FinishStep)
    return f"ends step {instruction.step}"


def _waiting(setting: Setting, trace: Trace) -> list[str]:
    """Where each stage stands after the trace: what runs, and what each unfinished task lacks."""
    arbiters = [setting.make_arbiter(stage) for stage in range(setting.num_stages)]
    for stage, event in trace:
        try:
            arbiters[stage].handle(event)
        except (IllegalTransition, AssertionError):
            break
    return [line for arbiter in arbiters for line in _standing(arbiter)]


def _standing(arbiter: StageArbiter) -> list[str]:
    if not arbiter.is_active:
        return [
            f"stage {arbiter.stage}: is done with step {arbiter.step}"
            if arbiter.step is not None
            else f"stage {arbiter.stage}: has not started"
        ]
    running = ", ".join(map(str, arbiter.running())) or "nothing"
    held = sorted(arbiter.held())
    lines = [f"stage {arbiter.stage}: runs {running}, holds microbatches {held}, limit {arbiter.limit}"]
    return lines + [f"    {waiting}" for waiting in arbiter.waiting()]
