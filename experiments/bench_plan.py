"""Compare plans with real runs.

::

    python -m experiments.bench_plan                       # everything
    python -m experiments.bench_plan --only real-memory

``real-step``: real training in two processes, each on its own core: the step beside its forecast, for some cuts and
orders of a small model. ``real-memory``: in four processes, the most that each stage holds beside its forecast.
``cut``: the gain of the best cut of an uneven model over the even one, trained and emulated. ``emulated``: steps on
emulated stages beside their forecasts, whether both rank settings alike, and the cost of trusting a plan's first
choice.
"""

import os
from collections.abc import Callable
from statistics import median

from rich.console import Console

from experiments.bench_plan_cut import auto_cut
from experiments.bench_plan_emulated import emulated_plans
from experiments.bench_plan_real import (
    MODEL,
    SMALL_MODEL,
    Case,
    bench_of,
    forecast_peaks,
    forecast_step_ms,
)
from rrfp_jax.commands.common.console import make_console, make_table
from rrfp_jax.commands.common.errors import run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.readable import format_bytes

STEP_ROUNDS, STEPS = 3, 15
STRICT_1F1B = {"schedule": "1f1b", "consume": "strict"}
STEP_CASES = [
    Case(layers=layers, num_stages=2, num_microbatches=8, order=order)
    for layers in ((4, 4), (5, 3))
    for order in (STRICT_1F1B, {"schedule": "zb-h1", "consume": "strict"}, {"hint": "bf", "window": 4})
]
MEMORY_CASES = [
    Case(layers=(2, 2, 2, 2), num_stages=4, num_microbatches=12, order=STRICT_1F1B),
    Case(layers=(3, 2, 2, 1), num_stages=4, num_microbatches=12, order={"schedule": "zb-h1", "consume": "strict"}),
    Case(layers=(1, 2, 3, 2), num_stages=4, num_microbatches=12, order={"schedule": "1f1b"}),
    Case(layers=(1,) * 8, num_stages=4, num_microbatches=12, order={"schedule": "interleaved-1f1b"}),
]
REMATS = ("none", "full")


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    console = make_console()
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            part(console)
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("bench_plan", __doc__)
    parser.add_argument(
        "--only", choices=[*PARTS], metavar="NAME", help=f"measure this alone: {', '.join(PARTS)} (default: all)"
    )
    return parser


def bench_plan(console: Console) -> None:
    """Runs all parts in turn."""
    for part in PARTS.values():
        part(console)


def real_step(console: Console) -> None:
    """Prints forecast and measured steps, each the median of some rounds, in which profile and runs take turns."""
    forecast_ms: dict[str, list[float]] = {case.words: [] for case in STEP_CASES}
    measured_ms: dict[str, list[float]] = {case.words: [] for case in STEP_CASES}
    with bench_of(MODEL, 8, length=128) as bench:
        for number in range(STEP_ROUNDS):
            book = bench.profile(2, repeats=STEPS)
            for case in STEP_CASES:
                forecast_ms[case.words].append(forecast_step_ms(case, book))
                measured_ms[case.words].append(bench.train(case, STEPS).step_ms)
                console.print(
                    f"round {number + 1}: {case.words}: forecast {forecast_ms[case.words][-1]:.1f} ms, measured "
                    f"{measured_ms[case.words][-1]:.1f} ms; load {os.getloadavg()[0]:.1f}"
                )
    table = make_table("a step in two processes, ms", "cut and order", "forecast", "measured", "off", numeric=True)
    for case in STEP_CASES:
        foreseen, seen = median(forecast_ms[case.words]), median(measured_ms[case.words])
        table.add_row(case.words, f"{foreseen:.1f}", f"{seen:.1f}", f"{foreseen / seen - 1:+.1%}")
    console.print(table)


def real_memory(console: Console) -> None:
    """Prints forecast and measured peaks of every stage."""
    headings = ("stage", "forecast", "measured", "over")
    table = make_table("the most that stages hold, in four processes", "cut and order", *headings, numeric=True)
    with bench_of(SMALL_MODEL, 8, length=32) as bench:
        book = bench.profile(4, repeats=1, remats=REMATS)
        for remat in REMATS:
            for case in MEMORY_CASES:
                peaks = bench.train(case, 3, remat=remat).peaks
                foreseen = forecast_peaks(case, book, remat=remat)
                for stage, (forecast, seen) in enumerate(zip(foreseen, peaks, strict=True)):
                    cells = format_bytes(forecast), format_bytes(seen), f"{forecast / seen - 1:+.1%}"
                    table.add_row(f"{case.words}, remat {remat}", str(stage), *cells)
    console.print(table)


PARTS: dict[str, Callable[[Console], object]] = {
    "real-step": real_step,
    "real-memory": real_memory,
    "cut": auto_cut,
    "emulated": emulated_plans,
}


if __name__ == "__main__":
    run_command(main)
