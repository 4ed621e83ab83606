"""Foresight without estimates: a stage that may look ahead does whatever it is told to.

What real foresight decides depends on times, averages and announcements, and comes to one of three things wherever it
is asked: the best task runs, another candidate runs, or the stage holds until something happens. Here a script chooses,
so that an exploration can try everything that any estimates and announcements might lead to. Announcements change
nothing, as each thing that one could change is tried without it. What remains are two rules that hold for the real one
whatever it has learnt: a stage that holds has asked for a tick, and after that tick it runs something.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rrfp_jax.core import Estimates, Foresight, ForesightRules, Message
from rrfp_jax.core.foresight import ArrivalTable
from rrfp_jax.core.hints import Heads
from tests.model_checker.packets import Choice

EVENTS_S, TICK_S = 0.0, 1.0
"""The time of all events but the ticks that were asked for, and the time of those."""
Choices = tuple[Choice, ...]
T = TypeVar("T")


class Script:
    """What is chosen while one event is handled, and what there was to choose from."""

    def __init__(self) -> None:
        self.choose(())

    def choose(self, choices: Choices) -> None:
        """An event begins; these are its first choices."""
        self._choices = choices
        self.options: list[Choices] = []
        """For each question that was asked, what could be chosen."""
        self.chosen: Choices = ()

    def ask(self, options: Choices) -> Choice:
        number = len(self.options)
        choice = self._choices[number] if number < len(self._choices) else options[0]
        assert choice in options, f"{choice} is none of {options}"
        self.options.append(options)
        self.chosen += (choice,)
        return choice

    def outcomes(self, act: Callable[[], T]) -> Iterator[tuple[Choices, T]]:
        """Do something once for each way to choose; gives the choices and what came of it."""
        scripts: list[Choices] = [()]
        while scripts:
            script = scripts.pop()
            self.choose(script)
            result = act()
            chosen, asked = self.chosen, self.options[len(script) :]
            for number, options in enumerate(asked, start=len(script)):
                scripts += [(*chosen[:number], option) for option in options[1:]]
            yield chosen, result


@dataclass(frozen=True, kw_only=True)
class FreeChoice(ForesightRules):
    """Foresight by a script, which all that is made by these rules share."""

    script: Script = field(default_factory=Script, compare=False)

    def make(self, table: ArrivalTable, estimates: Estimates | None = None) -> "FreeForesight":
        return FreeForesight(self, table, estimates or Estimates())


class FreeForesight(Foresight):
    """Holds and fills as the script says; it learns nothing and hears nothing."""

    __slots__ = ()
    rules: FreeChoice

    def hear_early(self, step: int, message: Message, time_s: float) -> None:
        pass

    def hear(self, number: int, time_s: float) -> None:
        pass

    def arrived(self, number: int, time_s: float) -> None:
        pass

    def finish(self, position: int, time_s: float, *, goes_on: bool = False) -> None:
        pass

    def expected_end_s(self, position: int) -> float:
        return EVENTS_S

    def key(self, *, is_active: bool) -> Hashable:
        return is_active and (self.held_since_s is not None, self._told_wake_s is None)

    def awaits(self, position: int) -> bool:
        return self.rules.script.ask((None, self.table.task_at[position])) is not None

    def choose(
        self,
        best: int,
        heads: Heads,
        missing: Sequence[int],
        now_s: float,
        free_s: float,
    ) -> int | None:
        task_at = self.table.task_at
        tasks = {task_at[position]: position for position in sorted(head for head in heads if head is not None)}
        choice = self.rules.script.ask((*([] if now_s >= TICK_S else [None]), *tasks))
        if choice is not None:
            return tasks[choice]
        self._hold(EVENTS_S, TICK_S)
        return None
