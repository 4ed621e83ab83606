"""The flags of simulate."""

import argparse

from experiments.ordering import add_ordering_arguments
from experiments.simulate_flags import JITTER_FORMS
from rrfp_jax.simulation import Communication


def make_parser() -> argparse.ArgumentParser:
    """The parser; what the small languages of its values mean is read later (:mod:`experiments.simulate_flags`)."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.simulate",
        description="Simulate a schedule or a hint: the runtime's own arbiters in virtual time.",
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
    add("--seed", type=int, default=0, help="of the jitter; the same tasks meet the same noise whatever the order")
    _add_costs(parser.add_argument_group("costs"))
    _add_machine(parser.add_argument_group("machine"))
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
    add("--jitter", metavar="FORM", help=f"{JITTER_FORMS}; several joined by +")
    add("--memory-weights", metavar="F,I,W", help="what F holds, and what I and W free of it (default 1,0,1)")


def _add_machine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--comm", metavar="MODE", default="async", help=f"{', '.join(Communication)} (default async)")
    add("--comm-ms", type=float, default=0.0, help="latency of every tensor between stages")
    add("--message-bytes", metavar="A[,G]", help="size of an activation and of a gradient; needs --bandwidth-gb-per-s")
    add("--bandwidth-gb-per-s", type=float, help="of each directed link, 10^9 bytes per second")
    add("--contention", action="store_true", help="a directed link carries one tensor at a time (async only)")
    add("--link-delay-ms", metavar="A-B:MS,...", help="extra latency of a link, both directions, as 6-7:30")
    add("--dispatch-overhead-ms", type=float, default=0.0, help="of the host, per task")
    add("--dispatch-ahead", type=int, default=0, metavar="N", help="tasks handed over before the running one has ended")
    add("--agreement-ms", type=float, default=0.0, help="of a tensor-parallel group, per task")
    add("--control-ms", type=float, default=0.0, help="latency of the reports and verdicts between steps")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="one JSON object on the last line of stdout, instead of tables")
    add("--timeline", metavar="FILE", help="a picture (.png, .svg) or an interactive page (.html)")
    add("--trace", metavar="FILE.json", help="a trace for ui.perfetto.dev")
    add("--optimum", type=float, metavar="SECONDS", help="look for the true optimum (small cases; extra 'optimum')")
