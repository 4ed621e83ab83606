"""Contributions to the speed-up: from blocking 1F1B to tables with foresight, one step at a time, alone and cumulated.

The paper gives readiness a window of 32 microbatches and asynchronous communication, and strict 1F1B neither. Here each
is a step of its own. *Cumulated*, a step is added to all before it; *alone*, to blocking strict 1F1B. Where the two
differ, steps help or hinder each other. All but the wider window are taken within the memory of strict 1F1B, and once
more in the paper's regime, with a window of 32.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.paper.pictures import draw_bars
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, selected
from experiments.paper.scene import (
    EQUAL,
    FORESIGHT,
    NO_JITTER,
    SLOW_LINK,
    SLOW_STAGE,
    Method,
    Scene,
    simulated,
)
from experiments.paper.tables import geometric_mean, interval, markdown, settings_of

PAPER_WINDOW = 32
STRICT = {"schedule": "1f1b", "consume": "strict"}
BASE = "1f1b strict, blocking"


class Step(NamedTuple):
    """Contribution of one step."""

    name: str
    cumulated: str
    before: str
    alone: str


METHODS = {
    BASE: Method(STRICT, communication="blocking"),
    "1f1b strict": Method(STRICT),
    "bf": Method({"hint": "bf"}, EQUAL),
    "bfw": Method({"hint": "bfw"}, EQUAL),
    "1f1b-split + foresight": Method({"schedule": "1f1b-split"}),
    "bf, blocking": Method({"hint": "bf"}, EQUAL, "blocking"),
    "1f1b-split strict, blocking": Method({"schedule": "1f1b-split", "consume": "strict"}, communication="blocking"),
    "1f1b + foresight, blocking": Method({"schedule": "1f1b"}, communication="blocking"),
    "1f1b strict, wide, blocking": Method({"hint": "bf"}, PAPER_WINDOW, "blocking", frozen="strict"),
    "1f1b strict, wide": Method({"hint": "bf"}, PAPER_WINDOW, frozen="strict"),
    "bf, wide": Method({"hint": "bf"}, PAPER_WINDOW),
    "bfw, wide": Method({"hint": "bfw"}, PAPER_WINDOW),
    "bfw's table + foresight, wide": Method({"hint": "bfw"}, PAPER_WINDOW, frozen=FORESIGHT),
}
"""Every method of the ladder, by name."""
EQUAL_MEMORY = (
    Step("asynchronous communication", "1f1b strict", BASE, "1f1b strict"),
    Step("readiness (bf)", "bf", "1f1b strict", "bf, blocking"),
    Step("split backward (bfw)", "bfw", "bf", "1f1b-split strict, blocking"),
    Step("table, footprint and foresight", "1f1b-split + foresight", "bfw", "1f1b + foresight, blocking"),
)
PAPER_REGIME = (
    Step("asynchronous communication", "1f1b strict", BASE, "1f1b strict"),
    Step("window of 32", "1f1b strict, wide", "1f1b strict", "1f1b strict, wide, blocking"),
    Step("readiness (bf)", "bf, wide", "1f1b strict, wide", "bf, blocking"),
    Step("split backward (bfw)", "bfw, wide", "bf, wide", "1f1b-split strict, blocking"),
    Step("table, footprint and foresight", "bfw's table + foresight, wide", "bfw, wide", "1f1b + foresight, blocking"),
)
WITHIN = tuple(name for name in METHODS if "wide" not in name)
"""Names of the methods that hold no more than strict 1F1B."""


def cells(quick: bool) -> Sequence[Cell]:
    """Returns cells over sizes, noise and links; all have the same seeds."""
    sizes = [(8, 32)] if quick else [(4, 16), (8, 32), (8, 64), (16, 64)]
    jitters = [NO_JITTER, "lognormal:0.5", SLOW_LINK, SLOW_STAGE]
    if not quick:
        jitters += ["lognormal:0.2", "lognormal:1", "paper:J1", "paper:J3"]
    seeds = range(1, 4 if quick else 11)
    return [
        Scene(stages=p, microbatches=m, jitter=jitter, comm_ms=comm_ms, seed=seed).as_cell()
        for p, m in sizes
        for comm_ms in (1.0, 5.0)
        for jitter in jitters
        for seed in (seeds if jitter not in (NO_JITTER, SLOW_LINK, SLOW_STAGE) else (1,))
    ]


def measure(cell: Cell) -> Measured:
    """Measures all methods on the same draws."""
    scene = Scene.of(cell)
    found = {name: simulated(scene, method) for name, method in METHODS.items()}
    return [
        {"method": name, "step_ms": round(one.step_ms, 6), "peak": one.peak, "above_1f1b": one.above_1f1b}
        for name, one in found.items()
    ]


def factors(rows: Rows, before: str, after: str) -> list[float]:
    """Returns the speed of ``after`` relative to ``before`` in each cell."""
    scene_of = settings_of(QUESTION.settings)
    first = {scene_of(row): float(row["step_ms"]) for row in selected(rows, method=before)}
    return [first[scene_of(row)] / float(row["step_ms"]) for row in selected(rows, method=after)]


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: two tables, a picture and their findings."""
    regimes = (("Within the memory of strict 1F1B", EQUAL_MEMORY), ("In a window of 32", PAPER_REGIME))
    parts = []
    for title, steps in regimes:
        parts += [f"**{title}**", _table(rows, steps)]
    above = max(float(row["above_1f1b"]) for name in WITHIN for row in selected(rows, method=name))
    bars = {
        title: {step.name: geometric_mean(factors(rows, step.before, step.cumulated)) for step in steps}
        for title, steps in regimes
    }
    picture = draw_bars(bars, folder / "ladder.png", "times as fast as the step before")
    within = [factors(rows, BASE, step.cumulated) for step in EQUAL_MEMORY][-1]
    fixed = factors(rows, "1f1b strict", "1f1b-split + foresight")
    wide = factors(rows, "1f1b strict, wide", "bf, wide")
    parts += [
        picture,
        f"At equal memory (no method above strict 1F1B by more than {above:g} activations) all steps together make "
        f"{geometric_mean(within):.3f} of blocking 1F1B's speed, the least {min(within):.3f}; against *asynchronous* "
        f"1F1B the table with foresight makes {geometric_mean(fixed):.3f} (least {min(fixed):.3f}). In the paper's "
        f"window, readiness alone is {geometric_mean(wide):.3f} times as fast as an order with the same warm-up.",
        f"*Threats*: durations are drawn independently for each task, and blocking senders are simulated as occupied "
        f"for the whole transfer. {len(rows) // len(METHODS)} cells, simulated; the section on the real runtime "
        "repeats the steps there.",
    ]
    return "\n\n".join(parts)


def _table(rows: Rows, steps: Sequence[Step]) -> str:
    lines = []
    total = 1.0
    for step in steps:
        cumulated = factors(rows, step.before, step.cumulated)
        total *= geometric_mean(cumulated)
        alone = factors(rows, BASE, step.alone)
        lines.append(
            [
                step.name,
                interval(alone),
                interval(cumulated),
                f"{geometric_mean(cumulated) / geometric_mean(alone):.3f}",
                f"{total:.3f}",
                f"{max(float(row['peak']) for row in selected(rows, method=step.cumulated)):g}",
            ]
        )
    return markdown(["step", "alone", "cumulated", "cumulated over alone", "of the base", "held at most"], lines)


QUESTION = Question(
    name="ladder",
    title="What makes the difference?",
    settings=tuple(Scene.__dataclass_fields__),
    figures=("method", "step_ms", "peak", "above_1f1b"),
    cells=cells,
    measure=measure,
    write=write,
)
