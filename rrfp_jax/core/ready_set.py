"""The tasks whose inputs are all here, sorted by the hint's order in four lanes.

The forwards lie in two lists, those of microbatches that the stage holds and those of *fresh* ones, since the window
restrains only the latter. Either all fresh forwards are admissible, or those of one microbatch, or none; so the first
admissible one is found without a walk over those that wait behind a full window. The forwards of a chunk whose
read-ahead is bounded (:mod:`rrfp_jax.core.memory`) have a list of their own, and are walked over only while that bound
admits something. Where microbatches have weights, a light one may fit where a heavy one does not: then all fresh ones
are walked over, while there is room for the lightest."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence

from rrfp_jax.core.hints import Heads
from rrfp_jax.core.memory import Window
from rrfp_jax.core.plan import NUM_LANES

HELD = NUM_LANES
"""The number of the list, behind the lanes, with the forwards of held microbatches."""
AHEAD = HELD + 1
"""The number of the first list with the forwards of a bounded chunk; there is one for each of these."""


class ReadySet:
    """Positions of ready tasks, ascending in each list; a position is a task's place in the hint's order."""

    __slots__ = ("_common", "lanes")

    def __init__(self, num_bounded: int = 0) -> None:
        self.lanes: tuple[list[int], ...] = tuple([] for _ in range(AHEAD + num_bounded))
        """The lanes, of the forwards the fresh ones; then the forwards of held microbatches, and of bounded chunks."""
        self._common = self.lanes[:AHEAD]

    def copy(self) -> "ReadySet":
        twin = object.__new__(ReadySet)
        twin.lanes = tuple(lane.copy() for lane in self.lanes)
        twin._common = twin.lanes[:AHEAD]
        return twin

    def __bool__(self) -> bool:
        return any(self.lanes)

    def add(self, lane: int, position: int) -> None:
        """Add a ready task: forwards of bounded chunks to their list, other forwards of held microbatches to
        :data:`HELD`, all else to its lane."""
        insort(self.lanes[lane], position)

    def remove(self, lane: int, position: int) -> None:
        """Remove a task from the list to which :meth:`add` added it."""
        entries = self.lanes[lane]
        del entries[bisect_left(entries, position)]

    def hold(self, forwards: Iterable[int]) -> None:
        """Move the forwards of a microbatch, at these positions, to :data:`HELD`: the stage holds it from now on."""
        fresh, held = self.lanes[0], self.lanes[HELD]
        if not fresh:
            return
        for position in forwards:
            if _holds(fresh, position):
                del fresh[bisect_left(fresh, position)]
                insort(held, position)

    def heads(self, window: Window, microbatch_at: tuple[int, ...], forwards_of: Mapping[int, Sequence[int]]) -> Heads:
        """Returns the first admissible position of each lane, bounded chunks apart; only forwards can be inadmissible.

        Args:
            microbatch_at: the microbatch of the task at each position.
            forwards_of: for each microbatch of the stage the positions of its forwards.
        """
        fresh, backwards, weights, last, held = self._common
        forward = held[0] if held else None
        if fresh and (forward is None or fresh[0] < forward) and not window.is_full:
            if window.admits(microbatch_at[fresh[0]]):
                forward = fresh[0]
            elif not window.is_even:
                forward = _first_that_fits(fresh, window, microbatch_at, forward)
            elif window.admits(window.oldest):
                oldest = [p for p in forwards_of[window.oldest] if _holds(fresh, p)]
                forward = min([*oldest, *held[:1]], default=None)
        return (
            forward,
            backwards[0] if backwards else None,
            weights[0] if weights else None,
            last[0] if last else None,
        )

    def first_ahead(self, windows: Sequence[Window], window: Window, microbatch_at: tuple[int, ...]) -> int | None:
        """Returns the first forward of the bounded chunks that the chunk's window and the stage's admit."""
        best: int | None = None
        for waiting, chunk_window in zip(self.lanes[AHEAD:], windows, strict=True):
            if not waiting or chunk_window.is_full:
                continue
            for position in waiting:
                if best is not None and position > best:
                    break
                m = microbatch_at[position]
                if chunk_window.admits(m) and window.admits(m):
                    best = position
                    break
        return best


def _first_that_fits(
    fresh: Sequence[int], window: Window, microbatch_at: tuple[int, ...], held: int | None
) -> int | None:
    """Returns the first admissible position of fresh forwards of different weights, or ``held`` if that is before."""
    refused: dict[int, int] = {}
    for position in fresh:
        if held is not None and position > held:
            break
        m = microbatch_at[position]
        weight = window.weight(m)
        # Younger microbatches of the same weight are refused too.
        if m < refused.get(weight, m + 1):
            if window.admits(m):
                return position
            refused[weight] = m
    return held


def _holds(positions: list[int], position: int) -> bool:
    place = bisect_left(positions, position)
    return place < len(positions) and positions[place] == position
