"""Command ``experiments.levels --systems``: simulate, print, and write."""

import argparse
import json
import logging
from pathlib import Path

from experiments.systems.cells import Case, CaseJob, study_case
from experiments.systems.options import Wishes, parse_wishes
from experiments.systems.results import Study, as_json, distinct_hops, rows, turnover_rows, write_csv
from experiments.systems.tables import show_study
from experiments.systems.turnovers import find_turnover, turnover_jobs
from experiments.systems.workers import Workers, WorkersFailed
from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import BadInput, checking_input
from rrfp_jax.commands.common.options import CommandParser

_log = logging.getLogger(__name__)


def run_study(arguments: argparse.Namespace, parser: CommandParser) -> int:
    """Runs the command with these options and returns its exit code."""
    with checking_input():
        wishes = parse_wishes(arguments, parser)
    try:
        study = make_study(wishes)
    except WorkersFailed as failure:
        _log.error("%s", failure)
        return failure.code
    if wishes.as_json:
        print(json.dumps(as_json(study), allow_nan=False))
    else:
        show_study(make_console(), study)
    if wishes.output is not None:
        write_study(study, wishes.output)
    return 0


def make_study(wishes: Wishes) -> Study:
    """Simulates everything; raises BadInput where no schedule fits any size."""
    hops = {num_stages: distinct_hops(wishes.systems, num_stages) for num_stages in wishes.stages}
    jobs = [
        CaseJob(
            case=Case(entry, num_stages, num_microbatches),
            hops=tuple(hops[num_stages]),
            communications=wishes.communications,
            orders=wishes.orders,
            window=wishes.window,
        )
        for num_stages in wishes.stages
        for num_microbatches in wishes.microbatches
        for entry in wishes.entries
    ]
    with Workers(min(wishes.processes, len(jobs))) as workers:
        results = workers.run(study_case, jobs, "cases")
        if all(one.refused for one in results):
            raise BadInput(f"no schedule fits any size; for example {results[0].refused}")
        crossings = list(turnover_jobs(results, hops, wishes.communications))
        turnovers = workers.run(find_turnover, crossings, "changes of places")
    return Study(wishes=wishes, results=tuple(results), turnovers=tuple(turnovers))


def write_study(study: Study, folder: Path) -> None:
    """Writes all numbers, and a picture for each question that the study can answer; matplotlib is loaded only now."""
    from experiments.systems.pictures import draw_study

    folder.mkdir(parents=True, exist_ok=True)
    write_csv(rows(study), folder / "cells.csv")
    write_csv(turnover_rows(study), folder / "turnovers.csv")
    names = draw_study(study, folder)
    _log.info("%s holds cells.csv, turnovers.csv, %s", folder, ", ".join(names))
