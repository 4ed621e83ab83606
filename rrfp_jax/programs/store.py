"""What chunks of one kind share: made once, by the first that needs it, while the others wait."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any


class ProgramStore:
    """Plans and compiled programs by what they are for; for the threads that compile a model together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[Hashable, Future[Any]] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returned the first time that it was called for this key; what it raised is raised for all."""
        with self._lock:
            is_first = key not in self._made
            made = self._made.setdefault(key, Future())
        if is_first:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)
        return made.result()
