"""The signals that a launcher receives, as events for its main loop."""

import signal
from queue import SimpleQueue
from types import FrameType
from typing import Any, Self

from rrfp_jax.runtime.cluster.events import Signalled

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*STOPPING, signal.SIGUSR1)


class SignalInbox:
    """Catches signals while it is entered, on the main thread, and puts them into ``queue``, which may be exchanged."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.stopped_by: int | None = None
        """The first signal that asked the run to end."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _PASSED_ON:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number in STOPPING and self.stopped_by is None:
            self.stopped_by = number
        self.queue.put(Signalled(number))  # SimpleQueue.put may interrupt itself
