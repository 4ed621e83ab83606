"""Plan how to run a model: from costs to the best cut, order and memory, ranked by forecast step time.

::

    rrfp plan --config gpu/one_node_8 --device h100 --devices 64 --memory 72GiB
    rrfp plan --config mine.yaml --costs costs.json --jitter lognormal:0.2 \\
        --write best.yaml
    rrfp plan --costs costs.json --devices 8 --microbatches 8,16,32 --json
    rrfp plan --config gpu/llama3_70b_128 --device h100 --as-configured

With ``--json`` the last line on stdout is one JSON object. No device is needed: costs are worked out from a device's
record (``--device``) or come from a file (``--costs``), and candidates run in virtual time, in the scheduling core that
also runs on devices. ``rrfp train`` runs the configuration that ``--write`` has written as it is.
"""

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import BadInput, checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser, offer
from rrfp_jax.commands.studies import rare_collections
from rrfp_jax.commands.training.config_sources import add_trust_argument, preset_names
from rrfp_jax.core import READY, STRICT
from rrfp_jax.costs.devices import DEVICES
from rrfp_jax.costs.layer_sizes import REMAT_NAMES
from rrfp_jax.exit_codes import DONE
from rrfp_jax.planner.configured import configured_plan, encoder_notes
from rrfp_jax.planner.plan_request import NOISE_FORMS, ORDER_NAMES, UNEQUAL, read_request
from rrfp_jax.planner.report import milliseconds, plan_as_json, refused_in_words, show_plan
from rrfp_jax.planner.search import SearchProgress, make_plan, with_optimum
from rrfp_jax.planner.search_space import CONSUMPTIONS
from rrfp_jax.planner.writing import write_choice
from rrfp_jax.simulation.optimum import load_solver

_log = logging.getLogger(__name__)
_LIST = "N,N,...|A..B"
_FEW = 3
"""Number of shapes that are told where nothing fits."""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        _check_exact(arguments)
        request = read_request(arguments)
        if arguments.as_configured:
            assert request.config is not None
            plan = configured_plan(request.config, request.book)
        else:
            with rare_collections(), _bar() as progress:
                plan = make_plan(request.book, request.space, progress=progress)
                if arguments.exact is not None and plan.ranking:
                    progress("the solver", 0, 1, float("inf"))
                    plan = with_optimum(plan, request.book, request.space, arguments.exact)
            plan = replace(plan, notes=(*plan.notes, *encoder_notes(request.config)))
    if not plan.ranking:
        told = "; ".join(refused_in_words(refused) for refused in plan.refused[:_FEW])
        schedules = request.space.schedules
        if told or schedules is None:
            told = told or "allow more stages, smaller microbatches or more rematerialisation"
            raise BadInput(f"nothing fits: {told}")
        raise BadInput(f"no order of {', '.join(schedules)} fits these sizes: name more --schedules, or leave them out")
    if arguments.json:
        print(json.dumps(plan_as_json(plan, request.book, top=arguments.top), allow_nan=False), flush=True)
    else:
        show_plan(
            make_console(), plan, request.book, top=arguments.top, memory_bytes=request.memory_bytes,
            is_configured=arguments.as_configured,
        )  # fmt: skip
    if arguments.write is not None:
        assert request.config is not None
        with checking_input():
            written = write_choice(request.config, plan.ranking[0], Path(arguments.write))
        beside = "" if written.table is None else f", with its order in {written.table}"
        _log.info("the configuration is in %s%s", written.config, beside)
    return DONE


def _check_exact(arguments: argparse.Namespace) -> None:
    """Raise ValueError where the solver is asked for and cannot be, before anything takes time."""
    if arguments.exact is None:
        return
    if not arguments.exact > 0:
        raise ValueError(f"--exact has {arguments.exact:g} s: give the solver more than 0")
    if arguments.as_configured or arguments.schedules is not None:
        other = "--as-configured" if arguments.as_configured else "--schedules"
        raise ValueError(f"--exact looks for an order without a name, and {other} for none: leave one out")
    if arguments.replicas == UNEQUAL:
        raise ValueError(f"--exact looks for one replica's order: leave it or --replicas {UNEQUAL} out")
    if STRICT not in (arguments.consume or STRICT).split(","):
        raise ValueError(f"--exact finds an order that stages keep to: let --consume name {STRICT}, or leave it out")
    try:
        load_solver()
    except ImportError as error:
        raise ValueError(str(error)) from error


