"""From measurements of one or several ways to run the stages to a :class:`CostBook`, for people and as plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import jax
from rich.console import Console

from rrfp_jax.byte_sizes import format_bytes
from rrfp_jax.commands.common.console import make_table
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.costs import CostBook, CostEntry, LayerCosts, LinkCosts
from rrfp_jax.costs.fitting import LayerTimes, fit_bytes, fit_links, fit_noise, fit_times
from rrfp_jax.costs.layer_costs import StageSetting
from rrfp_jax.planner.measuring import Measured, layers_here
from rrfp_jax.planner.model_layers import ModelLayers
from rrfp_jax.planner.small_cut import type_of_kind


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A book, and how well it fits the measurements."""

    book: CostBook
    off: Mapping[str, float] = field(default_factory=dict)
    """By kind how far layers added up are from the chunks that they make, as a share."""
    num_runs: int = 0
    """Number of runs of all tasks."""


def make_book(
    config: TrainConfig,
    measured: Mapping[StageSetting, Measured],
    *,
    source: str,
    links: LinkCosts | None = None,
) -> Profiled:
    """Returns the costs of a run's model; ``links`` where messages were not measured. Raises ValueError where a type of
    layer was not seen."""
    every, models = list(measured.values()), {setting: layers_here(config, setting) for setting in measured}
    model = next(iter(models.values()))
    chunks = [chunk for each in every for chunk in each.times]
    noise, fits = fit_noise(chunks), {setting: fit_times(each.times) for setting, each in measured.items()}
    if links is None:
        controls = [each.control_ms for each in every if each.control_ms is not None]
        links = fit_links((one for each in every for one in each.messages), max(controls, default=None))
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    host = [milliseconds for each in every for milliseconds in each.host_ms]
    book = CostBook(
        layers=model.layers,
        ends=model.ends,
        entries=tuple(
            CostEntry(types=_types(models[setting], fits[setting], measured[setting]), **setting._asdict())
            for setting in measured
        ),
        links=links,
        noise=noise,
        task_ms=median(fit.task_ms for fit in fits.values()) + (median(host) if host else 0.0),
        tokens_per_sample=model.tokens_per_sample,
        device=device.device_kind,
        device_bytes=None if limit is None else int(limit),
        source=source,
    )
    kinds = dict.fromkeys(kind for fit in fits.values() for kind in fit.off)
    off = {kind: max(fit.off.get(kind, 0.0) for fit in fits.values()) for kind in kinds}
    return Profiled(book=book, off=off, num_runs=sum(len(runs) for c in chunks for runs in c.runs_ms.values()))


def _types(model: ModelLayers, fit: LayerTimes, measured: Measured) -> dict[str, LayerCosts]:
    """Returns the costs by type. Where only whole backwards ran, all of one counts as input gradient, as in simulated
    recordings."""
    sizes, found = fit_bytes(measured.parts), {}
    for kind, medians in fit.types.items():
        name = type_of_kind(kind, model.types)
        has_halves = bool({"I", "W"} & medians.keys())
        layer = model.types[name]
        found[name] = LayerCosts(
            forward_ms=medians["F"],
            input_gradient_ms=medians.get("I", 0.0) if has_halves else medians.get("B", 0.0),
            weight_gradient_ms=medians.get("W", 0.0),
            backward_ms=medians.get("B"),
            update_ms=medians["U"],
            flops=sum(layer.sizes.flops.tasks(trains=layer.trains, has_backward=layer.has_backward)),
            **sizes[kind],
        )
    return found


_COLUMNS = ("forward_ms", "input_gradient_ms", "weight_gradient_ms", "backward_ms", "update_ms")


def profile_as_json(profiled: Profiled) -> dict[str, Any]:
    """Returns the profile as plain data."""
    book = profiled.book
    return {
        "entries": [asdict(entry) for entry in book.entries],
        "task_ms": book.task_ms,
        "links": asdict(book.links),
        "noise": asdict(book.noise),
        "layers_off": dict(profiled.off),
        "runs": profiled.num_runs,
        "device": book.device,
    }


def show_profile(console: Console, profiled: Profiled) -> None:
    """Prints a table for each way to run, and the figures that are common to all."""
    book = profiled.book
    headings = ("F ms", "I ms", "W ms", "B ms", "U ms", "fixed", "stash", "owed", "temporaries")
    for entry in book.entries:
        table = make_table(entry.words, "layer", *headings, numeric=True)
        for name, costs in entry.types.items():
            times = [getattr(costs, column) for column in _COLUMNS]
            sizes = (
                costs.fixed_bytes,
                costs.stash_bytes + costs.kept_bytes,
                costs.owed_bytes,
                costs.temporaries_bytes + costs.more_temporaries_bytes,
            )
            cells = ["-" if ms is None else f"{ms:.3f}" for ms in times]
            table.add_row(name, *cells, *map(format_bytes, sizes))
        console.print(table)
    for line in _words(profiled):
        console.print(line, soft_wrap=True)


def _words(profiled: Profiled) -> list[str]:
    book, off = profiled.book, profiled.off
    sigma = ", ".join(f"{kind} {value:.3f}" for kind, value in book.noise.sigma.items()) or "not known"
    links, rate = book.links, book.links.gb_per_s
    told = [f"{profiled.num_runs} tasks were timed; every task takes {book.task_ms:.3f} ms beside its layers"]
    if off:
        told[0] += "; layers added up are off by " + ", ".join(f"{kind} {share:.1%}" for kind, share in off.items())
    tail = (
        f"; {book.noise.tail:.1%} of the tasks take {book.noise.tail_factor:.1f} times as long"
        if book.noise.tail
        else ""
    )
    told.append(f"sigma of durations: {sigma}{tail}")
    told.append(
        f"links: {links.latency_ms:.3f} ms" + (f" and {rate:.2f} GB/s" if rate is not None else ", whatever the size")
    )
    return told
