"""Measure the costs of a model's layers here, for ``rrfp plan``.

::

    rrfp profile --config cpu/debug --output costs.json
    rrfp profile --config cpu/debug --microbatch-size 1,2,4 --remat none,full
    rrfp launch --processes 2 -- profile --config cpu/debug
    rrfp profile --timeline runs/mine

The real programs of a few small chunks run in the real runtime, on the device of this host or, under ``rrfp launch``,
in several processes at the same time, which also tells the times of links, and which devices are slower. Differences
between chunks give the time and the bytes of each type of layer, and the time that every task takes beside; repeated
runs give how much durations vary. With ``--timeline`` the times are those of a run's own last steps."""

import argparse
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rrfp_jax.commands.common.console import RUNS, make_console, make_table
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser, offer
from rrfp_jax.commands.common.process import enter
from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.commands.training.config_sources import add_trust_argument, preset_names
from rrfp_jax.costs import CostBook, CostEntry, LayerCosts, LinkCosts, MachineCosts
from rrfp_jax.costs.layer_costs import StageSetting, every_setting
from rrfp_jax.costs.layer_sizes import REMAT_NAMES
from rrfp_jax.layout import with_axes_in_order
from rrfp_jax.observe.output_files import check_file
from rrfp_jax.planner.plan_request import parse_counts, parse_words
from rrfp_jax.readable import format_bytes
from rrfp_jax.runtime.cluster import membership_from
from rrfp_jax.storage import located

if TYPE_CHECKING:
    from rich.console import Console

    from rrfp_jax.costs.fitting import LayerTimes
    from rrfp_jax.planner.analytic_costs import ModelLayers
    from rrfp_jax.planner.measuring import Measured
    from rrfp_jax.runtime.process import Process


_ALIKE = 0.2
"""Devices whose speeds differ by less are alike: so much comes from chance."""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        config = _config(arguments)
        settings = _settings(arguments, config)
        check_file(Path(arguments.output), "output")
        if arguments.repeats < 1:
            raise ValueError(f"repeats is {arguments.repeats}: measure at least 1 step")
        process = _enter(config, settings)

    from rrfp_jax.runtime.compile_cache import use_compile_cache

    use_compile_cache()
    console = make_console(is_quiet=bool(process.rank))
    with checking_input():
        profiled = _profile(arguments, config, settings, process, console)
    process.finish()
    if profiled is None:
        return 0
    from rrfp_jax.planner.cost_file import write_costs

    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    write_costs(profiled.book, arguments.output)
    if arguments.json:
        print(json.dumps(_as_json(profiled) | {"output": arguments.output}), flush=True)
    else:
        _show(console, profiled)
        console.print(f"the costs are in {arguments.output}", soft_wrap=True)
    return 0


def make_parser() -> CommandParser:
    """The parser of the command."""
    parser = CommandParser("profile", __doc__, usage="%(prog)s --config FILE.yaml | --timeline RUN [option ...]")
    file = parser.add_argument(
        "--config", metavar="FILE.yaml", help="the run whose model is measured: a file, or a preset by name"
    )
    offer(file, preset_names())
    parser.add_argument("--timeline", metavar="RUN", help="take the times of this run directory's last steps instead")
    add_trust_argument(parser)
    ways = parser.add_argument_group("ways to run the stages, each measured with each")
    ways.add_argument("--microbatch-size", metavar="N,N,...", help="samples of a microbatch (default: the run's)")
    ways.add_argument("--tensor", metavar="N,N,...", help="devices that share every layer (default: the run's)")
    ways.add_argument(
        "--remat",
        metavar="NAME,NAME,...",
        help=f"what backwards recompute: {', '.join(REMAT_NAMES)} (default: the run's)",
    )
    parser.add_argument(
        "--repeats", type=int, default=10, metavar="N", help="steps of four microbatches that count (default 10)"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output",
        default=str(RUNS / "costs.json"),
        metavar="FILE.json",
        help="where the costs go (default %(default)s)",
    )
    output.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def _config(arguments: argparse.Namespace) -> TrainConfig:
    if (arguments.config is None) == (arguments.timeline is None):
        raise ValueError("either --config says which model is measured, or --timeline in which run: give one of them")
    if arguments.config is not None:
        return load_train_config(arguments.config, {}, trust=arguments.trust)
    given = [name for name in ("microbatch_size", "tensor", "remat") if getattr(arguments, name) is not None]
    if given:
        flag = given[0].replace("_", "-")
        raise ValueError(f"a timeline is of one way to run the stages: leave --{flag} out")
    from rrfp_jax.training.run_directory import CONFIG

    folder = os.fspath(located(arguments.timeline))  # refused in an object store
    return load_train_config(str(Path(folder) / CONFIG), {}, trust=arguments.trust)


