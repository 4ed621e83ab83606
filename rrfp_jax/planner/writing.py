"""A choice as a configuration that ``rrfp train`` runs as it is, the table of a searched order in a file beside it.

The written configuration is read back as ``train`` reads it and compared with the choice, so that a forecast is always
that of the run: the same tasks in the same rows on the same stages."""

import os
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.planned import order_of, ordering_of
from rrfp_jax.core import STRICT, Order
from rrfp_jax.core.replicas import ReduceWay
from rrfp_jax.costs.cut_model import cut_in_words, letters_of
from rrfp_jax.layout import with_tensor
from rrfp_jax.models.cuts import ChunkLayout
from rrfp_jax.observe.output_files import check_file, replacing
from rrfp_jax.planner.records import PlanChoice, Ranked
from rrfp_jax.planner.report import milliseconds, order_in_words
from rrfp_jax.readable import format_bytes
from rrfp_jax.schedules import ScheduleTable, looped, schedule_names, write_csv
from rrfp_jax.training.run_config import FORESIGHT_ORDER, PipelineConfig

_LAYERS, _OF_ENCODERS = {"E": 0, "L": 0, "<": 0.5, ">": 0.5}, "Pvp"
"""How many layers a letter is, others than 1; and the letters of encoders."""


@dataclass(frozen=True)
class Written:
    """The files of a choice."""

    config: Path
    table: Path | None
    """None: the order has a name."""


def check_writable(config: TrainConfig, path: Path) -> None:
    """Raises ValueError, before the search, where a plan for this configuration cannot be written to ``path``."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(f"write {str(path)!r}: let the name end in .yaml")
    check_file(path, "write")
    check_file(table_path(path), "the order's table")
    if config.vision is not None:
        raise ValueError(
            "a plan of a model with an encoder cannot be written as a configuration: leave --write out, and give "
            "layout the cut that the report prints"
        )
    if config.row_length is None:
        raise ValueError(
            f"a plan is written for fixed microbatches, and data of kind {config.data_kind} makes its own: leave "
            "--write out"
        )


def table_path(path: Path) -> Path:
    """Returns the path of the table of a searched order: ``best.order.csv`` beside ``best.yaml``."""
    return path.with_name(f"{path.stem}.order.csv")


def write_choice(config: TrainConfig, ranked: Ranked, path: Path) -> Written:
    """Writes a choice for the model, data and optimizer of ``config``; raises ValueError where its layers are
    others."""
    choice = ranked.choice
    layout = replace(config.pipeline, **_sizes(config, choice), **_order(choice), layout=_layout(config, choice))
    table = _table(choice) if choice.ordering.follows_table else None
    has_name = choice.order_name in schedule_names() and not choice.is_searched
    named = replace(layout, schedule=choice.order_name if has_name else None)
    written = Written(path, None)
    if table is not None and not (has_name and _is_same(named, choice)):
        written = Written(path, table_path(path))
        with replacing(table_path(path)) as temporary:
            write_csv(table, temporary, signed=True)
        named = replace(layout, schedule=os.fspath(table_path(path)), chunks_per_stage=None)
    if not _is_same(named, choice):
        raise RuntimeError(f"{order_in_words(choice)} would be read from {path} as another order than was planned")
    shape = choice.shape
    num_microbatches = shape.num_microbatches * shape.data
    data: Any = replace(config.data, batch_size=shape.batch_size, num_microbatches=num_microbatches)
    optimizer = replace(config.optimizer, shard=config.optimizer.shard and shape.data > 1 and not shape.replicas)
    changed: dict[str, Any] = {"pipeline": named, "optimizer": optimizer, "data": data}
    if choice.devices:
        changed["run"] = replace(config.run, devices=_devices(choice, by_replica=named.by_messages))
    text = replace(config, **changed).as_yaml()
    with replacing(path) as temporary:
        temporary.write_text(f"{_head(ranked)}{text}", encoding="utf-8")
    return written


def _head(ranked: Ranked) -> str:
    """Returns the comment at the head of the file."""
    forecast, shape = ranked.forecast, ranked.choice.shape
    return (
        f"# Written by rrfp plan for {shape.num_devices} devices: {cut_in_words(ranked.choice.cut, short=True)}, "
        f"{order_in_words(ranked.choice)}.\n"
        f"# Forecast: {milliseconds(forecast.step_ms)} ms per step, and "
        f"{format_bytes(ranked.choice.peak_bytes)} on the fullest stage.\n"
    )


def _devices(choice: PlanChoice, *, by_replica: bool) -> tuple[int, ...]:
    """Returns all devices in the order in which a run's units take them: stage by stage, or replica by replica."""
    numbers = [list(of_stage) for of_stage in choice.devices]
    if not by_replica:
        return tuple(number for of_stage in numbers for number in of_stage)
    size = choice.shape.num_devices // (sum(choice.shape.replicas) or choice.shape.num_stages * choice.shape.data)
    firsts = range(0, choice.shape.data * size, size)
    return tuple(number for first in firsts for of_stage in numbers for number in of_stage[first : first + size])


