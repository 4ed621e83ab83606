"""Virtual time: what is to happen, in the order of its time."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

_ARRIVAL, _END = 0, 1


class EventQueue:
    """Actions at points of virtual time, in milliseconds.

    Of what is due at the same time, arrivals come first, so that a stage that chooses a task knows of everything that
    is there by then; the rest follows in the order in which it was posted. So a run is a function of its inputs.
    """

    __slots__ = ("_actions", "_num_posted", "is_paused", "now_ms")

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.is_paused = False
        self._num_posted = 0
        self._actions: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []

    def post(self, at_ms: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have ``action(*arguments)`` run at ``at_ms``, which must not lie in the past."""
        self._num_posted += 1
        heappush(self._actions, (at_ms, _END, self._num_posted, action, arguments))

    def post_arrival(self, at_ms: float, action: Callable[..., None], *arguments: Any) -> None:
        """As :meth:`post`, before everything else at that time."""
        self._num_posted += 1
        heappush(self._actions, (at_ms, _ARRIVAL, self._num_posted, action, arguments))

    def run(self) -> bool:
        """Run actions, and those that they post, until none is left or one of them pauses; tells whether it paused."""
        actions, self.is_paused = self._actions, False
        while actions and not self.is_paused:
            self.now_ms, _, _, action, arguments = heappop(actions)
            action(*arguments)
        return self.is_paused
