"""Stage threads launch the tasks of a stage and wait for them, so that the event loop never does.

There are two ways. With one task at a time, one thread launches and waits (:class:`ComputeThread`): no hop between
threads comes in between. Where the next task is launched while one runs (:class:`LaunchAndWait`), one thread launches,
and another waits and reports, in the order of launches: the devices' queue need not run empty.

Spans
-----
A task starts when its launch has reached the devices (``Launched.begun_s``) or, if that is later, when the task before
it was seen to end; it ends when it is seen to have ended. The host sees an end when its thread wakes up, some 0.05 to
0.1 ms late. So the span of a task that the devices had ahead of time is as long as the task, up to the difference of
two such delays. The span of a task that found the devices idle is longer by one delay.

Decisions just in time
----------------------
Where the successor of a task is chosen shortly before its end, the thread that launches also keeps the time, for an
event loop's timers are too coarse: it waits for instructions until the decision is due, and then asks for it.
:class:`rrfp_jax.core.DecisionTimer` learns how long after a task's start that is, from the lengths of tasks and from
the host's latency. The latency of a decision is the time from when it was due to the end of the launch that answers it,
plus the time by which the thread woke up late: the start of the task was seen about as late.

Names in traces
---------------
With ``names_tasks`` an annotation for :mod:`jax.profiler` encloses each task, with its name (``2F5``, ``2F5+2B1`` for
a pair) and its step.
Where one thread launches and waits it is as long as the task. Elsewhere it is as long as the launch, and the device's
own lines of the trace show the rest.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import jax
from jax.profiler import TraceAnnotation

from rrfp_jax.core import BESIDE, DecisionTimer, Message, RunInstruction, TimingRule
from rrfp_jax.core.dispatch import GapTimer
from rrfp_jax.programs.batches import StepBatch
from rrfp_jax.runtime.failure import error_text
from rrfp_jax.runtime.sleeping import reduce_timer_slack, sleep_exactly
from rrfp_jax.schedules import Pair, PipelineGraph, Task

_LOG = logging.getLogger(__name__)


class Launched(NamedTuple):
    """A task that the stage's devices have been given."""

    begun_s: float
    """Time at which the devices can have begun the task, unless they were busy (``time.perf_counter``)."""
    wait: Callable[[], None] = lambda: None
    """Blocks until the task has ended, without holding up other threads, and raises the error that it failed with.
    Called once, in the order of launches."""


def one_after_the_other(first: Launched, second: Launched) -> Launched:
    """Returns the launches of the tasks of a pair as one, for an executor that has no program for both."""

    def wait() -> None:
        first.wait()
        second.wait()

    return Launched(first.begun_s, wait)


class StageOutcome(NamedTuple):
    """The outcome of a step on one stage."""

    result: Any = None
    """The result of the step, alike on all stages."""
    peak_memory_bytes: int = 0
    """Most bytes that the stage held on its devices during the step."""
    peak_host_bytes: int = 0
    """Most bytes that operations of the stage held in host memory."""
    sums: Sequence[Any] = ()
    """The sums of the bits of its results, in a step that verifies (:mod:`rrfp_jax.runtime.consistency`)."""


class StageExecutor(Protocol):
    """Carries out the tasks of one stage. :class:`rrfp_jax.runtime.stage.ProgramStage` runs the compiled programs of
    real chunks, :mod:`rrfp_jax.testing.emulated_stage` emulates them.

    ``launch`` is called on a stage thread. All other methods run in the serial executor, and must return within
    microseconds.
    """

    def begin(self, step: int, batch: StepBatch, graph: PipelineGraph) -> None:
        """Takes the batch and the graph of a step, which may start later."""

    def launch(self, step: int, task: Task | Pair) -> Launched:
        """Gives one task, or two that run as one program, to the devices, which run what a stage launches one after
        another, in the order of launches.

        The tasks before may still be running, so their results may be used here and not waited for.
        """

    def payload(self, step: int, message: Message) -> Any:
        """Returns the content of a message; called once, after the task that produces it was waited for."""

    def accept(self, step: int, message: Message, payload: Any) -> None:
        """Takes the content of a message. Its step need not have begun here, and it may be a second delivery."""

    def finish(self, step: int) -> StageOutcome:
        """Frees all that the stage held of a step, which is done, and returns its outcome."""

    @property
    def hands_ahead(self) -> bool:
        """Whether outputs can be handed on from the launch of their tasks, since devices wait for inputs by themselves.
        Only then the two methods below are called."""

    def ahead(self, step: int, message: Message) -> Any:
        """Returns the later result of ``payload`` for a stage of this process; None before the launch of its task, and
        after it was handed out. For any thread."""

    def fetch(self, step: int, message: Message, ahead: Callable[[], Any]) -> bool:
        """Takes the content of a message ahead of its delivery, from the stage that makes it; the delivery then counts
        as a second one. Returns whether the content is here. For the thread that launches."""


