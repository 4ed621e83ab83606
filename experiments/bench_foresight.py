"""Foresight beside strict consumption of the same table, at exactly that table's memory, in virtual time.

::

    python -m experiments.bench_foresight --seed 5 --csv cells.csv

Eight groups pair a table consumed strictly with one that ranks the ready tasks within the memory of the first, and each
meets ten kinds of jitter. A *ratio* is how many times as fast the second is: mean makespan of all steps, the first
included, with the same durations on both sides. ``python -m experiments.bench --only foresight`` prints a table, this
command can write each cell.
"""

import csv
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.common.console import make_console
from rrfp_jax.commands.common.errors import checking_input, run_command
from rrfp_jax.commands.common.options import CommandParser
from rrfp_jax.commands.common.ordering import OrderingOptions
from rrfp_jax.commands.studies import RULES, parse_jitter
from rrfp_jax.core import Order
from rrfp_jax.core.foresight import ForesightRules
from rrfp_jax.observe.output_files import check_file
from rrfp_jax.simulation import Costs, Links, Machine, both_directions, constant, for_steps, peak_memory, simulate
from rrfp_jax.simulation.costs import Durations
from rrfp_jax.waiting import end_with_parent


class Group(NamedTuple):
    """Name, a table consumed strictly, and a table as hint within the memory of the first."""

    strict: str
    hint: str
    same_backward: bool = True


