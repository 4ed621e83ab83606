"""A rank of ours beside torch: emulated stages, one in every process, that run the order of whose turn it is.

:mod:`experiments.bench_torch` starts it through the launcher. Every line of the file ``--turns``, of which rank 0 tells
the others, is a JSON object: ``order``, an entry of ``--compare``, and ``durations``, a file as of emulate, whose steps
are run. Rank 0 answers with a line of JSON.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from experiments.emulate import EMULATED_STEP
from rrfp_jax.cluster import ClusterConfig
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.common.process import enter
from rrfp_jax.commands.simulate import parse_entries
from rrfp_jax.commands.studies import load_durations
from rrfp_jax.core import Order, dispatch_of
from rrfp_jax.core.dispatch import AUTO
from rrfp_jax.simulation import peak_memory

if TYPE_CHECKING:
    from rrfp_jax.runtime.process import Process


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        sizes = (arguments.num_stages, arguments.num_microbatches)
        orders = resolve_entries(arguments.compare, arguments.window, *sizes, num_chunks=arguments.num_chunks)
        process = enter(
            num_stages=arguments.num_stages, configuration=vars(arguments), cluster=ClusterConfig(), platform="cpu"
        )

    from rrfp_jax.testing import emulate

    dispatch = dispatch_of(AUTO, on_host=True)
    for turn in turns(process, arguments.turns):
        durations_ms = load_durations(turn["durations"]).durations_ms
        order = orders[turn["order"]]
        arbiters = order.arbiters(EMULATED_STEP, certain_ahead=dispatch.certain, members=process.members())
        emulation = emulate(arbiters, durations_ms, len(durations_ms), process=process)
        if process.rank == 0:
            in_flight = max(peak_memory(emulation.timeline, order.graph, order.placement))
            print(json.dumps({"step_ms": emulation.step_ms, "in_flight": in_flight}), flush=True)
    process.finish()
    return 0


def turns(process: "Process", path: str) -> Iterator[dict[str, Any]]:
    """Yields, on all ranks, the lines that rank 0 reads, until the file ends."""
    with open(path, encoding="utf-8") if process.rank == 0 else nullcontext() as lines:
        while line := process.gather("turn", lines.readline() if lines else "")[0]:
            yield json.loads(line)


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("bench_torch_ranks", __doc__)
    parser.add_argument("--turns", required=True, metavar="FILE", help="a file of lines that say what to run")
    parser.add_argument("--num-chunks", type=int, metavar="C", help="chunks of the pipeline (default: one per stage)")
    add_size_arguments(parser)
    return parser


def add_size_arguments(parser: CommandParser) -> None:
    """Adds the options that both sides take: sizes and orders."""
    add = parser.add_argument
    add("--num-stages", type=int, default=4, metavar="P", help="stages, each a process")
    add("--num-microbatches", type=int, default=16, metavar="M", help="microbatches of a step")
    add(
        "--compare",
        default="1f1b:strict,bf,1f1b:ready",
        metavar="A,B,...",
        help="orders of ours, written as for rrfp simulate, whose --list names them",
    )
    add("--window", metavar="N|N,N,...", help="microbatches that a stage may hold (default: as of rrfp simulate)")


def resolve_entries(
    compare: str, window: str | None, num_stages: int, num_microbatches: int, *, num_chunks: int | None = None
) -> dict[str, Order]:
    """Returns the orders by their entries. Raises ValueError if one does not fit or has other chunks."""
    orders = {}
    for label, ordering in parse_entries(compare, OrderingOptions(window=window)):
        order = ordering.resolve(num_stages=num_stages, num_microbatches=num_microbatches)
        if order.placement.num_chunks != (num_chunks or num_stages):
            raise ValueError(
                f"compare entry {label!r} has {order.placement.num_chunks} chunks on {num_stages} stages, and torch's "
                f"schedule {num_chunks or num_stages}: name orders with as many"
            )
        orders[label] = order
    return orders


if __name__ == "__main__":
    run_command(main)
