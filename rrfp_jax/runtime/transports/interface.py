"""The interface between the runtime and a transport, and the parts that all ways of transport share."""

import asyncio
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from rrfp_jax.core import Message

Deliver = Callable[[int, int, Message, Any], None]
"""Called with the receiving unit, the step, the message and its payload: on the event loop, or within ``send``."""

Failed = Callable[[Exception], None]
"""Called on the event loop with an error after which the transport is useless: the run cannot go on."""


class TransportFailed(RuntimeError):
    """Data could not be fetched or put on a device; the text says which, and from whom."""


class Transport(Protocol):
    """Carries payloads between units, in any order; each message is known by step and identity."""

    def send_array(self, payload: Any, stage: int, message: Message, bucket: int = 0, step: int | None = None) -> Any:
        """Begins to send a finished task's output; returns the form in which ``send`` takes it. Called on the compute
        thread.

        ``bucket`` is that of the message's microbatch, which decides on the payload's shapes. For a message that stays
        in its unit this is the form in which the receiving task takes it. With ``step``, all parts that can leave
        without waiting for the event loop do; ``send`` is called all the same.
        """

    def send(self, stage: int, step: int, message: Message, payload: Any) -> None:
        """Sends the result of ``send_array``, or plain data, to unit ``stage``. Called on any thread, one call at a
        time; never blocks."""

    def close(self) -> None:
        """Stops threads and servers. Later messages are dropped, or stay queued for the next transport."""


class HeldBytes:
    """Counts the bytes that a transport holds; usable on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = 0
        """Bytes sent or offered, and not confirmed by the receiver."""
        self.received = 0
        """Bytes arrived, and not delivered: not all parts are here, or they are being assembled."""
        self.peak = 0
        """The largest sum of both."""

    def add(self, *, sent: int = 0, received: int = 0) -> None:
        """Changes both counts by this much."""
        with self._lock:
            self.sent += sent
            self.received += received
            self.peak = max(self.peak, self.sent + self.received)


class _Job(NamedTuple):
    loop: AbstractEventLoop
    work: Callable[[], Any]
    done: Callable[[Any], None]


class Workers:
    """A few threads for work that would hold up the event loop: large copies, and waiting for devices.

    They start when first needed, take work in the order given, and report back to the event loop. ``failed`` is called
    there with the error of a piece of work.
    """

    def __init__(self, name: str, num_threads: int, failed: Failed) -> None:
        self._name, self._num_threads, self._failed = name, num_threads, failed
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Runs ``work`` on a thread, then ``done`` with its result on the loop. Called on the event loop."""
        if not self._threads:
            for i in range(self._num_threads):
                self._threads.append(threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True))
                self._threads[-1].start()
        self._queue.put(_Job(asyncio.get_running_loop(), work, done))

    def close(self, timeout_s: float) -> None:
        """Ends the threads after all queued work; one that waits for a device that never answers is left behind."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                result, report = job.work(), job.done
            except Exception as error:
                result, report = error, self._failed
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits for it any more
                job.loop.call_soon_threadsafe(report, result)
            del job, result  # they hold buffers, and the next job may come late