class RunEnded(RuntimeError):
    """The run ends before an input could be had."""


class AwaitedInputs:
    """Inputs that one task still lacks when it is handed over.

    Within a process an output exists as a future from the launch of its task on. So the thread that launches fetches it
    from the stage that makes it, perhaps some moments before that launch, and the device waits for the rest.

    Args:
        fetches: one function for each input; takes the input if it can be had, and returns whether it is here.
    """

    _FIRST_POLL_S, _LAST_POLL_S, _LONGER = 20e-6, 1e-3, 1.1
    """Pauses between the checks for an input that has not come. They grow longer, each to about a tenth of the time
    waited so far: the task that makes the input may take long, and its threads need the core and the lock."""

    def __init__(self, fetches: Sequence[Callable[[], bool]]) -> None:
        self._fetches = fetches
        self.came = threading.Event()
        """Set once all inputs have been delivered, so that the device can have begun the task, or the run ends."""
        self._is_given_up = False

    def fetch(self) -> None:
        """Takes all inputs; on the thread that launches. Raises RunEnded if the run ends meanwhile."""
        for fetch in self._fetches:
            pause_s = self._FIRST_POLL_S
            while not fetch():
                if self._is_given_up:
                    raise RunEnded("the task that makes an input was not launched")
                sleep_exactly(pause_s)
                pause_s = min(pause_s * self._LONGER, self._LAST_POLL_S)

    def give_up(self) -> None:
        """Ends all waits, since the run ends."""
        self._is_given_up = True
        self.came.set()


_Launch = Callable[[int, Task | Pair], Launched]
"""Gives a task of a step, or a pair, to the devices."""
_Done = Callable[[RunInstruction, float, float, BaseException | None], None]
"""Called with an instruction, its start and end (``time.perf_counter``) and its error, if any."""
_Running = tuple[RunInstruction, float]
"""An instruction, and the time of its start."""
_WITHOUT_NAME = nullcontext()