def make_parser() -> CommandParser:
    """Returns the parser of the command; the values of lists and noise are read later."""
    parser = CommandParser(
        "plan", __doc__, usage="%(prog)s --config FILE.yaml (--device NAME | --costs FILE) [option ...]"
    )
    config = parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="model, data and batch: a file, or a preset by name; optional with --costs, which tells the layers too",
    )
    offer(config, preset_names())
    add_trust_argument(parser)
    parser.add_argument(
        "--as-configured",
        action="store_true",
        help="forecast the run as the configuration lays it out, in place of a search: memory of every stage on "
        "devices that need not be here, and the step's time",
    )

    add = parser.add_argument_group("machine").add_argument
    device = add(
        "--device",
        metavar="NAME",
        help=f"costs are worked out from the record of an accelerator, which need not be here: {', '.join(DEVICES)} "
        "(default: --costs)",
    )
    offer(device, DEVICES)
    add(
        "--costs",
        metavar="FILE.json",
        help="the costs of layers, as rrfp profile measures and writes them (default: --device)",
    )
    add(
        "--compile",
        action="store_true",
        help="compile a few layers, in seconds to minutes, for --device where the compiler for it is installed, else "
        "for the devices here: they hold what the compiler says, at the speed of --device; for --microbatch-size, "
        "--tensor and --remat, which are then the configuration's own where they are not given",
    )
    add(
        "--devices",
        type=int,
        metavar="N",
        help="how many there are, all of which are used (default: those of the machine, else as many as the "
        "configuration has)",
    )
    add(
        "--machine",
        metavar="FILE.json",
        help="devices that are not alike and links between them, as rrfp doctor --links and rrfp profile write them "
        "(default: as --costs has them, else all are alike)",
    )
    add("--memory", metavar="SIZE", help="memory of each device, as 72GiB (default: that of the device, if known)")
    add(
        "--jitter",
        metavar="FORM",
        help=f"how durations vary from step to step: {NOISE_FORMS}, or the last two joined by + (default: as "
        "--costs tell, else none)",
    )

    add = parser.add_argument_group("choices").add_argument
    add("--batch-size", type=int, metavar="N", help="samples of a step (default: as many as the configuration has)")
    add(
        "--microbatches",
        metavar=_LIST,
        help="microbatches of each replica (default: as many as the batch makes; without a batch required)",
    )
    add(
        "--microbatch-size",
        metavar=_LIST,
        help="samples of a microbatch (default: the configuration's own and 1, 2, 4 and 8, as far as they divide the "
        "batch; with --costs all that it has)",
    )
    add("--stages", metavar=_LIST, help="stages of the pipeline (default: every number that divides the devices)")
    add(
        "--replicas",
        metavar=f"{_LIST}|{UNEQUAL}",
        help=f"replicas of the pipeline (default: every number that divides the devices); {UNEQUAL}: stages may have "
        "different numbers of them too",
    )
    add(
        "--tensor",
        metavar=_LIST,
        help="devices that share every layer (default: 1, 2, 4 and 8 as far as they divide the model; with --costs all "
        "that it has)",
    )
    add("--chunks-per-stage", metavar=_LIST, help="chunks on every stage (default: 1, 2 and 4)")
    schedules = add(
        "--schedules",
        metavar="A,B,...",
        help=f"these orders alone, and none is searched for: {', '.join(ORDER_NAMES)} (default: all, and a search)",
    )
    offer(schedules, ORDER_NAMES)
    consume = add(
        "--consume",
        metavar="A,B",
        help=f"how stages follow tables: {STRICT}, {READY} or both (default both)",
    )
    offer(consume, CONSUMPTIONS)
    remat = add(
        "--remat",
        metavar="A,B,...",
        help=f"what backwards may recompute: {', '.join(REMAT_NAMES)} (default: as the configuration says, if not "
        "none; else none, dots and full; with --costs all that it has); where nothing is measured or compiled, a name "
        "that keeps attention or experts is counted as full",
    )
    offer(remat, REMAT_NAMES)
    add(
        "--exact",
        type=float,
        metavar="SECONDS",
        help="after the search, let the solver (OR-tools) look for the best order of the best cut, in so many seconds "
        "and the memory that there is, with copies to the host where it is short; the notes tell its bound (default: "
        "it does not)",
    )

    add = parser.add_argument_group("output").add_argument
    add("--top", type=int, default=5, metavar="N", help="how many of the ranking are told (default 5)")
    add(
        "--write",
        metavar="FILE.yaml",
        help="write the best one as a configuration for rrfp train, and beside it its table where no name stands for "
        "that (default: it is only told)",
    )
    add("--json", action="store_true", help="one JSON object on the last line of stdout, instead of tables")
    return parser


@contextmanager
def _bar() -> Iterator[SearchProgress]:
    """Shows a bar on stderr, so that it never mixes with printed results; it is gone once the search has ended."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("searching", total=None, told="")

        def tell(doing: str, done: int, total: int, best_ms: float) -> None:
            best = "" if best_ms == float("inf") else f", {milliseconds(best_ms)} ms per sample"
            bar.update(task, description=doing, completed=done, total=total, told=f"{done} of {total}{best}")

        yield tell


if __name__ == "__main__":
    run_command(main)
