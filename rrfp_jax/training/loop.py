"""The training loop: load, step, record, one step ahead of the results; with its saves and its trace."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from rrfp_jax.checkpoint import APART, Checkpoints, ChunkLayers, StoredStep, last_committed, layer_owners
from rrfp_jax.costs.devices import peak_flops
from rrfp_jax.data import BrokenData
from rrfp_jax.data.dataset import BatchContents, contents_of
from rrfp_jax.observe.metrics import MetricsFile
from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.programs.chunk import param_specs
from rrfp_jax.programs.shapes import pick
from rrfp_jax.programs.shardings import shardings_of
from rrfp_jax.programs.state import ChunkState
from rrfp_jax.runtime import StepMetrics, StepResult
from rrfp_jax.schedules.timeline import IdleReason, Timeline
from rrfp_jax.training.batches import AgreedBatches, StepOrder
from rrfp_jax.training.evaluation import EvaluationRow, Evaluations
from rrfp_jax.training.run_directory import RunRows

_log = logging.getLogger(__name__)
_NORMS = "norms"
"""The key of a step's plain data that has the norms by which spikes are known."""
_AGAIN_S = 60.0
"""Seconds after a failed save until it is time for the next one."""
_STOP_AFTER_FAILURE_S = 3.0
"""How long a trace may take to be written once a run has failed: a hang must not keep the run from ending."""


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One line of ``metrics.jsonl``."""

    step: int
    loss: float
    """Mean loss of the step, in nats per token."""
    means: dict[str, float]
    """Further sums of the model over the step's weight, by name: ``router_loss`` of experts, which is a part of the
    loss."""
    grad_norm: float | None
    """Global gradient norm before clipping; None where neither clipping nor skipping needs it."""
    learning_rate: float
    """Learning rate of this step's update."""
    step_time_s: float
    """Seconds from the end of the step before (the first: from its start) to the end of this one."""
    tokens_per_s: float
    """Loss weight per second: the tokens that are predicted."""
    tokens_per_s_per_device: float | None = None
    positions_per_s: float
    """Positions of text, image features among them, padding left out."""
    images_per_s: float
    token_padding: float
    """Part of all positions that is padding, 0 to 1."""
    patch_padding: float
    """Part of all patches that is padding, 0 to 1."""
    forwards_skipped: int
    """Tasks that did not exist: forwards of chunks for microbatches that lack their inputs, such as encoders'."""
    model_flops: float | None = None
    """Operations that the model needs for this step, nothing computed again (:mod:`rrfp_jax.costs.flops`)."""
    model_tflops_per_device: float | None = None
    """Teraflops per second and device: ``model_flops`` over ``step_time_s``."""
    mfu: float | None = None
    """Model FLOPs utilisation: the part of the devices' bfloat16 peaks, 0 to 1; None where one of these is not known,
    as of CPUs."""
    bubble_fraction: float | None
    """Part of the stages' time in which they ran no task, 0 to 1; None, with no ``idle_s`` and no peaks, for a step in
    which the rank that collects these numbers was lost."""
    idle_s: dict[str, float]
    """Seconds that stages were idle, by reason (:class:`.IdleReason`), added up over all stages."""
    looking_ahead: int
    """Number of stages whose foresight was at work: where tasks are too short for it, it sleeps."""
    skipped: bool
    """Whether the update was left out; ``fault`` says why."""
    fault: str | None = None
    """The fault of the step: loss or gradients that are not finite, no weight at all, or a negative one."""
    num_skipped: int
    """Number of updates that this run has left out so far."""
    bad_samples: int
    """Number of samples that this run has left out so far, because they could not be read."""
    peak_memory_bytes: tuple[int, ...]
    """Peak memory of each stage during the step, in bytes; 0 of units that are lost."""
    peak_host_bytes: tuple[int, ...]
    """Peak of each stage's data in host memory, beside that on its devices, in bytes."""
    goodput: float
    """Time of all steps so far, each counted once, over the time since the run was launched, restarts included."""
    lost_units: tuple[int, ...] = ()
    """Units that were lost before the step had ended. The living replicas of their stages have run their
    microbatches."""
    slow_units: dict[str, float] = field(default_factory=dict)
    """How many times as long as its peers a unit takes, by units that have fewer microbatches for that."""
    predicted_step_s: float | None = None
    """Predicted seconds of the step's tasks, beside ``step_time_s``; None where its microbatches were not ordered by
    predicted cost."""