GROUPS = {
    "lin-f-1f1b": Group("1f1b", "1f1b"),
    "lin-f-eager": Group("eager-1f1b", "eager-1f1b"),
    "lin-s-1f1b": Group("1f1b", "1f1b-split", same_backward=False),
    "lin-s-h1": Group("zb-h1", "zb-h1"),
    "lin-s-h2": Group("zb-h2", "zb-h2"),
    "loop-f": Group("interleaved-1f1b", "interleaved-1f1b"),
    "loop-s": Group("interleaved-1f1b", "interleaved-1f1b-split", same_backward=False),
    "v-s": Group("zb-v", "zb-v"),
}
MULTIMODAL, SLOW_STAGE, SLOW_LINK = "multimodal", "slow stage", "slow link"
JITTERS = (
    "none",
    "lognormal:0.2",
    "lognormal:0.5",
    "lognormal:1",
    "paper:J1",
    "paper:J2",
    "paper:J3",
    SLOW_STAGE,
    SLOW_LINK,
    MULTIMODAL,
)
SLOW_STAGE_FACTOR, SLOW_LINK_PARTS = 1.3, 3.0
"""Factor on the durations of the middle stage's tasks, and the delay that the middle link adds, in forwards."""
MULTIMODAL_SIGMAS = 0.8, 0.3
"""Sigmas of the first quarter of the model, the encoders, and of the rest. Each microbatch has one draw for both."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Setting of one comparison."""

    group: str
    num_stages: int
    num_microbatches: int
    jitter: str
    durations_ms: tuple[float, float, float] = (10.0, 10.0, 10.0)
    """Durations of F, I and W of a whole stage."""
    comm_ms: float = 1.0
    num_steps: int = 20
    seed: int = 1

    @property
    def machine(self) -> Machine:
        extra: dict[tuple[int, int], float] = {}
        if self.jitter == SLOW_LINK:
            middle = (self.num_stages // 2 - 1, self.num_stages // 2)
            extra = both_directions({middle: SLOW_LINK_PARTS * self.durations_ms[0]}, self.num_stages)
        return Machine(links=Links(latency_ms=self.comm_ms, extra_ms=extra))

    def order(self, schedule: str, **words: Any) -> Order:
        return OrderingOptions(schedule=schedule, **words).resolve(
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            durations_ms=self.durations_ms,
            comm_ms=self.comm_ms,
        )

    def costs(self, order: Order) -> Costs:
        """Returns the same costs for every order with so many chunks."""
        placement = order.placement
        forward, input_gradient, weight = (ms * self.num_stages / placement.num_chunks for ms in self.durations_ms)
        durations_ms = for_steps(constant((forward, input_gradient, weight), order.graph), self.num_steps)
        rng = np.random.default_rng((self.seed, *map(ord, self.jitter)))
        if self.jitter == MULTIMODAL:
            return Costs(durations_ms=_multimodal(durations_ms, rng))
        text = f"straggler:{self.num_stages // 2},{SLOW_STAGE_FACTOR}" if self.jitter == SLOW_STAGE else self.jitter
        jitter = parse_jitter(None if text in ("none", SLOW_LINK) else text)
        durations_ms, sleeps = jitter(durations_ms, placement, rng)
        return Costs(durations_ms=durations_ms, sleeps=sleeps)


class Result(NamedTuple):
    """Speed relative to strict consumption, and whether no stage held more."""

    ready: float
    foresight: float
    within_memory: bool


def _multimodal(durations_ms: Durations, rng: np.random.Generator) -> Durations:
    num_chunks = durations_ms.shape[1]
    num_first = max(1, num_chunks // 4)
    sigmas = np.repeat(MULTIMODAL_SIGMAS, [num_first, num_chunks - num_first])[None, :, None, None]
    draws = rng.standard_normal((durations_ms.shape[0], 1, durations_ms.shape[2], 1))
    return durations_ms * np.exp(sigmas * draws - sigmas**2 / 2)


def measure(cell: Cell, rules: ForesightRules | None = None) -> Result:
    """Runs both sides of a cell, and beside them readiness alone with the same footprint."""
    group = GROUPS[cell.group]
    strict_ms, strict_memory = _run(cell, cell.order(group.strict, consume="strict"))
    ready_ms, _ = _run(cell, cell.order(group.hint, foresight=False))
    foresight_ms, memory = _run(cell, cell.order(group.hint, foresight=rules))
    within = all(held <= most + 1e-9 for held, most in zip(memory, strict_memory, strict=True))
    return Result(strict_ms / ready_ms, strict_ms / foresight_ms, within)


def _run(cell: Cell, order: Order) -> tuple[float, list[float]]:
    """Returns the mean makespan in milliseconds, and the most that each stage held."""
    run = simulate(order.arbiters(RULES), cell.costs(order), machine=cell.machine, num_steps=cell.num_steps)
    makespan_ms = fmean(run.timeline.of_step(step).makespan_s() for step in range(cell.num_steps)) * 1e3
    return makespan_ms, peak_memory(run.timeline, order.graph, order.placement)


def all_cells(seed: int, **changes: Any) -> list[Cell]:
    """Returns the cells of eight groups, 4 and 8 stages, one, two and four microbatches per stage, and ten jitters."""
    return [
        Cell(group=group, num_stages=p, num_microbatches=p * times, jitter=jitter, seed=seed, **changes)
        for group, p, times, jitter in product(GROUPS, (4, 8), (1, 2, 4), JITTERS)
    ]


def measure_all(cells: Sequence[Cell], rules: ForesightRules | None = None) -> list[Result]:
    """Returns the results of all cells, which are measured on all cores."""
    with ProcessPoolExecutor(os.cpu_count(), initializer=end_with_parent) as pool:
        return list(pool.map(measure, cells, [rules] * len(cells), chunksize=4))


def show(console: Console, cells: Sequence[Cell], results: Sequence[Result]) -> None:
    """Prints a row per group and one for all."""
    table = Table(
        title=f"{len(cells)} cells: times as fast as the table consumed strictly, at its memory "
        "(fewest/mean, and the share below 0.995)",
        title_justify="left",
    )
    for heading in ("group", "ready", "foresight", "memory kept"):
        table.add_column(heading, justify="left" if heading == "group" else "right")
    rows = list(zip(cells, results, strict=True))
    for name in [*GROUPS, "same backward", "all"]:
        of_row = [result for cell, result in rows if _belongs(cell, name)]
        if of_row:
            columns = [_summary([r.ready for r in of_row]), _summary([r.foresight for r in of_row])]
            table.add_row(name, *columns, "yes" if all(r.within_memory for r in of_row) else "NO")
    console.print(table)


def _belongs(cell: Cell, row: str) -> bool:
    return row in ("all", cell.group) or (row == "same backward" and GROUPS[cell.group].same_backward)


def _summary(ratios: Sequence[float]) -> str:
    below = sum(ratio < 0.995 for ratio in ratios) / len(ratios)
    return f"{min(ratios):.4f} / {fmean(ratios):.4f}, median {median(ratios):.4f}, {below:.1%}"


def bench_foresight(console: Console | None = None, seed: int = 1) -> list[tuple[Cell, Result]]:
    """Prints and returns all cells."""
    cells = all_cells(seed)
    results = measure_all(cells)
    show(console or make_console(), cells, results)
    return list(zip(cells, results, strict=True))


def write_csv(path: str, rows: Iterable[tuple[Cell, Result]]) -> None:
    """Writes one line per cell."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["group", "stages", "microbatches", "jitter", *Result._fields])
        for cell, result in rows:
            writer.writerow([cell.group, cell.num_stages, cell.num_microbatches, cell.jitter, *result])


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = make_parser().parse_args(argv)
    with checking_input():
        if arguments.seed < 0:
            raise ValueError(f"seed is {arguments.seed}: give 0 or more")
        if arguments.csv is not None:
            check_file(Path(arguments.csv), "csv")
    rows = bench_foresight(seed=arguments.seed)
    if arguments.csv is not None:
        write_csv(arguments.csv, rows)
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of the command."""
    parser = CommandParser("bench_foresight", __doc__)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the jitter")
    parser.add_argument("--csv", metavar="FILE", help="write every cell to this file")
    return parser


if __name__ == "__main__":
    run_command(main)
