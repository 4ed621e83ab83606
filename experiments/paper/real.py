"""Measure the ladder in the real runtime: the same steps on emulated stages, beside the simulator's forecasts.

All methods take their turn, again and again; a cell is one round of them.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from experiments.paper.emulated import emulated
from experiments.paper.ladder import BASE, EQUAL_MEMORY, METHODS, PAPER_REGIME
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.repeats import Ratios, Rounds, precision
from experiments.paper.rows import Cell, selected
from experiments.paper.scene import NO_JITTER, Scene
from experiments.paper.tables import markdown, settings_of

BAR = 0.03
"""Largest distance of a factor from its forecast."""
STEPS = (*EQUAL_MEMORY, *PAPER_REGIME)


def one_round(quick: bool, number: int) -> Sequence[Cell]:
    """Returns cells of four stages under several kinds of noise."""
    jitters = [NO_JITTER, "lognormal:0.5"] + ([] if quick else ["lognormal:0.2", "lognormal:1"])
    return [
        Scene(
            stages=4,
            microbatches=16,
            jitter=jitter,
            comm_ms=3.0,
            forward_ms=6.0,
            input_ms=6.0,
            weight_ms=6.0,
            steps=3 if quick else 6,
            seed=number,
        ).as_cell()
        for jitter in jitters
    ]


def measure(cell: Cell) -> Measured:
    """Measures each method once, with its forecast."""
    scene = Scene.of(cell)
    return [{"method": name, **emulated(scene, method)._asdict()} for name, method in METHODS.items()]


def factors(rows: Rows, before: str, after: str, column: str, jitter: str) -> list[float]:
    """Returns the speed of ``after`` relative to ``before`` in each round."""
    cell_of = settings_of(QUESTION.settings)
    first = {cell_of(row): float(row[column]) for row in selected(rows, method=before, jitter=jitter)}
    return [first[cell_of(row)] / float(row[column]) for row in selected(rows, method=after, jitter=jitter)]


def ratios(rows: Rows) -> Ratios:
    """Returns the factor of each step in the real runtime."""
    return {
        f"{name}, from {before} ({jitter})": factors(rows, before, after, "real_ms", jitter)
        for jitter in _jitters(rows)
        for name, before, after in _pairs()
    }


def _jitters(rows: Rows) -> list[str]:
    return sorted({row["jitter"] for row in rows}, key=lambda jitter: (jitter != NO_JITTER, jitter))


def _pairs() -> list[tuple[str, str, str]]:
    """Returns each step cumulated and alone: its name, before, after."""
    return list(
        dict.fromkeys(
            pair
            for step in STEPS
            for pair in [(step.name, step.before, step.cumulated), (f"{step.name}, alone", BASE, step.alone)]
            if pair[2]
        )
    )


def write(rows: Rows, folder: Path) -> str:  # noqa: ARG001
    """Returns the section: each step's factor, real and forecast."""
    lines, deviations = [], {}
    for jitter in _jitters(rows):
        for name, before, after in _pairs():
            real, forecast = (
                median(factors(rows, before, after, column, jitter)) for column in ("real_ms", "forecast_ms")
            )
            deviations[f"{name}, from {before} ({jitter})"] = real / forecast - 1
            lines.append([jitter, name, before, after, f"{real:.3f}", f"{forecast:.3f}", f"{real / forecast - 1:+.1%}"])
    worst = max(deviations, key=lambda name: abs(deviations[name]))
    host_ms = [float(row["host_ms"]) for row in rows]
    return "\n\n".join(
        [
            markdown(["noise", "step", "from", "to", "real", "simulated", "difference"], lines),
            f"{sum(abs(each) <= BAR for each in deviations.values())} of {len(deviations)} factors are within "
            f"{BAR:.0%} of the simulated ones; the farthest is {worst}, {deviations[worst]:+.1%}. "
            f"{precision(ratios(rows))}",
            f"*Threats*: four stages on one machine, whose tasks sleep; the host took {min(host_ms):.2f} to "
            f"{max(host_ms):.2f} ms per task.",
        ]
    )


ROUNDS = Rounds(of=one_round, ratios=ratios)
QUESTION = Question(
    name="real",
    title="Does the real runtime show it too?",
    settings=tuple(Scene.__dataclass_fields__),
    figures=("method", "real_ms", "forecast_ms", "host_ms"),
    cells=ROUNDS.first,
    measure=measure,
    write=write,
    is_timed=True,
    rounds=ROUNDS,
)