def speed_of_steps(
    kinds: Sequence[str], flops: Callable[[BatchContents], float]
) -> Callable[[BatchContents, float, float], dict[str, Any]]:
    """Returns a function from a step's contents, loss weight and seconds to the fields of its row that tell its speed.

    ``kinds`` has the kind of every device of the run (:attr:`.Process.device_kinds`). ``flops`` tells how many
    operations the model needs for a step (:mod:`rrfp_jax.costs.flops`).
    """
    peaks = [peak_flops(kind) for kind in kinds]
    # The sum of their bfloat16 peaks, if that of every kind is known, which it is not of CPUs.
    known = [peak for peak in peaks if peak is not None]
    peak, num_devices = sum(known) if len(known) == len(peaks) else None, len(peaks)

    def speed(contents: BatchContents, weight: float, step_time_s: float) -> dict[str, Any]:
        needed = flops(contents)
        return {
            "tokens_per_s_per_device": weight / step_time_s / num_devices,
            "model_flops": needed,
            "model_tflops_per_device": needed / step_time_s / num_devices / 1e12,
            "mfu": None if peak is None else needed / (step_time_s * peak),
        }

    return speed


def _is_lacking(layer: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(layer))


def _initial_layers(init: Callable[[jax.Array], Any], names: Sequence[str], seed: int) -> dict[str, Any]:
    return pick(init(jax.random.key(seed)), names)


