"""Compare all schedules at three levels: closed formula, ideal slot table, and execution by the runtime's arbiters.

::

    python -m experiments.levels --num-stages 8 --num-microbatches 16 \\
        --durations-ms 10,5,5
    python -m experiments.levels --num-stages 8 --num-microbatches 16 \\
        --comm-ms 1 --jitter lognormal:0.5 --steps 10
    python -m experiments.levels --systems 3x3 --output

With ``--json`` the last line on stdout is one JSON object.

Durations are those of a *whole stage*, divided among its chunks, so that all schedules do the same work (simulate's are
those of one chunk). Each schedule has one table at all levels: executed strictly, and as a hint under
readiness alone.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from experiments.levels_report import Execution, Row, as_json, show_levels
from experiments.systems.command import run_study
from experiments.systems.options import add_systems_arguments, refuse_systems_options
from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import BadInput, checking_input
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.ordering import parse_window
from rrfp_jax.commands.main import run
from rrfp_jax.commands.simulate_reports import formulas_of
from rrfp_jax.commands.studies import (
    Profile,
    add_graph_arguments,
    add_machine_arguments,
    add_noise_arguments,
    arbiters_of,
    check_noise,
    chunk_durations,
    make_costs,
    make_machine,
    parse_durations_ms,
    requested_graph,
)
from rrfp_jax.core import READY, STRICT, Ordering, check_windows
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, build_schedule, schedule_entry, schedule_names
from rrfp_jax.schedules.formulas import Levels, compare
from rrfp_jax.schedules.registry import schedules_of_any_graph
from rrfp_jax.schedules.slots import SlotLengths
from rrfp_jax.simulation import Machine, for_steps, peak_memory, run_metrics, simulate

OWN_PEAK = "table"
"""Value of ``--window`` with which each stage may hold as much as the table itself holds there."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings that all schedules have in common, from the flags."""

    arguments: argparse.Namespace
    durations_ms: Profile
    """Durations of F, I and W of a whole stage in execution."""
    request: ScheduleRequest
    """Sizes, and lengths of the slots: F, I and W of a whole stage in formulas and ideal tables."""
    machine: Machine
    window: int | tuple[int, ...] | None
    """Window of the run as a hint; None: the default, or each table's own peak."""

    @property
    def slot_lengths(self) -> SlotLengths:
        return SlotLengths(*self.request.durations_ms)


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.systems is not None:
        return run_study(arguments, parser)
    if arguments.num_stages is None or arguments.num_microbatches is None:
        parser.error("give --num-stages and --num-microbatches, or --systems, for example 3x3")
    with checking_input():
        refuse_systems_options(arguments, parser)
        setting = make_setting(arguments)
        names = _names(arguments.schedules, is_graph=setting.request.graph is not None)
    rows, refused = compare_levels(setting, names)
    if not rows:
        raise BadInput(f"no schedule fits; for example {next(iter(refused.values()))}")
    if arguments.json:
        print(json.dumps(_given(setting) | as_json(rows, refused), allow_nan=False))
    else:
        show_levels(make_console(), rows, refused, given=_given(setting))
    return 0


def _given(setting: Setting) -> dict[str, Any]:
    """Returns the settings that the numbers hold for."""
    said = vars(setting.arguments)
    sizes = ("num_stages", "num_microbatches", "encoders", "frozen_encoder", "frozen_chunks", "stage_of_chunk")
    names = (*sizes, "steps", "window", "comm", "comm_ms", "jitter", "seed")
    lengths = {"slot_lengths": [*setting.request.durations_ms], "durations_ms": [*setting.durations_ms]}
    return {name: said[name] for name in names} | lengths


def make_parser() -> CommandParser:
    """Returns the parser. The values of options that are small languages are parsed later."""
    parser = CommandParser("levels", __doc__)
    add = parser.add_argument
    add("--num-stages", type=int, metavar="P", help="stages of the pipeline (required, but for --systems)")
    add("--num-microbatches", type=int, metavar="M", help="microbatches of a step (required, but for --systems)")
    add_graph_arguments(parser)
    add(
        "--schedules",
        metavar="A,B,...",
        help="these schedules alone, by the names that rrfp simulate --list has (default: all that fit the graph); "
        "with --systems the first is what others are compared with, and hanayo:4 has 4 chunks per stage",
    )
    add(
        "--durations-ms",
        metavar="F,I,W",
        default="10,10,10",
        help="milliseconds of a forward, an input gradient and a weight gradient of a whole stage in execution",
    )
    add(
        "--slot-lengths",
        metavar="F,I,W",
        help="the same of a whole stage in formulas and ideal tables (default: the durations)",
    )
    add("--steps", type=int, default=1, metavar="N", help="steps of each execution; several make sense with jitter")
    add(
        "--window",
        metavar=f"N|N,...|{OWN_PEAK}",
        help=f"microbatches that a stage may hold where the table is a hint; {OWN_PEAK}: as many as the table itself "
        "(default 32)",
    )
    add("--json", action="store_true", help="one JSON object on the last line of stdout, instead of tables")
    add_noise_arguments(parser.add_argument_group("noise"))
    add_machine_arguments(parser.add_argument_group("machine of the execution"))
    add_systems_arguments(parser)
    return parser


