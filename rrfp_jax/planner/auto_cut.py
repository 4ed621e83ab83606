"""``layers_per_chunk: auto``: the best cut of a run's model, found at its start.

Costs come from a file (``pipeline.costs``), else from the operations and bytes of the layers. All ranks work the cut
out alike. Where a run goes on it keeps the cut that it has, as its directory tells.
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
from rrfp_jax.models.encoder_config import ENCODER
from rrfp_jax.planner.analytic_costs import analytic_book
from rrfp_jax.planner.best_cut import best_cut, even_cut
from rrfp_jax.planner.cut_problem import MemoryBudget
from rrfp_jax.planner.plan_request import costs_of_model
from rrfp_jax.record_files import read_record
from rrfp_jax.simulation import simulate
from rrfp_jax.training.run_config import AUTO_CUT
from rrfp_jax.training.run_directory import CONFIG
from rrfp_jax.yaml_text import read_yaml

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
_SAME = (
    "num_stages",
    "chunks_per_stage",
    "stage_of_chunk",
    "schedule",
    "embedding_chunk",
    "head_chunk",
    "projector_in",
)
"""Fields that must be equal for an earlier cut to be kept."""
_Counts = dict[str, tuple[int, ...]]
"""Layers of each chunk by key of the configuration."""


@dataclass(frozen=True, kw_only=True)
class ResolvedCut:
    """A configuration whose cut is known, and lines that tell it."""

    config: TrainConfig
    lines: tuple[str, ...] = ()


def resolve_auto_cut(config: TrainConfig, *, fresh: bool = False) -> ResolvedCut:
    """Returns the configuration with the numbers of layers in place of ``auto``; any other one as it is.

    ``fresh``: a cut in the run directory does not count. Raises ValueError, with the remedy, where no cut fits.
    """
    if config.pipeline.layers_per_chunk != AUTO_CUT:
        return ResolvedCut(config=config)
    _refuse_other_ends(config)
    if not fresh and (kept := _kept(config)) is not None:
        return ResolvedCut(
            config=_with_counts(config, kept),
            lines=(f"layers_per_chunk auto: {_in_words(kept)}, as this run has it already",),
        )
    share = microbatches_per_replica(config.data_set.num_microbatches, config.pipeline.data)
    order = order_of(config.pipeline, ordering_of(config.pipeline), share)
    if order.graph.shared:
        raise ValueError(
            "layers_per_chunk auto is for models that run in one direction: give the numbers, or another schedule"
        )
    book = _book(config)
    even, best = _cuts(config, book, order)
    return ResolvedCut(
        config=_with_counts(config, _counts(config, best)),
        lines=choice_in_words(book, order, lambda cut: _in_words(_counts(config, cut)), even, best),
    )


def _refuse_other_ends(config: TrainConfig) -> None:
    layout = config.pipeline
    if layout.embedding_chunk != 0 or layout.head_chunk != -1:
        raise ValueError(
            "layers_per_chunk auto puts the embedding into the first chunk and the head into the last: leave "
            "embedding_chunk and head_chunk out, or give the numbers"
        )
    if config.vision is None:
        return
    given = [
        name
        for name in ("encoder_layers_per_chunk", "encoder_stages", "stage_of_chunk", "chunks_per_stage", "schedule")
        if getattr(layout, name) is not None
    ]
    if given or layout.projector_in != ENCODER:
        name = given[0] if given else "projector_in"
        raise ValueError(
            "layers_per_chunk auto finds which stages the encoder has, a chunk on each and the projector on the last: "
            f"leave {name} out (null), or give the numbers"
        )


def _kept(config: TrainConfig) -> _Counts | None:
    """Returns the cut of the run in its directory, if that is one for the same chunks of the same model."""
    if config.run.run_dir is None:
        return None
    wanted = {"layers_per_chunk": config.model.num_layers}
    if config.vision is not None:
        wanted["encoder_layers_per_chunk"] = config.vision.num_layers_run
    asked: dict[str, Any] = config.as_dict()["pipeline"]
    try:
        saved = read_yaml(read_record(Path(config.run.run_dir) / CONFIG)[0].decode())["pipeline"]
        counts = {name: tuple(map(int, saved[name])) for name in wanted}
        is_same = all(saved[name] == asked[name] for name in _SAME)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None
    return counts if is_same and all(sum(counts[name]) == number for name, number in wanted.items()) else None


def _book(config: TrainConfig) -> CostBook:
    if config.pipeline.costs is None:
        device = _CPU if config.run.platform == "cpu" else device_of(_ACCELERATOR)
        return analytic_book(
            config,
            device,
            microbatch_sizes=[config.data_set.microbatch_size],
            tensors=[_tensor(config)],
            remats=[config.pipeline.remat],
        )
    return costs_of_model(config.pipeline.costs, config)


def _cuts(config: TrainConfig, book: CostBook, order: Order) -> tuple[CutModel, CutModel]:
    """Returns the even and the best cut."""
    layout = config.pipeline
    try:
        costs = book.at(microbatch_size=config.data_set.microbatch_size, tensor=_tensor(config), remat=layout.remat)
    except ValueError as error:
        raise ValueError(f"costs {layout.costs}: {error}") from None
    number, split = order.graph.num_microbatches, bool(order.graph.split)
    even = even_cut(costs, order.placement, number, split=split, replicas=layout.data)
    room = _room(config, order)
    return even, best_cut(costs, order.placement, number, split=split, memory=room, replicas=layout.data)


def _tensor(config: TrainConfig) -> int:
    """Returns the number of devices that share a layer's matrices."""
    layout = config.pipeline
    return layout.tensor if layout.mesh is None else layout.mesh.get("tensor", 1)


