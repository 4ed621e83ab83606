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

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import BadInput, checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.studies import rare_collections
from rrfp_jax.exit_codes import DONE
from rrfp_jax.planner.as_configured import configured_plan, encoder_notes
from rrfp_jax.planner.options import plan_parser
from rrfp_jax.planner.plan_request import read_request
from rrfp_jax.planner.records import Plan
from rrfp_jax.planner.report import milliseconds, plan_as_json, refused_in_words, show_plan
from rrfp_jax.planner.search import SearchProgress, make_plan
from rrfp_jax.planner.writing import write_choice

_log = logging.getLogger(__name__)
_FEW = 3
"""Number of shapes that are told where nothing fits."""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        request = read_request(arguments)
        if arguments.as_configured:
            assert request.config is not None
            plan = configured_plan(request.config, request.book)
        else:
            with rare_collections(), _bar() as progress:
                plan = make_plan(request.book, request.space, progress=progress)
            plan = replace(plan, notes=(*plan.notes, *encoder_notes(request.config)))
    if not plan.ranking:
        raise BadInput(_nothing_fits(plan, request.space.schedules))
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


def make_parser() -> CommandParser:
    """The parser of the command."""
    return plan_parser(__doc__)


def _nothing_fits(plan: Plan, schedules: Sequence[str] | None) -> str:
    """Returns the nearest changes that would help, in one sentence."""
    told = "; ".join(refused_in_words(refused) for refused in plan.refused[:_FEW])
    if told or schedules is None:
        return f"nothing fits: {told or 'allow more stages, smaller microbatches or more rematerialisation'}"
    return f"no order of {', '.join(schedules)} fits these sizes: name more --schedules, or leave them out"


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
