"""How far the work has come, for whoever wants to be told."""

import threading
from collections.abc import Callable

READING, TRAINING, TOKENIZING, WRITING = "reading", "training", "tokenizing", "writing"
"""The parts of the work, in order; all but the last are counted in bytes."""
Progress = Callable[[str, int, int], None]
"""Is told which part of the work is on, how much of it is done, and how much there is."""


def silent(part: str, done: int, total: int) -> None:
    """Nobody asked."""


class Counter:
    """Adds up how much of a part of the work is done; safe to use from any thread."""

    def __init__(self, tell: Progress, part: str, total: int) -> None:
        self._tell, self._part, self._total, self._done = tell, part, total, 0
        self._lock = threading.Lock()
        tell(part, 0, total)

    def add(self, more: int) -> None:
        """So much more is done."""
        with self._lock:
            self._done += more
            self._tell(self._part, self._done, self._total)
