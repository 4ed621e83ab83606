"""RQ4 in the real runtime: the paper's sleeps, exactly, on emulated stages.

Every stage keeps the moving average of its own compute times and sleeps as the paper says; the draws are the same for
all methods, and for the simulation beside them.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from experiments.paper import jitter
from experiments.paper.emulated import emulated
from experiments.paper.jitter import LEVELS, THEIRS
from experiments.paper.pictures import draw_lines
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.repeats import Ratios, Rounds, precision
from experiments.paper.rows import Cell, Value, selected
from experiments.paper.scene import NO_JITTER, Scene
from experiments.paper.tables import markdown, settings_of

METHODS = {
    name: jitter.METHODS[name]
    for name in ("1f1b strict, blocking", "1f1b strict", "1f1b-split + foresight", "bf, window 32", "bfw, window 32")
}


def one_round(quick: bool, number: int) -> Sequence[Cell]:
    """Returns a cell of four stages; a transfer takes half a forward, so that blocking it costs something."""
    return [
        Scene(
            stages=4,
            microbatches=16,
            comm_ms=5.0,
            forward_ms=10.0,
            input_ms=10.0,
            weight_ms=10.0,
            steps=2 if quick else 5,
            seed=number,
        ).as_cell()
    ]


def measure(cell: Cell) -> Measured:
    """Measures every method without sleeps, which shows the host's time, and then at each level."""
    rows: list[dict[str, Value]] = []
    for name, method in METHODS.items():
        host_ms = None
        for level in ("J0", *LEVELS):
            noise = NO_JITTER if level == "J0" else f"paper:{level}"
            found = emulated(Scene.of({**cell, "jitter": noise}), method, host_ms=host_ms)
            host_ms = found.host_ms
            rows.append({"method": name, "level": level, **found._asdict()})
    return rows


def longer(rows: Rows, method: str, level: str, column: str) -> list[float]:
    """Returns the ratio of step times with sleeps to those without, in each round."""
    cell_of = settings_of(QUESTION.settings)
    quiet = {cell_of(row): float(row[column]) for row in selected(rows, method=method, level="J0")}
    return [float(row[column]) / quiet[cell_of(row)] for row in selected(rows, method=method, level=level)]


def degradation(rows: Rows, method: str, level: str, column: str) -> float:
    """Returns how much longer steps take, in percent; the mean over rounds."""
    return 100 * (fmean(longer(rows, method, level, column)) - 1)


def ratios(rows: Rows) -> Ratios:
    """Returns the real slowdown over that of a simulation with the same draws, which differ from round to round."""
    return {
        f"{method}, {level}": [
            real / forecast
            for real, forecast in zip(
                *(longer(rows, method, level, c) for c in ("real_ms", "forecast_ms")), strict=True
            )
        ]
        for method in METHODS
        for level in LEVELS
    }


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: real and simulated percentages beside the paper's."""
    lines = [[f"paper: {name}", *(f"{each:.1f}" for each in theirs)] for name, theirs in THEIRS.items()]
    curves: dict[str, list[tuple[float, float]]] = {}
    farthest = 0.0
    for method in METHODS:
        cells_of = []
        for level in LEVELS:
            real, forecast = (degradation(rows, method, level, column) for column in ("real_ms", "forecast_ms"))
            farthest = max(farthest, abs((100 + real) / (100 + forecast) - 1))
            cells_of.append(f"{real:.1f} ({forecast:.1f})")
            curves.setdefault(method, [(0.0, 0.0)]).append((float(level[1]), real))
        lines.append([method, *cells_of])
    strict, ready = (degradation(rows, name, "J3", "real_ms") for name in ("1f1b strict, blocking", "bf, window 32"))
    return "\n\n".join(
        [
            markdown(["method", "J1 %, real (simulated)", "J2 %", "J3 %"], lines),
            draw_lines({"real runtime": curves}, folder / "jitter_real.png", across="level J", up="longer steps, %"),
            f"At J3 blocking strict 1F1B takes {strict:.1f}% longer, bf in a window of 32 {ready:.1f}%. Real and "
            f"simulated step times change alike within {farthest:.1%}. The paper's percentages are smaller on both "
            "sides: with tasks of 10 ms the injected sleeps alone add more work than its steps grew by. Of real over "
            f"simulated: {precision(ratios(rows))}",
            "*Threats*: four stages whose tasks sleep, on one machine; the length of the paper's tasks is not known.",
        ]
    )


ROUNDS = Rounds(of=one_round, ratios=ratios)
QUESTION = Question(
    name="jitter_real",
    title="Do random delays cost the same in the real runtime? (RQ4)",
    settings=tuple(Scene.__dataclass_fields__),
    figures=("method", "level", "real_ms", "forecast_ms", "host_ms"),
    cells=ROUNDS.first,
    measure=measure,
    write=write,
    is_timed=True,
    rounds=ROUNDS,
)
