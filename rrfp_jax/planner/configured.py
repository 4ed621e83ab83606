"""A run as its configuration lays it out: its forecast without its devices, and the cut for ``layout: auto``.

Costs come from the operations and bytes of the layers, on the record of a device. All ranks work a cut out alike. Where
a run goes on it keeps the cut that it has, as its directory tells.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import yaml

from rrfp_jax.commands.common.options import as_text
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.planned import has_shards, order_of, ordering_of
from rrfp_jax.core import Order, StepRules
from rrfp_jax.core.replicas import microbatches_per_replica
from rrfp_jax.costs import CostBook, CutModel, ModelCosts
from rrfp_jax.costs.devices import Device, device_of
from rrfp_jax.costs.forecast import StageForecast
from rrfp_jax.layout import describe_axes
from rrfp_jax.models.cuts import ChunkLayout, balanced_counts, plan_cut
from rrfp_jax.models.vision_config import DECODER, ENCODER, OWN_CHUNK
from rrfp_jax.planner.analytic_costs import analytic_book
from rrfp_jax.planner.best_cut import best_cut, even_cut
from rrfp_jax.planner.cut_problem import MemoryBudget
from rrfp_jax.planner.judging import Judge, draws_for
from rrfp_jax.planner.layer_kinds import MicrobatchRows
from rrfp_jax.planner.order_search import copies_of
from rrfp_jax.planner.records import Plan, PlanChoice, PlanShape, Ranked
from rrfp_jax.planner.search import forecast
from rrfp_jax.readable import parse_bytes
from rrfp_jax.record_files import read_yaml
from rrfp_jax.simulation import simulate
from rrfp_jax.storage import located, read_stored
from rrfp_jax.training.run_directory import CONFIG

_CHOICES = (
    *("microbatches", "microbatch_size", "stages", "replicas", "tensor", "chunks_per_stage", "schedules", "consume"),
    *("remat", "devices", "batch_size", "machine"),
)
_CPU = Device(
    name="cpu",
    title="a CPU",
    kind="cpu",
    flops=1e11,
    float32_flops=1e11,
    memory_gb_per_s=20,
    num_bytes=2**36,
    near_gb_per_s=2,
    far_gb_per_s=1,
)
"""One record for all CPUs: only how layers compare with each other decides a cut."""
_ACCELERATOR = "h100"
_SAME = ("num_stages", "chunks_per_stage", "schedule")
"""Fields that must be equal for an earlier cut to be kept."""
_STEPS, _MOST_TASKS = 3, 30_000


def _configured_book(config: TrainConfig, device: Device, rows: MicrobatchRows | None = None) -> CostBook:
    return analytic_book(
        config,
        device,
        microbatch_sizes=[config.data.microbatch_size],
        tensors=[config.pipeline.tensor],
        remats=config.pipeline.remats,
        rows=rows,
    )


def _costs_of(config: TrainConfig, book: CostBook, remat: str) -> ModelCosts:
    return book.at(microbatch_size=config.data.microbatch_size, tensor=config.pipeline.tensor, remat=remat)


# -- forecasts ---------------------------------------------------------------------------------------------------------


def check_as_configured(arguments: argparse.Namespace, config: TrainConfig | None) -> None:
    """Raises ValueError where options or the configuration ask for a part that such a forecast does not know."""
    if config is None:
        raise ValueError("--as-configured forecasts a configuration: give --config FILE.yaml")
    given = [name for name in _CHOICES if getattr(arguments, name) is not None]
    if given:
        flag = f"--{given[0].replace('_', '-')}"
        raise ValueError(
            f"{flag} is for a search, and --as-configured takes what the configuration says: leave one out"
        )
    layout = config.pipeline
    for name in ("offload", "recompute"):
        if getattr(layout, name) is not None:
            raise ValueError(f"--as-configured knows nothing of {name}: leave that out of the configuration")
    if layout.is_auto or isinstance(layout.window, str):
        raise ValueError(
            "--as-configured needs the cut, and the window in numbers: give layout and window so, or search"
        )


def configured_plan(config: TrainConfig, book: CostBook) -> Plan:
    """Returns the one choice that the configuration is, by these costs. Raises ValueError where it does not fit
    together."""
    one = _with_copy_times(_configured_choice(config, book))
    judge = Judge(book.noise, draws_for([one.shape]), seed=0)
    ranked = Ranked(choice=one, forecast=forecast(one, book, judge))
    notes = encoder_notes(config)
    if book.machine is not None:
        notes += ("devices and links are taken as alike, whatever the machine of the costs",)
    return Plan(ranking=(ranked,), is_decided=True, num_draws=judge.num_draws, evaluations=1, notes=notes)


def configured_memory(config: TrainConfig, device: Device, rows: MicrobatchRows) -> tuple[StageForecast, ...]:
    """Returns the memory of every stage on a device, worked out from the layers' sizes for microbatches of these
    rows."""
    return _configured_choice(config, _configured_book(config, device, rows)).memory


def encoder_notes(config: TrainConfig | None) -> tuple[str, ...]:
    """Returns a note where stages of the encoder have a mesh of their own."""
    mesh = None if config is None else config.pipeline.encoder_mesh
    if mesh is None:
        return ()
    return (f"the encoder's stages have a mesh of their own, {describe_axes(tuple(mesh.items()))}",)


def _configured_choice(config: TrainConfig, book: CostBook) -> PlanChoice:
    layout, ordering = config.pipeline, ordering_of(config.pipeline)
    if not isinstance(layout.replicas, int):
        raise ValueError("--as-configured knows stages of equally many replicas: give one number of replicas")
    share = microbatches_per_replica(config.data.num_microbatches, layout.replicas)
    num_encoder_chunks = 0
    if config.vision is None:
        order = order_of(layout, ordering, share)
    else:  # the order is that of a chain of the chunks, as if every microbatch had images
        from rrfp_jax.commands.training.model_parts import placement_of  # loads JAX

        placement, num_encoder_chunks = placement_of(layout)
        order = ordering.resolve(
            num_stages=layout.num_stages,
            num_microbatches=share,
            chunks_per_stage=layout.chunks_per_stage,
            placement=placement,
        )
    if order.graph.shared or order.graph.passes or has_shards(layout):
        raise ValueError(
            "--as-configured knows schedules of one direction, whole sequences and whole vocabularies: take another "
            "schedule"
        )
    shape = PlanShape(
        num_stages=layout.num_stages,
        num_microbatches=share,
        data=layout.replicas,
        tensor=layout.tensor,
        mesh=tuple(book.mesh.items()),
        microbatch_size=config.data.microbatch_size,
        remat=as_text(layout.remat),
    )
    counts, halved = _configured_counts(config, order.placement.num_chunks, num_encoder_chunks)
    costs = {remat: _costs_of(config, book, remat).in_halves(halved) for remat in layout.remats}
    if any(each.num_layers != sum(counts) for each in costs.values()) and halved:
        raise ValueError(
            "the layout has < and >, and these costs are of whole layers: leave them out, or take costs by --device"
        )
    cut = CutModel(
        costs=costs[layout.remats[0]],
        counts=counts,
        placement=order.placement,
        num_microbatches=share,
        split=bool(order.graph.split),
        replicas=layout.replicas,
        own_costs=tuple(costs[remat] for remat in layout.chunk_remats(order.placement)) if len(costs) > 1 else (),
    )
    followed = ordering.on(order.table)
    return PlanChoice(
        shape=shape,
        cut=cut,
        is_even=layout.layout is None,
        ordering=followed if followed.hint or order.table is not None else replace(followed, hint="bf"),
        order_name=layout.schedule or order.label,
    )


def _with_copy_times(one: PlanChoice) -> PlanChoice:
    """Returns the choice with copies to the host as long as the costs say. Raises ValueError where they do not."""
    table = one.ordering.schedule
    if table is None or not any(one.moved_of_stage):
        return one
    copies = copies_of(one.cut)
    if copies is None:
        raise ValueError("the schedule has copies to the host, and the costs no host_gb_per_s of links: add it")
    ops = tuple(replace(op, ms=copies[0].ms) for op in table.graph.ops)
    timed = replace(table, graph=replace(table.graph, ops=ops))
    return replace(one, ordering=replace(one.ordering, schedule=timed))


def _configured_counts(
    config: TrainConfig, num_chunks: int, num_encoder_chunks: int
) -> tuple[tuple[int, ...], set[int]]:
    """Returns the layers of each chunk, ends and parts of layers included, and the numbers of the layers that are cut,
    counted with the ends."""
    cut, where = config.pipeline.cut, config.pipeline.projector_in
    of_encoder: list[int] = []
    if config.vision is not None:
        of_encoder = [*(cut.encoder_layers or balanced_counts(config.vision.num_layers_run, num_encoder_chunks))]
        of_encoder[0] += 1
        of_encoder[-1] += where == ENCODER
        of_encoder += [1] * (where == OWN_CHUNK)
        num_chunks -= len(of_encoder)
    if cut.embedding_chunk != 0 or cut.head_chunk not in (-1, num_chunks - 1):
        raise ValueError(
            "--as-configured knows the embedding in the first chunk and the head in the last: put them there"
        )
    counts = cut.layers
    if config.vision is not None and counts is None:  # a decoder behind an encoder need not be cut evenly
        counts = tuple(balanced_counts(config.model.num_layers, num_chunks))
    plans = plan_cut(config.model.num_layers, num_chunks=None if counts else num_chunks, layers_per_chunk=counts)
    first, *others = (plan.embedding + len(plan.layers) + plan.head for plan in plans)
    before = 1 if config.vision is None else config.vision.num_layers_run + 3  # patches, projector, embedding
    halved = {before + plan.layers[-1] for plan in plans if plan.ends_inside}
    return (*of_encoder, first + (config.vision is not None and where == DECODER), *others), halved


# -- layout: auto ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ResolvedCut:
    """A configuration whose cut is known, and lines that tell it."""

    config: TrainConfig
    lines: tuple[str, ...] = ()


def resolve_auto_cut(config: TrainConfig, *, fresh: bool = False) -> ResolvedCut:
    """Returns the configuration with the numbers of layers in place of ``auto``; any other one as it is.

    ``fresh``: a cut in the run directory does not count. Raises ValueError, with the remedy, where no cut fits.
    """
    pipeline = config.pipeline
    if not pipeline.is_auto:
        return ResolvedCut(config=config)
    given = [name for name in ("chunks_per_stage", "schedule") if getattr(pipeline, name) is not None]
    if config.vision is not None and given:
        raise ValueError(
            "layout auto finds which stages the encoder has, a chunk on each and the projector on the last: leave "
            f"{given[0]} out (null), or give the layout"
        )
    if not fresh and (kept := _kept(config)) is not None:
        return ResolvedCut(
            config=_with_layout(config, kept), lines=(f"layout auto: {kept}, as this run has it already",)
        )
    if not isinstance(pipeline.replicas, int):
        raise ValueError("layout auto finds a cut for stages of equally many replicas: give such, or the layout")
    order = order_of(
        pipeline, ordering_of(pipeline), microbatches_per_replica(config.data.num_microbatches, pipeline.replicas)
    )
    if len(pipeline.remats) > 1:
        raise ValueError("layout auto finds a cut for one remat on all stages: give one, or the layout")
    if order.graph.shared or order.graph.passes or has_shards(pipeline):
        raise ValueError(
            "layout auto is for models that run in one direction, in whole sequences, with whole vocabularies: give "
            "the layout, or another schedule"
        )
    book = _book(config)
    costs = _costs_of(config, book, pipeline.remats[0])
    number, split = order.graph.num_microbatches, bool(order.graph.split)
    memory, limit = None, pipeline.memory_limit
    if limit is not None and not isinstance(pipeline.window, str) and not order.graph.ops:
        limits = (parse_bytes(limit, "memory_limit") if isinstance(limit, str) else limit,) * pipeline.num_stages
        memory = MemoryBudget.of_order(order, limits)
    even = even_cut(costs, order.placement, number, split=split, replicas=pipeline.replicas)
    best = best_cut(costs, order.placement, number, split=split, memory=memory, replicas=pipeline.replicas)
    lines = _choice_in_words(book, order, lambda cut: str(_layout_of(config, cut)), even, best)
    return ResolvedCut(config=_with_layout(config, _layout_of(config, best)), lines=lines)


def _book(config: TrainConfig) -> CostBook:
    return _configured_book(config, _CPU if config.run.platform == "cpu" else device_of(_ACCELERATOR))


def _kept(config: TrainConfig) -> ChunkLayout | None:
    """Returns the cut of the run in its directory, if that is one for the same chunks of the same model."""
    if config.run.run_dir is None:
        return None
    asked: dict[str, Any] = config.as_dict()["pipeline"]
    try:
        saved = read_yaml(read_stored(located(config.run.run_dir) / CONFIG)[0].decode())["pipeline"]
        layout = ChunkLayout.parse(saved["layout"])
        is_same = all(saved[name] == asked[name] for name in _SAME)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, AttributeError, TypeError, ValueError):
        return None
    encoder = None if config.vision is None else config.vision.num_layers_run
    of_encoder = None if layout.encoder_layers is None else sum(layout.encoder_layers)
    fits = sum(layout.layers or ()) == config.model.num_layers and of_encoder == encoder
    return layout if is_same and fits else None


def _layout_of(config: TrainConfig, cut: CutModel) -> ChunkLayout:
    """Returns the layers of each chunk, without the ends of encoder and decoder."""

    def counts(first: int, stop: int) -> tuple[int, ...]:
        inner = range(first + 1, stop - 1)
        return tuple(sum(layer in inner for layer in range(*each)) for each in cut.bounds if first <= each[0] < stop)

    start = 0 if config.vision is None else config.vision.num_layers_run + 2
    return ChunkLayout(layers=counts(start, cut.bounds[-1][1]), encoder_layers=counts(0, start) or None)


def _with_layout(config: TrainConfig, layout: ChunkLayout) -> TrainConfig:
    return replace(config, pipeline=replace(config.pipeline, layout=str(layout)))


def _choice_in_words(
    book: CostBook, order: Order, counts: Callable[[CutModel], str], even: CutModel, best: CutModel
) -> tuple[str, ...]:
    """Returns two lines: the cut that was chosen, and the reason."""
    source = ", ".join(filter(None, (book.source, f"for {book.device}" if book.device else "")))
    chosen = f"layout auto: {counts(best)}; costs: {source or 'of a file'}"
    best_share, even_share = (max(cut.stage_work_ms) / sum(cut.stage_work_ms) for cut in (best, even))
    if best.counts == even.counts:
        return (chosen, f"the fullest stage has {best_share:.1%} of the work: no cut is better than the even one")
    told = (
        f"the fullest stage has {best_share:.1%} of the work, and {even_share:.1%} with "
        f"{counts(even)}: a step is expected to take {_step_ms(order, best) / _step_ms(order, even):.1%} of "
        "that cut's"
    )
    return chosen, told


def _step_ms(order: Order, cut: CutModel) -> float:
    """Returns a simulated step in this order; for many tasks the fullest stage's part of it."""
    tasks = cut.graph.num_chunks * cut.num_microbatches * (3 if cut.split else 2)
    if tasks > _MOST_TASKS:
        return max(cut.stage_work_ms)
    steps = min(_STEPS, _MOST_TASKS // tasks)
    run = simulate(order.arbiters(StepRules()), cut.simulated_costs(), machine=cut.machine, num_steps=steps)
    return run.step_ms[-1]
