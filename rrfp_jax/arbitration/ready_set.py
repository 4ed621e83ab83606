"""The tasks whose inputs are all here, sorted by the hint's order in four lanes.

The forwards lie in two lists, those of microbatches that the stage holds and those of *fresh* ones, since the window
restrains only the latter. Either all fresh forwards are admissible, or those of one microbatch, or none; so the first
admissible one is found without a walk over those that wait behind a full window.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence

from rrfp_jax.arbitration.hints import Heads
from rrfp_jax.arbitration.plan import NUM_LANES
from rrfp_jax.arbitration.window import Window

HELD = NUM_LANES
"""The number of the list, behind the lanes, with the forwards of held microbatches."""


class ReadySet:
    """Positions of ready tasks, ascending in each list; a position is a task's place in the hint's order."""

    __slots__ = ("lanes",)

    def __init__(self) -> None:
        self.lanes: tuple[list[int], ...] = tuple([] for _ in range(HELD + 1))
        """The lanes, of the forwards the fresh ones; then the forwards of held microbatches."""

    def copy(self) -> "ReadySet":
        twin = object.__new__(ReadySet)
        twin.lanes = tuple(lane.copy() for lane in self.lanes)
        return twin

    def __bool__(self) -> bool:
        return any(self.lanes)

    def add(self, lane: int, position: int) -> None:
        """Forwards of held microbatches go to :data:`HELD`, all else to its lane."""
        insort(self.lanes[lane], position)

    def remove(self, lane: int, position: int) -> None:
        """As in :meth:`add`."""
        entries = self.lanes[lane]
        del entries[bisect_left(entries, position)]

    def hold(self, forwards: Iterable[int]) -> None:
        """The stage holds a microbatch from now on, whose forwards have these positions."""
        fresh, held = self.lanes[0], self.lanes[HELD]
        if not fresh:
            return
        for position in forwards:
            if _holds(fresh, position):
                del fresh[bisect_left(fresh, position)]
                insort(held, position)

    def heads(self, window: Window, microbatch_at: tuple[int, ...], forwards_of: Mapping[int, Sequence[int]]) -> Heads:
        """The first admissible position of each lane; only forwards can be inadmissible.

        Args:
            microbatch_at: the microbatch of the task at each position.
            forwards_of: for each microbatch of the stage the positions of its forwards.
        """
        fresh, backwards, weights, last, held = self.lanes
        forward = held[0] if held else None
        if fresh and (forward is None or fresh[0] < forward):
            if window.admits(microbatch_at[fresh[0]]):
                forward = fresh[0]
            elif window.admits(window.oldest):
                oldest = [p for p in forwards_of[window.oldest] if _holds(fresh, p)]
                forward = min([*oldest, *held[:1]], default=None)
        return (
            forward,
            backwards[0] if backwards else None,
            weights[0] if weights else None,
            last[0] if last else None,
        )


def _holds(positions: list[int], position: int) -> bool:
    place = bisect_left(positions, position)
    return place < len(positions) and positions[place] == position
