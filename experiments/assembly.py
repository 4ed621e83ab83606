"""From a run's configuration to the objects that train, with every check that can be made before work starts."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from experiments.config import TrainConfig
from experiments.devices import use_cpu
from experiments.ordering import parse_ordering
from rrfp_jax.data import VOCAB_SIZE, TextBytes, prefetched
from rrfp_jax.models import language_model
from rrfp_jax.observe.metrics import MetricsFile
from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.tasks import looped
from rrfp_jax.training.loop import StepRow, TrainingLoop
from rrfp_jax.training.optimizer import learning_rate_schedule, make_optimizer


@dataclass(frozen=True)
class Run:
    """A run that is ready to start."""

    config: TrainConfig
    pipeline: Pipeline
    state: PipelineState
    dataset: TextBytes
    devices: tuple[jax.Device, ...]
    """One per stage."""
    order: str
    """For captions, for example ``bf, window 8``."""

    def prepare(self) -> None:
        """Compile all programs and start the stages."""
        self.pipeline.prepare(self.dataset.batch(0))

    def loop(self, metrics: MetricsFile, on_step: Callable[[StepRow], None]) -> TrainingLoop:
        """The loop over this run's steps."""
        return TrainingLoop(
            self.pipeline,
            learning_rate=learning_rate_schedule(self.config.optimizer, self.config.run.steps),
            metrics=metrics,
            on_step=on_step,
            timeline_steps=self.config.run.timeline_steps,
        )

    def train(self, loop: TrainingLoop) -> None:
        """Run all steps, the next batch being made while a step runs."""
        with self.pipeline, prefetched(self.dataset) as batches:
            loop.run(self.state, batches, self.config.run.steps)


def assemble(config: TrainConfig) -> Run:
    """Build model, data, pipeline and initial state. Raises ValueError, with the remedy, on whatever does not fit."""
    chunks = _chunks(config)
    ordering = parse_ordering(
        schedule=config.pipeline.schedule,
        consume=config.pipeline.consume,
        hint=config.pipeline.hint,
        window=config.pipeline.window,
    )
    resolved = ordering.resolve(
        num_stages=config.pipeline.num_stages,
        num_microbatches=config.data.num_microbatches,
        chunks_per_stage=config.pipeline.chunks_per_stage,
        placement=looped(config.pipeline.num_stages, config.pipeline.chunks_per_stage),
    )
    if resolved.graph.split:
        raise ValueError(
            f"schedule {config.pipeline.schedule!r} splits the backward into I and W, and training runs full ones: "
            "choose a schedule with a full backward, for example 1f1b"
        )
    dataset = TextBytes(config.data)
    use_cpu(config.pipeline.num_stages)
    devices = tuple(jax.devices()[: config.pipeline.num_stages])
    pipeline = Pipeline(
        chunks,
        placement=resolved.placement,
        optimizer=make_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, config.run.steps)),
        hint=ordering.hint,
        consume=ordering.consume,
        schedule=resolved.table,
        window=ordering.window,
        devices=devices,
        clip_norm=config.pipeline.clip_norm,
        skip_nonfinite=config.pipeline.skip_nonfinite,
        ordered=config.pipeline.ordered,
        seed=config.run.seed,
        progress_deadline_s=config.pipeline.progress_deadline_s,
    )
    state = pipeline.init(jax.random.key(config.run.seed))
    order = f"{resolved.label}, window {','.join(map(str, sorted(set(resolved.windows), reverse=True)))}"
    return Run(config, pipeline, state, dataset, devices, order)


def _chunks(config: TrainConfig) -> list[Chunk]:
    if config.model.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {config.model.vocab_size}, but a byte has {VOCAB_SIZE} values: give at least that"
        )
    layout = config.pipeline
    return language_model(config.model).split(
        None if layout.layers_per_chunk else layout.num_chunks,
        layers_per_chunk=layout.layers_per_chunk,
        embedding_in=layout.embedding_chunk,
        head_in=layout.head_chunk,
    )
