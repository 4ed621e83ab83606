"""A planned run put together: its model, its pipeline, and the objects that train or evaluate them."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import optax

from rrfp_jax.checkpoint import StoredStep, last_committed
from rrfp_jax.cluster.config import STARTED
from rrfp_jax.commands.common.process import enter
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.model_parts import batch_costs, cut_language_model, model_flops
from rrfp_jax.commands.training.planned import OrderedRun, PlannedRun
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.core.dispatch import AUTO, PAIRS
from rrfp_jax.data.dataset import Batch
from rrfp_jax.hf.model_folder import files_are_kept, keep_files
from rrfp_jax.models.float8 import float8_notes
from rrfp_jax.models.vision_config import encoder_values
from rrfp_jax.observe.trackers import TrackedMetrics, read_trackers
from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.programs.chunk import Chunk, trained_specs, whole_layers
from rrfp_jax.programs.model_graph import mirrored
from rrfp_jax.programs.shapes import model_params
from rrfp_jax.programs.target import current_target
from rrfp_jax.runtime.compile_cache import use_compile_cache
from rrfp_jax.runtime.operations import moves_activations
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.storage import located
from rrfp_jax.training.batches import AgreedBatches, CostOrders
from rrfp_jax.training.evaluation import EvaluationRow, Evaluations
from rrfp_jax.training.loop import RunSaver, StepProfile, TrainingLoop, speed_of_steps
from rrfp_jax.training.optimizer import check_groups, learning_rate_schedule, make_optimizer, rates_changed
from rrfp_jax.training.run_config import parse_steps
from rrfp_jax.training.run_directory import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    PROFILE_FOLDER,
    RunDirectory,
    RunRows,
)

_LOG = logging.getLogger(__name__)
_TAKE_OVER_TRIES, _TAKE_OVER_PAUSE_S = 30, 2.0
"""Tries to take over the lock of a lost rank: for a minute, after which the launcher has ended it for long."""
_DATA_THREADS = 2
"""Threads that decode images or draw them, or run a user's own code."""


# -- model and pipeline ------------------------------------------------------------------------------------------------


def chunks_of(config: TrainConfig, ordered: OrderedRun) -> list[Chunk]:
    """Returns the model, cut for the order's placement; twice if it runs in both directions."""
    if ordered.cut is not None:
        return ordered.cut.chunks
    chunks = cut_language_model(config, ordered.num_chunks, ordered.num_slices)
    return mirrored(chunks) if ordered.order.graph.shared else chunks


def make_pipeline(config: TrainConfig, chunks: Sequence[Chunk], process: Process, ordered: OrderedRun) -> Pipeline:
    """Returns the pipeline of a configuration whose order is resolved and whose model is cut."""
    layout, (ordering, order, cut) = config.pipeline, ordered
    return Pipeline(
        chunks,
        placement=order.placement,
        edges=None if cut is None else cut.edges,
        process=process,
        optimizer=make_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, config.run.steps)),
        # Where an offload moves activations, the order knows how many stay on the devices. One with nothing to move
        # bounds nothing: its number as a window would refuse tables that begin more microbatches.
        ordering=replace(
            ordering.on(order.table),
            window=order.windows if layout.offload and moves_activations(order.graph) else layout.window,
        ),
        updates=UpdateRules(
            clip_norm=config.optimizer.clip_norm,
            **config.optimizer.spike_rule,
            deterministic=config.run.deterministic,
            shard_optimizer=config.optimizer.shard,
            reduce=config.pipeline.reduce,
            delay=config.pipeline.delay,
        ),
        remat=ordered.chunk_remats(layout),
        seed=config.run.seed,
        options=_runtime_options(config),
    )


def _runtime_options(config: TrainConfig) -> RuntimeOptions:
    return RuntimeOptions(
        memory_limit=config.pipeline.memory_limit,
        progress_deadline_s=config.cluster.progress_deadline_s,
        dispatch_ahead=PAIRS if config.pipeline.makes_pairs else AUTO,
    )


