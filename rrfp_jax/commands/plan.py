"""Plan how to run a model: from costs to the best cut, order and memory, ranked by forecast step time.

::

    rrfp plan --config gpu/one_node_8 --device h100 --devices 64 --memory 72GiB
    rrfp plan --config mine.yaml --costs costs.json --jitter lognormal:0.2 \\
        --objective p95 --write best.yaml --picture frontier.png
    rrfp plan --costs costs.json --devices 8 --microbatches 8..32 --json
    rrfp plan --config gpu/llama3_70b_128 --device h100 --as-configured

With ``--json`` the last line on stdout is one JSON object. No device is needed: costs are worked out from a device's
record (``--device``) or come from a file (``--costs``), and what is judged runs in virtual time, in the scheduling core
that also runs on devices. ``rrfp train`` runs what ``--write`` has written as it is.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import BadInput, checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.planning.as_configured import configured_plan, encoder_notes
from rrfp_jax.commands.planning.as_json import plan_as_json
from rrfp_jax.commands.planning.asking import Asked, read_asked
from rrfp_jax.commands.planning.options import plan_parser
from rrfp_jax.commands.planning.report import refused_in_words, show_configured, show_plan
from rrfp_jax.commands.planning.searching import search
from rrfp_jax.commands.planning.writing import write_choice
from rrfp_jax.exit_codes import DONE, INTERRUPTED
from rrfp_jax.planning.search.records import Plan

_log = logging.getLogger(__name__)
_FEW = 3
"""Of what does not fit, where nothing does."""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        asked = read_asked(arguments)
        if arguments.as_configured:
            assert asked.config is not None
            plan = configured_plan(asked.config, asked.book, draws=arguments.draws, seed=arguments.seed)
        else:
            plan = search(asked, arguments.seed)
            plan = replace(plan, notes=(*plan.notes, *encoder_notes(asked.config)))
    if not plan.ranking and not plan.is_complete:
        _log.warning("interrupted before anything was judged")
        return INTERRUPTED
    if not plan.ranking:
        raise BadInput(_nothing_fits(plan, asked.wishes.schedules))
    if arguments.json:
        print(json.dumps(plan_as_json(plan, asked.book, top=arguments.top), allow_nan=False), flush=True)
    else:
        show = show_configured if arguments.as_configured else show_plan
        show(make_console(), plan, asked.book, top=arguments.top, memory_bytes=asked.memory_bytes)
    _write_files(arguments, asked, plan)
    return DONE if plan.is_complete else INTERRUPTED


def make_parser() -> CommandParser:
    """The parser of the command."""
    return plan_parser(__doc__)


def _nothing_fits(plan: Plan, schedules: Sequence[str] | None) -> str:
    """The nearest changes that would help, in one sentence."""
    told = "; ".join(refused_in_words(refused) for refused in plan.refused[:_FEW])
    if told or schedules is None:
        return f"nothing fits: {told or 'allow more stages, smaller microbatches or more rematerialisation'}"
    return f"no order of {', '.join(schedules)} fits these sizes: name more --schedules, or leave them out"


def _write_files(arguments: argparse.Namespace, asked: Asked, plan: Plan) -> None:
    if arguments.write is not None:
        assert asked.config is not None
        with checking_input():
            written = write_choice(asked.config, plan.ranking[0], Path(arguments.write))
        beside = "" if written.table is None else f", with its order in {written.table}"
        _log.info("the configuration is in %s%s", written.config, beside)
    if arguments.picture is not None:
        from rrfp_jax.commands.planning.picture import draw_frontier

        draw_frontier(
            plan, arguments.picture, memory_bytes=asked.memory_bytes, title=f"Step time against memory: {asked.title}"
        )
        _log.info("the picture is in %s", arguments.picture)


if __name__ == "__main__":
    run_command(main)
