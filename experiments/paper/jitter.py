"""RQ4: how much slower do steps become when tasks take longer at random?

The paper injects sleeps before forwards and backwards, at four levels (probability, base and factor: J0 none; J1 0.1,
5 ms, 0.5; J2 0.2, 10 ms, 1; J3 0.3, 15 ms, 1.5, times a uniform number between 0.5 and 1.5 and times the larger of the
base and the stage's moving average of compute times), on eight stages, and reports 2.8, 11.3 and 18.1% for strict 1F1B
and 1.8, 6.8 and 11.4% for readiness. It leaves open how large a task is and which part of a step is communication,
which decides: so both are varied here.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from experiments.paper.pictures import draw_lines
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, selected
from experiments.paper.scene import EQUAL, NO_JITTER, Method, Scene, simulated
from experiments.paper.tables import markdown

LEVELS = ("J1", "J2", "J3")
THEIRS = {"1F1B": (2.8, 11.3, 18.1), "RRFP": (1.8, 6.8, 11.4)}
"""The paper's, in percent."""
METHODS = {
    "1f1b strict, blocking": Method({"schedule": "1f1b", "consume": "strict"}, communication="blocking"),
    "1f1b strict": Method({"schedule": "1f1b", "consume": "strict"}),
    "bf within its memory": Method({"hint": "bf"}, EQUAL),
    "1f1b + foresight": Method({"schedule": "1f1b"}),
    "1f1b-split + foresight": Method({"schedule": "1f1b-split"}),
    "bf, window 32": Method({"hint": "bf"}, 32),
    "bfw, window 32": Method({"hint": "bfw"}, 32),
}


def cells(quick: bool) -> Sequence[Cell]:
    """Forwards from 5 to 80 ms, and transfers from a tenth of a forward to twice its length."""
    return [
        Scene(
            stages=8,
            microbatches=48 if quick else 96,
            jitter=NO_JITTER if level == "J0" else f"paper:{level}",
            forward_ms=forward_ms,
            input_ms=forward_ms,
            weight_ms=forward_ms,
            comm_ms=forward_ms * part,
            steps=4 if quick else 10,
            seed=seed,
        ).as_cell()
        for forward_ms in ((5.0, 20.0, 80.0) if quick else (5.0, 10.0, 20.0, 40.0, 80.0))
        for part in (0.1, 2.0)
        for level in ("J0", *LEVELS)
        for seed in ((1,) if level == "J0" else range(1, 3 if quick else 6))
    ]


def measure(cell: Cell) -> Measured:
    """All methods under the same sleeps' draws."""
    scene = Scene.of(cell)
    return [{"method": name, "step_ms": round(simulated(scene, method).step_ms, 6)} for name, method in METHODS.items()]


def degradation(rows: Rows, method: str, level: str, **scene: float) -> list[float]:
    """How much longer steps take than without sleeps, in percent, for each seed."""
    (quiet,) = selected(rows, method=method, jitter=NO_JITTER, **scene)
    noisy = selected(rows, method=method, jitter=f"paper:{level}", **scene)
    return [100 * (float(row["step_ms"]) / float(quiet["step_ms"]) - 1) for row in noisy]


def write(rows: Rows, folder: Path) -> str:
    """A row for each method and setting, beside the paper's."""
    scenes = sorted({(float(row["forward_ms"]), float(row["comm_ms"])) for row in rows})
    lines = [[f"paper: {name}", "?", "?", *(f"{percent:.1f}" for percent in theirs)] for name, theirs in THEIRS.items()]
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for forward_ms, comm_ms in scenes:
        title = f"forward {forward_ms:g} ms, transfer {comm_ms:g} ms"
        for method in METHODS:
            means = [
                fmean(degradation(rows, method, level, forward_ms=forward_ms, comm_ms=comm_ms)) for level in LEVELS
            ]
            lines.append([method, f"{forward_ms:g}", f"{comm_ms:g}", *(f"{mean:.1f}" for mean in means)])
            if comm_ms > forward_ms:
                curve = [(0.0, 0.0), *((float(level[1]), mean) for level, mean in zip(LEVELS, means, strict=True))]
                curves.setdefault(title, {})[method] = curve
    picture = draw_lines(curves, folder / "jitter.png", across="level J", up="longer steps, %")
    return "\n\n".join(
        [
            markdown(["method", "forward ms", "transfer ms", "J1 %", "J2 %", "J3 %"], lines),
            picture,
            _finding(rows, scenes),
            "*Threats*: simulated; the paper's tasks, microbatches and links are not known. Percentages compare each "
            "method with itself: a method that is slow without noise can lose less to it in percent.",
        ]
    )


def _finding(rows: Rows, scenes: Sequence[tuple[float, float]]) -> str:
    strict, ready = (
        [
            fmean(degradation(rows, method, "J3", forward_ms=forward_ms, comm_ms=comm_ms))
            for forward_ms, comm_ms in scenes
        ]
        for method in ("1f1b strict, blocking", "bf, window 32")
    )
    return (
        f"At J3 blocking strict 1F1B loses between {min(strict):.1f} and {max(strict):.1f}%, bf in a window of 32 "
        f"between {min(ready):.1f} and {max(ready):.1f}%, over the settings above: sleeps of a given length weigh more "
        "on short tasks, and sleeps in proportion to a task add up to more work than the paper's steps grew by. Its "
        f"{THEIRS['1F1B'][2]} and {THEIRS['RRFP'][2]}% come about where compute is a smaller part of a step."
    )


QUESTION = Question(
    name="jitter",
    title="How much do random delays cost? (RQ4)",
    settings=tuple(Scene.__dataclass_fields__),
    figures=("method", "step_ms"),
    cells=cells,
    measure=measure,
    write=write,
)
