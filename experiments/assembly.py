"""From a run's configuration to the objects that train, with every check that can be made before work starts."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from experiments.config import TrainConfig
from experiments.devices import stage_devices
from experiments.ordering import parse_ordering
from rrfp_jax.arbitration import Order
from rrfp_jax.data import VOCAB_SIZE, TextBytes, prefetched
from rrfp_jax.models import language_model
from rrfp_jax.observe.metrics import MetricsFile
from rrfp_jax.pipeline import Pipeline, PipelineState
from rrfp_jax.programs.chunk import Chunk
from rrfp_jax.programs.layout import mirrored
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

    @property
    def label(self) -> str:
        """The order, for captions, for example ``bf, window 8``."""
        order = self.pipeline.order
        return f"{order.label}, window {','.join(map(str, sorted(set(order.windows), reverse=True)))}"

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
        with prefetched(self.dataset) as batches:
            loop.run(self.state, batches, self.config.run.steps)
        self.pipeline.close()  # not after an error: closing waits for programs, one of which may hang


def assemble(config: TrainConfig) -> Run:
    """Build model, data, pipeline and initial state. Raises ValueError, with the remedy, on whatever does not fit."""
    layout = config.pipeline
    ordering = parse_ordering(
        schedule=layout.schedule,
        consume=layout.consume,
        hint=layout.hint,
        window=None if isinstance(layout.window, str) else layout.window,
        backward=layout.backward,
    )
    order = ordering.resolve(
        num_stages=layout.num_stages,
        num_microbatches=config.data.num_microbatches,
        chunks_per_stage=layout.chunks_per_stage,
    )
    devices = stage_devices(layout.num_stages, platform=config.run.platform, pinned=layout.deterministic)
    chunks = _chunks(config, order)
    dataset = TextBytes(config.data)
    pipeline = Pipeline(
        chunks,
        placement=order.placement,
        optimizer=make_optimizer(config.optimizer, learning_rate_schedule(config.optimizer, config.run.steps)),
        hint=ordering.hint,
        consume=ordering.consume,
        schedule=order.table,
        window=layout.window,
        remat=layout.remat,
        memory_limit=layout.memory_limit,
        backward=ordering.backward,
        devices=devices,
        clip_norm=layout.clip_norm,
        skip_nonfinite=layout.skip_nonfinite,
        deterministic=layout.deterministic,
        dispatch_ahead=layout.dispatch_ahead,
        seed=config.run.seed,
        progress_deadline_s=layout.progress_deadline_s,
    )
    state = pipeline.init(jax.random.key(config.run.seed))
    return Run(config, pipeline, state, dataset, devices)


def _chunks(config: TrainConfig, order: Order) -> list[Chunk]:
    """The model, cut for the order's placement; twice where it runs in both directions."""
    if config.model.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {config.model.vocab_size}, but a byte has {VOCAB_SIZE} values: give at least that"
        )
    layout, num_chunks = config.pipeline, order.placement.num_chunks
    is_mirrored = bool(order.graph.shared)
    if is_mirrored:
        num_chunks //= 2
    if layout.layers_per_chunk is not None and len(layout.layers_per_chunk) != num_chunks:
        raise ValueError(
            f"layers_per_chunk has {len(layout.layers_per_chunk)} numbers for {num_chunks} chunks: give one per chunk"
        )
    chunks = language_model(config.model).split(
        None if layout.layers_per_chunk else num_chunks,
        layers_per_chunk=layout.layers_per_chunk,
        embedding_in=layout.embedding_chunk,
        head_in=layout.head_chunk,
    )
    return mirrored(chunks) if is_mirrored else chunks