def _settings(arguments: argparse.Namespace, config: TrainConfig) -> list[StageSetting]:
    sizes = parse_counts(arguments.microbatch_size, "--microbatch-size") or (config.data.microbatch_size,)
    tensors = parse_counts(arguments.tensor, "--tensor") or (config.pipeline.tensor,)
    remats = parse_words(arguments.remat, "--remat", REMAT_NAMES) or config.pipeline.remats
    return every_setting(sizes, tensors, remats)


def _enter(config: TrainConfig, settings: list[StageSetting]) -> "Process":
    """A stage for each process; alone with the devices of the widest stage."""
    membership = membership_from(os.environ)
    num_ranks = 1 if membership is None else membership.num_ranks
    tensors = {setting.tensor for setting in settings}
    if num_ranks > 1 and len(tensors) > 1:
        raise ValueError("several processes share layers in one way at a time: give one number to --tensor")
    profiled = config.as_dict()
    profiled["pipeline"] = with_axes_in_order(profiled["pipeline"])
    return enter(
        num_stages=num_ranks,
        tensor=max(tensors),
        configuration={"profile": profiled, "settings": [list(setting) for setting in settings]},
        cluster=config.cluster,
        platform=config.run.platform,
    )


def _profile(
    arguments: argparse.Namespace,
    config: TrainConfig,
    settings: list[StageSetting],
    process: "Process",
    console: "Console",
) -> "_Profiled | None":
    """Measure all settings; None on all ranks but the first."""
    from rrfp_jax.commands.training.training_console import CompileReport
    from rrfp_jax.layout import Layout
    from rrfp_jax.planner.cost_file import machine_in
    from rrfp_jax.planner.measuring import device_links, device_speeds, measure, with_times_of
    from rrfp_jax.runtime.process import Process

    devices = () if arguments.timeline else device_speeds(process, config.model.compute_dtype)
    differ = any(abs(each.speed - 1) > _ALIKE or each.bytes != devices[0].bytes for each in devices)
    layout, speeds = process.layout, list[float]()
    if differ:
        speeds = [devices[layout.devices_of(unit)[0]].speed for unit in range(layout.num_units)]
    devices = tuple(each if differ else replace(each, speed=1.0) for each in devices)
    measured: dict[StageSetting, Measured] = {}
    for number, setting in enumerate(settings, start=1):
        console.print(f"{number} of {len(settings)}: {setting.words}", soft_wrap=True)
        report, narrow = CompileReport(console), process
        if process.layout.tensor != setting.tensor:  # a stage that takes so many of the devices
            narrow = Process(Layout(num_stages=1, tensor=setting.tensor), devices=process.devices[: setting.tensor])
        try:
            measured[setting] = measure(
                config,
                setting,
                narrow,
                repeats=0 if arguments.timeline else arguments.repeats,
                progress=report,
                speeds=speeds,
            )
        finally:
            report.stop()
    if process.rank:
        return None
    if arguments.timeline:
        measured = {setting: with_times_of(arguments.timeline, config, each) for setting, each in measured.items()}
    source = f"measured by rrfp profile{f' in {arguments.timeline}' if arguments.timeline else ''}"
    links = None
    if process.cluster is None:
        links = device_links(part.outputs for each in measured.values() for part in each.parts)
    profiled = _profiled(config, measured, source=source, links=links)
    known = None
    with suppress(ValueError, OSError):  # a file that was none is written over
        known = machine_in(arguments.output)
    if devices and known is not None and len(known.devices) == len(devices):  # with links that rrfp doctor measured
        return replace(profiled, book=replace(profiled.book, machine=replace(known, devices=devices)))
    machine = MachineCosts(devices=devices) if differ else None
    return replace(profiled, book=replace(profiled.book, machine=machine))


# -- the costs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Profiled:
    """A book, and how well it fits the measurements."""

    book: CostBook
    off: Mapping[str, float] = field(default_factory=dict)
    """By kind how far layers added up are from the chunks that they make, as a share."""
    num_runs: int = 0
    """Number of runs of all tasks."""


