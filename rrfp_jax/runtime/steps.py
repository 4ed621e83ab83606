"""Steps of a running pipeline: those under way, the futures that wait for them, and their results.

Of several processes rank 0 resolves a step when all have ended it, every other one when the stages hosted there have.

The threads of a runtime refer to it, so it is never collected by itself. The pipeline, its states and the results of
its steps share a :class:`Hold`, to which nothing of the runtime refers: once the last of them is gone, the runtime is
closed. A runtime that is open when the process ends is closed then, before JAX takes its clients down: a thread that
comes back from a program while the interpreter goes away would abort the process. Closing waits for a limited time, so
a program that hangs keeps no process alive.

A child made by ``fork`` has all these objects and none of the threads, so it would wait for ever. Such a child gets an
error, and closes nothing.
"""

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax  # noqa: F401 - Registers its clean-up at exit, which runs after the one registered below.

from rrfp_jax.core import BESIDE
from rrfp_jax.runtime.control_plane import Peers
from rrfp_jax.runtime.stage_threads import StageOutcome
from rrfp_jax.runtime.tree_collectives import StepStatistics
from rrfp_jax.schedules.timeline import StepSums, Timeline
from rrfp_jax.waiting import result_of

if TYPE_CHECKING:
    from rrfp_jax.runtime.driver import PipelineRuntime
    from rrfp_jax.runtime.recovery import RecoveringRuntime

_Result = TypeVar("_Result")
_STEPS_NAMED = 16
_open: "weakref.WeakSet[PipelineRuntime | RecoveringRuntime]" = weakref.WeakSet()
_makers: set[int] = set()
"""Ids of the process that has made pipelines, and of those that it was forked from and that had made some."""


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a finished step. Fields whose cost grows with the run are computed on the thread that asks, not on
    the event loop."""

    step: int
    result: Any
    """Result of the executors, alike on all stages."""
    stages: dict[int, StageOutcome]
    """Outcomes of the stages hosted here, ascending."""
    timeline: Timeline
    """Record of the stages hosted here."""
    ended_s: float
    """Time at which the last stage ended the step (``time.perf_counter``)."""
    looking_ahead: int = 0
    """Number of stages hosted here whose foresight was at work."""
    statistics: StepStatistics | None = None
    """Statistics of all ranks together, on the first of several."""
    lost_units: tuple[int, ...] = ()
    """Units that were lost before the step had ended."""
    slow_units: Mapping[int, float] = field(default_factory=dict)
    """How many times as long as its peers a unit takes, by units that have fewer microbatches for that."""

    @cached_property
    def peak_memory_bytes(self) -> dict[int, int]:
        """Most bytes that each stage held on its devices: of all stages on rank 0, elsewhere of those hosted here."""
        if self.statistics is not None:
            return self.statistics.peak_memory_bytes()
        return {stage: one.peak_memory_bytes for stage, one in self.stages.items()}

    @cached_property
    def peak_host_bytes(self) -> dict[int, int]:
        """Most bytes that operations of each stage held in host memory."""
        if self.statistics is not None:
            return self.statistics.peak_host_bytes()
        return {stage: one.peak_host_bytes for stage, one in self.stages.items()}

    @cached_property
    def sums(self) -> StepSums:
        """Sums over the timelines of all stages on rank 0, elsewhere of those hosted here."""
        if self.statistics is not None:
            return self.statistics.sums
        return replace(self.timeline.sums(), looking_ahead=self.looking_ahead)


@dataclass
class _Pending:
    """A step that has not ended here."""

    future: "Future[StepOutcome]"
    timeline: Timeline
    sums: StepSums
    """Sums of the stages of which this is the first rank."""
    peaks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Peaks of these stages, on devices and in host memory."""
    outcomes: dict[int, StageOutcome] = field(default_factory=dict)
    looking_ahead: int = 0