def _cost_orders(
    config: TrainConfig, chunks: Sequence[Chunk], planned: PlannedRun, process: Process
) -> CostOrders | None:
    """Returns the object that orders microbatches by cost; None where their shapes do not differ, where sums have an
    order of their own, and where the model runs in both directions."""
    order, images = planned.ordered.order, config.images
    if images is None or not images.balance or config.run.deterministic or order.graph.shared:
        return None
    if len(planned.dataset.buckets or ()) < 2:
        return None
    return CostOrders(
        order,
        batch_costs(config, chunks, order.graph),
        num_replicas=config.pipeline.most_replicas,
        is_first=lambda: process.is_first,
    )


def _enter_run(planned: PlannedRun) -> Process:
    """Meet the other processes of a run, and start JAX."""
    config, layout = planned.config, planned.config.pipeline
    return enter(
        num_stages=layout.num_stages,
        data=layout.replicas,
        mesh=layout.meshes,
        configuration=planned.agreed,
        cluster=config.cluster,
        platform=config.run.platform,
        devices=config.run.devices,
        pinned=config.run.deterministic,
        xla_flags=config.run.xla_flags,
        sums_by_messages=layout.by_messages,
    )


def _evaluations_of(planned: PlannedRun, pipeline: Pipeline) -> Evaluations | None:
    """Returns the evaluations of a run's pipeline on its evaluation sets; None if it evaluates nothing."""
    config = planned.config
    if config.evaluation is None:
        return None
    return Evaluations(
        config.evaluation,
        pipeline,
        planned.evaluation_sets,
        num_steps=config.run.steps,
        num_microbatches=config.data.num_microbatches,
        max_bad=getattr(config.data, "max_bad_samples", 0),
    )


# -- training ----------------------------------------------------------------------------------------------------------


