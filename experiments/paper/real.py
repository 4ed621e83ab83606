"""The ladder in the real runtime: the same steps on emulated stages, beside what the simulator says of them.

All methods take their turn, again and again; a cell is one round of them.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from experiments.paper.emulated import emulated
from experiments.paper.ladder import BASE, EQUAL_MEMORY, METHODS, PAPER_REGIME
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, selected
from experiments.paper.scene import NO_JITTER, Scene
from experiments.paper.tables import markdown

BAR = 0.03
"""How far a factor may be from its forecast."""
REAL = {name: method for name, method in METHODS.items() if "adaptive" not in name}
STEPS = [step for step in (*EQUAL_MEMORY, *PAPER_REGIME) if step.cumulated in REAL]


def cells(quick: bool) -> Sequence[Cell]:
    """Four stages; as many rounds as settle a median."""
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
            seed=seed,
        ).as_cell()
        for seed in range(1, 4 if quick else 8)
        for jitter in jitters
    ]


def measure(cell: Cell) -> Measured:
    """Each method once, and its forecast."""
    scene = Scene.of(cell)
    return [{"method": name, **emulated(scene, method)._asdict()} for name, method in REAL.items()]


def factor(rows: Rows, before: str, after: str, column: str, jitter: str) -> float:
    """How many times as fast ``after`` is: the median over rounds of the ratios within a round."""
    first = {row["seed"]: float(row[column]) for row in selected(rows, method=before, jitter=jitter)}
    return median(first[row["seed"]] / float(row[column]) for row in selected(rows, method=after, jitter=jitter))


def write(rows: Rows, folder: Path) -> str:  # noqa: ARG001
    """Each step's factor, real and forecast."""
    jitters = sorted({row["jitter"] for row in rows}, key=lambda jitter: (jitter != NO_JITTER, jitter))
    lines, deviations = [], {}
    pairs = dict.fromkeys(
        pair
        for step in STEPS
        for pair in [(step.name, step.before, step.cumulated), (f"{step.name}, alone", BASE, step.alone)]
        if pair[2]
    )
    for jitter in jitters:
        for name, before, after in pairs:
            real, forecast = (factor(rows, before, after, column, jitter) for column in ("real_ms", "forecast_ms"))
            deviations[f"{name}, from {before} ({jitter})"] = real / forecast - 1
            lines.append([jitter, name, before, after, f"{real:.3f}", f"{forecast:.3f}", f"{real / forecast - 1:+.1%}"])
    worst = max(deviations, key=lambda name: abs(deviations[name]))
    host_ms = [float(row["host_ms"]) for row in rows]
    rounds = len({row["seed"] for row in rows})
    return "\n\n".join(
        [
            markdown(["noise", "step", "from", "to", "real", "simulated", "difference"], lines),
            f"{sum(abs(each) <= BAR for each in deviations.values())} of {len(deviations)} factors are within "
            f"{BAR:.0%} of the simulated ones; the farthest is {worst}, {deviations[worst]:+.1%}.",
            f"*Threats*: four stages on one machine, whose tasks sleep; the host took {min(host_ms):.2f} to "
            f"{max(host_ms):.2f} ms per task, {rounds} rounds.",
        ]
    )


QUESTION = Question(
    name="real",
    title="Does the real runtime show it too?",
    settings=tuple(Scene.__dataclass_fields__),
    figures=("method", "real_ms", "forecast_ms", "host_ms"),
    cells=cells,
    measure=measure,
    write=write,
    is_timed=True,
)