def _room(config: TrainConfig, order: Order) -> MemoryBudget | None:
    """Returns the budget where the configuration limits memory and says in numbers how much stages hold."""
    limit, layout = config.pipeline.memory_limit, config.pipeline
    if limit is None or isinstance(layout.window, str) or order.graph.ops:
        return None
    limits = (parse_bytes(limit, "memory_limit") if isinstance(limit, str) else limit,) * layout.num_stages
    return MemoryBudget.of_order(order, limits)


def _counts(config: TrainConfig, cut: CutModel) -> _Counts:
    """Returns the layers of each chunk, without the ends of encoder and decoder."""
    start = 0 if config.vision is None else config.vision.num_layers_run + 2
    found: _Counts = {}
    for name, first, stop in (("encoder_layers_per_chunk", 0, start), ("layers_per_chunk", start, cut.bounds[-1][1])):
        chunks = [each for each in cut.bounds if first <= each[0] < stop]
        inner = range(first + 1, stop - 1)
        if chunks:
            found[name] = tuple(sum(layer in inner for layer in range(*each)) for each in chunks)
    return found


def _with_counts(config: TrainConfig, counts: _Counts) -> TrainConfig:
    layout: dict[str, Any] = {**counts, "costs": None}
    return replace(config, pipeline=replace(config.pipeline, **layout))


def _in_words(counts: _Counts) -> str:
    parts = {"encoder_layers_per_chunk": "encoder ", "layers_per_chunk": "decoder " if len(counts) > 1 else ""}
    return ", ".join(parts[name] + ",".join(map(str, each)) for name, each in counts.items())


_STEPS, _MOST_TASKS = 3, 30_000


def choice_in_words(
    book: CostBook, order: Order, counts: Callable[[CutModel], str], even: CutModel, best: CutModel
) -> tuple[str, ...]:
    """Returns two lines: the cut that was chosen, and the reason."""
    source = ", ".join(filter(None, (book.source, f"for {book.device}" if book.device else "")))
    chosen = f"layers_per_chunk auto: {counts(best)}; costs: {source or 'of a file'}"
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