class Run:
    """A run that is ready to begin: this process's share of it."""

    def __init__(self, planned: PlannedRun) -> None:
        """Build model and pipeline; the first rank's run directory becomes that of all processes.

        Raises ValueError, with the remedy, on whatever does not fit.
        """
        config = planned.config
        # Checks that need no other process come before the others are met: a mistake is told at once, on every rank.
        chunks = chunks_of(config, planned.ordered)
        check_groups(config.optimizer, whole_layers(model_params(map(trained_specs, chunks))))
        self._cache = use_compile_cache()
        self.process = process = _enter_run(planned)
        self.notes = float8_notes(config.model, current_target())
        """Lines for the user before training."""
        self.pipeline = make_pipeline(config, chunks, process, planned.ordered)
        # Ranks may be started in different folders, so the first sends its whole path. Alone, the path stays as given.
        path = str(planned.path.absolute()) if process.cluster else str(planned.path)
        self.directory = RunDirectory(process.gather("run directory", path)[0])
        self.config, self.dataset = config, planned.dataset
        # One program: each operation by itself would be one, and all are loaded before the first row.
        self._learning_rate = jax.jit(learning_rate_schedule(config.optimizer, config.run.steps))
        self._training, self._known, self._saved = planned.training, planned.known, planned.saved
        self._lock_taken: threading.Thread | None = None
        self._profile: StepProfile | None = None
        if self.is_first and config.run.profile_steps is not None:
            self._profile = StepProfile(
                parse_steps(config.run.profile_steps),
                self.directory.path / PROFILE_FOLDER / "rank-0",
                lambda is_on: self.pipeline.runtime.name_tasks(is_on),  # noqa: PLW0108 - it runs only later
            )
        self.console = TrainingConsole(
            config.run.steps, report_every=config.run.report_every, is_quiet=not self.is_first
        )
        self.state = PipelineState(0)
        self._num_skipped = self._skipped_in_row = 0
        self._last_verified: int | None = None
        self._launch = os.environ.get(STARTED)
        self._launched_s, self._counted_s = _launch_time(self._launch), 0.0
        # Only data that is decoded, or made by a user's own code, has samples that can be left out.
        max_bad = getattr(config.data, "max_bad_samples", 0)
        orders = _cost_orders(config, chunks, planned, process)
        self.batches = AgreedBatches(self.dataset, process.gather, max_bad=max_bad, orders=orders)
        self._saver: RunSaver | None = None
        self._verification: tuple[int, Batch] | None = None
        self._evaluations = _evaluations_of(planned, self.pipeline)
        self.is_saved = True
        """Whether the last checkpoint was committed; known once the run has finished."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes the run's files: the first rank that lives."""
        return self.process.is_first

    @property
    def is_complete(self) -> bool:
        """Whether no step is left."""
        return self.state.step >= self.config.run.steps

    @property
    def label(self) -> str:
        """The order, for captions, for example ``bf, window 8``."""
        order = self.pipeline.order
        bounds = ",".join(sorted(set(order.bounds), key=float, reverse=True))
        return f"{order.label}, {'window' if order.footprints is None else 'footprint'} {bounds}"

    def begin(self, *, fresh: bool, force: bool) -> None:
        """Go on from the newest checkpoint of the run directory, or start over; compile, and write the first files.

        No other run may write there from the first moment on. The files of an earlier run stay untouched until
        everything else is known to fit. Raises ValueError where it does not, where another run is at work there, and
        where the checkpoint was saved by another training, unless forced.
        """
        settings = self.config.run
        # The lock comes before the search for a checkpoint: another run could save or clear one in between.
        self._first_does("run directory is held", lambda: self.directory.hold(to_clear=fresh))
        saver = self._saver = RunSaver(
            self.directory.place / CHECKPOINTS,
            self.pipeline,
            every=settings.checkpoint_every,
            minutes=settings.checkpoint_minutes,
            keep=settings.keep_checkpoints,
            before_commit=self._check_lock,
        )
        # The state comes before compiling, which takes minutes: a checkpoint that does not fit is refused at once.
        if self.process.comes_back:
            self.state = self.pipeline.await_state()
        elif (found := None if fresh else saver.checkpoints.newest()) is not None:
            self._go_on(saver, found, force=force)
        elif settings.init_from is not None:
            start = located(settings.init_from).absolute() / CHECKPOINTS
            self.state = saver.start_from(start, seed=settings.seed)
            self.console.say(f"starting from the parameters of {settings.init_from}")
        else:
            self.state = self.pipeline.init(jax.random.key(settings.seed))
        with self.console.compiling() as progress:
            # Step 0 wherever the run goes on: the batch only gives shapes, and all starts compile for the same ones.
            first = self.batches.shown(0, self.pipeline.reads(self.config.data.num_microbatches))
            if settings.verify_every is not None:
                self._verification = settings.verify_every, self._fullest_microbatch(first)
            shapes = None if self._evaluations is None else self._evaluations.shapes()
            self.pipeline.prepare(first, buckets=self.dataset.buckets, evaluation=shapes, progress=progress)
        if (recovery := self.process.recovery) is not None:
            recovery.on_loss = self._take_over_if_first
            recovery.take_back()
            if self.process.comes_back:
                float(self._learning_rate(0))  # For the others would wait while the first row compiles it.
                recovery.come_back(lambda turn: self._go_on(saver, saver.last_saved(), force=force, turn=turn))
                return
            self._take_over_if_first()
        if self._cache is not None:
            self.console.say(self._cache.describe())
        # Files of an earlier run go last, when nothing can be refused any more.
        self._first_does("run directory is ready", lambda: self._start_directory(fresh=fresh))

    def _fullest_microbatch(self, batch: Batch) -> Batch:
        """Returns a batch of the microbatch of the first step that skips the fewest chunks; this process may have
        read none of it yet."""
        self.pipeline.check_verifies()
        number = max(
            range(self.config.data.num_microbatches),
            key=lambda m: sum(leaf[m] is not None for leaf in batch.values()),
        )
        whole = self.batches.shown(0, dict.fromkeys(batch, range(number, number + 1)))
        return {name: [leaf[number]] for name, leaf in whole.items()}

    def _go_on(self, saver: RunSaver, found: StoredStep, *, force: bool, turn: int | None = None) -> None:
        if not isinstance(found.host.get("config"), dict):
            raise ValueError(
                f"{found.path} was not saved by this command: start over with --fresh, or in another run_dir"
            )
        # The configurations are compared first: their difference explains a failure of the restore better than shapes.
        changed = check_same_training(found.host["config"], self._training, force=force)
        self.state = saver.restore(found, turn=turn)
        # All that take part count alike; a new start counts anew.
        if turn is not None:
            self._skipped_in_row, self._last_verified = (found.host[key] for key in ("skipped_in_row", "last_verified"))
        self._num_skipped = int(found.host["num_skipped"])
        self.batches.num_bad = int(found.host.get("bad_samples", 0))
        self.batches.go_on(found.step, found.host.get("data"))
        if self._launch is not None and found.host.get("launch") == self._launch:
            self._counted_s = float(found.host["counted_s"])
        if self._evaluations is not None:
            self._evaluations.go_on(found.host.get("evaluation"))
        self.console.say(f"going on after {found.step} steps, from {found.path} (saved as {found.layout['describe']})")
        for difference in changed:
            self.console.say(f"forced: {difference}")
        if (steps := found.host["config"]["run"]["steps"]) != self.config.run.steps:
            now, step = self.config.run.steps, found.step
            changed_rates = rates_changed(self.config.optimizer, steps, now, step, step - self._num_skipped)
            self.console.say(f"the run was to have {steps} steps and now has {now}: {changed_rates}")

    def _start_directory(self, *, fresh: bool) -> None:
        """Clear the directory, write the configuration, and give the run its own copies of the model's files."""
        path, known, kind = self.directory.path, self._known, self.dataset.token_kind
        if fresh and (old := self.directory.leftovers()):
            self.console.say(f"starting over: removing {', '.join(old)} from {self.directory.place}")
            self.directory.clear()
        self.directory.start(self._saved, from_step=self.state.step)
        is_other = kind is not None and known.tokens is not None and not kind.is_same(known.tokens)
        # A run whose import is gone, and that has no copies, has nothing to copy.
        is_gone = known.has_begun and known.files is None and self.config.run.init_from is not None
        if is_other or not (files_are_kept(path) or is_gone):
            try:
                keep_files(path, known.files, kind or known.tokens)
            except OSError as error:
                raise ValueError(f"run_dir {path} cannot be written ({error.strerror}): name another folder") from None
        self.directory.send()
        self.console.say(f"the resolved configuration is in {self.directory.place / CONFIG}")

    def _first_does(self, what: str, action: Callable[[], None]) -> None:
        """Runs ``action`` on the first rank while the others wait; its error becomes a ValueError on all ranks."""
        problem = None
        if self.is_first:
            try:
                action()
            except (OSError, ValueError) as error:
                problem = str(error)
        gathered = self.process.gather(what, problem)
        problem = gathered[min(gathered)]
        if problem is not None:
            raise ValueError(problem)

    def _take_over_if_first(self) -> None:
        """Does from now on what the first rank did, which is lost; rows are taken over as they come."""
        if not self.is_first or self._lock_taken is not None or self.directory.lock.is_held:
            return
        self.console.speak()
        self.console.say(f"rank {self.process.rank} prints and writes the run's files from now on")
        self._lock_taken = threading.Thread(target=self._take_lock, name="run lock taken over", daemon=True)
        self._lock_taken.start()

    def _take_lock(self) -> None:
        # A rank that is lost may live on for a moment, until the launcher ends it.
        for tries_left in reversed(range(_TAKE_OVER_TRIES)):
            try:
                self.directory.lock.take()
            except (ValueError, OSError) as error:
                if not tries_left:
                    _LOG.warning("nothing more can be saved: %s", error)
                time.sleep(_TAKE_OVER_PAUSE_S)
            else:
                return

    def _check_lock(self) -> None:
        """Raises LockHeld where this run has lost the directory to another, whose checkpoints it must not replace."""
        if self._lock_taken is not None:
            self._lock_taken.join()
        self.directory.lock.check()
        self.directory.send()

    def metrics(self) -> RunRows:
        """The run's rows: the file, and the trackers that the configuration names."""
        trackers = read_trackers(self.config.run.trackers)

        def open_metrics(first_step: int | None) -> TrackedMetrics:
            if trackers:
                names = ", ".join(each.tracker for each in trackers)
                self.console.say(f"the rows of {self.directory.path / METRICS} also go to {names}")
            step = self.state.step if first_step is None else first_step
            return self.directory.tracked_metrics(self.config.as_dict(), trackers, first_step=step)

        rows = self.directory.path / METRICS
        return RunRows(rows, lambda: self.is_first, open_metrics, self.directory.fetch_metrics)

    def loop(self, metrics: RunRows) -> TrainingLoop:
        """The loop over this run's steps."""
        loop = TrainingLoop(
            self.pipeline,
            learning_rate=self._learning_rate,
            metrics=metrics,
            on_step=self.console.show_step,
            saver=self._saver,
            host_data={"config": self._training, "launch": self._launch},
            profile=self._profile,
            speed=speed_of_steps(self.process.device_kinds, model_flops(self.config)),
            num_skipped=self._num_skipped,
            evaluations=self._evaluations,
            on_evaluation=self.console.show_evaluation,
            max_skipped_in_row=self.config.run.max_skipped_in_row,
            num_bad=lambda: self.batches.num_bad,
            agreed=self.batches,
            launched_s=self._launched_s,
            verification=self._verification,
        )
        loop.skipped_in_row, loop.last_verified = self._skipped_in_row, self._last_verified
        loop.counted_s = self._counted_s
        return loop

    def train(self, loop: TrainingLoop) -> None:
        """Run all steps that are left, the next batch being made while a step runs; then end in good order."""
        # Rows of one length are copied from a file. Images and a user's own code may take longer than a step.
        num_threads = _DATA_THREADS if self.config.row_length is None else 1
        reads = self.pipeline.reads(self.config.data.num_microbatches)
        with self.batches.ahead(self.state.step, reads, num_threads) as batches, self._profile or nullcontext():
            self.state = loop.run(self.state, batches, self.config.run.steps)
        if self._profile is not None and self._profile.is_written:
            self.console.say(f"the trace of steps {self.config.run.profile_steps} is in {self._profile.folder}")
        # Not after an error: closing waits for programs, one of which may hang.
        self.finish()

    def describe_saved(self, *, is_last: bool = False) -> str:
        """Returns a sentence on which of the steps so far are on the disk; ``is_last``: all that were trained."""
        try:
            step = None if self._saver is None else last_committed(self._saver.checkpoints.directory)
        except (OSError, ValueError) as error:
            return f"it is not known what was saved: {error}"
        if step is None:
            return "nothing was saved: the same command starts over"
        if is_last:
            return f"saved after step {step - 1}; the same command goes on from there"
        return (
            f"the last checkpoint holds step {step - 1}, nothing was saved since; the same command goes on from there"
        )

    def finish(self) -> None:
        """Wait for the last checkpoint, and leave."""
        if self._saver is not None:
            # The last commit needs all processes, so it comes before any of them leaves.
            last = self._saver.checkpoints.close()
            self.is_saved = last is None or last.failure is None
        self.pipeline.close()
        self.process.finish()