class RunSaver:
    """Saves a pipeline's state at step boundaries, and restores it. All processes call the same methods alike.

    The caller looks in ``checkpoints`` for a state to restore, and closes them at the end.

    Args:
        directory: the directory of the run's checkpoints, shared by all processes.
        pipeline: the pipeline, which may have run steps already.
        every: number of steps from one save to the next; None: steps do not count.
        minutes: minutes after which a save is due since the last one; None: time does not count.
        keep: how many committed steps stay.
        before_commit: called on the first rank before a step is committed; an error that it raises keeps it from being
            so.
    """

    def __init__(
        self,
        directory: Path,
        pipeline: Pipeline,
        *,
        every: int | None,
        minutes: float | None,
        keep: int,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._pipeline, self._every, self._minutes = pipeline, every, minutes
        process, chunks, stages = pipeline.process, pipeline.holding, pipeline.placement.stage_of_chunk
        num_shares, sparse = pipeline.updates.num_shares(process.layout.data), pipeline.updates.sparse
        self._apart = None if sparse is None else {"replicas": process.layout.data, **asdict(sparse)}
        self._layers = {
            (index, replica): ChunkLayers(
                chunk, pipeline.optimizer, trains=pipeline.trains(index), num_shares=num_shares, replica=replica
            )
            for index, chunk in enumerate(chunks)
            for replica in {0, *(() if sparse is None else process.replicas_here(stages[index]))}
        }
        self._owners = partial(
            layer_owners,
            [param_specs(chunk) for chunk in chunks],
            stages,
            process.layout,
            process.devices,
            shard_optimizer=num_shares > 1 or pipeline.updates.shards_together(process.layout.data),
            whole_arrays=num_shares > 1,
            by_replica=sparse is not None,
        )
        self.checkpoints = Checkpoints(
            directory,
            self._owners(),
            keep=keep,
            coordinator=process.peers,
            before_commit=before_commit,
            layout={"describe": process.layout.describe(), "stage_of_chunk": list(stages)},
        )
        self._last_s = time.monotonic()
        self._last_step: int | None = None

    def restore(self, found: StoredStep, *, turn: int | None = None) -> PipelineState:
        """Returns the pipeline's state as it was saved; raises ValueError if model or optimizer differ, or how replicas
        average parameters.

        ``turn`` is that of :meth:`Pipeline.restore`.
        """
        if (was := found.host.get(APART)) != self._apart:
            told = ["replicas that stay equal" if each is None else f"reduce {each}" for each in (was, self._apart)]
            raise ValueError(
                f"{found.path} was saved with {told[0]} and is read with {told[1]}: give the same, or start another "
                "run from it with init_from"
            )
        states = self.checkpoints.restore(found, self._with_layers(self._pipeline.state_specs()))
        self._last_step = found.step
        return self._pipeline.restore(states, found.step, turn=turn, norms=found.host.get(_NORMS, ()))

    def _with_layers(self, states: Iterable[tuple[int, ChunkState]]) -> list[tuple[ChunkLayers, ChunkState]]:
        """Returns states of chunks, as the pipeline lists them, each with the layers of its replica."""
        if self._apart is None:
            return [(self._layers[chunk, 0], state) for chunk, state in states]
        process, stages = self._pipeline.process, self._pipeline.placement.stage_of_chunk
        replicas = {chunk: iter(process.replicas_here(stage)) for chunk, stage in enumerate(stages)}
        return [(self._layers[chunk, next(replicas[chunk])], state) for chunk, state in states]

    def last_saved(self) -> StoredStep:
        """Returns the newest committed step; raises ValueError if there is none."""
        step = last_committed(self.checkpoints.directory)
        if step is None:
            raise ValueError(f"{self.checkpoints.directory} has no checkpoint with which a lost rank could come back")
        return self.checkpoints.find(step)

    def start_from(self, checkpoints: Path, *, seed: int | None = None) -> PipelineState:
        """Returns a state before the first step, with the parameters of the newest checkpoint in another directory.

        Adapters that it lacks begin from ``seed``; None: raises ValueError where there are some.
        """
        chunks = self._pipeline.state_specs()
        states = self.checkpoints.start_from(
            checkpoints, [(self._layers[chunk, 0], target) for chunk, target in chunks]
        )
        for (chunk, _), state in zip(chunks, states, strict=True):
            fresh = {name: layer for name, layer in state.params.items() if _is_lacking(layer)}
            if not fresh:
                continue
            if seed is None:
                raise ValueError(f"{checkpoints} has no {next(iter(fresh))}: give the folder of a run that trained it")
            # In one program, which makes nothing else: the layers that were read need no place twice.
            make = partial(_initial_layers, self._pipeline.holding[chunk].init, tuple(fresh), seed)
            state.params |= jax.jit(make, out_shardings=shardings_of(fresh))()
        return self._pipeline.restore(states, 0)

    def must_repeat(self) -> bool:
        """Blocks until the save under way has ended; returns whether it was spoilt by a loss."""
        self.checkpoints.wait()
        return self.checkpoints.has_met_loss

    def is_time(self) -> bool:
        """Returns whether enough minutes have passed by the clock of this process, or a save was spoilt by a loss, or a
        lost rank is about to come back."""
        recovery = self._pipeline.process.recovery
        if self.checkpoints.has_met_loss or (recovery is not None and recovery.awaits_newcomers):
            return True
        if self._minutes is None:
            return False
        # A save that failed is tried again soon, but not at every step.
        wait_s = min(60 * self._minutes, _AGAIN_S) if self.checkpoints.has_failed else 60 * self._minutes
        return time.monotonic() - self._last_s >= wait_s

    def is_due(self, step: int) -> bool:
        """Returns whether the state after ``step`` steps is to be saved whatever the time."""
        return self._every is not None and step % self._every == 0

    def save(self, state: PipelineState, host: Mapping[str, Any], *, keep_also: Iterable[int] = ()) -> None:
        """Saves in the background, with plain data; the pipeline may go on once this returns.

        Committed steps of ``keep_also`` stay beside the newest ones.
        """
        if state.step == self._last_step:
            last = self.checkpoints.wait()
            if last is None or last.failure is None:  # the state was restored from there, or is saved
                return
        found = self._pipeline.differing_copies(state)
        if found is not None and self._pipeline.process.is_first:
            _log.error("after %d steps %s: a device computes wrongly; go on from an earlier save", state.step, found)
        living = self._pipeline.process.living
        if living != self.checkpoints.living:
            self.checkpoints.follow(living, self._owners(living=living))
        states = self._with_layers(self._pipeline.chunk_states(state, once=True))
        more = {_NORMS: list(self._pipeline.norms(state)), APART: self._apart}
        host = {**host, **{name: value for name, value in more.items() if value}}
        self.checkpoints.save(state.step, states, host, keep_also=keep_also)
        self._last_s, self._last_step = time.monotonic(), state.step

    def take_back(self, state: PipelineState) -> None:
        """Blocks, where lost ranks are about to come back, until they take part; they start from the last save."""
        process = self._pipeline.process
        if process.recovery is None:
            return
        # Some hear of them sooner than others.
        if any(process.gather("newcomers", process.recovery.awaits_newcomers).values()):
            last = self.checkpoints.wait()
            if last is None or last.failure is None:
                self._pipeline.hold(state)


class StepProfile:
    """Starts and stops :mod:`jax.profiler` between steps, while none is under way in this process.

    The trace is for Perfetto and XProf, and every task in it has its name. A context manager around the loop: a run
    that ends within the steps leaves the trace of those that it has trained. A trace that fails is named in a warning:
    it is not worth a run.

    Args:
        steps: the steps to be traced.
        folder: the folder of this process; the trace is in a folder of it that is named by the time.
        name_tasks: makes the stages name their tasks, or stop doing so.
    """

    def __init__(self, steps: range, folder: Path, name_tasks: Callable[[bool], None]) -> None:
        self._steps, self._name_tasks, self.folder = steps, name_tasks, folder
        self._is_tracing = self._is_over = False
        self.is_written = False

    def is_boundary(self, step: int) -> bool:
        """Returns whether the trace starts or stops before this step; no step may be under way then."""
        if self._is_over:
            return False
        return step >= self._steps.stop if self._is_tracing else step in self._steps

    def turn(self) -> None:
        """Starts the trace, or stops it."""
        try:
            if self._is_tracing:
                self._is_tracing, self._is_over = False, True
                self._name_tasks(False)
                jax.profiler.stop_trace()
                self.is_written = True
            else:
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0  # every call of Python would be an event, and cost as much as it takes
                jax.profiler.start_trace(self.folder, profiler_options=options)
                self._is_tracing = True
                self._name_tasks(True)
        except Exception as error:  # whatever the library raises
            self._is_over = True
            _log.warning("the profile in %s is left out: %s", self.folder, " ".join(str(error).split()) or repr(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._is_tracing and kind is None:
            self.turn()
        elif self._is_tracing:
            # Writing may hang on what failed, so the run waits only a while for it.
            thread = threading.Thread(target=self.turn, name="profile", daemon=True)
            thread.start()
            thread.join(_STOP_AFTER_FAILURE_S)


_Running = tuple[StepMetrics[StepResult], BatchContents, int, StepOrder | None]
"""A step under way, the contents of its batch, the number of samples left out by then, and its order."""


class TrainingLoop:
    """Runs a pipeline over batches, reports every step and saves at step boundaries.

    Args:
        learning_rate: the learning rate of each update, counted without the skipped ones.
        metrics: receives one row per step; None: nothing does.
        on_step: called with every row, for progress displays.
        saver: saves the state at step boundaries and at the end; None: nothing is saved.
        host_data: plain data that is saved with the state.
        speed: tells the speed of a step (:func:`speed_of_steps`); None: nothing does.
        profile: starts and stops a trace between steps; None: there is none.
        num_skipped: updates that were left out before the first step of this loop.
        evaluations: evaluates between steps; None: nothing does.
        on_evaluation: called with every row of the evaluations.
        max_skipped_in_row: number of consecutive skipped steps that ends the loop; None: no number does.
        num_bad: returns how many samples were left out so far.
        agreed: the batches of the run, where these also tell the orders of their microbatches.
        launched_s: time (of :func:`time.time`) at which the run was launched; None: now.
        verification: the number of steps from one verification to the next, and the batch of one microbatch that it
            runs (:meth:`.Pipeline.verify`); None: there is none.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        learning_rate: Callable[[int], Any],
        metrics: RunRows | MetricsFile | None,
        on_step: Callable[[StepRow], None],
        saver: RunSaver | None = None,
        host_data: Mapping[str, Any] | None = None,
        speed: Callable[[BatchContents, float, float], dict[str, Any]] | None = None,
        profile: StepProfile | None = None,
        num_skipped: int = 0,
        evaluations: Evaluations | None = None,
        on_evaluation: Callable[[EvaluationRow], None] = lambda row: None,
        max_skipped_in_row: int | None = None,
        num_bad: Callable[[], int] = lambda: 0,
        agreed: AgreedBatches | None = None,
        launched_s: float | None = None,
        verification: tuple[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self._verification, self._agreed = verification, agreed
        self._launched_s = time.time() if launched_s is None else launched_s
        self.counted_s = 0.0
        """Seconds of the steps since the launch, each counted once."""
        self.last_verified: int | None = None
        """Steps after which all replicas computed the same bits; None: this loop has not verified yet."""
        self.wrong: str | None = None
        """A sentence on the difference for which the loop ended before its last step, with nothing saved; None: none
        was found."""
        self._pipeline, self._learning_rate = pipeline, learning_rate
        self._metrics, self._on_step = metrics, on_step
        self.timeline = Timeline(pipeline.layout.num_units)
        """The record of the last step that has ended: the stages that this process hosts, and on the first process,
        once the loop has ended, all stages."""
        self._saver, self._host_data = saver, dict(host_data or {})
        self._speed, self._profile, self._num_skipped = speed, profile, num_skipped
        self._evaluations, self._on_evaluation = evaluations, on_evaluation
        self._last_end_s = 0.0
        self._stop_requests = pipeline.process.stop_requests
        self._stop = self._asked_to_save = False
        """The requests of the steps recorded so far, to stop and to save; the same in all processes."""
        self.was_stopped = False
        """Whether the loop ended before its last step because of a request to stop."""
        self._max_skipped_in_row, self._num_bad = max_skipped_in_row, num_bad
        self.skipped_in_row = self.num_skipped = self.num_recorded = 0
        """Numbers of steps that were skipped since the last one that was not, that were skipped in all, and that this
        loop has run."""
        self.last_fault: str | None = None
        """The reason why the last skipped step was skipped."""
        self.unreadable: BrokenData | None = None
        """The error in the data for which the loop ended before its last step, with the state saved; None: there was
        none."""
        if saver is not None:
            self._stop_requests.is_time_to_save = saver.is_time

    def stop(self) -> None:
        """Ends the loop with a save at the next step boundary or the one after it. May be called from any thread or
        signal handler."""
        self._stop_requests.ask_to_stop()

    @property
    def goodput(self) -> float:
        """See :class:`StepRow`."""
        return self.counted_s / max(self.counted_s, time.time() - self._launched_s)

    @property
    def has_diverged(self) -> bool:
        """Whether ``max_skipped_in_row`` consecutive steps were skipped, which ends the loop."""
        return self._max_skipped_in_row is not None and self.skipped_in_row >= self._max_skipped_in_row

    def run(self, state: PipelineState, batches: Iterator[Mapping[str, Any]], num_steps: int) -> PipelineState:
        """Trains up to step ``num_steps`` and returns the state after the last step.

        The host prepares and enqueues one step while the one before it runs; where steps overlap, one more is under
        way.
        """
        running: deque[_Running] = deque()
        delay = bool(self._pipeline.updates.delay)
        self._verify_and_evaluate(state)
        while state.step < num_steps and not self._stop and self.unreadable is None and self.wrong is None:
            try:
                batch = next(batches)
            except BrokenData as error:
                self.unreadable = error
                break
            if not running and not self._last_end_s:
                self._pipeline.prepare(batch)  # so that the first step's time holds no compilation
                self._last_end_s = time.perf_counter()
            if self._profile is not None and self._profile.is_boundary(state.step):
                # A trace starts and stops while no step is under way.
                self._record_all(running)
                self._profile.turn()
                self._last_end_s = time.perf_counter()  # which may have taken seconds
            order = None if self._agreed is None else self._agreed.order
            if order is None:
                state, enqueued = self._pipeline.step(state, batch)
            else:
                state, enqueued = self._pipeline.step(state, batch, order=order.order)
            running.append((enqueued, contents_of(batch), self._num_bad(), order))
            while len(running) > 1 + delay:
                self._record(running.popleft())
            is_looked_at = self._is_evaluated(state.step) or self._is_verified(state.step)
            if is_looked_at or self._is_boundary(state.step, num_steps):
                # Recorded first: the step may ask to stop or to save.
                self._record_all(running)
                self._verify_and_evaluate(state)
                if self._is_boundary(state.step, num_steps):
                    self._finish_evaluation(at=None if state.step == num_steps else state.step)
                    self._save(state)
                    self._take_back(state, num_steps)
        was_running = bool(running)
        self._record_all(running)
        if was_running and self.unreadable is not None and self._saver is not None:
            # The data ended the loop after a step that is no boundary: nobody knew that it would be the last.
            self._save(state)
        while self._saver is not None and self.wrong is None and self._saver.must_repeat():
            self._save(state)
        self._finish_evaluation()
        self.was_stopped = self._stop and state.step < num_steps
        self.timeline = self._pipeline.process.whole_timeline(self.timeline)
        return state

    def _is_boundary(self, step: int, num_steps: int) -> bool:
        """Returns whether the state after this step is saved; all processes find the same."""
        if self._saver is None or self.wrong is not None:  # A state that is wrong must not be saved.
            return False
        is_best = self._evaluations is not None and step in self._evaluations.keep_also
        is_last = self._stop or self.unreadable is not None
        return is_last or self._asked_to_save or step == num_steps or self._saver.is_due(step) or is_best

    def _is_evaluated(self, step: int) -> bool:
        return self._evaluations is not None and self._evaluations.is_due(step)

    def _is_verified(self, step: int) -> bool:
        # A process that comes back starts where the others may just have verified.
        if self._verification is None or step == self.last_verified:
            return False
        # The first one of the loop also tells whether units give the same bits at all.
        return self.last_verified is None or step % self._verification[0] == 0

    def _verify_and_evaluate(self, state: PipelineState) -> None:
        if self._is_verified(state.step) and not self._stop:
            self._verify(state)
        if self._is_evaluated(state.step) and not self._stop and self.wrong is None:
            self._evaluate(state)

    def _verify(self, state: PipelineState) -> None:
        """Verifies; the time that it takes counts for no step."""
        assert self._verification is not None
        found = self._pipeline.verify(state, self._verification[1])
        self._stop |= found.stop
        self._asked_to_save |= found.save
        if found.difference is None:
            self.last_verified = state.step
        elif self.last_verified is None:
            self.wrong = (
                f"{found.difference}, at the first verification: a device computes wrongly, or their kinds or hosts "
                "round differently; take out the one, or leave verify_every out"
            )
        else:
            self.wrong = (
                f"after {state.step} steps {found.difference}: a device computes wrongly; take it out, and go on from "
                f"a checkpoint of at most {self.last_verified} steps, after which all agreed"
            )
        if self._last_end_s:
            self._last_end_s = time.perf_counter()

    def _evaluate(self, state: PipelineState) -> None:
        """Evaluates and writes the rows; the time that it takes counts for no step."""
        evaluations, rows = self._evaluations, list[EvaluationRow]()
        assert evaluations is not None
        try:
            if evaluations.in_idle_time:
                self._finish_evaluation()
                evaluations.begin(state)
            else:
                rows = evaluations.run(state)
        except BrokenData as error:
            self.unreadable = error
        self._write(rows)
        # An evaluation's requests count as those of a step.
        self._stop |= evaluations.stop
        self._asked_to_save |= evaluations.save
        evaluations.save = False
        if self._last_end_s:
            self._last_end_s = time.perf_counter()

    def _finish_evaluation(self, at: int | None = None) -> None:
        """Writes the rows of an evaluation in idle time, if one is under way: no matter of which state, or of one other
        than that after ``at`` steps. A run that was told to stop drops it."""
        evaluations = self._evaluations
        if evaluations is None or evaluations.pending in (None, at):
            return
        if self._stop:  # Nobody who stops a run waits for it: the rest may take minutes.
            if self._pipeline.process.is_first:
                _log.warning("the evaluation after %d steps has no rows: the run was stopped", evaluations.pending)
            evaluations.drop()
            return
        self._write(evaluations.finish())
        if self._last_end_s:
            self._last_end_s = time.perf_counter()

    def _write(self, rows: Iterable[EvaluationRow]) -> None:
        for row in rows:
            if self._metrics is not None:
                self._metrics.write(asdict(row))
            self._on_evaluation(row)

    def _save(self, state: PipelineState) -> None:
        assert self._saver is not None
        self._asked_to_save = False
        self._stop_requests.has_saved()
        host = {
            **self._host_data,
            "num_skipped": self._num_skipped,
            "skipped_in_row": self.skipped_in_row,
            "last_verified": self.last_verified,
            "counted_s": self.counted_s,
            "bad_samples": self._num_bad(),
        }
        if self._agreed is not None and (data := self._agreed.state_at(state.step)) is not None:
            host["data"] = data
        if self._evaluations is None:
            self._saver.save(state, host)
        else:
            host["evaluation"] = self._evaluations.host
            self._saver.save(state, host, keep_also=self._evaluations.keep_also)

    def _take_back(self, state: PipelineState, num_steps: int) -> None:
        """Lets lost ranks come back after a save, unless the loop ends here."""
        if self._saver is not None and state.step < num_steps and not self._stop and self.unreadable is None:
            self._saver.take_back(state)

    def _record_all(self, running: deque[_Running]) -> None:
        """Waits for all steps under way, and takes them out."""
        while running:
            self._record(running.popleft())

    def _record(self, running: _Running) -> None:
        """Waits for the result of a step under way, counts it and hands out its row."""
        metrics, contents, num_bad, order = running
        result = metrics.result()
        self._stop |= result.stop
        self._asked_to_save |= result.save
        self.timeline = result.timeline
        # From end to end, since steps overlap on the host.
        step_time_s = result.ended_s - self._last_end_s
        self._last_end_s = result.ended_s
        self.counted_s += step_time_s
        if self._agreed is not None and self._agreed.orders is not None:
            self._agreed.orders.learn(result.step, None if order is None else order.order, result.timeline, step_time_s)
        learning_rate = float(self._learning_rate(result.step - self._num_skipped))
        self._num_skipped += result.skipped
        self.num_recorded += 1
        self.num_skipped += result.skipped
        self.skipped_in_row = self.skipped_in_row + 1 if result.skipped else 0
        self.last_fault = result.fault or self.last_fault
        self._stop |= self.has_diverged
        speed = {} if self._speed is None else self._speed(contents, result.weight, step_time_s)
        row = StepRow(
            step=result.step,
            loss=result.loss,
            means=result.means,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            step_time_s=step_time_s,
            tokens_per_s=result.weight / step_time_s,
            positions_per_s=contents.tokens / step_time_s,
            images_per_s=contents.images / step_time_s,
            token_padding=contents.token_padding,
            patch_padding=contents.patch_padding,
            forwards_skipped=result.forwards_skipped,
            **speed,
            bubble_fraction=result.sums.bubble_fraction() if result.sums.cost_s else None,
            idle_s={str(reason): result.sums.idle_s.get(reason, 0.0) for reason in IdleReason},
            looking_ahead=result.sums.looking_ahead,
            skipped=result.skipped,
            fault=result.fault,
            num_skipped=self._num_skipped,
            bad_samples=num_bad,
            peak_memory_bytes=result.peak_memory_bytes,
            peak_host_bytes=result.peak_host_bytes,
            lost_units=result.lost_units,
            goodput=self.goodput,
            slow_units={str(unit): factor for unit, factor in result.slow_units.items()},
            predicted_step_s=None if order is None else order.predicted_s,
        )
        if self._metrics is not None:
            self._metrics.write(asdict(row))
        self._on_step(row)
