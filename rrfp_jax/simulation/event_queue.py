"""Virtual time: what is to happen, in the order of its time."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class EventQueue:
    """Actions at points of virtual time, in milliseconds.

    What is due at the same time runs in the order in which it was posted, so that a run is a function of its inputs.
    """

    __slots__ = ("_actions", "_num_posted", "now_ms")

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._num_posted = 0
        self._actions: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def post(self, at_ms: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have ``action(*arguments)`` run at ``at_ms``, which must not lie in the past."""
        self._num_posted += 1
        heappush(self._actions, (at_ms, self._num_posted, action, arguments))

    def run(self) -> None:
        """Run actions, and those that they post, until none is left."""
        actions = self._actions
        while actions:
            self.now_ms, _, action, arguments = heappop(actions)
            action(*arguments)
