"""A training run as far as it is known before JAX is loaded: its order, its cut and its text, all of them checked.

A configuration that does not fit is refused here within a second. The devices, the memory and the other processes are
checked later.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rrfp_jax.commands.common.ordering import OrderingOptions, parse_ordering
from rrfp_jax.commands.studies.work import check_fits_graph
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.data_sets import RunData, make_data_set, make_evaluation_sets
from rrfp_jax.commands.training.mesh_checks import check_meshes
from rrfp_jax.commands.training.model_tokens import KnownModel, known_model
from rrfp_jax.commands.training.starting import check_init_from
from rrfp_jax.core import READY, SCHEDULE, STRICT, Order
from rrfp_jax.core.replicas import microbatches_per_replica
from rrfp_jax.layout import with_axes_in_order
from rrfp_jax.models.cuts import ChunkLayout, balanced_counts, plan_cut
from rrfp_jax.observe.trackers.config import check_installed, read_trackers
from rrfp_jax.schedules import Placement
from rrfp_jax.training.run_config import PipelineConfig
from rrfp_jax.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from rrfp_jax.commands.training.model_parts import ModelChunks


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run whose order, cut and data are known and checked."""

    config: TrainConfig
    path: Path
    """The run directory."""
    ordering: OrderingOptions
    """The order as the user said it."""
    order: Order
    """The order of one replica."""
    dataset: RunData
    evaluation_sets: Mapping[str, RunData] = field(default_factory=dict)
    """The evaluation sets of the run, by name."""
    saved: Mapping[str, Any] = field(default_factory=dict)
    """The configuration as the run saves it, with whole paths."""
    known: KnownModel = field(default_factory=KnownModel)
    """The model that the run begins or goes on with."""
    cut: "ModelChunks | None" = None
    """The cut of a vision-language model; None: a language model, which is cut later."""

    @property
    def ordered(self) -> "OrderedRun":
        """The part that needs neither data nor devices."""
        return OrderedRun(self.ordering, self.order, self.cut)

    @property
    def training(self) -> dict[str, Any]:
        """The values that decide the result: the configuration, with the data's fingerprint in its section ``data``."""
        return {**self.saved, "data": {**self.saved["data"], "text": self.dataset.fingerprint}}

    @property
    def agreed(self) -> dict[str, Any]:
        """The values that must be the same on all ranks: the configuration, the fingerprints of all data, and the
        fingerprint of the order's table, which each rank may read from a file of its own."""
        agreed = self.config.as_dict()
        agreed["data"]["text"] = self.dataset.fingerprint  # nodes may have it elsewhere
        agreed["pipeline"] = with_axes_in_order(agreed["pipeline"])
        for name, dataset in self.evaluation_sets.items():
            agreed["evaluation"][f"text of {name}"] = dataset.fingerprint
        if self.order.table is not None:
            agreed["pipeline"]["rows"] = self.order.table.fingerprint
        return agreed


def plan_run(config: TrainConfig, path: Path, *, fresh: bool = False, force: bool = False) -> PlannedRun:
    """Resolve the configuration into a planned run; ``path`` becomes the run directory.

    ``fresh``: ignore the contents of the directory; ``force``: data in other tokens than the model's is meant. Raises
    ValueError, with the remedy, for anything that does not fit.
    """
    RunDirectory(path).check()
    known = known_model(config, path, fresh=fresh)
    if not known.has_begun:
        check_init_from(config)
    check_installed(read_trackers(config.run.trackers))
    ordered = order_run(config)
    run = PlannedRun(
        config=config,
        path=path,
        ordering=ordered.ordering,
        order=ordered.order,
        dataset=make_data_set(config, known=known, force=force),
        evaluation_sets=make_evaluation_sets(config, known=known, force=force),
        saved=config.as_saved(),
        known=known,
        cut=ordered.cut,
    )
    ordered.check_cut(config)
    return run


