"""The engines beside a stage's compute lane: each runs one operation at a time, the first of its order that can run.

An engine is never made to wait for its next entry, whatever the stage's consumption is: that says in which order the
stage *computes*. The graph holds the operations and their engines (:mod:`rrfp_jax.schedules.operations`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

NOTHING = -1
"""In place of the node that an engine runs."""


class Engines:
    """What is ready on each engine, as positions, and what it runs, as a node."""

    __slots__ = ("ready", "running")

    def __init__(self, number: int) -> None:
        self.ready: tuple[list[int], ...] = tuple([] for _ in range(number))
        self.running = [NOTHING] * number

    def copy(self) -> "Engines":
        twin = object.__new__(Engines)
        twin.ready = tuple(positions.copy() for positions in self.ready)
        twin.running = self.running.copy()
        return twin

    @property
    def is_busy(self) -> bool:
        return any(node != NOTHING for node in self.running)

    def add(self, engine: int, position: int) -> None:
        insort(self.ready[engine], position)

    def startable(self, admits: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
        """(engine, position) of what can start, one engine after the other; what is given is taken off its list."""
        for engine, positions in enumerate(self.ready):
            if self.running[engine] == NOTHING:
                position = next((p for p in positions if admits(p)), None)
                if position is not None:
                    del positions[bisect_left(positions, position)]
                    yield engine, position

    def nodes(self) -> list[int]:
        """What runs."""
        return [node for node in self.running if node != NOTHING]


def lane_number(engine: int) -> int:
    """What a plan's ``lanes`` hold for the tasks of an engine: below 0, where compute's are not."""
    return -1 - engine


engine_of = lane_number
"""And the other way round."""
