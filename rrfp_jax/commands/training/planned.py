"""A training run as far as it is known before JAX is loaded: its meshes, its order, its cut and its data, all checked.

A configuration that does not fit is refused here within a second. The devices, the memory and the other processes are
checked later.
"""

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.config_sources import whole_paths
from rrfp_jax.commands.training.data_sets import (
    KnownModel,
    RunData,
    check_init_from,
    known_model,
    make_data_set,
    make_evaluation_sets,
)
from rrfp_jax.core import READY, SCHEDULE, STRICT, Order
from rrfp_jax.core.replicas import microbatches_per_replica
from rrfp_jax.layout import CONTEXT, EXPERT, FSDP, TENSOR, describe_axes, with_axes_in_order
from rrfp_jax.models.cuts import ChunkLayout, SequenceSlices, balanced_counts, check_divides, check_size, plan_cut
from rrfp_jax.models.presets import decoder_sizes
from rrfp_jax.observe.trackers import check_installed, read_trackers
from rrfp_jax.schedules import Placement, schedule_names
from rrfp_jax.schedules.registry import is_schedule, schedule_entry
from rrfp_jax.training.run_config import ADAMW, PipelineConfig
from rrfp_jax.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from rrfp_jax.commands.training.model_parts import ModelChunks

_log = logging.getLogger(__name__)
_TILE = 128
"""Positions of a tile of attention's kernels; slices of sequences are whole tiles."""
_AXES = (TENSOR, FSDP, EXPERT, CONTEXT)
"""The axes over which something of a model is cut."""