class StageThreads:
    """Carries out a stage's instructions, one after another, on threads of its own.

    Args:
        launch: gives a task to the devices.
        done: called with each completion, on one of the threads.
    """

    submit: Callable[..., None]
    """Enqueues an instruction."""

    def __init__(self, launch: _Launch, done: _Done, targets: dict[str, Callable[[], None]]) -> None:
        self._launch, self._done = launch, done
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in targets.items()]
        self._launching: _Running | None = None
        self._running: _Running | None = None
        self.names_tasks = False
        """Whether tasks have names in traces; changed while no step is under way."""

    @property
    def started(self) -> _Running | None:
        """Instruction that the devices run, or that is being launched, and its start; for reports."""
        return self._running or self._launching

    @property
    def is_launching(self) -> bool:
        """Whether that instruction has not reached the devices yet, as far as these threads can tell."""
        return self._running is None and self._launching is not None

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake_later(self, at_s: float, call: Callable[[], None]) -> bool:  # noqa: ARG002
        """Makes a call at a time, if these threads can do so at no cost; returns whether they will."""
        return False

    def ask_to_stop(self) -> None:
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Blocks until the threads have ended, at most so long; returns whether they have."""
        until_s = time.perf_counter() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.perf_counter()))
        return not any(thread.is_alive() for thread in self._threads)


LONGEST_PIECE_S = 10.0
"""Seconds after which a piece of other work counts as hanging."""


class PieceThread:
    """Runs short pieces of other work while a stage idles, one at a time, on a thread of its own.

    A piece begins where it will probably end before the stage has a task (:class:`rrfp_jax.core.dispatch.GapTimer`). No
    task waits for this thread: where a piece takes longer, its programs and the task's share the devices. The thread
    gives up, with a line in the log, once a piece raises an error or hangs; training goes on without.

    Args:
        pieces: the calls, one after the other; a piece ends when the arrays that it returns are ready.
        gaps: the stage's timer, told of its idle time by others.
        call: makes a call in the serial executor, in which ``look`` is called too.
        ended: called there after each piece, with the present time.
    """

    def __init__(
        self,
        name: str,
        pieces: Iterable[Callable[[], Any]],
        gaps: GapTimer,
        call: Callable[..., None],
        ended: Callable[[float], None],
    ) -> None:
        self.name, self._pieces, self._gaps, self._call, self._report = name, iter(pieces), gaps, call, ended
        self._begun_s: float | None = None
        """The start of the piece that runs; None while none does."""
        self._is_over = self._has_compiled = False
        self._begin = SimpleQueue[bool]()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def look(self, time_s: float, earliest_s: float | None, *, is_active: bool) -> bool:
        """Begins a piece, while the stage idles, if a step is under way and one fits in; returns whether one runs.

        ``earliest_s``: see :meth:`.GapTimer.fits`.
        """
        if self._begun_s is not None and time_s - self._begun_s > LONGEST_PIECE_S:
            self._give_up(f"a piece has taken more than {LONGEST_PIECE_S:g} s")
        if self._begun_s is None and not self._is_over and is_active and self._gaps.fits(time_s, None, earliest_s):
            self._begun_s = time_s
            self._begin.put(True)
        return self._begun_s is not None

    def close(self, timeout_s: float) -> bool:
        """Ends the thread once its piece has ended; blocks at most so long, and returns whether it has ended."""
        self._is_over = True
        self._begin.put(False)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _give_up(self, why: str) -> None:
        if not self._is_over:
            _LOG.warning("%s: %s, so the stage runs no more of them; training goes on", self.name, why)
        self._is_over, self._begun_s = True, None

    def _work(self) -> None:
        while self._begin.get():
            begun_s, error = time.perf_counter(), None
            try:
                piece = next(self._pieces, None)
                if piece is not None:
                    jax.block_until_ready(piece())
            except BaseException as caught:
                piece, error = None, caught
            self._call(self._ended, time.perf_counter() - begun_s, piece is None, error)
            del piece, error  # They may hold arrays.

    def _ended(self, duration_s: float, is_last: bool, error: BaseException | None) -> None:
        if error is not None:
            self._give_up(f"a piece failed ({error_text(error)})")
        self._is_over |= is_last
        if self._has_compiled:  # The first piece tells nothing about the others.
            self._gaps.piece_ended(duration_s)
        self._has_compiled = True
        self._begun_s = None
        self._report(time.perf_counter())


class ComputeThread(StageThreads):
    """Runs instructions one after another and reports each completion, all in one thread."""

    def __init__(self, name: str, launch: _Launch, done: _Done) -> None:
        super().__init__(launch, done, {name: self._work})
        self.submit = self._queue.put
        self._alarm: tuple[float, Callable[[], None]] | None = None

    def wake_later(self, at_s: float, call: Callable[[], None]) -> bool:
        """Makes the call at that time, unless an instruction comes first: that costs no timer that would wake a thread.

        Only while this thread itself asks, as it reports a task or is woken; else returns False and does nothing.
        """
        if threading.get_ident() != self._threads[0].ident:
            return False
        self._alarm = at_s, call
        return True

    def _work(self) -> None:
        clock = time.perf_counter
        while (instruction := self._next()) is not None:
            step, task = instruction
            error: BaseException | None = None
            wait: Callable[[], None] | None = None
            start_s = clock()
            self._running = (instruction, start_s)
            try:
                with TraceAnnotation(str(task), step=step) if self.names_tasks else _WITHOUT_NAME:
                    start_s, wait = self._launch(step, task)
                    wait()
            except BaseException as caught:
                error = caught
            end_s = clock()
            self._running = None
            del wait  # It holds results of the task, which nobody may keep alive here.
            self._done(instruction, start_s, end_s, error)

    def _next(self) -> RunInstruction | None:
        while self._alarm is not None:
            alarm, self._alarm = self._alarm, None
            try:
                instruction = self._queue.get(timeout=max(0.0, alarm[0] - time.perf_counter()))
            except Empty:
                alarm[1]()
                continue
            if instruction is not None and instruction.step >= BESIDE:
                self._alarm = alarm  # A forward in idle time ends no hold: only the stage's own tasks do.
            return instruction
        return self._queue.get()


class _Order(NamedTuple):
    """An instruction, for the thread that launches."""

    run: RunInstruction
    due_s: float | None
    """Time at which the decision that it answers was due."""
    inputs: AwaitedInputs | None


class LaunchAndWait(StageThreads):
    """Launches instructions in one thread; waits for them, and reports each completion, in another.

    Args:
        decide: called shortly before the end of a task with the task and the time at which the call was due; asks for
            the task's successor.
        rule: how long before; None: the rule for stages of which nothing else hides a launch.
    """

    def __init__(
        self,
        name: str,
        launch: _Launch,
        done: _Done,
        *,
        decide: Callable[[RunInstruction, float], None] = lambda run, due_s: None,
        rule: TimingRule | None = None,
    ) -> None:
        super().__init__(launch, done, {name: self._launch_all, f"{name}-wait": self._wait_for_all})
        # The queue holds orders, and tasks that have started.
        self._launched: SimpleQueue[tuple[RunInstruction, Launched | BaseException, AwaitedInputs | None] | None]
        self._launched = SimpleQueue()
        self.answers_due_s: float | None = None
        """Time at which the decision was due that instructions submitted now answer."""
        self.submit = self._submit
        # All that follows is owned by the thread that launches, except for ``_ended``.
        self._decide, self._timer = decide, DecisionTimer(rule or TimingRule())
        self._last: RunInstruction | None = None
        """Task launched last: every other task has its successor."""
        self._due: _Running | None = None
        """Task whose successor is to be decided, and the time of that."""
        self._late_s = 0.0
        """Seconds by which the last decision was asked for too late."""
        self._ended: deque[tuple[Task | Pair, float]] = deque()
        """Tasks that have ended with their lengths, as the thread that waits has seen them."""

    def _submit(self, instruction: RunInstruction, inputs: AwaitedInputs | None = None) -> None:
        self._queue.put(_Order(instruction, self.answers_due_s, inputs))

    def _launch_all(self) -> None:
        """Launches what is ordered, on one thread."""
        reduce_timer_slack()
        while (order := self._next_order()) is not None:
            instruction, due_s, inputs = order
            step, task = instruction
            self._last, self._due = instruction, None
            result: Launched | BaseException
            try:
                if inputs is not None:
                    inputs.fetch()
                self._launching = (instruction, time.perf_counter())
                with TraceAnnotation(str(task), step=step) if self.names_tasks else _WITHOUT_NAME:
                    result = self._launch(step, task)
            except BaseException as caught:
                result = caught
            self._launching = None
            self._launched.put((instruction, result, inputs))
            if due_s is not None:
                self._timer.latency(time.perf_counter() - due_s + self._late_s)
            del order, inputs, result  # They hold results of tasks, which nobody may keep alive here.
        self._launched.put(None)

    def _next_order(self) -> _Order | None:
        """Returns the next instruction; asks for decisions meanwhile."""
        while True:
            remaining_s = None if self._due is None else max(0.0, self._due[1] - time.perf_counter())
            try:
                item = self._queue.get(timeout=remaining_s)
            except Empty:
                assert self._due is not None
                (instruction, due_s), self._due, running = self._due, None, self._running
                # A task that has ended meanwhile reports its end, and its successor is chosen then.
                if running is not None and running[0] is instruction:
                    self._late_s = max(0.0, time.perf_counter() - due_s)
                    self._decide(instruction, due_s)
                continue
            if item is None or isinstance(item, _Order):
                return item
            instruction, start_s = item
            while self._ended:
                self._timer.ended(*self._ended.popleft())
            if instruction is self._last:
                self._due = (instruction, start_s + self._timer.delay_s(instruction.task))

    def _wait_for_all(self) -> None:
        """Waits for the launched tasks and reports them, on the other thread."""
        free_s = 0.0  # the end of the task before
        while (item := self._launched.get()) is not None:
            instruction, result, inputs = item
            error: BaseException | None = None
            start_s = free_s
            if isinstance(result, Launched):
                start_s = max(result.begun_s, free_s)
                if inputs is not None:
                    inputs.came.wait()
                    start_s = max(start_s, time.perf_counter())
                self._running = (instruction, start_s)
                self._queue.put(self._running)
                try:
                    result.wait()
                except BaseException as caught:
                    error = caught
            else:  # A failed launch is reported in its turn, behind the tasks that may have caused it.
                error = result
            free_s = time.perf_counter()
            self._running = None
            if instruction.step < BESIDE:  # The timer knows how long tasks of training take.
                self._ended.append((instruction.task, free_s - start_s))
            self._done(instruction, start_s, free_s, error)
            del item, result, inputs, error  # They hold results of the task, which nobody may keep alive here.