class OrderedRun(NamedTuple):
    """The part of a run that needs neither data nor devices."""

    ordering: OrderingOptions
    """The order as the user said it."""
    order: Order
    """The order of one replica."""
    cut: "ModelChunks | None"
    """The cut of a vision-language model; None: a language model, which is cut later."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the model, each of them counted once where the order has two copies."""
        return self.order.placement.num_chunks // (2 if self.order.graph.shared else 1)

    def check_cut(self, config: TrainConfig) -> None:
        """Raise ValueError where a language model cannot be cut for the order."""
        if self.cut is not None:
            return
        cut, num_layers = config.pipeline.cut, config.model.num_layers
        if cut.layers is not None and len(cut.layers) != self.num_chunks:
            raise ValueError(
                f"layout has {len(cut.layers)} chunks, and the stages and the schedule take {self.num_chunks}: give "
                "that many"
            )
        if cut.layers is None and num_layers % self.num_chunks and self.num_chunks <= num_layers + 2:
            example = ChunkLayout(layers=tuple(balanced_counts(num_layers, self.num_chunks)))
            raise ValueError(
                f"{num_layers} layers do not cut into {self.num_chunks} equal chunks: give layout, for example "
                f"'{example}', or auto"
            )
        with about_layout():
            plan_cut(
                num_layers,
                num_chunks=None if cut.layers else self.num_chunks,
                layers_per_chunk=cut.layers,
                embedding_in=cut.embedding_chunk,
                head_in=cut.head_chunk,
            )


def order_run(config: TrainConfig) -> OrderedRun:
    """Resolve the order of a run. Raises ValueError where it does not fit."""
    layout, ordering = config.pipeline, ordering_of(config.pipeline)
    check_meshes(config)
    share = microbatches_per_replica(config.data.num_microbatches, layout.replicas)
    if config.vision is not None:
        return _with_vision(config, ordering, share)
    _refuse_encoder_options(config)
    return OrderedRun(ordering, order_of(layout, ordering, share), None)


def ordering_of(layout: PipelineConfig) -> OrderingOptions:
    """Returns the order that a configuration asks for. Raises ValueError where it contradicts itself."""
    schedule, group_size = layout.schedule_and_group
    is_guided = schedule is not None and layout.hint in (None, SCHEDULE)
    return parse_ordering(
        schedule=schedule,
        group_size=group_size,
        consume=STRICT if layout.consume == STRICT else READY,
        hint=layout.hint,
        window=None if isinstance(layout.window, str) else layout.window,
        backward=layout.backward,
        foresight=False if layout.consume == READY and is_guided else None,
        offload=layout.offload,
        recompute=layout.recompute,
    )


def order_of(layout: PipelineConfig, ordering: OrderingOptions, num_microbatches: int) -> Order:
    """The order of a language model's chunks, with so many microbatches. Raises ValueError where it does not fit."""
    return ordering.resolve(
        num_stages=layout.num_stages,
        num_microbatches=num_microbatches,
        chunks_per_stage=layout.chunks_per_stage,
        placement=None if layout.is_auto or layout.cut.stages is None else Placement(layout.cut.stages),
    )


def _with_vision(config: TrainConfig, ordering: OrderingOptions, share: int) -> OrderedRun:
    """A model that is no chain brings its own graph, for which the table is built."""
    from rrfp_jax.commands.training.model_parts import cut_vision_language_model
    from rrfp_jax.programs.model_graph import model_graph

    check_fits_graph([ordering], has_graph=True)
    cut, layout = cut_vision_language_model(config), config.pipeline
    order = ordering.resolve(
        num_stages=layout.num_stages,
        num_microbatches=share,
        chunks_per_stage=layout.chunks_per_stage,
        placement=cut.placement,
        graph=replace(model_graph(cut.chunks, cut.edges, None), num_microbatches=share),
    )
    return OrderedRun(ordering, order, cut)


def _refuse_encoder_options(config: TrainConfig) -> None:
    layout = config.pipeline
    if layout.encoder_mesh is not None:
        raise ValueError("encoder_mesh is for models with an encoder: give a section vision, or leave it out")
    if layout.cut.encoder_layers is not None:
        raise ValueError(
            f"layout {layout.layout!r} has an encoder, and the model none: give a section vision, or E first"
        )


@contextmanager
def about_layout() -> Iterator[None]:
    """Names the key of the configuration in errors about the arguments that it becomes."""
    try:
        yield
    except ValueError as error:
        words = ("encoder_layers_per_chunk", "decoder_layers_per_chunk", "layers_per_chunk")
        text = reduce(lambda text, word: text.replace(word, "layout"), words, str(error))
        raise ValueError(text.replace("embedding_in", "E of layout").replace("head_in", "L of layout")) from None