def make_setting(arguments: argparse.Namespace) -> Setting:
    """Checks everything that does not depend on the schedule. Raises ValueError with the remedy."""
    check_noise(arguments)
    if arguments.steps < 1:
        raise ValueError(f"steps is {arguments.steps}: simulate at least 1")
    durations_ms = _lengths(arguments.durations_ms, "durations-ms")
    slots = _lengths(arguments.slot_lengths or arguments.durations_ms, "slot-lengths")
    machine = make_machine(arguments)
    window = None if arguments.window in (None, OWN_PEAK) else parse_window(arguments.window)
    model = requested_graph(arguments, num_microbatches=arguments.num_microbatches)
    request = ScheduleRequest(
        num_stages=arguments.num_stages,
        num_microbatches=arguments.num_microbatches,
        graph=model and model.graph,
        placement=model and model.placement,
        durations_ms=slots,
        # schedules made from profiled times get all of them in the unit of the slots
        comm_ms=machine.links.latency_ms * sum(slots) / sum(durations_ms),
    )
    if window is not None:
        check_windows(window, arguments.num_stages)
    return Setting(
        arguments=arguments,
        durations_ms=durations_ms,
        request=request,
        machine=machine,
        window=window,
    )


def compare_levels(setting: Setting, names: Iterable[str]) -> tuple[list[Row], dict[str, str]]:
    """Returns the rows of the schedules that accept these sizes, and the reasons why the others do not."""
    rows, refused = [], {}
    for name in names:
        try:
            ideal = compare(name, setting.request, setting.slot_lengths)
        except ValueError as error:
            refused[name] = str(error)
        else:
            rows.append(_row(setting, ideal))
    return rows, refused


def _row(setting: Setting, ideal: Levels) -> Row:
    name = ideal.schedule
    table = build_schedule(name, setting.request)
    cut = schedule_entry(name).chunk_parts
    parts = cut(table.num_stages) if cut else ()
    window = table.peak_in_flight() if setting.arguments.window == OWN_PEAK else setting.window
    readiness = Ordering(schedule=table, consume=READY, window=window, footprint=False, foresight=False)
    return Row(
        ideal=ideal,
        formulas=formulas_of(name, setting.request, setting.slot_lengths),
        strict=_execute(setting, table, parts, Ordering(schedule=table, consume=STRICT)),
        hint=_execute(setting, table, parts, readiness),
    )


def _execute(setting: Setting, table: ScheduleTable, parts: tuple[int, ...], ordering: Ordering) -> Execution:
    num_steps: int = setting.arguments.steps
    durations_ms = for_steps(chunk_durations(table, setting.durations_ms, parts), num_steps)
    with checking_input():
        order = ordering.resolve(table.placement, table.graph)
        costs = make_costs(setting.arguments, durations_ms, table.placement)
    arbiters = arbiters_of(order, setting.arguments)
    simulation = simulate(arbiters, costs, machine=setting.machine, num_steps=num_steps)
    metrics = run_metrics(simulation.timeline, simulation.step_ms)
    steps = simulation.timeline.by_step()
    peaks = [peak_memory(step, table.graph, table.placement, chunk_parts=parts) for step in steps]
    return Execution(
        bubble=max(0.0, metrics.bubble_fraction),
        peak=round(max(max(peak) for peak in peaks), 9),
        makespan_ms_mean=metrics.makespan_ms_mean,
    )


def _names(text: str | None, *, is_graph: bool) -> tuple[str, ...]:
    every = schedules_of_any_graph() if is_graph else schedule_names()
    names = every if text is None else tuple(dict.fromkeys(text.split(",")))
    return tuple(schedule_entry(name).name for name in names)


def _lengths(text: str, flag: str) -> Profile:
    lengths = parse_durations_ms(text, flag)
    if not sum(lengths):
        raise ValueError(f"{flag} {text} leave nothing to do: give at least one number above 0")
    return lengths


if __name__ == "__main__":
    run("experiments.levels")
