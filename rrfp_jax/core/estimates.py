"""What a stage learns for its foresight, on its own clock alone: moving averages that outlive the steps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rrfp_jax.core.events import MessageKind
from rrfp_jax.schedules import TaskKind

TaskKey = tuple[TaskKind, int]
"""Kind and chunk."""
Edge = tuple[MessageKind, int, int]
"""Kind of the message, source and target chunk."""
K = TypeVar("K")


@dataclass(kw_only=True)
class Estimates:
    """Durations in seconds. Plain data, so that a log can hold them."""

    durations_s: dict[TaskKey, float] = field(default_factory=dict)
    """What a task usually takes."""
    leads_s: dict[Edge, float] = field(default_factory=dict)
    """From an announcement to the arrival of what it announced."""
    notices: dict[Edge, float] = field(default_factory=dict)
    """The share of waits for an announcement that were not in vain."""


class Averages(Generic[K]):
    """Moving averages of what has numbers: those of ``keys`` in their order, and behind them what else is known.

    ``kept`` is how much one more observation leaves of an average. Most events teach one and most choices ask for some,
    so they lie in a list.
    """

    __slots__ = ("_known", "_share", "keys", "values")

    def __init__(self, keys: Iterable[K], known: Mapping[K, float], kept: float) -> None:
        self._share = 1 - kept
        self.keys = tuple(dict.fromkeys((*keys, *known)))
        self.values = [known.get(key) for key in self.keys]
        """By number; None: not known."""
        self._known = [self.keys.index(key) for key in known]
        """The numbers of the known ones, in the order in which they were first learnt."""

    def copy(self) -> "Averages[K]":
        twin: Averages[K] = object.__new__(type(self))
        twin.keys, twin._share = self.keys, self._share
        twin.values, twin._known = self.values.copy(), self._known.copy()
        return twin

    def learn(self, number: int, observed: float) -> None:
        """One more observation; the first one is the average itself."""
        before = self.values[number]
        if before is None:
            self.values[number] = observed
            self._known.append(number)
        else:
            self.values[number] = before + self._share * (observed - before)

    def known(self) -> dict[K, float]:
        """What is known, as plain data."""
        return {self.keys[number]: value for number in self._known if (value := self.values[number]) is not None}
