"""``layout: auto``: the best cut of a run's model, found at its start.

Costs come from the operations and bytes of the layers. All ranks work the cut out alike. Where a run goes on it keeps
the cut that it has, as its directory tells.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rrfp_jax.byte_sizes import parse_bytes
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.planned import order_of, ordering_of
from rrfp_jax.core import Order, StepRules
from rrfp_jax.core.replicas import microbatches_per_replica
from rrfp_jax.costs import CostBook, CutModel
from rrfp_jax.costs.devices import Device, device_of
from rrfp_jax.models.cuts import ChunkLayout
from rrfp_jax.planner.analytic_costs import analytic_book
from rrfp_jax.planner.best_cut import best_cut, even_cut
from rrfp_jax.planner.cut_problem import MemoryBudget
from rrfp_jax.record_files import read_record, read_yaml
from rrfp_jax.simulation import simulate
from rrfp_jax.training.run_directory import CONFIG

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


@dataclass(frozen=True, kw_only=True)
class ResolvedCut:
    """A configuration whose cut is known, and lines that tell it."""

    config: TrainConfig
    lines: tuple[str, ...] = ()


def resolve_auto_cut(config: TrainConfig, *, fresh: bool = False) -> ResolvedCut:
    """Returns the configuration with the numbers of layers in place of ``auto``; any other one as it is.

    ``fresh``: a cut in the run directory does not count. Raises ValueError, with the remedy, where no cut fits.
    """
    if not config.pipeline.is_auto:
        return ResolvedCut(config=config)
    _check_is_free(config)
    if not fresh and (kept := _kept(config)) is not None:
        return ResolvedCut(
            config=_with_layout(config, kept), lines=(f"layout auto: {kept}, as this run has it already",)
        )
    share = microbatches_per_replica(config.data.num_microbatches, config.pipeline.replicas)
    order = order_of(config.pipeline, ordering_of(config.pipeline), share)
    if order.graph.shared:
        raise ValueError("layout auto is for models that run in one direction: give the layout, or another schedule")
    book = _book(config)
    even, best = _cuts(config, book, order)
    return ResolvedCut(
        config=_with_layout(config, _layout_of(config, best)),
        lines=choice_in_words(book, order, lambda cut: str(_layout_of(config, cut)), even, best),
    )


def _check_is_free(config: TrainConfig) -> None:
    """Raises ValueError where other keys say already which stages the encoder has."""
    layout = config.pipeline
    if config.vision is None:
        return
    for name in ("chunks_per_stage", "schedule"):
        if getattr(layout, name) is not None:
            raise ValueError(
                "layout auto finds which stages the encoder has, a chunk on each and the projector on the last: leave "
                f"{name} out (null), or give the layout"
            )


def _kept(config: TrainConfig) -> ChunkLayout | None:
    """Returns the cut of the run in its directory, if that is one for the same chunks of the same model."""
    if config.run.run_dir is None:
        return None
    asked: dict[str, Any] = config.as_dict()["pipeline"]
    try:
        saved = read_yaml(read_record(Path(config.run.run_dir) / CONFIG)[0].decode())["pipeline"]
        layout = ChunkLayout.parse(saved["layout"])
        is_same = all(saved[name] == asked[name] for name in _SAME)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, AttributeError, TypeError, ValueError):
        return None
    encoder = None if config.vision is None else config.vision.num_layers_run
    fits = sum(layout.layers or ()) == config.model.num_layers
    return layout if is_same and fits and _total(layout.encoder_layers) == encoder else None


def _total(counts: tuple[int, ...] | None) -> int | None:
    return None if counts is None else sum(counts)


def _book(config: TrainConfig) -> CostBook:
    return analytic_book(
        config,
        _CPU if config.run.platform == "cpu" else device_of(_ACCELERATOR),
        microbatch_sizes=[config.data.microbatch_size],
        tensors=[config.pipeline.tensor],
        remats=[config.pipeline.remat],
    )


def _cuts(config: TrainConfig, book: CostBook, order: Order) -> tuple[CutModel, CutModel]:
    """Returns the even and the best cut."""
    layout = config.pipeline
    costs = book.at(microbatch_size=config.data.microbatch_size, tensor=layout.tensor, remat=layout.remat)
    number, split = order.graph.num_microbatches, bool(order.graph.split)
    even = even_cut(costs, order.placement, number, split=split, replicas=layout.replicas)
    room = _room(config, order)
    return even, best_cut(costs, order.placement, number, split=split, memory=room, replicas=layout.replicas)


def _room(config: TrainConfig, order: Order) -> MemoryBudget | None:
    """Returns the budget where the configuration limits memory and says in numbers how much stages hold."""
    limit, layout = config.pipeline.memory_limit, config.pipeline
    if limit is None or isinstance(layout.window, str) or order.graph.ops:
        return None
    limits = (parse_bytes(limit, "memory_limit") if isinstance(limit, str) else limit,) * layout.num_stages
    return MemoryBudget.of_order(order, limits)


def _layout_of(config: TrainConfig, cut: CutModel) -> ChunkLayout:
    """Returns the layers of each chunk, without the ends of encoder and decoder."""

    def counts(first: int, stop: int) -> tuple[int, ...]:
        inner = range(first + 1, stop - 1)
        return tuple(sum(layer in inner for layer in range(*each)) for each in cut.bounds if first <= each[0] < stop)

    start = 0 if config.vision is None else config.vision.num_layers_run + 2
    return ChunkLayout(layers=counts(start, cut.bounds[-1][1]), encoder_layers=counts(0, start) or None)


def _with_layout(config: TrainConfig, layout: ChunkLayout) -> TrainConfig:
    return replace(config, pipeline=replace(config.pipeline, layout=str(layout)))


_STEPS, _MOST_TASKS = 3, 30_000


def choice_in_words(
    book: CostBook, order: Order, counts: Callable[[CutModel], str], even: CutModel, best: CutModel
) -> tuple[str, ...]:
    """Returns two lines: the cut that was chosen, and the reason."""
    source = ", ".join(filter(None, (book.source, f"for {book.device}" if book.device else "")))
    chosen = f"layout auto: {counts(best)}; costs: {source or 'of a file'}"
    if best.counts == even.counts:
        return (chosen, f"the fullest stage has {_share(best):.1%} of the work: no cut is better than the even one")
    told = (
        f"the fullest stage has {_share(best):.1%} of the work, and {_share(even):.1%} with "
        f"{counts(even)}: a step is expected to take {_step_ms(order, best) / _step_ms(order, even):.1%} of "
        "that cut's"
    )
    return chosen, told


def _share(cut: CutModel) -> float:
    """Returns the share of the fullest stage in the work of all."""
    return max(cut.stage_work_ms) / sum(cut.stage_work_ms)


def _step_ms(order: Order, cut: CutModel) -> float:
    """Returns a simulated step in this order; for many tasks the fullest stage's part of it."""
    tasks = cut.graph.num_chunks * cut.num_microbatches * (3 if cut.split else 2)
    if tasks > _MOST_TASKS:
        return max(cut.stage_work_ms)
    steps = min(_STEPS, _MOST_TASKS // tasks)
    return simulate(order.arbiters(StepRules()), cut.simulated_costs(), machine=cut.machine, num_steps=steps).step_ms[
        -1
    ]
