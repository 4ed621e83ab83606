"""Measure the evaluation again, or write its report.

::

    python -m experiments.paper run                     # every question, quickly: minutes on two cores
    python -m experiments.paper run ladder hints --full # these two, in all settings
    python -m experiments.paper run real --again        # once more, beside the first: do the intervals agree?
    python -m experiments.paper report                  # tables, pictures and text from the rows

A run that was stopped goes on where it was. The report goes to ``--folder``, by default runs/paper, rows and pictures
into its folder ``results``; with ``--folder experiments/paper`` they are those that this checkout keeps.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.paper.again import measure_again
from experiments.paper.question import Question
from experiments.paper.questions import QUESTIONS
from experiments.paper.report import REPORT, write_report
from experiments.paper.run import measure_all, row_file, row_path
from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser

DEFAULT_FOLDER = "runs/paper"


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    console, folder = make_console(), Path(arguments.folder)
    with checking_input():
        questions = _questions(arguments.questions)
        if arguments.action == "report" and (arguments.full or arguments.fresh):
            raise ValueError("report measures nothing: leave --full and --fresh out")
        if arguments.again and (arguments.action == "report" or arguments.fresh):
            raise ValueError("again measures a second time, beside what is there: take run, and leave --fresh out")
        if arguments.fresh:
            for question in questions:
                row_path(question, folder).unlink(missing_ok=True)
        for question in questions:
            row_file(question, folder)
    given = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "experiments.paper", *given])
    if arguments.again:
        with checking_input():
            agree = measure_again(questions, folder, console, quick=not arguments.full, command=command)
        return 0 if agree else 1
    if arguments.action == "run":
        measure_all(questions, folder, console, quick=not arguments.full, command=command)
    missing = write_report(list(QUESTIONS.values()), folder)
    if missing:
        console.print(f"not measured yet, and not in the report: {', '.join(missing)}")
    console.print(f"the report is {folder / REPORT}")
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("paper", __doc__)
    parser.add_argument("action", choices=("run", "report"), help="measure and write the report, or only write it")
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(QUESTIONS)} (default: all)")
    parser.add_argument("--full", action="store_true", help="all settings, which takes hours; without it minutes")
    parser.add_argument("--folder", default=DEFAULT_FOLDER, metavar="FOLDER", help="of rows, report and pictures")
    parser.add_argument("--again", action="store_true", help="measure once more, and say whether it comes out again")
    parser.add_argument("--fresh", action="store_true", help="remove the rows of these questions, and measure again")
    return parser


def _questions(names: Sequence[str]) -> list[Question]:
    unknown = [name for name in names if name not in QUESTIONS]
    if unknown:
        raise ValueError(f"there is no question {unknown[0]!r}: the questions are {', '.join(QUESTIONS)}")
    return [QUESTIONS[name] for name in names or QUESTIONS]


if __name__ == "__main__":
    run_command(main)
