"""A choice as a configuration that ``rrfp train`` runs as it is, the table of a searched order in a file beside it.

The written configuration is read back as ``train`` reads it and compared with the choice, so that a forecast is always
that of the run: the same tasks in the same rows on the same stages."""

import os
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.commands.training.planned import order_of, ordering_of
from rrfp_jax.core import Order
from rrfp_jax.costs.cut_model import cut_in_words, letters_of
from rrfp_jax.layout import with_tensor
from rrfp_jax.observe.output_files import check_file, replacing
from rrfp_jax.planner.records import PlanChoice, Ranked
from rrfp_jax.planner.report import milliseconds, order_in_words
from rrfp_jax.schedules import ScheduleTable, looped, schedule_names, write_csv
from rrfp_jax.training.run_config import PipelineConfig

_ENDS, _OF_ENCODERS = "EL", "Pvp"


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
            "encoder_layers_per_chunk, layers_per_chunk and stage_of_chunk what the report says"
        )
    if config.row_length is None:
        raise ValueError(
            f"a plan is written for fixed microbatches, and {config.data_section} makes its own: leave --write out"
        )


def table_path(path: Path) -> Path:
    """Returns the path of the table of a searched order: ``best.order.csv`` beside ``best.yaml``."""
    return path.with_name(f"{path.stem}.order.csv")


def write_choice(config: TrainConfig, ranked: Ranked, path: Path) -> Written:
    """Writes a choice for the model, data and optimizer of ``config``; raises ValueError where its layers are
    others."""
    choice = ranked.choice
    layout = replace(config.pipeline, **_cut(config, choice), **_placement(config, choice), **_order(choice))
    table = None if choice.offload is not None or not choice.ordering.follows_table else _table(choice)
    has_name = choice.order_name in schedule_names() and not choice.is_searched
    named = replace(layout, schedule=choice.order_name if has_name else None)
    written = Written(path, None)
    if table is not None and not (has_name and _is_same(named, choice)):
        written = Written(path, table_path(path))
        with replacing(table_path(path)) as temporary:
            write_csv(table, temporary)
        named = replace(
            layout, schedule=os.fspath(table_path(path)), schedule_hash=table.fingerprint, chunks_per_stage=None
        )
    if not _is_same(named, choice):
        raise RuntimeError(f"{order_in_words(choice)} would be read from {path} as another order than was planned")
    shape = choice.shape
    num_microbatches = shape.num_microbatches * shape.data
    data: Any = replace(config.data_set, batch_size=shape.batch_size, num_microbatches=num_microbatches)
    changed: dict[str, Any] = {"pipeline": named, config.data_section: data}
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
        f"# Forecast: {milliseconds(forecast.step_ms)} ms per step, and {format_bytes(forecast.peak_bytes)} on the "
        "fullest stage.\n"
    )


def _cut(config: TrainConfig, choice: PlanChoice) -> dict[str, Any]:
    """Returns the fields that say which layers each chunk has."""
    cut, letters = choice.cut, letters_of(choice.cut.costs.layers)
    chunks = [[letters[name] for name in cut.costs.layers[start:stop]] for start, stop in cut.bounds]
    counts = tuple(sum(letter not in _ENDS for letter in chunk) for chunk in chunks)
    if sum(counts) != config.model.num_layers or any(letter in _OF_ENCODERS for chunk in chunks for letter in chunk):
        raise ValueError(
            f"the costs have {sum(counts)} layers between the ends, and the model of the configuration "
            f"{config.model.num_layers}: give the costs of this model"
        )
    embeds = [number for number, chunk in enumerate(chunks) if "E" in chunk]
    heads = [number for number, chunk in enumerate(chunks) if "L" in chunk]
    is_even = len(set(counts)) == 1
    return {
        "layers_per_chunk": None if is_even else counts,
        "costs": None,
        "embedding_chunk": embeds[0] if embeds else 0,
        "head_chunk": -1 if not heads or heads[0] == len(chunks) - 1 else heads[0],
        "remat": choice.shape.remat,
    }


def _placement(config: TrainConfig, choice: PlanChoice) -> dict[str, Any]:
    """Returns the fields that say where the chunks lie, unless a table says it."""
    placement, shape = choice.cut.placement, choice.shape
    each = placement.num_chunks // shape.num_stages
    is_looped = placement == looped(shape.num_stages, each)
    says_it = choice.ordering.schedule is not None
    return {
        "num_stages": shape.num_stages,
        "data": shape.data,
        "tensor": 1 if shape.mesh else shape.tensor,
        "mesh": with_tensor(config.pipeline.mesh, shape.tensor) if shape.mesh else None,
        "shard_optimizer": config.pipeline.shard_optimizer and shape.data > 1,
        "chunks_per_stage": each if each > 1 and (is_looped or says_it) else None,
        "stage_of_chunk": None if is_looped or says_it else placement.stage_of_chunk,
    }


def _order(choice: PlanChoice) -> dict[str, Any]:
    ordering = choice.ordering
    windows = ordering.window
    if isinstance(windows, tuple) and len(list(groupby(windows))) == 1:
        windows = windows[0]
    return {
        "schedule": None,
        "schedule_hash": None,
        "group_size": None,
        "consume": ordering.consume,
        "hint": ordering.hint,
        "window": None if choice.offload is not None else windows,
        "footprint": ordering.footprint,
        "foresight": None if ordering.foresight is None else bool(ordering.foresight),
        "read_ahead": ordering.read_ahead,
        "offload": choice.offload,
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
    return order.placement, order.graph, bounds, followed
