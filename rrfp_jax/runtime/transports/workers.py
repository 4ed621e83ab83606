"""A few threads, started when first needed, for what would hold up the event loop: large copies, and waiting."""

import asyncio
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple


class _Job(NamedTuple):
    loop: AbstractEventLoop
    work: Callable[[], Any]
    done: Callable[[Any], None]


class Workers:
    """Runs work in the order given, ``num_threads`` at a time, and reports back to the event loop.

    Args:
        failed: called on the event loop with the error of a piece of work.
    """

    def __init__(self, name: str, num_threads: int, failed: Callable[[Exception], None]) -> None:
        self._name, self._num_threads, self._failed = name, num_threads, failed
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Have ``work`` done, and ``done`` called on the loop with its result; called on the event loop."""
        if not self._threads:
            self._start()
        self._queue.put(_Job(asyncio.get_running_loop(), work, done))

    def close(self, timeout_s: float) -> None:
        """End the threads after what is queued; one that waits for a device that never answers is left behind."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))

    def _start(self) -> None:
        for i in range(self._num_threads):
            self._threads.append(threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                result, report = job.work(), job.done
            except Exception as error:
                result, report = error, self._failed
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits for it any more
                job.loop.call_soon_threadsafe(report, result)
            del job, result  # they hold buffers, and the next job may come late
