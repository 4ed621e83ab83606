"""A stage's compute thread: launches programs and waits for them, so that the event loop never does."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from rrfp_jax.arbitration import RunTask
from rrfp_jax.tasks import Task

Done = Callable[[RunTask, float, float, BaseException | None], None]
"""Called on the compute thread with the instruction, its start and end (``time.perf_counter``) and an error, if any."""


class ComputeThread:
    """Runs instructions one after another and reports each completion."""

    def __init__(self, name: str, run: Callable[[int, Task], None], done: Done) -> None:
        self._run, self._done = run, done
        self._queue: SimpleQueue[RunTask | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.submit: Callable[[RunTask], None] = self._queue.put
        """Enqueue an instruction."""
        self.started: tuple[RunTask, float] | None = None
        """The instruction that is running and its start, for reports from other threads."""

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        """End after the queued work."""
        self._queue.put(None)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if the thread is still busy after ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        clock = time.perf_counter
        while (instruction := self._queue.get()) is not None:
            error: BaseException | None = None
            start = clock()
            self.started = (instruction, start)
            try:
                self._run(instruction.step, instruction.task)
            except BaseException as caught:
                error = caught
            end = clock()
            self.started = None
            self._done(instruction, start, end, error)
