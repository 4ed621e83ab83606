"""A stage's threads where tasks are launched while others run: one launches, another waits and reports.

Deciding just in time
---------------------
Where what follows a task is chosen shortly before its end, the thread that launches also keeps the time, for an event
loop's timers are too coarse: it waits for instructions until the decision is due, and then asks for it. How long after
a task's start that is, :class:`DecisionTimer` learns from the lengths of tasks and from the host's latency. The latency
of a decision is the time from when it was due to the end of the launch that answers it, and once more the time by which
the thread woke up late: about as late was the task seen to start.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import NamedTuple

from rrfp_jax.core import DecisionTimer, RunTask, TimingRule
from rrfp_jax.runtime.awaited import AwaitedInputs
from rrfp_jax.runtime.compute import Done, Launch, Started
from rrfp_jax.runtime.executor import Launched
from rrfp_jax.runtime.named_tasks import named
from rrfp_jax.runtime.sleeping import reduce_timer_slack
from rrfp_jax.schedules import Task

Decide = Callable[[RunTask, float], None]
"""Called with a task that is about to end, and when that should have happened."""


class _Order(NamedTuple):
    """To the thread that launches: an instruction."""

    run: RunTask
    due_s: float | None
    """When the decision that it answers was due."""
    inputs: AwaitedInputs | None
    """Those that it lacks still."""


class _Handed(NamedTuple):
    """To the thread that waits: what was launched, and what became of that."""

    run: RunTask
    result: Launched | BaseException
    inputs: AwaitedInputs | None


class LaunchAndWait:
    """Launches instructions in one thread; waits for them, and reports each completion, in another.

    Args:
        decide: asked for what follows a task, shortly before its end; None: nobody is asked.
        rule: how long before; None: as where nothing else hides a launch.
    """

    def __init__(
        self, name: str, launch: Launch, done: Done, *, decide: Decide | None = None, rule: TimingRule | None = None
    ) -> None:
        self._launch, self._done, self._unnamed = launch, done, launch
        self._clock = None if decide is None else _DecisionClock(decide, rule or TimingRule())
        self._orders: SimpleQueue[_Order | Started | None] = SimpleQueue()
        """Instructions; and, where decisions are asked for, tasks that have started."""
        self._launched: SimpleQueue[_Handed | None] = SimpleQueue()
        self._threads = (
            threading.Thread(target=self._launch_all, name=name, daemon=True),
            threading.Thread(target=self._wait_for_all, name=f"{name}-wait", daemon=True),
        )
        self._answered_s: float | None = None
        self._launching: Started | None = None
        self._running: Started | None = None

    def submit(self, instruction: RunTask, inputs: AwaitedInputs | None = None) -> None:
        """Enqueue an instruction, perhaps with inputs that it lacks still."""
        self._orders.put(_Order(instruction, self._answered_s, inputs))

    @contextmanager
    def answering(self, due_s: float) -> Iterator[None]:
        """What is submitted within the block answers a decision that was due then."""
        self._answered_s = due_s
        try:
            yield
        finally:
            self._answered_s = None

    @property
    def started(self) -> Started | None:
        return self._running or self._launching

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def ask_to_stop(self) -> None:
        self._orders.put(None)

    def name_tasks(self, is_on: bool) -> None:
        self._launch = named(self._unnamed, until_ended=False) if is_on else self._unnamed

    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self, timeout_s: float) -> bool:
        until_s = time.perf_counter() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.perf_counter()))
        return not self.is_alive()

    # -- on the thread that launches ---------------------------------------------------------------------------------

    def _launch_all(self) -> None:
        get = self._orders.get if self._clock is None else self._next_order
        while (order := get()) is not None:
            assert isinstance(order, _Order)
            self._launch_one(*order)
            del order
        self._launched.put(None)

    def _launch_one(self, instruction: RunTask, due_s: float | None, inputs: AwaitedInputs | None) -> None:
        if self._clock is not None:
            self._clock.follows(instruction)
        result: Launched | BaseException
        try:
            if inputs is not None:
                inputs.fetch()
            self._launching = (instruction, time.perf_counter())
            result = self._launch(instruction.step, instruction.task)
        except BaseException as caught:
            result = caught
        self._launching = None
        self._launched.put(_Handed(instruction, result, inputs))
        if self._clock is not None and due_s is not None:
            self._clock.answered(due_s)

    def _next_order(self) -> _Order | None:
        """The next instruction; asks for decisions meanwhile."""
        clock = self._clock
        assert clock is not None
        while True:
            try:
                item = self._orders.get(timeout=clock.remaining_s())
            except Empty:
                clock.ask(self._running)
                continue
            if item is None or isinstance(item, _Order):
                return item
            clock.began(*item)

    # -- on the thread that waits ------------------------------------------------------------------------------------

    def _wait_for_all(self) -> None:
        free_s = 0.0
        while (item := self._launched.get()) is not None:
            free_s = self._wait_for_one(*item, free_s)
            del item  # it holds what the task made

    def _wait_for_one(
        self, instruction: RunTask, result: Launched | BaseException, inputs: AwaitedInputs | None, free_s: float
    ) -> float:
        error: BaseException | None = None
        start_s = free_s
        if isinstance(result, Launched):
            start_s = max(result.begun_s, free_s)
            if inputs is not None:
                inputs.wait()
                start_s = max(start_s, time.perf_counter())
            self._running = (instruction, start_s)
            if self._clock is not None:
                self._orders.put(self._running)
            try:
                result.wait()
            except BaseException as caught:
                error = caught
        else:  # reported in its turn, behind what may have caused it
            error = result
        end_s = time.perf_counter()
        self._running = None
        if self._clock is not None:
            self._clock.ended.append((instruction.task, end_s - start_s))
        self._done(instruction, start_s, end_s, error)
        return end_s


class _DecisionClock:
    """When to ask for a decision; but for ``ended``, of the thread that launches."""

    def __init__(self, decide: Decide, rule: TimingRule) -> None:
        self._decide = decide
        self._timer = DecisionTimer(rule)
        self._last: RunTask | None = None
        """What was launched last: every other task has its successor."""
        self._due: Started | None = None
        """The task whose successor is to be decided, and when."""
        self._late_s = 0.0
        """By how much the last decision was asked for too late."""
        self.ended: deque[tuple[Task, float]] = deque()
        """Tasks that have ended with their lengths, as the thread that waits has seen them."""
        self._is_precise = False

    def follows(self, instruction: RunTask) -> None:
        """This task is launched next."""
        self._last, self._due = instruction, None

    def began(self, instruction: RunTask, start_s: float) -> None:
        """A task runs since then."""
        while self.ended:
            self._timer.ended(*self.ended.popleft())
        if instruction is self._last:
            self._due = (instruction, start_s + self._timer.delay_s(instruction.task))

    def remaining_s(self) -> float | None:
        """How long to wait for something else; None: for ever."""
        if not self._is_precise:
            self._is_precise = reduce_timer_slack() or True
        return None if self._due is None else max(0.0, self._due[1] - time.perf_counter())

    def ask(self, running: Started | None) -> None:
        """It is time, unless the task has ended meanwhile."""
        assert self._due is not None
        (instruction, due_s), self._due = self._due, None
        if running is not None and running[0] is instruction:
            self._late_s = max(0.0, time.perf_counter() - due_s)
            self._decide(instruction, due_s)

    def answered(self, due_s: float) -> None:
        """What was decided has been launched."""
        self._timer.latency(time.perf_counter() - due_s + self._late_s)
