"""Assembles a planned run: its model, its pipeline, and the objects that train them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from rrfp_jax.checkpoint import StoredStep, last_committed
from rrfp_jax.commands.common.process import enter
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.model_flops import model_flops
from rrfp_jax.commands.training.model_parts import cut_language_model
from rrfp_jax.commands.training.planned import OrderedRun, PlannedRun
from rrfp_jax.commands.training.resuming import check_same_training
from rrfp_jax.commands.training.training_console import TrainingConsole
from rrfp_jax.hf.model_folder import files_are_kept, keep_files
from rrfp_jax.observe.metrics import TakesRows
from rrfp_jax.observe.trackers import TrackedMetrics
from rrfp_jax.observe.trackers.config import read_trackers
from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.programs.chunk import Chunk, trained_specs
from rrfp_jax.programs.model_graph import mirrored
from rrfp_jax.programs.shapes import model_params
from rrfp_jax.runtime.compile_cache import CompileCache, use_compile_cache
from rrfp_jax.runtime.operations import moves_activations
from rrfp_jax.runtime.options import RuntimeOptions, UpdateRules
from rrfp_jax.runtime.process import Process
from rrfp_jax.training.batches import AgreedBatches
from rrfp_jax.training.evaluation import Evaluations, Evaluator
from rrfp_jax.training.loop import ModelSpeed, TrainingLoop
from rrfp_jax.training.optimizer import check_groups, learning_rate_schedule, make_optimizer, rates_changed
from rrfp_jax.training.run_config import RunConfig
from rrfp_jax.training.run_directory import CHECKPOINTS, CONFIG, METRICS, RunDirectory
from rrfp_jax.training.saving import RunSaver
from rrfp_jax.training.step_profile import StepProfile, parse_steps, profile_folder

_DATA_THREADS = 2
"""Threads that decode images or draw them, or run a user's own code."""


