"""Rule for all timed questions: how often one is repeated, and whether it comes out again.

A *round* measures every method once, in turn, with draws of its own; ratios are taken within a round. Rounds are
repeated until the 95% interval of each printed ratio is at most :data:`TARGET` of it on either side, or the budget of
rounds is spent. A second run agrees where the two intervals of a ratio touch. Simulated figures must come out equal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from experiments.paper.rows import Cell
from experiments.paper.tables import geometric_mean, half_interval

TARGET = 0.01
AGREEING = 0.9
"""Least share of ratios that must come out again, of intervals that hold 95% each."""
Rows = Sequence[Mapping[str, str]]
Ratios = Mapping[str, Sequence[float]]
"""Ratios of each round, by the name of the comparison."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Rounds of a question."""

    of: Callable[[bool, int], Sequence[Cell]]
    """Function that returns the cells of a round, given whether quickly, and the round's number from 1 on."""
    ratios: Callable[[Rows], Ratios]
    """Function that returns the printed ratios."""
    quick: tuple[int, int] = (3, 5)
    """Least and largest number of rounds."""
    full: tuple[int, int] = (7, 20)

    def first(self, quick: bool) -> list[Cell]:
        """Returns the cells of the rounds that are always measured."""
        return [cell for number in range(1, self._bounds(quick)[0] + 1) for cell in self.of(quick, number)]

    def further(self, quick: bool) -> list[Sequence[Cell]]:
        """Returns the cells of each round that the budget has beside them."""
        least, most = self._bounds(quick)
        return [self.of(quick, number) for number in range(least + 1, most + 1)]

    def is_settled(self, rows: Rows) -> bool:
        """Returns whether every interval is narrow enough."""
        return all(width <= TARGET for width in widths(self.ratios(rows)).values())

    def _bounds(self, quick: bool) -> tuple[int, int]:
        return self.quick if quick else self.full


def widths(ratios: Ratios) -> dict[str, float]:
    """Returns half of each 95% interval, in parts of the ratio."""
    return {name: half_interval(some) / geometric_mean(some) for name, some in ratios.items()}


def precision(ratios: Ratios) -> str:
    """Returns a sentence on how many rounds there were, and how wide their intervals are."""
    found = list(widths(ratios).values())
    rounds = max(map(len, ratios.values()))
    if rounds < 2:
        return "One round, so that no interval can be given."
    return (
        f"{rounds} rounds, in each of which all methods took their turn; half of a ratio's 95% interval is "
        f"{median(found):.1%} of it in the median, {max(found):.1%} at most."
    )


def disagreeing(once: Ratios, again: Ratios) -> list[str]:
    """Returns the names of ratios whose two intervals do not touch."""
    return [
        f"{name} ({geometric_mean(some):.4f} and {geometric_mean(again[name]):.4f})"
        for name, some in once.items()
        if abs(geometric_mean(some) - geometric_mean(again[name])) > half_interval(some) + half_interval(again[name])
    ]
