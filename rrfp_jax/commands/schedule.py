"""Show one schedule: its rows, its picture, what it holds, its formulas, and a simulated step.

::

    rrfp schedule show zb-h1 --num-stages 4 --num-microbatches 8
    rrfp schedule show my_schedules.py:mine --num-stages 4 --num-microbatches 8 \\
        --durations-ms 10,12,8 --picture

Durations are those of a *whole stage*, divided among its chunks. With ``--json`` the last line on stdout is one JSON
object.
"""

import argparse
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Console

from rrfp_jax.arbitration import READY, STRICT, Ordering
from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser, offer
from rrfp_jax.commands.common.outputs import check_outputs, draw
from rrfp_jax.commands.studies.durations import parse_durations_ms
from rrfp_jax.commands.studies.execution import RULES, chunk_durations
from rrfp_jax.commands.studies.levels_report import Formula, formulas_of
from rrfp_jax.schedules import ScheduleRequest, ScheduleTable, schedule_entry, schedule_names, write_csv
from rrfp_jax.schedules.formulas import Levels, compare
from rrfp_jax.schedules.registry import build_schedule
from rrfp_jax.schedules.slots import SlotLengths, SlotTable, drawing, execute, per_stage
from rrfp_jax.simulation import Costs, Links, Machine, Simulation, simulate

TEXT = "text"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One schedule at one size."""

    request: ScheduleRequest
    table: ScheduleTable
    levels: Levels
    formulas: list[tuple[Formula, bool]]
    parts: tuple[int, ...]
    """The relative sizes of chunks that are not meant to be equal."""

    @cached_property
    def slots(self) -> SlotTable:
        """The ideal slots, without the way between stages."""
        lengths = SlotLengths(*self.request.durations_ms)
        return execute(self.table, per_stage(self.table, lengths, self.parts))

    def simulated(self, consume: str) -> Simulation:
        """One step as the runtime's own arbiters run it."""
        order = Ordering(schedule=self.table, consume=consume).resolve(self.table.placement, self.table.graph)
        durations = chunk_durations(self.table, self.request.durations_ms, self.parts)
        machine = Machine(links=Links(latency_ms=self.request.comm_ms))
        return simulate(order.arbiters(RULES), Costs(durations_ms=durations), machine=machine)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        if arguments.picture not in (None, TEXT):
            check_outputs(timeline=arguments.picture, trace=None)
        shown = look_up(arguments)
    strict, ready = shown.simulated(STRICT), shown.simulated(READY)
    if arguments.csv is not None:
        with checking_input():
            write_csv(shown.table, arguments.csv)
    if arguments.picture not in (None, TEXT):
        draw([(f"{shown.table.name}, strict", strict.timeline)], arguments.picture)
    if arguments.json:
        print(json.dumps(as_json(shown, strict, ready)))
    else:
        show(make_console(), shown, strict, ready, has_picture=arguments.picture == TEXT)
    return 0


def make_parser() -> CommandParser:
    """The parser of the command."""
    parser = CommandParser("schedule", __doc__)
    add = parser.add_argument
    add("action", choices=("show",), metavar="show", help="what to do with it")
    name = add("name", metavar="NAME|FILE.py:NAME", help="a schedule that rrfp simulate --list has, or one of your own")
    offer(name, schedule_names())
    add("--num-stages", type=int, metavar="P", required=True, help="stages of the pipeline")
    add("--num-microbatches", type=int, metavar="M", required=True, help="microbatches of a step")
    add("--chunks-per-stage", type=int, metavar="V", help="chunks on every stage (default: the schedule's own number)")
    add(
        "--group-size",
        type=int,
        metavar="N",
        help="microbatches that go through a chunk before the stage's next one, for schedules with such groups "
        "(default: the fewest)",
    )
    add(
        "--durations-ms",
        metavar="F,I,W",
        default="10,10,10",
        help="milliseconds of a forward, an input gradient and a weight gradient of a whole stage",
    )
    add("--comm-ms", type=float, metavar="MS", default=0.0, help="milliseconds from one stage to another")
    add(
        "--memory-limit", type=float, metavar="N", help="microbatches that a stage may hold, for schedules that heed it"
    )
    add = parser.add_argument_group("what comes of it").add_argument
    add(
        "--picture",
        nargs="?",
        const=TEXT,
        metavar="FILE",
        help="draw it: its ideal slots as text, or the simulated step into a FILE (.png, .svg, .html)",
    )
    add("--csv", metavar="FILE", help="write its table, as torch.distributed.pipelining reads it")
    add("--json", action="store_true", help="one JSON object on the last line of stdout, instead of text")
    return parser


