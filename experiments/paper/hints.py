"""RQ5: which hint, and does a table beat the simple rules?

The paper ranks by BF, FB, backward first and forward first in a window of 32 and finds them close (6,007, 6,034, 6,058
and 6,303 ms). Here the rules meet tables, with and without foresight, in that window and within the memory of strict
1F1B.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.paper.pictures import draw_bars
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, selected
from experiments.paper.scene import EQUAL, NO_JITTER, SLOW_LINK, Method, Scene, simulated
from experiments.paper.tables import geometric_mean, interval, markdown, settings_of

STRICT = "1f1b strict"
RULES = ("bf", "fb", "b-priority", "f-priority", "bfw")
TABLES = ("1f1b", "1f1b-split", "zb-h1")
THEIRS = {"bf": 6007, "fb": 6034, "b-priority": 6058, "f-priority": 6303}
"""Milliseconds of a step in the paper."""
EQUAL_WORDS, WIDE_WORDS = "within 1F1B's memory", "window 32"
METHODS = {
    STRICT: Method({"schedule": "1f1b", "consume": "strict"}),
    **{f"{hint}, {EQUAL_WORDS}": Method({"hint": hint}, EQUAL) for hint in RULES},
    **{f"{hint}, {WIDE_WORDS}": Method({"hint": hint}, 32) for hint in RULES},
    **{f"{table}, readiness alone": Method({"schedule": table, "foresight": False}) for table in TABLES},
    **{f"{table} + foresight": Method({"schedule": table}) for table in TABLES},
    **{f"{table} + foresight, {WIDE_WORDS}": Method({"schedule": table}, 32) for table in TABLES},
}


def cells(quick: bool) -> Sequence[Cell]:
    """Returns cells of eight stages under several kinds of noise."""
    jitters = ["lognormal:0.2", "lognormal:0.5", "paper:J2"] + (
        [] if quick else ["lognormal:1", "paper:J1", "paper:J3"]
    )
    seeds = range(1, 4 if quick else 11)
    sizes = [(8, 32)] if quick else [(4, 16), (8, 32), (8, 96), (16, 64)]
    noisy = [(jitter, seed) for jitter in jitters for seed in seeds]
    return [
        Scene(stages=p, microbatches=m, jitter=jitter, comm_ms=2.0, seed=seed).as_cell()
        for p, m in sizes
        for jitter, seed in [(NO_JITTER, 1), (SLOW_LINK, 1), *noisy]
    ]


def measure(cell: Cell) -> Measured:
    """Measures all hints on the same draws."""
    scene = Scene.of(cell)
    found = {name: simulated(scene, method) for name, method in METHODS.items()}
    return [
        {"method": name, "step_ms": round(one.step_ms, 6), "peak": one.peak, "above_1f1b": one.above_1f1b}
        for name, one in found.items()
    ]


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: the speed of each hint relative to strict 1F1B."""
    scene_of = settings_of(QUESTION.settings)
    first = {scene_of(row): float(row["step_ms"]) for row in selected(rows, method=STRICT)}
    ratios = {
        name: [first[scene_of(row)] / float(row["step_ms"]) for row in selected(rows, method=name)] for name in METHODS
    }
    held, above = (
        {name: max(float(row[column]) for row in selected(rows, method=name)) for name in METHODS}
        for column in ("peak", "above_1f1b")
    )
    lines = [[name, interval(ratios[name]), f"{held[name]:g}", f"{max(0.0, above[name]):g}"] for name in METHODS]
    equal = {name: geometric_mean(ratios[name]) for name in METHODS if held[name] <= held[STRICT]}
    strictly = {name: equal[name] for name in equal if above[name] <= 0}
    wide = {name.partition(",")[0]: geometric_mean(ratios[name]) for name in METHODS if WIDE_WORDS in name}
    panels = {"Held at most what the fullest stage of strict 1F1B holds": equal, "In a window of 32": wide}
    best, best_strictly = (max(those, key=those.__getitem__) for those in (equal, strictly))
    order = sorted((hint for hint in THEIRS), key=lambda hint: -wide[hint])
    return "\n\n".join(
        [
            markdown(["hint", "times as fast as strict 1F1B", "held at most", "more on some stage"], lines),
            draw_bars(panels, folder / "hints.png", "times as fast as strict 1F1B"),
            f"Of those that hold no more than strict 1F1B's fullest stage, {best} is the fastest ({equal[best]:.3f}); "
            f"of those that hold no more on any stage, {best_strictly} ({strictly[best_strictly]:.3f}). In a window of "
            f"32 the rules come in the order {', '.join(order)} (paper: {', '.join(THEIRS)}), with "
            f"{wide[order[0]] / wide[order[-1]] - 1:.1%} between the first and the last "
            f"(paper: {THEIRS['f-priority'] / THEIRS['bf'] - 1:.1%}).",
            "*Threats*: simulated; every chunk takes equally long, and noise is independent from task to task.",
        ]
    )


QUESTION = Question(
    name="hints",
    title="Which hint? (RQ5)",
    settings=tuple(Scene.__dataclass_fields__),
    figures=("method", "step_ms", "peak", "above_1f1b"),
    cells=cells,
    measure=measure,
    write=write,
)
