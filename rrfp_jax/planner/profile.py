"""Measure the costs of a model's layers here, for ``rrfp plan``.

::

    rrfp profile --config cpu/debug --output costs.json
    rrfp profile --config cpu/debug --microbatch-sizes 1,2,4 --remat none,full
    rrfp launch --processes 2 -- profile --config cpu/debug
    rrfp profile --timeline runs/mine

The real programs of a few small chunks run in the real runtime, on the device of this host or, under ``rrfp launch``,
in several processes at the same time, which also tells the times of links. Differences between chunks give the time and
the bytes of each type of layer, and the time that every task takes beside; repeated runs give how much durations vary.
With ``--timeline`` the times are those of a run's own last steps."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp_jax.commands.common.console import RUNS, make_console
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser, offer
from rrfp_jax.commands.common.process import enter
from rrfp_jax.commands.training.config import TrainConfig, load_train_config
from rrfp_jax.commands.training.config_sources import add_trust_argument, preset_names
from rrfp_jax.costs.layer_costs import StageSetting, every_setting
from rrfp_jax.costs.layer_sizes import REMAT_NAMES
from rrfp_jax.layout import with_axes_in_order
from rrfp_jax.observe.output_files import check_file
from rrfp_jax.planner.options import parse_counts, parse_words
from rrfp_jax.runtime.cluster import membership_from

if TYPE_CHECKING:
    from rich.console import Console

    from rrfp_jax.planner.measuring import Measured
    from rrfp_jax.planner.profiled import Profiled
    from rrfp_jax.runtime.process import Process


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
    from rrfp_jax.planner.profiled import profile_as_json, show_profile

    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    write_costs(profiled.book, arguments.output)
    if arguments.json:
        print(json.dumps(profile_as_json(profiled) | {"output": arguments.output}), flush=True)
    else:
        show_profile(console, profiled)
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
    ways.add_argument("--microbatch-sizes", metavar="N,N,...", help="samples of a microbatch (default: the run's)")
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
    given = [name for name in ("microbatch_sizes", "tensor", "remat") if getattr(arguments, name) is not None]
    if given:
        flag = given[0].replace("_", "-")
        raise ValueError(f"a timeline is of one way to run the stages: leave --{flag} out")
    from rrfp_jax.training.run_directory import CONFIG

    return load_train_config(str(Path(arguments.timeline) / CONFIG), {}, trust=arguments.trust)


def _settings(arguments: argparse.Namespace, config: TrainConfig) -> list[StageSetting]:
    sizes = parse_counts(arguments.microbatch_sizes, "--microbatch-sizes") or (config.data.microbatch_size,)
    tensors = parse_counts(arguments.tensor, "--tensor") or (config.pipeline.tensor,)
    remats = parse_words(arguments.remat, "--remat", REMAT_NAMES) or (config.pipeline.remat,)
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


def _of_width(process: "Process", tensor: int) -> "Process":
    """A process whose one stage takes so many of the devices."""
    if process.layout.tensor == tensor:
        return process
    from rrfp_jax.layout import Layout
    from rrfp_jax.runtime.process import Process

    return Process(Layout(num_stages=1, tensor=tensor), devices=process.devices[:tensor])


def _profile(
    arguments: argparse.Namespace,
    config: TrainConfig,
    settings: list[StageSetting],
    process: "Process",
    console: "Console",
) -> "Profiled | None":
    """Measure all settings; None on all ranks but the first."""
    from rrfp_jax.commands.training.training_console import CompileReport
    from rrfp_jax.planner.measuring import device_links, measure, with_times_of
    from rrfp_jax.planner.profiled import make_book

    measured: dict[StageSetting, Measured] = {}
    for number, setting in enumerate(settings, start=1):
        console.print(f"{number} of {len(settings)}: {setting.words}", soft_wrap=True)
        report = CompileReport(console)
        try:
            measured[setting] = measure(
                config,
                setting,
                _of_width(process, setting.tensor),
                repeats=0 if arguments.timeline else arguments.repeats,
                progress=report,
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
    return make_book(config, measured, source=source, links=links)


if __name__ == "__main__":
    run_command(main)
