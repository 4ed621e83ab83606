"""The flags of simulate."""

import argparse

from experiments.machine import add_machine_arguments
from experiments.noise import add_noise_arguments
from experiments.options import CommandParser
from experiments.ordering import add_ordering_arguments


def make_parser() -> CommandParser:
    """The parser; what the small languages of its values mean is read later (:mod:`experiments.simulate_flags`)."""
    parser = CommandParser(
        "simulate",
        "Simulate a schedule or a hint: the runtime's own arbiters in virtual time.",
    )
    add = parser.add_argument
    add("--list", action="store_true", help="name every schedule and hint, and end")
    add("--num-stages", type=int, metavar="P")
    add("--num-microbatches", type=int, metavar="M")
    add("--chunks-per-stage", type=int, metavar="V", help="default: the schedule's own number, else 1")
    add_ordering_arguments(parser)
    add(
        "--compare", metavar="A,B,...", help="several orders side by side: hints, and schedules with or without :strict"
    )
    add("--steps", type=int, metavar="N", help="default: as many as the durations have")
    _add_costs(parser.add_argument_group("costs"))
    add_machine_arguments(parser.add_argument_group("machine"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_costs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--durations-ms", metavar="F,I,W", help="of every task of a chunk; B takes I + W (default 10,10,10)")
    add(
        "--durations",
        metavar="FILE",
        help="an .npy file of milliseconds [steps, chunks, microbatches, 3], or a run's trace .json",
    )
    add(
        "--recorded",
        choices=("mean", "tasks"),
        help="of a trace take means per chunk and kind (default), or every task by itself",
    )
    add_noise_arguments(group)
    add("--memory-weights", metavar="F,I,W", help="what F holds, and what I and W free of it (default 1,0,1)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="one JSON object on the last line of stdout, instead of tables")
    add("--timeline", metavar="FILE", help="a picture (.png, .svg) or an interactive page (.html)")
    add("--trace", metavar="FILE.json", help="a trace for ui.perfetto.dev")
    add("--optimum", type=float, metavar="SECONDS", help="look for the true optimum (small cases; extra 'optimum')")