class StepsUnderWay:
    """The steps of one process that have not ended. They begin on the event loop and end in the serial executor."""

    def __init__(self, num_stages: int, num_hosted: int, peers: Peers | None) -> None:
        self._num_stages, self._num_hosted, self._peers = num_stages, num_hosted, peers
        self._pending: dict[int, _Pending] = {}
        self.begun_s = 0.0
        """Time at which the first step that is under way was submitted, or a step ended elsewhere."""
        self.num_ended = 0
        self._trained: dict[int, int] = {}
        """For the last steps, the number of the training step that they are, or that an evaluation comes after."""
        self._kinds: dict[int, str] = {}
        """For the last steps, the word for those that train nothing, else an empty text."""
        self._hurries = False

    def __len__(self) -> int:
        """The number of steps for which somebody waits: evaluations in idle time may take as long as they like."""
        return sum(step < BESIDE or self._hurries for step in self._pending)

    def hurry(self) -> None:
        """Counts evaluations in idle time as well, until all have ended."""
        if not self:
            self.begun_s = time.perf_counter()
        self._hurries = any(step >= BESIDE for step in self._pending)

    def call(self, step: int, trained: int | None, kind: str = "") -> None:
        """Gives a step its number for people, who count training steps, and its kind if it is none; from any thread."""
        self._trained[step] = step if trained is None else trained
        self._trained.pop(step - _STEPS_NAMED, None)
        self._kinds[step] = kind
        self._kinds.pop(step - _STEPS_NAMED, None)

    def number(self, step: int) -> int:
        return self._trained.get(step, step)

    def name(self, step: int) -> str:
        number, kind = self.number(step), self._kinds.get(step)
        return f"{kind} after {number} steps" if kind else f"step {number}"

    def begin(self, step: int, future: "Future[StepOutcome]") -> None:
        if not self:
            self.begun_s = time.perf_counter()
        self._pending[step] = _Pending(future, Timeline(self._num_stages), StepSums(num_stages=self._num_stages))

    def stage_ended(
        self, stage: int, step: int, outcome: StageOutcome, timeline: Timeline, *, looks_ahead: bool
    ) -> None:
        """Takes the outcome of a step on a stage hosted here; after the last stage, the step has ended here."""
        pending, peers = self._pending[step], self._peers
        pending.outcomes[stage] = outcome
        pending.timeline.extend(timeline)
        pending.looking_ahead += looks_ahead
        # A stage that spans processes is counted by the first of them alone.
        if peers is not None and peers.layout.ranks_of(stage)[0] == peers.rank:
            sums = replace(timeline.sums(), looking_ahead=int(looks_ahead))
            pending.sums = pending.sums.merged(sums, later_s=peers.clocks.offset_s)
            pending.peaks[stage] = outcome.peak_memory_bytes, outcome.peak_host_bytes
        if len(pending.outcomes) < self._num_hosted:
            return
        # Rank 0 resolves its future once the statistics of all others are here (``ended_everywhere``).
        if peers is None or not peers.tree.is_root:
            self._resolve(step, None)
        if peers is not None:
            peers.step_ended_here(step, pending.sums, pending.peaks)

    def ended_everywhere(self, step: int, statistics: StepStatistics) -> None:
        """Resolves a step that all stages, also those elsewhere, have ended; on rank 0."""
        self.begun_s = time.perf_counter()
        if step in self._pending:
            self._resolve(step, statistics)

    def fail(self, error: Exception) -> None:
        """Fails all steps, since none ends any more."""
        while self._pending:  # The loop may begin another meanwhile.
            self._pending.popitem()[1].future.set_exception(error)

    def _resolve(self, step: int, statistics: StepStatistics | None) -> None:
        pending = self._pending.pop(step)
        self._hurries &= any(each >= BESIDE for each in self._pending)
        self.num_ended += 1
        pending.future.set_result(
            StepOutcome(
                step=step,
                result=next(iter(pending.outcomes.values())).result,
                stages=dict(sorted(pending.outcomes.items())),
                timeline=pending.timeline,
                ended_s=time.perf_counter(),
                looking_ahead=pending.looking_ahead,
                statistics=statistics,
            )
        )


class Hold:
    """One start of a pipeline, by ``init`` or ``restore``, whose states it identifies.

    Raises RuntimeError in the child of a process that has made others.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        _makers.add(self._pid)
        if len(_makers) > 1:
            raise RuntimeError(
                f"process {self._pid} was forked from one that had made a pipeline, and JAX does not work in such a "
                "child: start it with multiprocessing's spawn method, or make pipelines in the parent alone"
            )

    def keep_open(self, runtime: "PipelineRuntime | RecoveringRuntime") -> None:
        """Has the runtime closed when the hold is gone, or when the process ends."""

        def close_unused(unused: "PipelineRuntime | RecoveringRuntime") -> None:
            if unused in _open:
                unused.close_soon()

        _open.add(runtime)
        # The finalizer's own hook at the exit may come after JAX's clean-up.
        weakref.finalize(self, close_unused, runtime).atexit = False

    def check_process(self) -> None:
        """Raises RuntimeError in any process other than the one that made this object."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the pipeline was made in process {self._pid}, and process {os.getpid()} was forked from it, without "
                "the threads that run it: use it in the process that made it"
            )


def _close_all() -> None:
    for runtime in list(_open):
        runtime.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_open.clear)


