"""The events that led to a failed check: readable, and replayable on fresh arbiters."""

from collections.abc import Iterable, Iterator

from rrfp_jax.core import IllegalTransition, Instruction, StageArbiter
from rrfp_jax.core.explain import event_text, instruction_text
from tests.model_checker.free_choice import FreeChoice
from tests.model_checker.packets import Stimulus
from tests.model_checker.setting import Setting

Trace = tuple[Stimulus, ...]


class Violation(Exception):
    """A place did what it must not do; :class:`CheckError` adds how it came about."""


class CheckError(AssertionError):
    """A check failed. ``trace`` leads there from the start: :func:`replay` runs it again on fresh arbiters."""

    def __init__(self, what: str, setting: Setting, trace: Trace) -> None:
        self.what, self.setting, self.trace = what, setting, trace
        lines = [what, f"in: {setting}", "events that led there:", *tell(setting, trace), *_waiting(setting, trace)]
        super().__init__("\n".join(lines))


def replay(setting: Setting, trace: Iterable[Stimulus]) -> Iterator[tuple[Stimulus, list[Instruction]]]:
    """Drive fresh arbiters through a trace; yields every event with the instructions that answered it."""
    arbiters = [setting.make_arbiter(place) for place in range(setting.num_places)]
    for stimulus in trace:
        yield stimulus, act(setting, arbiters[stimulus.place], stimulus)


def act(setting: Setting, arbiter: StageArbiter, stimulus: Stimulus) -> list[Instruction]:
    """What an arbiter answers to an event, with the choices that belong to it."""
    if isinstance(setting.foresight, FreeChoice):
        setting.foresight.script.choose(stimulus.choices)
    return arbiter.handle(stimulus.event)


def tell(setting: Setting, trace: Trace) -> list[str]:
    """One numbered line per event with its instructions."""
    lines = []
    answers = replay(setting, trace)
    for number, stimulus in enumerate(trace, start=1):
        try:
            answer = ", ".join(instruction_text(i) for i in next(answers)[1])
        except (IllegalTransition, AssertionError) as error:
            answer = f"refused: {error}"
        except StopIteration:  # behind a refused one
            break
        name = setting.name(stimulus.place)
        lines.append(
            f"{number:4}. {name}, step {stimulus.event.step}: {event_text(stimulus.event)}{answer and ': ' + answer}"
        )
    return lines


def _waiting(setting: Setting, trace: Trace) -> list[str]:
    """Where each place stands after the trace: what runs, and what each unfinished task lacks."""
    arbiters = [setting.make_arbiter(place) for place in range(setting.num_places)]
    for stimulus in trace:
        try:
            act(setting, arbiters[stimulus.place], stimulus)
        except (IllegalTransition, AssertionError):
            break
    return [line for place, arbiter in enumerate(arbiters) for line in _standing(setting.name(place), arbiter)]


def _standing(name: str, arbiter: StageArbiter) -> list[str]:
    if not arbiter.is_active:
        return [f"{name}: {'has not started' if arbiter.step is None else f'is done with step {arbiter.step}'}"]
    running = ", ".join(map(str, arbiter.running())) or "nothing"
    held = sorted(arbiter.held())
    lines = [f"{name}: runs {running}, holds microbatches {held}, limit {arbiter.setup.window}"]
    return lines + [f"    {waiting}" for waiting in arbiter.waiting()]
