"""From what was measured, in one way to run the stages or several, to a :class:`CostBook`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import jax

from rrfp_jax.commands.planning.measuring import Measured, layers_here
from rrfp_jax.commands.planning.model_layers import ModelLayers
from rrfp_jax.commands.planning.setting import Setting
from rrfp_jax.commands.planning.small_cut import named
from rrfp_jax.commands.training.config import TrainConfig
from rrfp_jax.costs import CostBook, CostEntry, LayerCosts, LinkCosts
from rrfp_jax.costs.byte_fit import fit_bytes
from rrfp_jax.costs.fitting import LayerTimes, fit_links, fit_noise, fit_times


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A book, and how well what was measured fits it."""

    book: CostBook
    off: Mapping[str, float] = field(default_factory=dict)
    """By kind how far layers added up are from the chunks that they make, as a share."""
    num_runs: int = 0
    """Of all tasks."""


def make_book(
    config: TrainConfig,
    measured: Mapping[Setting, Measured],
    *,
    source: str,
    links: LinkCosts | None = None,
) -> Profiled:
    """The costs of a run's model; ``links`` where messages were not measured. Raises ValueError where a type of layer
    was not seen."""
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
    """Where only whole backwards ran, all of one counts as input gradient, as in simulated recordings."""
    sizes, found = fit_bytes(measured.parts), {}
    for kind, medians in fit.types.items():
        name = named(kind, model.types)
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
