"""The options of simulate, and the small languages of their values: memory weights, and the entries of a comparison."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.ordering import Ordering, add_ordering_arguments
from rrfp_jax.commands.common.outputs import add_timeline_argument
from rrfp_jax.commands.studies.durations import parse_numbers
from rrfp_jax.commands.studies.graphs import add_graph_arguments
from rrfp_jax.commands.studies.machine import add_machine_arguments, add_noise_arguments
from rrfp_jax.core import READY, SCHEDULE, STRICT, hint_names
from rrfp_jax.schedules import schedule_entry, schedule_names
from rrfp_jax.schedules.registry import is_rule, is_schedule
from rrfp_jax.simulation import MemoryWeights

ROWS, SLOTS = "rows", "slots"
FOOTPRINT, FORESIGHT = "footprint", "foresight"


def simulate_parser(doc: str | None, *, add_work: Callable[[argparse._ArgumentGroup], None] | None) -> CommandParser:
    """Returns the parser of the command, whose docstring is ``doc``; ``add_work`` adds a study's own options.

    The small languages of the values are parsed later.
    """
    parser = CommandParser("simulate", doc)
    add = parser.add_argument
    add("--list", action="store_true", help="name every schedule and hint, and end")
    add("--num-stages", type=int, metavar="P", help="stages of the pipeline (required, but for --list)")
    add("--num-microbatches", type=int, metavar="M", help="microbatches of a step (required, but for --list)")
    add(
        "--chunks-per-stage",
        type=int,
        metavar="V",
        help="chunks on every stage (default: the schedule's own number, else 1)",
    )
    add_graph_arguments(parser)
    add_ordering_arguments(parser)
    add(
        "--compare",
        metavar="A,B,...",
        help="several orders side by side, by the names that --list has: hints, and schedules, alone or with :strict, "
        ":ready (readiness alone) or :ready+footprint+foresight",
    )
    add(
        "--show",
        nargs="?",
        const=ROWS,
        choices=(ROWS, SLOTS),
        help=f"show the table of --schedule itself: its rows, what stages hold, its formulas, and one step simulated "
        f"strictly and with foresight; {SLOTS}: draw its ideal slots too (optional, {ROWS} without a word)",
    )
    add("--csv", metavar="FILE", help="with --show, write the table, as torch.distributed.pipelining reads it")
    add("--steps", type=int, metavar="N", help="steps, one after the other (default: as many as the durations have)")
    _add_costs(parser.add_argument_group("costs"))
    if add_work is not None:
        add_work(parser.add_argument_group("workload"))
    add_machine_arguments(parser.add_argument_group("machine"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_costs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--durations-ms",
        metavar="F,I,W",
        help="milliseconds of a chunk's forward, input gradient and weight gradient; a backward in one takes I + W "
        "(default 10,10,10)",
    )
    add(
        "--durations",
        metavar="FILE",
        help="an .npy file of milliseconds [steps, chunks, microbatches, 3], NaN where a pair of chunk and microbatch "
        "does not exist, or a run's trace .json",
    )
    add(
        "--recorded",
        choices=("mean", "tasks"),
        help="what to take of a trace: means per chunk and kind (default), or every task by itself",
    )
    add_noise_arguments(group)
    add(
        "--memory-weights",
        metavar="F,I,W",
        help="memory that a forward holds, and what an input gradient and a weight gradient free of it (default 1,0,1)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="one JSON object on the last line of stdout, instead of tables")
    add_timeline_argument(group, "simulate")
    add(
        "--timeline-steps",
        type=int,
        metavar="N",
        help="how many of the last steps are drawn (default: one as a picture, in a page as many as it can well hold)",
    )
    add("--trace", metavar="FILE.json", help="write all steps for ui.perfetto.dev")
    add(
        "--optimum",
        type=float,
        metavar="SECONDS",
        help="look so long for the true optimum; for small cases, and with the extra 'optimum' installed",
    )


def refuse_beside_show(arguments: argparse.Namespace) -> None:
    """Raise ValueError, with the remedy, for options that belong to ``--show`` alone or mean nothing beside it."""
    if arguments.show is None:
        if arguments.csv is not None:
            raise ValueError("csv writes the table that --show shows: give --show too")
        return
    if arguments.schedule is None:
        raise ValueError("show is about the table of a schedule: give --schedule, for example zb-h1")
    for_runs = ("compare", "steps", "jitter", "durations", "workload", "optimum")
    for_orders = ("consume", "hint", "offload", "recompute")
    said = [f"--{name}" for name in (*for_runs, *for_orders) if getattr(arguments, name, None) is not None]
    if said:
        raise ValueError(f"show simulates one step of the schedule as it is: leave {', '.join(said)} out")


def parse_memory_weights(text: str | None) -> MemoryWeights:
    """Parse ``F,I,W``: the memory that F holds, I frees and W frees."""
    if text is None:
        return MemoryWeights()
    weights = parse_numbers(text, "memory-weights", example="1,0.5,0.5")
    if len(weights) != 3:
        raise ValueError(f"memory-weights {text} has {len(weights)} numbers: write those of F, I and W, as 1,0.5,0.5")
    return MemoryWeights(forward=weights[0], input_gradient=weights[1], weight_gradient=weights[2])


def parse_entries(text: str, base: Ordering, *, group_size: int | None = None) -> list[tuple[str, Ordering]]:
    """``1f1b:strict,zb-h1:ready+footprint+foresight,bf``: hints, and schedules with how they are consumed.

    A schedule without a colon is consumed as ``base`` and the defaults have it. ``base`` gives window and backward to
    all of them; ``group_size`` goes to the schedules that have groups.
    """
    entries = [(entry, _entry(entry, base)) for entry in _distinct(text.split(","))]
    if group_size is None:
        return entries
    if not any(_has_groups(one) for _, one in entries):
        raise ValueError(
            f"no entry of compare has groups of {group_size} microbatches: name gis, or leave group-size out"
        )
    return [(entry, replace(one, group_size=group_size) if _has_groups(one) else one) for entry, one in entries]


def _has_groups(ordering: Ordering) -> bool:
    name = ordering.schedule
    return name is not None and is_schedule(name) and schedule_entry(name).has_groups


def _distinct(entries: Sequence[str]) -> Sequence[str]:
    twice = sorted({entry for entry in entries if entries.count(entry) > 1})
    if twice:
        raise ValueError(f"compare names {', '.join(map(repr, twice))} twice: name each entry once")
    return entries


def _entry(entry: str, base: Ordering) -> Ordering:
    path, of_file, rest = entry.partition(".py:")
    name, colon, words = rest.partition(":") if of_file else entry.partition(":")
    name = path + of_file + name if of_file else name
    if is_schedule(name) or name.endswith(".csv"):
        return replace(base, schedule=name, **(_consumption(entry, name, words) if colon else {}))
    if name == SCHEDULE or not (name in hint_names() or is_rule(name)):
        known = ", ".join([*schedule_names(), *(hint for hint in hint_names() if hint != SCHEDULE)])
        raise ValueError(f"compare entry {entry!r} names no schedule and no hint: choose among {known}")
    if words not in ("", READY):
        raise ValueError(f"compare entry {entry!r}: {words} needs a schedule, and {name!r} is a hint")
    return replace(base, hint=name)


def _consumption(entry: str, name: str, words: str) -> dict[str, Any]:
    """Parse the words behind the colon. They are complete: ``ready`` alone is readiness without footprint and
    foresight."""
    consume, *more = words.split("+")
    known = consume == STRICT and not more
    if not known and (consume != READY or not set(more) <= {FOOTPRINT, FORESIGHT} or len(set(more)) < len(more)):
        choices = f"{name}:{STRICT}, {name}:{READY} or {name}:{READY}+{FOOTPRINT}+{FORESIGHT}"
        raise ValueError(f"compare entry {entry!r} ends in {words!r}: write {choices}")
    if consume == STRICT:
        return {"consume": STRICT, "footprint": None, "foresight": None, "read_ahead": None}
    said = {name: name in more for name in (FOOTPRINT, FORESIGHT)}
    return {"consume": READY, **said}