def look_up(arguments: argparse.Namespace) -> Shown:
    """Build the table; raises ValueError with the remedy."""
    request = ScheduleRequest(
        num_stages=arguments.num_stages,
        num_microbatches=arguments.num_microbatches,
        chunks_per_stage=arguments.chunks_per_stage,
        group_size=arguments.group_size,
        durations_ms=parse_durations_ms(arguments.durations_ms),
        comm_ms=arguments.comm_ms,
        memory_limit=arguments.memory_limit,
    )
    lengths, entry = SlotLengths(*request.durations_ms), schedule_entry(arguments.name)
    if not sum(request.durations_ms):
        raise ValueError(f"durations-ms {arguments.durations_ms} leave nothing to do: give at least one number above 0")
    return Shown(
        request=request,
        table=build_schedule(arguments.name, request),
        levels=compare(arguments.name, request, lengths),
        formulas=formulas_of(arguments.name, request, lengths),
        parts=entry.chunk_parts(request.num_stages) if entry.chunk_parts else (),
    )


def show(console: Console, shown: Shown, strict: Simulation, ready: Simulation, *, has_picture: bool) -> None:
    """What there is to know, as text."""
    table, entry = shown.table, schedule_entry(shown.table.name)
    backward = "I and W" if table.graph.split else "B"
    console.print(f"{table.name}: {entry.shape.words}; backward {backward}; source: {entry.source}", soft_wrap=True)
    for stage, order in enumerate(table.orders):
        console.print(f"stage {stage}: {' '.join(map(str, order))}", soft_wrap=True)
    if has_picture:
        shortest = min(end - start for start, end in shown.slots.spans.values() if end > start)
        console.print(drawing(shown.slots, shortest), soft_wrap=True, end="")
    stages = make_table("stages", "stage", "chunks", "tasks", "activations", "microbatches", numeric=True)
    held = zip(table.peak_activations(shown.parts), table.peak_in_flight(), strict=True)
    for stage, (activations, microbatches) in enumerate(held):
        chunks = ", ".join(map(str, table.placement.chunks_of_stage[stage]))
        stages.add_row(str(stage), chunks, str(len(table.orders[stage])), f"{activations:g}", str(microbatches))
    console.print(stages)
    for formula, holds in shown.formulas:
        console.print(f"formula {formula.text}: {'holds' if holds else 'does not hold'} ({formula.where.text})")
    for line in _figures(shown, strict, ready):
        console.print(line)


def _figures(shown: Shown, strict: Simulation, ready: Simulation) -> list[str]:
    levels = shown.levels
    rates = {
        "published": levels.published_rate,
        "our closed form": levels.fitted_rate,
        "ideal slots": levels.table_rate,
    }
    bubble = ", ".join(f"{rate:.1%} ({what})" for what, rate in rates.items() if rate is not None)
    peaks = {"formula": levels.formula_peak, "table": levels.table_peak}
    peak = ", ".join(f"{number:g} ({what})" for what, number in peaks.items() if number is not None)
    steps = ((strict, "strict"), (ready, "with foresight"))
    step = ", ".join(f"{one.timeline.makespan_s() * 1e3:.6g} ms ({what})" for one, what in steps)
    return [f"bubble: {bubble}", f"most activations: {peak}", f"simulated step: {step}"]


def as_json(shown: Shown, strict: Simulation, ready: Simulation) -> dict[str, Any]:
    """The same for programs."""
    table, levels = shown.table, shown.levels
    return {
        "schedule": table.name,
        "rows": [[*map(str, order)] for order in table.orders],
        "stage_of_chunk": [*table.placement.stage_of_chunk],
        "peak_activations": [*table.peak_activations(shown.parts)],
        "peak_in_flight": [*table.peak_in_flight()],
        "bubble": {"paper": levels.published_rate, "closed_form": levels.fitted_rate, "table": levels.table_rate},
        "formulas": [{"text": formula.text, "holds": holds} for formula, holds in shown.formulas],
        "step_ms": {"strict": strict.timeline.makespan_s() * 1e3, "foresight": ready.timeline.makespan_s() * 1e3},
    }


if __name__ == "__main__":
    run_command(main)