def _layout(config: TrainConfig, choice: PlanChoice) -> str | None:
    """Returns the cut, and the stages of its chunks unless a table or the usual turns say them; None: an even cut."""
    cut, letters = choice.cut, letters_of(choice.cut.costs.layers)
    chunks = [[letters[name] for name in cut.costs.layers[start:stop]] for start, stop in cut.bounds]
    counts = tuple(sum(_LAYERS.get(letter, 1) for letter in chunk) for chunk in chunks)
    if sum(counts) != config.model.num_layers or any(letter in _OF_ENCODERS for chunk in chunks for letter in chunk):
        raise ValueError(
            f"the costs have {sum(counts)} layers between the ends, and the model of the configuration "
            f"{config.model.num_layers}: give the costs of this model"
        )
    embeds = [number for number, chunk in enumerate(chunks) if "E" in chunk]
    heads = [number for number, chunk in enumerate(chunks) if "L" in chunk]
    layout = ChunkLayout(
        layers=counts,
        embedding_chunk=embeds[0] if embeds else 0,
        head_chunk=-1 if not heads or heads[0] == len(chunks) - 1 else heads[0],
        stages=None if _says_stages(choice) else cut.placement.stage_of_chunk,
    )
    is_even = layout == ChunkLayout(layers=(counts[0],) * len(counts))
    return None if is_even else str(layout)


def _says_stages(choice: PlanChoice) -> bool:
    """Returns whether the stages of the chunks need not be written."""
    placement = choice.cut.placement
    is_looped = placement == looped(placement.num_stages, placement.num_chunks // placement.num_stages)
    return is_looped or choice.ordering.schedule is not None


def _sizes(config: TrainConfig, choice: PlanChoice) -> dict[str, Any]:
    """Returns the numbers of stages, replicas, devices and chunks."""
    shape = choice.shape
    each = choice.cut.placement.num_chunks // shape.num_stages
    has_mesh = shape.mesh or shape.tensor > 1
    return {
        "num_stages": shape.num_stages,
        "replicas": shape.replicas or shape.data,
        **({"reduce": ReduceWay.MESSAGES.value} if shape.replicas else {}),
        "mesh": with_tensor(config.pipeline.mesh, shape.tensor) if has_mesh else None,
        "chunks_per_stage": each if each > 1 and _says_stages(choice) else None,
        "remat": choice.remats[0] if len(set(choice.remats)) == 1 else choice.remats,
    }


def _order(choice: PlanChoice) -> dict[str, Any]:
    ordering = choice.ordering
    windows = ordering.window
    if isinstance(windows, tuple) and len(list(groupby(windows))) == 1:
        windows = windows[0]
    has_foresight = ordering.consume != STRICT and not (ordering.is_guided and ordering.foresight is False)
    return {
        "schedule": None,
        "consume": FORESIGHT_ORDER if has_foresight else ordering.consume,
        "hint": ordering.hint,
        "window": windows,
        "offload": None,
        "recompute": None,
        "backward": ordering.backward,
    }


def _table(choice: PlanChoice) -> ScheduleTable:
    """Returns the table that the stages follow."""
    table = choice.ordering.schedule
    assert table is not None
    return table.hint or table if choice.ordering.is_guided else table


def _is_same(layout: PipelineConfig, choice: PlanChoice) -> bool:
    """Returns whether a run with this section follows the choice's order."""
    try:
        order = order_of(layout, ordering_of(layout), choice.shape.num_microbatches)
    except ValueError:
        return False
    return _told(order) == _told(choice.ordering.resolve(choice.cut.placement, choice.cut.graph))


def _told(order: Order) -> tuple[Any, ...]:
    """Returns all of an order that decides when each task runs."""
    followed = [(one.is_strict, one.hint.name, one.hint.row) for one in order.consumptions]
    bounds = order.windows, order.footprints, order.foresight, order.read_ahead
    # No file says how long copies take, and no plan has the functions that make them.
    graph = replace(order.graph, ops=tuple(replace(op, ms=0.0, run=None) for op in order.graph.ops))
    return order.placement, graph, bounds, followed
