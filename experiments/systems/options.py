"""Options of ``experiments.levels --systems``, and the study that they ask for."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from experiments.systems.cells import ORDERS, Entry
from experiments.systems.records import Device, Model, Network, System, make_systems
from experiments.systems.workers import available_cores
from rrfp_jax.commands.common.options import CommandParser, add_record_options, given_texts, whole_flag
from rrfp_jax.core import DEFAULT_WINDOW, STRICT
from rrfp_jax.observe.output_files import check_folder
from rrfp_jax.schedules import ScheduleRequest
from rrfp_jax.schedules.registry import chunks_per_stage
from rrfp_jax.simulation import Communication

SCHEDULES = "gpipe,1f1b,chimera,greedy-chimera,hanayo,hanayo:4,asymmetric-chimera"
"""Schedules of the tabular study, Hanayo with one wave and with two. The others are compared with the first."""
FOLDER = "runs/systems"
_SECTIONS: dict[str, type] = {"device": Device, "network": Network, "model": Model}
_OWN = ("systems", "stages", "microbatches", "modes", "orders", "output", "processes")
_SHARED = ("schedules", "window", "json")
"""Names of the options of levels that mean the same here."""


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Study that the options ask for."""

    systems: tuple[System, ...]
    entries: tuple[Entry, ...]
    stages: tuple[int, ...]
    microbatches: tuple[int, ...]
    communications: tuple[Communication, ...]
    orders: tuple[str, ...]
    """Orders of :data:`ORDERS`, strict among them."""
    window: int
    """Window of the orders with room."""
    output: Path | None
    processes: int
    as_json: bool


def add_systems_arguments(parser: CommandParser) -> None:
    """Adds the options that mean something with ``--systems`` only."""
    group = parser.add_argument_group("study over systems", "With --systems alone.")
    add = group.add_argument
    add(
        "--systems",
        metavar="NxN",
        help="compare schedules over so many levels of networks and of devices, each ten times as fast as the one "
        "before, around the middle one that the options below describe; 3x3 is the tabular study of arXiv 2605.24006 "
        "(default: compare them on one machine)",
    )
    add("--stages", metavar="P,...", default="4,8", help="numbers of stages")
    add("--microbatches", metavar="M,...", default="8,16,32,64,128,256", help="numbers of microbatches")
    add(
        "--modes",
        metavar="A,...",
        default="async,blocking",
        help=f"who is occupied while a tensor travels: {', '.join(Communication)}",
    )
    add(
        "--orders",
        metavar="A,...",
        default=",".join(ORDERS),
        help="how tables are executed; strict takes part always, and what has +room may hold --window microbatches",
    )
    add(
        "--output",
        nargs="?",
        const=FOLDER,
        metavar="FOLDER",
        help=f"write all numbers as CSV, and pictures, into a folder ({FOLDER} where none is named; default: nowhere)",
    )
    add("--processes", type=int, metavar="N", help="processes that simulate (default: as many as there are cores)")
    add_record_options(parser, _SECTIONS, {}, qualified=_SECTIONS)


def parse_wishes(arguments: argparse.Namespace, parser: CommandParser) -> Wishes:
    """Returns the study that the options ask for; raises ValueError, with the remedy, for values that mean nothing."""
    _refuse_others(arguments, parser)
    if arguments.processes is not None and arguments.processes < 1:
        raise ValueError(f"processes is {arguments.processes}: give at least 1")
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None:
        check_folder(output, "output")
    return Wishes(
        systems=_systems(arguments),
        entries=_distinct([_entry(word) for word in (arguments.schedules or SCHEDULES).split(",")], "schedules"),
        stages=_numbers(arguments.stages, "stages"),
        microbatches=_numbers(arguments.microbatches, "microbatches"),
        communications=_distinct([_communication(word) for word in arguments.modes.split(",")], "modes"),
        orders=_orders(arguments.orders),
        window=_window(arguments.window),
        output=output,
        processes=arguments.processes or available_cores(),
        as_json=arguments.json,
    )


def refuse_systems_options(arguments: argparse.Namespace, parser: CommandParser) -> None:
    """Raises ValueError for options of the study without ``--systems``."""
    said = [f"--{name}" for name in _OWN if getattr(arguments, name) != parser.get_default(name)]
    said += [whole_flag(name) for name in given_texts(arguments)]
    if said:
        raise ValueError(f"{', '.join(said)} is about a study over systems: give --systems too, for example 3x3")


def _refuse_others(arguments: argparse.Namespace, parser: CommandParser) -> None:
    known = {*_OWN, *_SHARED, *given_texts(arguments)}
    said = [name for name, value in vars(arguments).items() if name not in known and value != parser.get_default(name)]
    if said:
        flags = ", ".join(whole_flag(name) for name in said)
        raise ValueError(
            f"{flags} is about one machine: leave it out with --systems, whose sizes, modes and hops are --stages, "
            "--microbatches, --modes and what device, network and model say"
        )


def _systems(arguments: argparse.Namespace) -> tuple[System, ...]:
    networks, cross, devices = arguments.systems.partition("x")
    if not (cross and networks.isdecimal() and devices.isdecimal()):
        raise ValueError(f"systems {arguments.systems!r} are no levels: write those of networks and devices, as 3x3")
    return make_systems(
        replace(Device(), **_given(arguments, "device")),
        replace(Network(), **_given(arguments, "network")),
        replace(Model(), **_given(arguments, "model")),
        num_networks=int(networks),
        num_devices=int(devices),
    )


def _given(arguments: argparse.Namespace, section: str) -> dict[str, Any]:
    """Returns the given values of a section's fields."""
    kinds = get_type_hints(_SECTIONS[section])
    texts = {name.partition("."): text for name, text in given_texts(arguments).items()}
    return {name: _number(text, name, kinds[name]) for (of, _, name), text in texts.items() if of == section}


def _number(text: str, what: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        words = "a whole number" if kind is int else "a number"
        raise ValueError(f"{what} is {text!r}: give {words}") from None


def _entry(word: str) -> Entry:
    """Parses ``hanayo``, ``hanayo:4`` or ``FILE.py:NAME``, which may have a number too."""
    head, _, last = word.rpartition(":")
    name, chunks = (head, int(last)) if head and last.isdecimal() else (word, None)
    request = ScheduleRequest(num_stages=1, num_microbatches=1, chunks_per_stage=chunks)
    chunks_per_stage(name, request)
    return Entry(word, name, chunks)


def _communication(word: str) -> Communication:
    if word not in tuple(Communication):
        raise ValueError(f"mode {word!r} is unknown: choose among {', '.join(Communication)}")
    return Communication(word)


def _window(text: str | None) -> int:
    if text is None:
        return DEFAULT_WINDOW
    if not text.isdecimal() or not int(text):
        raise ValueError(f"window {text!r} is no number of microbatches: with --systems give one for all stages, as 32")
    return int(text)


def _orders(text: str) -> tuple[str, ...]:
    wanted = {STRICT, *_distinct(text.split(","), "orders")}
    unknown = sorted(wanted.difference(ORDERS))
    if unknown:
        raise ValueError(f"order {unknown[0]!r} is unknown: choose among {', '.join(ORDERS)}")
    return tuple(order for order in ORDERS if order in wanted)


def _numbers(text: str, what: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{what} {text!r} are no numbers: write one or several, as 4,8")
    return tuple(sorted(_distinct([int(word) for word in words], what)))


def _distinct(values: Sequence[T], what: str) -> tuple[T, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"{what} names something twice: name each once")
    return tuple(values)
