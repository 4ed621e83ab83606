"""The tasks whose inputs are all here, sorted by the hint's order in four lanes."""

from bisect import bisect_left, insort

from rrfp_jax.arbitration.hints import Heads
from rrfp_jax.arbitration.plan import NUM_LANES
from rrfp_jax.arbitration.window import Window


class ReadySet:
    """Positions of ready tasks, ascending in each lane; a position is a task's place in the hint's order."""

    __slots__ = ("lanes",)

    def __init__(self) -> None:
        self.lanes: tuple[list[int], ...] = tuple([] for _ in range(NUM_LANES))

    def copy(self) -> "ReadySet":
        twin = object.__new__(ReadySet)
        twin.lanes = tuple(lane.copy() for lane in self.lanes)
        return twin

    def __bool__(self) -> bool:
        return any(self.lanes)

    def add(self, lane: int, position: int) -> None:
        insort(self.lanes[lane], position)

    def remove(self, lane: int, position: int) -> None:
        entries = self.lanes[lane]
        del entries[bisect_left(entries, position)]

    def heads(self, window: Window, microbatch_at: tuple[int, ...]) -> Heads:
        """The first admissible position of each lane; only forwards can be inadmissible."""
        forwards, backwards, weights, last = self.lanes
        forward = None
        for position in forwards:
            if window.admits(microbatch_at[position]):
                forward = position
                break
        return (
            forward,
            backwards[0] if backwards else None,
            weights[0] if weights else None,
            last[0] if last else None,
        )