def _launch_time(started: str | None) -> float | None:
    """Returns the time, as of :func:`time.time`, at which a launcher started, by its ``STARTED``; None without one."""
    return None if started is None else datetime.strptime(started.rpartition("-")[0], "%Y%m%d-%H%M%S").timestamp()


# -- going on ----------------------------------------------------------------------------------------------------------

_DECIDING = ("model", "vision", "projector", "adapters", "data", "optimizer")
"""Sections that decide the result of training, beside ``run.seed``."""
_OF_FILES = ("num_microbatches", "path", "tokenizer", "cache")
_OF_SAMPLES = ("pack", "image_folder", "text_buckets", "image_buckets", "balance", "gather_text")
_LAYOUT_ONLY = {
    "text": ("num_microbatches", "path"),
    "tokens": _OF_FILES,
    "jsonl": _OF_FILES,
    "parquet": _OF_FILES,
    "image_text": (*_OF_FILES, *_OF_SAMPLES, "max_bad_samples"),
    "own": ("num_microbatches", "max_bad_samples"),
}
"""Keys of data, by its kind, that may change when a run goes on. The way in which a batch is cut and padded changes
neither its gradient nor the data that comes next; the digest of the data covers text, tokens and tokenizer, wherever
they lie."""


def check_same_training(saved: Mapping[str, Any], given: Mapping[str, Any], *, force: bool) -> list[str]:
    """Returns the differences that change the result of training, one text each.

    Raises ValueError, naming them, unless ``force`` says that they are meant.
    """
    before, now = _deciding(saved), _deciding(given)
    different = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({*before, *now})
        if (before.get(name) or None) != (now.get(name) or None)  # empty is the same as not given
    ]
    if different and not force:
        raise ValueError(
            f"the checkpoint was saved by another training: {'; '.join(different)}: go back to the saved values, start "
            "over with --fresh, or go on nevertheless with --force"
        )
    return different


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that decide the result, by ``section.key``."""
    found = {"run.seed": config.get("run", {}).get("seed")}
    for section in _DECIDING:
        values = {**(config.get(section) or {})}
        if values and section in ("vision", "projector"):
            # A kind with overrides, and all settings one by one, may be the same encoder.
            record, given = encoder_values(section, values)
            values = asdict(record(**given))
        values |= values.pop("images", None) or {}
        free = _LAYOUT_ONLY.get(values.get("kind", "text"), ()) if section == "data" else ("shard", "on_host")
        found |= {f"{section}.{name}": value for name, value in values.items() if name not in free}
    return found


# -- evaluating --------------------------------------------------------------------------------------------------------


def evaluate_run(planned: PlannedRun, run: Path) -> tuple[int, list[EvaluationRow], bool]:
    """Evaluates the newest checkpoint of a run, in any layout, on the sets of a configuration.

    Returns the number of steps of the checkpoint, the results of each set, and whether this process is the first.
    Nothing is written. All processes call it alike. Raises ValueError where there is no checkpoint, or it is of another
    model.
    """
    config, (_, order, cut) = planned.config, planned.ordered
    use_compile_cache()
    process = _enter_run(planned)
    checkpoints = run.absolute() / CHECKPOINTS
    with Pipeline(
        chunks_of(config, planned.ordered),
        placement=order.placement,
        edges=None if cut is None else cut.edges,
        process=process,
        optimizer=optax.identity(),
        # Replicas that train apart are evaluated as their mean, which each of them has.
        updates=UpdateRules(reduce="messages" if config.pipeline.by_messages else config.pipeline.reduce),
        seed=config.run.seed,
        options=_runtime_options(config),
        trains=False,
    ) as pipeline:
        # The saver's own directory is never made, because nothing is saved.
        saver = RunSaver(checkpoints.with_name("not-saved"), pipeline, every=None, minutes=None, keep=1)
        step = process.gather("step", last_committed(checkpoints))[0]
        state = saver.start_from(checkpoints)
        evaluations = _evaluations_of(planned, pipeline)
        assert evaluations is not None
        first = planned.dataset.batch(0, pipeline.reads(config.data.num_microbatches))
        pipeline.prepare(first, buckets=planned.dataset.buckets, evaluation=evaluations.shapes())
        rows = evaluations.run(state)
        saver.checkpoints.close()
    process.finish()
    return step, rows, process.is_first