class StepMetrics(Generic[_Result]):
    """The future result of an enqueued step; ``result()`` waits for it.

    Args:
        make: makes the result of the step's outcome.
        hurry: called before the wait for a step that would otherwise take its time.
    """

    def __init__(
        self,
        future: "Future[StepOutcome]",
        hold: Hold,
        make: Callable[[StepOutcome], _Result],
        hurry: Callable[[], None] = lambda: None,
    ) -> None:
        self._future, self._hold, self._make, self._hurry = future, hold, make, hurry

    def done(self) -> bool:
        """Returns whether the step has ended, also by an error."""
        self._hold.check_process()
        return self._future.done()

    def result(self) -> _Result:
        """Blocks until the step has ended. Raises RunFailed, with the wait-for report, if the run cannot go on."""
        self._hold.check_process()
        if not self._future.done():
            self._hurry()
        return self._make(result_of(self._future))


def _with_lost(peaks: Mapping[int, int], lost_units: Iterable[int]) -> tuple[int, ...]:
    """Returns the peaks of units in their order, 0 for lost ones."""
    whole = {**dict.fromkeys(lost_units, 0), **peaks} if peaks else peaks
    return tuple(peak for _, peak in sorted(whole.items()))


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one training step."""

    step: int
    loss: float
    """Summed loss over total weight."""
    weight: float
    """Total weight, for a language model the number of tokens."""
    grad_norm: float | None
    """Global norm of the gradient of ``loss`` before clipping; None where neither clipping nor skipping asks for it."""
    skipped: bool
    """Whether the update was left out; ``fault`` says why."""
    peak_memory_bytes: tuple[int, ...] = field(repr=False)
    """Most bytes that each stage held during the step; since the start of the process where the backend counts."""
    peak_host_bytes: tuple[int, ...] = field(repr=False)
    """Most bytes that operations of each stage had in host memory during the step."""
    timeline: Timeline = field(repr=False)
    """Record of the stages that this process hosts: times of all tasks, and reasons of idleness."""
    sums: StepSums = field(repr=False)
    """Sums over the timelines of all stages; in other processes than the first, of the stages hosted there."""
    stop: bool = field(repr=False)
    """Whether a process has asked to end the run; the same in all processes, as is ``save``."""
    save: bool = field(repr=False)
    """Whether it is time to save the state."""
    ended_s: float = field(repr=False)
    """Time at which the step had ended on all stages (``time.perf_counter``)."""
    fault: str | None = field(default=None, repr=False)
    """Fault of the step: a loss or gradients that are not finite, no weight at all, or a negative one."""
    means: dict[str, float] = field(default_factory=dict, repr=False)
    """Sums of the last chunk beside the loss, by name, over the total weight."""
    lost_units: tuple[int, ...] = field(default=(), repr=False)
    """Units that were lost before the step had ended, whose microbatches others have run."""
    slow_units: Mapping[int, float] = field(default_factory=dict, repr=False)
    """How many times as long as its peers a unit takes, by units that have fewer microbatches for that."""
    forwards_skipped: int = field(default=0, repr=False)
    """Number of pairs of a chunk and a microbatch that skipped it, such as encoders and microbatches without images."""
    weights_left_out: int = field(default=0, repr=False)
    """Number of weight gradients, of a chunk and a microbatch each, that the step was told to leave out."""

    @classmethod
    def of(
        cls,
        outcome: StepOutcome,
        *,
        step: int,
        has_norm: bool,
        forwards_skipped: int,
        weights_left_out: int = 0,
        absent: tuple[int, ...] = (),
    ) -> "StepResult":
        """Returns the result of training step number ``step``, in a run where some units are absent."""
        verdict = outcome.result
        return cls(
            step=step,
            loss=verdict.loss,
            weight=verdict.weight,
            grad_norm=verdict.grad_norm if has_norm else None,
            skipped=not verdict.apply,
            fault=verdict.fault,
            peak_memory_bytes=_with_lost(outcome.peak_memory_bytes, (*outcome.lost_units, *absent)),
            peak_host_bytes=_with_lost(outcome.peak_host_bytes, (*outcome.lost_units, *absent)),
            lost_units=outcome.lost_units,
            slow_units=outcome.slow_units,
            timeline=outcome.timeline,
            sums=replace(outcome.sums, num_stages=outcome.sums.num_stages - len(absent)),
            stop=verdict.stop,
            save=verdict.save,
            means=verdict.means,
            ended_s=outcome.ended_s,
            forwards_skipped=forwards_skipped,
            weights_left_out=weights_left_out,
        )
