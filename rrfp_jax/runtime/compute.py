"""A stage's threads: they launch its tasks and wait for them, so that the event loop never does.

There are two ways. With one task at a time, one thread launches and waits (:class:`ComputeThread`): no hop between
threads comes in between. Where the next task is launched while one runs, one thread launches only, and another waits
and reports, in the order of launches (:mod:`rrfp_jax.runtime.launching`): the devices' queue need not run empty.

What a span says
----------------
A task starts when its launch has reached the devices (``Launched.begun_s``) or, if that is later, when the task before
it was seen to end; it ends when it is seen to have ended. The host sees an end as late as its thread wakes up, some
0.05 to 0.1 ms. So a span of a task that the devices had ahead of time is as long as the task but for the difference of
two such delays, while one that found them idle is longer by one.
"""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from rrfp_jax.core import RunTask
from rrfp_jax.runtime.executor import Launched
from rrfp_jax.schedules import Task

Launch = Callable[[int, Task], Launched]
"""Gives a task of a step to the devices."""
Done = Callable[[RunTask, float, float, BaseException | None], None]
"""Called with the instruction, its start and end (``time.perf_counter``) and an error, if any."""
Started = tuple[RunTask, float]
"""An instruction and its start."""


class StageThreads(Protocol):
    """What carries out a stage's instructions, one after another."""

    @property
    def submit(self) -> Callable[[RunTask], None]:
        """Enqueue an instruction."""

    @property
    def started(self) -> Started | None:
        """The instruction that the devices run, or that is being launched, and its start; for reports."""

    def start(self) -> None:
        """Start the threads."""

    def ask_to_stop(self) -> None:
        """End after the queued work."""

    def is_alive(self) -> bool:
        """Whether a thread has not ended."""

    def name_tasks(self, is_on: bool) -> None:
        """Name tasks in traces from now on, or no more; while no step is under way."""

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if there still is work after ``timeout_s``."""


class ComputeThread:
    """Runs instructions one after another and reports each completion, all in one thread."""

    def __init__(self, name: str, launch: Launch, done: Done) -> None:
        self._launch, self._done, self._unnamed = launch, done, launch
        self._queue: SimpleQueue[RunTask | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.submit: Callable[[RunTask], None] = self._queue.put
        self.started: Started | None = None
        self._alarm: tuple[float, Callable[[], None]] | None = None

    def start(self) -> None:
        self._thread.start()

    def wake_later(self, at_s: float, call: Callable[[], None]) -> bool:
        """Have this called then, unless an instruction comes first, which costs no timer that would wake a thread.

        Only where this thread itself asks, as it reports a task or is woken: else nothing is done, and False returned.
        """
        if threading.get_ident() != self._thread.ident:
            return False
        self._alarm = at_s, call
        return True

    def ask_to_stop(self) -> None:
        self._queue.put(None)

    def name_tasks(self, is_on: bool) -> None:
        from rrfp_jax.runtime.named_tasks import named

        self._launch = named(self._unnamed, until_ended=True) if is_on else self._unnamed

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        clock = time.perf_counter
        while (instruction := self._next()) is not None:
            error: BaseException | None = None
            start = clock()
            self.started = (instruction, start)
            try:
                start, wait = self._launch(instruction.step, instruction.task)
                wait()
            except BaseException as caught:
                error = caught
            end = clock()
            self.started = None
            self._done(instruction, start, end, error)

    def _next(self) -> RunTask | None:
        while self._alarm is not None:
            (at_s, call), self._alarm = self._alarm, None
            try:
                return self._queue.get(timeout=max(0.0, at_s - time.perf_counter()))
            except Empty:
                call()
        return self._queue.get()
