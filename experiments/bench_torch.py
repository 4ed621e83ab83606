"""Compare step times with the 1F1B schedule of ``torch.distributed.pipelining``, with tasks of the same durations.

::

    python -m experiments.bench_torch --torch-python PATH
    python -m experiments.bench_torch --torch-python PATH --sigmas 0,0.5 \\
        --compare 1f1b:strict,bf --steps 8 --json

Both sides run every stage in a process of its own on this machine: torch its ``Schedule1F1B`` over gloo, ours the
runtime over its sockets, order by order. No model computes: tasks of both last for given durations
(:mod:`experiments.torch_stage`, :mod:`rrfp_jax.testing`). A duration is drawn once for its step, stage, kind and
microbatch, and all sides meet it there. They take turns in blocks; medians of steps are printed, torch's over ours, and
beside them those of a simulation that has neither a host nor messages to wait for.

Torch is no dependency (``pip install torch``, or the extra ``compare``). Where the interpreter at hand does not have
it, ``--torch-python`` names one that has.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console

from experiments.bench_torch_ranks import add_size_arguments, resolve_entries
from experiments.torch_comparison import Row, Setting, measure, rows_of
from experiments.turns import printed_by
from rrfp_jax.cluster.config import BINDINGS
from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.commands.common.errors import BadInput, checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.studies import parse_durations_ms, parse_numbers

_STRICT_1F1B = "1f1b:strict"
TORCH_VERSION = "import torch; from torch.distributed.pipelining import Schedule1F1B; print(torch.__version__)"


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        setting = make_setting(arguments)
    version = printed_by(arguments.torch_python, TORCH_VERSION)
    if version is None:
        raise BadInput(
            f"{arguments.torch_python} has no torch.distributed.pipelining: install torch 2.6 or newer there "
            "(pip install torch), or name an interpreter that has it with --torch-python PATH"
        )
    turns = measure(setting, arguments.torch_python, bind=arguments.bind, ours=options_of_ours(arguments))
    rows = rows_of(turns)
    if arguments.json:
        plain = {"rows": [*map(vars, rows)], "turns": [*map(vars, turns)]}
        print(json.dumps({"torch": version, "given": vars(arguments)} | plain), flush=True)
    else:
        show(make_console(), setting, version, rows)
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("bench_torch", __doc__)
    add = parser.add_argument
    add("--torch-python", default=sys.executable, metavar="PATH", help="an interpreter that has torch (default: this)")
    add_size_arguments(parser)
    add = parser.add_argument_group("measurement").add_argument
    add(
        "--durations-ms",
        default="10,10,10",
        metavar="F,I,W",
        help="milliseconds of a forward, an input gradient and a weight gradient; torch's backward takes I + W",
    )
    add("--sigmas", default="0,0.2,0.5,1", metavar="X,Y,...", help="sigmas of log-normal noise, whose mean is 1")
    add("--seed", type=int, default=0, metavar="N", help="seed of the draws")
    add("--blocks", type=int, default=3, metavar="N", help="how often all take their turn, each time with new draws")
    add("--steps", type=int, default=4, metavar="N", help="steps of each block, for each sigma and order")
    add("--warm-up", type=int, default=2, metavar="N", help="steps before them that do not count")
    add("--bind", choices=BINDINGS, default="cores", help="cores of a process, as for rrfp launch, on both sides")
    add("--json", action="store_true", help="print one JSON object as the last line, with the times of all steps")
    return parser


def make_setting(arguments: argparse.Namespace) -> Setting:
    """Checks all options and returns the setting. Raises ValueError with the remedy."""
    num_stages, num_microbatches = arguments.num_stages, arguments.num_microbatches
    if not 2 <= num_stages <= num_microbatches:
        raise ValueError(
            f"num-stages is {num_stages} and num-microbatches {num_microbatches}: torch's 1F1B takes at least 2 "
            "stages, and at least as many microbatches as stages"
        )
    for name, count in {"blocks": arguments.blocks, "steps": arguments.steps, "warm-up": arguments.warm_up}.items():
        if count < 1:
            raise ValueError(f"{name} is {count}: give at least 1")
    if arguments.seed < 0:
        raise ValueError(f"seed is {arguments.seed}: give 0 or more")
    sigmas = tuple(dict.fromkeys(parse_numbers(arguments.sigmas, "sigmas", example="0,0.5")))
    if min(sigmas) < 0:
        raise ValueError(f"sigmas are {arguments.sigmas}: give 0 or more")
    return Setting(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        durations_ms=parse_durations_ms(arguments.durations_ms),
        sigmas=sigmas,
        num_blocks=arguments.blocks,
        num_steps=arguments.steps,
        num_warm_up=arguments.warm_up,
        seed=arguments.seed,
        theirs=resolve_entries(_STRICT_1F1B, None, num_stages, num_microbatches)[_STRICT_1F1B],
        orders=resolve_entries(arguments.compare, arguments.window, num_stages, num_microbatches),
    )


def options_of_ours(arguments: argparse.Namespace) -> list[str]:
    """Returns the options that our ranks take, too."""
    given = {name: getattr(arguments, name) for name in ("num_stages", "num_microbatches", "compare", "window")}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def show(console: Console, setting: Setting, version: str, rows: Sequence[Row]) -> None:
    """Prints a table of the rows."""
    title = (
        f"{setting.num_stages} stages x {setting.num_microbatches} microbatches, torch {version}, "
        f"medians of {setting.num_blocks} x {setting.num_steps} steps"
    )
    table = make_table(title, "sigma, order", "step ms", "torch over this", "simulated ms", "in flight", numeric=True)
    for row in rows:
        table.add_row(
            f"{row.sigma:g}, {row.order}",
            f"{row.median_ms:.1f}",
            f"{row.torch_over_this:.3f}",
            f"{row.simulated_ms:.1f}",
            f"{row.in_flight:g}",
        )
    console.print(table)
    console.print("simulated: without a host or messages to wait for; in flight: most microbatches that a stage held")


if __name__ == "__main__":
    run_command(main)