def _profiled(
    config: TrainConfig,
    measured: "Mapping[StageSetting, Measured]",
    *,
    source: str,
    links: LinkCosts | None = None,
) -> _Profiled:
    """Returns the costs of a run's model; ``links`` where messages were not measured. Raises ValueError where a type of
    layer was not seen."""
    import jax

    from rrfp_jax.costs.fitting import fit_links, fit_noise, fit_times
    from rrfp_jax.planner.analytic_costs import model_layers
    from rrfp_jax.planner.measuring import measured_host_gb_per_s

    every = list(measured.values())
    models = {setting: model_layers(config, **setting._asdict()) for setting in measured}
    model = next(iter(models.values()))
    chunks = [chunk for each in every for chunk in each.times]
    noise, fits = fit_noise(chunks), {setting: fit_times(each.times) for setting, each in measured.items()}
    if links is None:
        controls = [each.control_ms for each in every if each.control_ms is not None]
        links = fit_links((one for each in every for one in each.messages), max(controls, default=None))
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    # A CPU has no memory of its own that could be short.
    to_host = None if device.platform == "cpu" else measured_host_gb_per_s(device)
    host = [milliseconds for each in every for milliseconds in each.host_ms]
    book = CostBook(
        layers=model.layers,
        ends=model.ends,
        entries=tuple(
            CostEntry(
                types=_types(models[setting], fits[setting], measured[setting], setting.remat), **setting._asdict()
            )
            for setting in measured
        ),
        links=replace(links, host_gb_per_s=to_host),
        noise=noise,
        task_ms=median(fit.task_ms for fit in fits.values()) + (median(host) if host else 0.0),
        tokens_per_sample=model.tokens_per_sample,
        device=device.device_kind,
        device_bytes=None if limit is None else int(limit),
        source=source,
    )
    kinds = dict.fromkeys(kind for fit in fits.values() for kind in fit.off)
    off = {kind: max(fit.off.get(kind, 0.0) for fit in fits.values()) for kind in kinds}
    return _Profiled(book=book, off=off, num_runs=sum(len(runs) for c in chunks for runs in c.runs_ms.values()))


def _types(model: "ModelLayers", fit: "LayerTimes", measured: "Measured", remat: str) -> dict[str, LayerCosts]:
    """Returns the costs by type. Where only whole backwards ran, all of one counts as input gradient, as in simulated
    recordings."""
    from rrfp_jax.costs.fitting import fit_bytes
    from rrfp_jax.planner.measuring import type_of_kind

    sizes, found = fit_bytes(measured.parts, recomputes=remat != "none"), {}
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
            flops=layer.flops,
            **sizes[kind],
        )
    return found


_COLUMNS = ("forward_ms", "input_gradient_ms", "weight_gradient_ms", "backward_ms", "update_ms")


def _as_json(profiled: _Profiled) -> dict[str, Any]:
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


def _show(console: "Console", profiled: _Profiled) -> None:
    """Prints a table for each way to run, and the figures that are common to all."""
    book = profiled.book
    headings = ("F ms", "I ms", "W ms", "B ms", "U ms", "fixed", "stash", "owed", "temporaries")
    for entry in book.entries:
        table = make_table(entry.setting.words, "layer", *headings, numeric=True)
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
    sigma = ", ".join(f"{kind} {value:.3f}" for kind, value in book.noise.sigma.items()) or "not known"
    links, rate = book.links, book.links.gb_per_s
    told = [f"{profiled.num_runs} tasks were timed; every task takes {book.task_ms:.3f} ms beside its layers"]
    if profiled.off:
        told[0] += "; layers added up are off by " + ", ".join(
            f"{kind} {share:.1%}" for kind, share in profiled.off.items()
        )
    tail = (
        f"; {book.noise.tail:.1%} of the tasks take {book.noise.tail_factor:.1f} times as long"
        if book.noise.tail
        else ""
    )
    told.append(f"sigma of durations: {sigma}{tail}")
    if book.machine is not None:
        devices = (f"{each.speed:.2f} ({each.name})" for each in book.machine.devices)
        told.append(f"speeds of the devices: {', '.join(devices)}")
    told.append(
        f"links: {links.latency_ms:.3f} ms" + (f" and {rate:.2f} GB/s" if rate is not None else ", whatever the size")
    )
    if links.host_gb_per_s is not None:
        told[-1] += f"; to the host {links.host_gb_per_s:.2f} GB/s"
    for line in told:
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
