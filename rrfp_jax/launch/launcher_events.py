"""What can happen to a launcher; everything reaches its main thread through one queue."""

import signal
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Self

from rrfp_jax.launch.children import ASKING
from rrfp_jax.network import Bulletin


@dataclass(frozen=True)
class RankEnded:
    """A rank of this node has ended."""

    rank: int
    code: int
    at_s: float
    """``time.monotonic``."""


@dataclass(frozen=True)
class Signalled:
    """Somebody sent the launcher a signal."""

    number: int


Event = RankEnded | Signalled | Bulletin


class EventQueue:
    """The queue of events. While it is entered, on the main thread, it catches signals, except those that the launcher
    was started to ignore, such as SIGHUP under ``nohup``."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Event] = SimpleQueue()
        self.stopped_by: int | None = None
        """The first signal that asked the run to end."""
        self._before: dict[int, Any] = {}

    def put(self, event: Event) -> None:
        self._queue.put(event)  # may interrupt itself, as a signal does

    def next(self, timeout_s: float) -> Event | None:
        """The next event, if one comes in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except Empty:
            return None

    def clear(self) -> None:
        """Forget what happened to an earlier attempt."""
        self._queue = SimpleQueue()

    def __enter__(self) -> Self:
        for number in ASKING:
            if number not in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.stopped_by is None:
            self.stopped_by = number
        self.put(Signalled(number))