class Run:
    """A run that is ready to begin: this process's share of it."""

    def __init__(
        self,
        planned: PlannedRun,
        pipeline: Pipeline,
        process: Process,
        directory: RunDirectory,
        cache: CompileCache | None,
    ) -> None:
        self.config, self.dataset, self.pipeline = planned.config, planned.dataset, pipeline
        self.process, self.directory = process, directory
        self._training, self._cache = planned.training, cache
        self._known, self._saved = planned.known, planned.saved
        self._profile = _profile(self.config.run, process, pipeline, directory.path)
        settings = self.config.run
        self.console = TrainingConsole(settings.steps, report_every=settings.report_every, is_quiet=not self.is_first)
        self.state = PipelineState(0)
        self._num_skipped = 0
        # Only data that is decoded, or made by a user's own code, has samples that can be left out.
        max_bad = getattr(self.config.data, "max_bad_samples", 0)
        self.batches = AgreedBatches(self.dataset, process.gather, max_bad=max_bad)
        self._saver: RunSaver | None = None
        self._evaluator = None if self.config.evaluation is None else make_evaluator(planned, pipeline)
        self._evaluated: Mapping[str, Any] | None = None
        """Results of the evaluations before this start, as the checkpoint holds them; None: there are none."""
        self.is_saved = True
        """Whether the last checkpoint was committed; known once the run has finished."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes the run's files."""
        return not self.process.rank

    @property
    def is_complete(self) -> bool:
        """Whether no step is left."""
        return self.state.step >= self.config.run.steps

    @property
    def _reads(self) -> dict[str, range]:
        """Leaves of a batch that this process reads, each with its range of microbatches."""
        return self.pipeline.reads(self.config.data.num_microbatches)

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
        self._saver = RunSaver(
            self.directory.checkpoints,
            self.pipeline,
            every=settings.checkpoint_every,
            minutes=settings.checkpoint_minutes,
            keep=settings.keep_checkpoints,
            # A run that seemed dead may have lost the directory to another one, whose checkpoints it must not replace.
            before_commit=self.directory.lock.check,
        )
        found = None if fresh else self._saver.checkpoints.newest()
        if found is None:
            self.state = self._initial_state(self._saver)
        else:
            self._go_on(self._saver, found, force=force)
        # The state comes before compiling, which takes minutes: a checkpoint that does not fit is refused at once.
        with self.console.compiling() as progress:
            # Step 0 wherever the run goes on: the batch only gives shapes, and all starts compile for the same ones.
            first = self.batches.shown(0, self._reads)
            shapes = None if self._evaluator is None else self._evaluator.shapes()
            self.pipeline.prepare(first, buckets=self.dataset.buckets, evaluation=shapes, progress=progress)
        if self._cache is not None:
            self.console.say(self._cache.describe())
        # Files of an earlier run go last, when nothing can be refused any more.
        self._first_does("run directory is ready", lambda: self._start_directory(fresh=fresh))

    def _initial_state(self, saver: RunSaver) -> PipelineState:
        if self.config.run.init_from is None:
            return self.pipeline.init(jax.random.key(self.config.run.seed))
        state = saver.start_from(Path(self.config.run.init_from).absolute() / CHECKPOINTS)
        self.console.say(f"starting from the parameters of {self.config.run.init_from}")
        return state

    def _start_directory(self, *, fresh: bool) -> None:
        if fresh and (old := self.directory.leftovers()):
            self.console.say(f"starting over: removing {', '.join(old)} from {self.directory.path}")
            self.directory.clear()
        self.directory.start(self._saved, from_step=self.state.step)
        self._keep_files()
        self.console.say(f"the resolved configuration is in {self.directory.path / CONFIG}")

    def _keep_files(self) -> None:
        """Give the run its own copies of the files that it needs from elsewhere; raises ValueError if it cannot."""
        known, kind, path = self._known, self.dataset.token_kind, self.directory.path
        is_other = kind is not None and known.tokens is not None and not kind.is_same(known.tokens)
        if files_are_kept(path) and not is_other:
            return
        if known.has_begun and known.files is None and self.config.run.init_from is not None:
            return  # an earlier version began this run, and its import is gone
        try:
            keep_files(path, known.files, kind or known.tokens)
        except OSError as error:
            raise ValueError(f"run_dir {path} cannot be written ({error.strerror}): name another folder") from None

    def _first_does(self, what: str, action: Callable[[], None]) -> None:
        """Runs ``action`` on rank 0 while the others wait; all ranks raise the ValueError that it raises."""
        problem = None
        if self.is_first:
            try:
                action()
            except ValueError as error:
                problem = str(error)
        problem = self.process.gather(what, problem)[0]
        if problem is not None:
            raise ValueError(problem)

    def _go_on(self, saver: RunSaver, found: StoredStep, *, force: bool) -> None:
        if not isinstance(found.host.get("config"), dict):
            raise ValueError(
                f"{found.path} was not saved by this command: start over with --fresh, or in another run_dir"
            )
        # The configurations are compared first: their difference explains a failure of the restore better than shapes.
        changed = check_same_training(found.host["config"], self._training, force=force)
        self.state = saver.restore(found)
        self._num_skipped = int(found.host["num_skipped"])
        self.batches.num_bad = int(found.host.get("bad_samples", 0))
        self._evaluated = found.host.get("evaluation")
        self.console.say(f"going on after {found.step} steps, from {found.path} (saved as {found.layout['describe']})")
        for difference in changed:
            self.console.say(f"forced: {difference}")
        if (steps := found.host["config"]["run"]["steps"]) != self.config.run.steps:
            now, step = self.config.run.steps, found.step
            changed_rates = rates_changed(self.config.optimizer, steps, now, step, step - self._num_skipped)
            self.console.say(f"the run was to have {steps} steps and now has {now}: {changed_rates}")

    def metrics(self) -> TrackedMetrics:
        """The run's rows, on the first rank: the file, and the trackers that it names."""
        trackers = read_trackers(self.config.run.trackers)
        if trackers:
            names = ", ".join(each.tracker for each in trackers)
            self.console.say(f"the rows of {self.directory.path / METRICS} also go to {names}")
        return self.directory.tracked_metrics(self.config.as_dict(), trackers, first_step=self.state.step)

    def loop(self, metrics: TakesRows | None) -> TrainingLoop:
        """The loop over this run's steps."""
        return TrainingLoop(
            self.pipeline,
            learning_rate=learning_rate_schedule(self.config.optimizer, self.config.run.steps),
            metrics=metrics,
            on_step=self.console.show_step,
            saver=self._saver,
            host_data={"config": self._training},
            profile=self._profile,
            # Rank 0 alone writes rows, and only they tell the speed.
            speed=ModelSpeed.on(self.process.devices, model_flops(self.config)) if self.is_first else None,
            num_skipped=self._num_skipped,
            evaluations=self._evaluations(),
            on_evaluation=self.console.show_evaluation,
            max_skipped_in_row=self.config.run.max_skipped_in_row,
            num_bad=lambda: self.batches.num_bad,
        )

    def _evaluations(self) -> Evaluations | None:
        config = self.config.evaluation
        if config is None or self._evaluator is None:
            return None
        return Evaluations(config, self._evaluator, self.config.run.steps, saved=self._evaluated)

    def train(self, loop: TrainingLoop) -> None:
        """Run all steps that are left, the next batch being made while a step runs; then end in good order."""
        # Rows of one length are copied from a file. Images and a user's own code may take longer than a step.
        is_slow = self.config.row_length is None
        num_threads = _DATA_THREADS if is_slow else 1
        with (
            self.batches.ahead(self.state.step, self._reads, num_threads) as batches,
            self._profile or nullcontext(),
        ):
            self.state = loop.run(self.state, batches, self.config.run.steps)
        if self._profile is not None and self._profile.is_written:
            self.console.say(f"the trace of steps {self.config.run.profile_steps} is in {self._profile.folder}")
        # not after an error: closing waits for programs, one of which may hang
        self.finish()

    def describe_saved(self, *, is_last: bool = False) -> str:
        """Returns a sentence on which of the steps so far are on the disk; ``is_last``: all that were trained."""
        step = None if self._saver is None else last_committed(self.directory.checkpoints)
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