class OrderedRun(NamedTuple):
    """The part of a run that needs neither data nor devices."""

    ordering: OrderingOptions
    """The order as the user said it."""
    order: Order
    """The order of one replica."""
    cut: "ModelChunks | None"
    """The cut of a model that is no chain; None: a chain, which is cut later."""

    @property
    def num_slices(self) -> int:
        """Slices in which sequences run through each chunk."""
        return max(map(len, self.order.graph.passes), default=1)

    @property
    def num_chunks(self) -> int:
        """Chunks of the model, each of them counted once where the order has two copies, or slices."""
        return self.order.placement.num_chunks // self.num_slices // (2 if self.order.graph.shared else 1)

    def chunk_remats(self, layout: PipelineConfig) -> tuple[str, ...]:
        """Returns the rematerialisation of every chunk. Raises ValueError for a list that does not fit."""
        slices, stages = self.num_slices, self.order.placement.stage_of_chunk
        remats = layout.chunk_remats(Placement(stages[::slices]))
        return tuple(remat for remat in remats for _ in range(slices))


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run whose order, cut and data are known and checked."""

    config: TrainConfig
    path: Path
    """The run directory."""
    ordered: OrderedRun
    dataset: RunData
    evaluation_sets: Mapping[str, RunData]
    """The evaluation sets of the run, by name."""
    saved: Mapping[str, Any]
    """The configuration as the run saves it, with whole paths, which mean the same wherever they are read."""
    known: KnownModel
    """The model that the run begins or goes on with."""

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
        if (table := self.ordered.order.table) is not None:
            agreed["pipeline"]["rows"] = table.fingerprint
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
    ordered = order_run(config)  # before the data, which may take minutes to read
    planned = PlannedRun(
        config=config,
        path=path,
        ordered=ordered,
        dataset=make_data_set(config, known=known, force=force),
        evaluation_sets=make_evaluation_sets(config, known=known, force=force),
        saved=whole_paths(config.as_dict()),
        known=known,
    )
    # Last: data that does not fit the model says more than a cut that does not.
    check_cut(config, ordered)
    return planned


# -- the order ---------------------------------------------------------------------------------------------------------


def order_run(config: TrainConfig) -> OrderedRun:
    """Resolve the order of a run. Raises ValueError where it does not fit."""
    layout, ordering = config.pipeline, ordering_of(config.pipeline)
    check_meshes(config)
    share = microbatches_per_replica(config.data.num_microbatches, layout.most_replicas)
    if layout.delay:
        _warn_of_delay(config, share)
    if config.vision is None:
        if layout.encoder_mesh is not None:
            raise ValueError("encoder_mesh is for models with an encoder: give a section vision, or leave it out")
        if layout.cut.encoder_layers is not None:
            raise ValueError(
                f"layout {layout.layout!r} has an encoder, and the model none: give a section vision, or E first"
            )
        in_shards = None
        if has_shards(layout):
            from rrfp_jax.commands.training.model_parts import cut_vocabulary  # loads JAX

            in_shards = cut_vocabulary(config)  # before the order, which knows less of the layout
        ordered = OrderedRun(ordering, order_of(layout, ordering, share), in_shards)
        ordered.chunk_remats(layout)  # refuses a list that does not fit
        return ordered
    # A model that is no chain brings its own graph, for which the table is built; to cut it takes JAX.
    from rrfp_jax.commands.studies import check_fits_graph
    from rrfp_jax.commands.training.model_parts import cut_vision_language_model
    from rrfp_jax.programs.model_graph import model_graph

    check_fits_graph([ordering], has_graph=True)
    cut = cut_vision_language_model(config)
    order = ordering.resolve(
        num_stages=layout.num_stages,
        num_microbatches=share,
        chunks_per_stage=layout.chunks_per_stage,
        placement=cut.placement,
        graph=replace(model_graph(cut.chunks, cut.edges, None), num_microbatches=share),
    )
    ordered = OrderedRun(ordering, order, cut)
    ordered.chunk_remats(layout)
    return ordered


def ordering_of(layout: PipelineConfig) -> OrderingOptions:
    """Returns the order that a configuration asks for. Raises ValueError where it contradicts itself."""
    schedule, number = layout.named_schedule[:2]
    if has_shards(layout):  # the number is that of stages to which one sends
        schedule, number = layout.schedule, None
    group_size = number if schedule and number is not None and schedule_entry(schedule).has_groups else None
    is_guided = schedule is not None and layout.hint in (None, SCHEDULE)
    return OrderingOptions(
        schedule=schedule,
        group_size=group_size,
        consume=STRICT if layout.consumption == STRICT else READY,
        hint=layout.hint,
        window=None if isinstance(layout.window, str) else layout.window,
        backward=layout.backward,
        foresight=False if layout.consumption == READY and is_guided else None,
        delay=layout.delay or None,
        offload=layout.offload,
        recompute=layout.recompute,
    )


def has_shards(layout: PipelineConfig) -> bool:
    """Whether the schedule has embedding and head on all stages, in shards of words."""
    name = layout.schedule
    return name is not None and is_schedule(name) and schedule_entry(name).shape.is_sharded


def order_of(layout: PipelineConfig, ordering: OrderingOptions, num_microbatches: int) -> Order:
    """Returns the order of a language model's chunks, with so many microbatches. Raises ValueError where it does not
    fit."""
    schedule, slices = layout.named_schedule[:2]
    if ordering.group_size is not None or has_shards(layout):  # the number is another
        slices = None
    elif slices is None and schedule in schedule_names() and schedule_entry(schedule).shape.is_sliced:
        slices = layout.num_stages
    placement = None if layout.is_auto or layout.cut.stages is None else Placement(layout.cut.stages)
    return ordering.resolve(
        num_stages=layout.num_stages,
        num_microbatches=num_microbatches,
        chunks_per_stage=layout.chunks_per_stage,
        slices=slices,
        placement=None if placement is None else placement.repeated(slices or 1),
    )


def sequence_slices(config: TrainConfig, number: int) -> SequenceSlices:
    """Returns the cut of sequences into slices that take equally long, unless they are to have equal lengths."""
    sizes, (schedule, _, is_equal) = decoder_sizes(config.model), config.pipeline.named_schedule
    model, num_layers = config.model, config.model.num_layers
    # The time of a window's pairs grows as that of all else does; of experts those count that compute a token.
    num_growing = sum(map(model.is_global, range(num_layers))) if model.sliding_window is not None else num_layers
    is_equal |= schedule == "slimpipe"
    pair_cost = 0.0 if is_equal else sizes.attention(0, 1).forward / sizes.layer(1, 0).forward
    pair_cost *= num_growing / num_layers
    return SequenceSlices(number, pair_cost, _TILE * config.pipeline.tensor)


def check_cut(config: TrainConfig, ordered: OrderedRun) -> None:
    """Raise ValueError where a chain cannot be cut for the order."""
    if ordered.cut is not None:
        return
    cut, num_layers, num_chunks = config.pipeline.cut, config.model.num_layers, ordered.num_chunks
    if cut.layers is not None and len(cut.layers) != num_chunks:
        raise ValueError(
            f"layout has {len(cut.layers)} chunks, and the stages and the schedule take {num_chunks}: give that many"
        )
    if cut.layers is None and num_layers % num_chunks and num_chunks <= num_layers + 2:
        example = ChunkLayout(layers=tuple(balanced_counts(num_layers, num_chunks)))
        raise ValueError(
            f"{num_layers} layers do not cut into {num_chunks} equal chunks: give layout, for example "
            f"'{example}', or auto"
        )
    with about_layout():
        plan_cut(
            num_layers,
            num_chunks=None if cut.layers else num_chunks,
            layers_per_chunk=cut.layers,
            embedding_in=cut.embedding_chunk,
            head_in=cut.head_chunk,
        )
    if config.row_length is not None:
        sequence_slices(config, ordered.num_slices).bounds(config.row_length)


@contextmanager
def about_layout() -> Iterator[None]:
    """Names the key of the configuration in errors about the arguments that it becomes."""
    try:
        yield
    except ValueError as error:
        words = ("encoder_layers_per_chunk", "decoder_layers_per_chunk", "layers_per_chunk")
        text = reduce(lambda text, word: text.replace(word, "layout"), words, str(error))
        raise ValueError(text.replace("embedding_in", "E of layout").replace("head_in", "L of layout")) from None


def _warn_of_delay(config: TrainConfig, num_microbatches: int) -> None:
    """Warn where steps that overlap cost more than they have to, or leave a bubble."""
    optimizer, num_stages = config.optimizer, config.pipeline.num_stages
    if optimizer.name == ADAMW and not (optimizer.arguments["feedback"] or optimizer.arguments["nesterov"]):
        _log.warning(
            "delay 1 cost AdamW 0.28 of loss at 360M parameters, and Muon 0.01 (arXiv 2606.30634): give optimizer.name "
            "muon, or optimizer.arguments {feedback: true} or {nesterov: true}"
        )
    # Two steps fill a pipeline that one microbatch takes num_stages slots to pass, in both directions.
    filled = 2 * num_microbatches / (num_stages + num_microbatches - 1)
    if filled < 1:
        _log.warning(
            "with %d microbatches for %d stages about %.0f%% of the time stays idle although steps overlap: give %d",
            *(num_microbatches, num_stages, 100 * (1 - filled), num_stages),
        )


# -- meshes ------------------------------------------------------------------------------------------------------------


def check_meshes(config: TrainConfig) -> None:
    """Raise ValueError for an axis over which nothing is cut, and where layers, experts, rows or positions do not
    divide. Warns of axes in an order that costs time.

    Only data whose microbatches all have the same rows are looked at. Where samples are packed, the rows of some
    microbatches may divide and those of others not; the latter are whole on every device.
    """
    layout, data = config.pipeline, config.data
    mesh = layout.mesh or {}
    _check_axes(mesh, "mesh")
    check_divides(config.model, mesh.get(TENSOR, 1), mesh.get(EXPERT, 1))
    if config.vision is not None:
        of_encoder = layout.encoder_mesh or mesh
        _check_axes(of_encoder, "encoder_mesh")
        check_size("vision.mlp_dim", config.vision.mlp_dim, of_encoder.get(TENSOR, 1))
    if config.row_length is None:
        return
    # The rows of a microbatch are cut over both of these axes, its positions over the third.
    cut, num_rows = tuple(axis for axis in mesh.items() if axis[0] in (FSDP, EXPERT)), data.microbatch_size
    num_parts = prod(size for _, size in cut)
    if num_rows % num_parts:
        larger = (num_rows + -num_rows % num_parts) * data.num_microbatches
        raise ValueError(
            f"a microbatch has {num_rows} {'row' if num_rows == 1 else 'rows'} (batch_size / num_microbatches), which "
            f"{'does' if num_rows == 1 else 'do'} not divide over {describe_axes(cut)}: give batch_size {larger}, "
            "fewer microbatches, or smaller axes"
        )
    length, size = config.row_length, mesh.get(CONTEXT, 1)
    if length % size:
        raise ValueError(
            f"length {length} does not divide over {CONTEXT} {size}: give length {length + -length % size}, or a size "
            f"of {CONTEXT} that divides {length}"
        )


def _check_axes(mesh: Mapping[str, int], key: str) -> None:
    odd = next((name for name, size in mesh.items() if name not in _AXES and size > 1), None)
    if odd is not None:
        near = difflib.get_close_matches(odd, _AXES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"{key} has an axis {odd!r}, over which nothing of this model is cut: {meant}take {', '.join(_AXES[:-1])} "
            f"or {_AXES[-1]}"
        )
    inner = [name for name, size in mesh.items() if size > 1]
    if TENSOR in inner[1:]:
        # Every layer adds up its activations over tensor, and the order of the keys says which devices do it together.
        _log.warning(
            "%s names %s after %s, so devices that are no neighbours, on several hosts perhaps, add up the activations "
            "of every layer: name %s first",
            *(key, TENSOR, " and ".join(inner[: inner.index(TENSOR)]), TENSOR),
        )