def assemble(planned: PlannedRun) -> Run:
    """Build model and pipeline; rank 0's run directory becomes that of all processes.

    Raises ValueError, with the remedy, on whatever does not fit.
    """
    config, path = planned.config, planned.path
    # Checks that need no other process come before the others are met: a mistake is told at once, on every rank.
    chunks = chunks_of(config, planned.ordered)
    check_groups(config.optimizer, model_params(map(trained_specs, chunks)))
    cache = use_compile_cache()
    process = enter_run(planned)
    pipeline = make_pipeline(config, chunks, process, planned.ordered)
    # Ranks may be started in different folders, so rank 0 sends its whole path. Alone, the path stays as it was given.
    path = Path(process.gather("run directory", str(path.absolute()) if process.cluster else str(path))[0])
    return Run(planned, pipeline, process, RunDirectory(path), cache)


def make_pipeline(config: TrainConfig, chunks: Sequence[Chunk], process: Process, ordered: OrderedRun) -> Pipeline:
    """The pipeline of a configuration whose order is resolved and whose model is cut."""
    layout, (ordering, order, cut) = config.pipeline, ordered
    return Pipeline(
        chunks,
        placement=order.placement,
        edges=None if cut is None else cut.edges,
        process=process,
        optimizer=make_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, config.run.steps)),
        # Where activations move to the host, the order knows how many stay on the devices. An offload with nothing to
        # move bounds nothing: its number as a window would refuse tables that begin more microbatches.
        ordering=replace(
            ordering.on(order.table), window=order.windows if moves_activations(order.graph) else layout.window
        ),
        updates=UpdateRules(
            clip_norm=config.optimizer.clip_norm,
            deterministic=config.run.deterministic,
            shard_optimizer=config.optimizer.shard,
        ),
        remat=layout.remat,
        seed=config.run.seed,
        options=runtime_options(config),
    )


def enter_run(planned: PlannedRun) -> Process:
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
    )


def _profile(settings: RunConfig, process: Process, pipeline: Pipeline, path: Path) -> StepProfile | None:
    """Returns the profile that traces the steps of this process; None where it traces none."""
    if settings.profile_steps is None or process.rank:
        return None
    return StepProfile(
        parse_steps(settings.profile_steps),
        profile_folder(path, 0),
        lambda is_on: pipeline.runtime.name_tasks(is_on),  # noqa: PLW0108 - it runs only later
    )


def make_evaluator(planned: PlannedRun, pipeline: Pipeline) -> Evaluator:
    """Returns the evaluator of a run's pipeline on its evaluation sets."""
    config = planned.config
    assert config.evaluation is not None
    return Evaluator(
        pipeline,
        planned.evaluation_sets,
        batches=config.evaluation.batches,
        num_microbatches=config.data.num_microbatches,
        max_bad=getattr(config.data, "max_bad_samples", 0),
    )


def runtime_options(config: TrainConfig) -> RuntimeOptions:
    """Returns the settings of the runtime that a configuration has."""
    return RuntimeOptions(
        memory_limit=config.pipeline.memory_limit, progress_deadline_s=config.cluster.progress_deadline_s
    )


def chunks_of(config: TrainConfig, ordered: OrderedRun) -> list[Chunk]:
    """The model, cut for the order's placement; twice where it runs in both directions."""
    if ordered.cut is not None:
        return ordered.cut.chunks
    chunks = cut_language_model(config, ordered.num_chunks)
    return mirrored(chunks) if ordered.order.graph.shared else chunks
