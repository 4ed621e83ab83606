"""RQ4: how much slower do steps become when tasks take longer at random?

The paper injects sleeps before forwards and backwards, at four levels (probability, base and factor: J0 none; J1 0.1,
5 ms, 0.5; J2 0.2, 10 ms, 1; J3 0.3, 15 ms, 1.5, times a uniform number between 0.5 and 1.5 and times the larger of the
base and the stage's moving average of compute times), on eight stages, and reports 2.8, 11.3 and 18.1% for strict 1F1B
and 1.8, 6.8 and 11.4% for readiness. It leaves open how large a task is and which part of a step is communication,
which decides: so both are varied here.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from experiments.paper.pictures import draw_lines
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, selected
from experiments.paper.scene import EQUAL, NO_JITTER, Method, Scene, simulated
from experiments.paper.tables import markdown
from rrfp_jax.simulation.costs import PAPER_LEVELS

LEVELS = ("J1", "J2", "J3")
PARTS = (0.1, 2.0, 6.0)
"""Durations of a transfer, in forwards."""
THEIRS = {"1F1B": (2.8, 11.3, 18.1), "RRFP": (1.8, 6.8, 11.4)}
"""Slowdowns of the paper, in percent."""
THEIR_COMPUTE_SHARE = 0.859 / 2.581
"""Fraction of a step of 1F1B on sixteen stages that is computation (section 7.2)."""
BLOCKING, READY = "1f1b strict, blocking", "bf, window 32"
METHODS = {
    BLOCKING: Method({"schedule": "1f1b", "consume": "strict"}, communication="blocking"),
    "1f1b strict": Method({"schedule": "1f1b", "consume": "strict"}),
    "bf within its memory": Method({"hint": "bf"}, EQUAL),
    "1f1b + foresight": Method({"schedule": "1f1b"}),
    "1f1b-split + foresight": Method({"schedule": "1f1b-split"}),
    READY: Method({"hint": "bf"}, 32),
    "bfw, window 32": Method({"hint": "bfw"}, 32),
}


def cells(quick: bool) -> Sequence[Cell]:
    """Returns cells with forwards from 5 to 80 ms, and transfers from a tenth of a forward to six times its length."""
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
        for part in PARTS
        for level in ("J0", *LEVELS)
        for seed in ((1,) if level == "J0" else range(1, 3 if quick else 6))
    ]


def measure(cell: Cell) -> Measured:
    """Measures all methods with the same draws of sleeps."""
    scene = Scene.of(cell)
    return [{"method": name, "step_ms": round(simulated(scene, method).step_ms, 6)} for name, method in METHODS.items()]


def degradation(rows: Rows, method: str, level: str, **scene: float) -> list[float]:
    """Returns how much longer steps take than without sleeps, in percent, for each seed."""
    (quiet,) = selected(rows, method=method, jitter=NO_JITTER, **scene)
    noisy = selected(rows, method=method, jitter=f"paper:{level}", **scene)
    return [100 * (float(row["step_ms"]) / float(quiet["step_ms"]) - 1) for row in noisy]


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: a row for each method and setting, beside the paper's."""
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
            if comm_ms == PARTS[1] * forward_ms:
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
    lost = {scene: {name: _means(rows, name, scene) for name in (BLOCKING, READY)} for scene in scenes}
    strict, ready = ([of_scene[name][-1] for of_scene in lost.values()] for name in (BLOCKING, READY))
    nearest = min(scenes, key=lambda scene: _distance(lost[scene][BLOCKING], THEIRS["1F1B"]))
    added = [PAPER_LEVELS[level].probability * PAPER_LEVELS[level].alpha for level in LEVELS]
    shares = [grown / 100 / work for grown, work in zip(THEIRS["1F1B"], added, strict=True)]
    where = lost[nearest]
    blocking_ms, ready_ms = (_added_ms(rows, name, nearest) for name in (BLOCKING, READY))
    return (
        f"At J3 blocking strict 1F1B loses between {min(strict):.1f} and {max(strict):.1f}%, bf in a window of 32 "
        f"between {min(ready):.1f} and {max(ready):.1f}%, over the settings above. *Why the paper's are smaller*: its "
        f"sleeps add at least {_percents([100 * part for part in added], 0)} to the time of all F and B at the three "
        f"levels, yet its 1F1B steps grew by {_percents(THEIRS['1F1B'])}, so F and B can have been no more than "
        f"{_percents([100 * share for share in shares], 0)} of its step. That fits the {THEIR_COMPUTE_SHARE:.0%} that "
        f"section 7.2 gives for another setting. The nearest setting above has forwards of {nearest[0]:g} ms and "
        f"transfers of {nearest[1]:g} ms. There blocking 1F1B computes {_share(rows, nearest):.0%} of the time and "
        f"loses {_percents(where[BLOCKING])}, bf in a window of 32 {_percents(where[READY])}; at J3 that is "
        f"{blocking_ms:,.0f} and {ready_ms:,.0f} ms of a step."
    )


def _means(rows: Rows, method: str, scene: tuple[float, float]) -> list[float]:
    return [fmean(degradation(rows, method, level, forward_ms=scene[0], comm_ms=scene[1])) for level in LEVELS]


def _distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the distance between two rows of percentages, as factors of time."""
    return sum(abs(math.log((100 + a) / (100 + b))) for a, b in zip(ours, theirs, strict=True))


def _share(rows: Rows, scene: tuple[float, float]) -> float:
    """Returns the fraction of a quiet step that blocking 1F1B computes."""
    (quiet,) = selected(rows, method=BLOCKING, jitter=NO_JITTER, forward_ms=scene[0], comm_ms=scene[1])
    work_ms = sum(float(quiet[name]) for name in ("forward_ms", "input_ms", "weight_ms")) * int(quiet["microbatches"])
    return work_ms / float(quiet["step_ms"])


def _added_ms(rows: Rows, method: str, scene: tuple[float, float]) -> float:
    """Returns the milliseconds by which steps are longer at J3."""
    (quiet,) = selected(rows, method=method, jitter=NO_JITTER, forward_ms=scene[0], comm_ms=scene[1])
    return float(quiet["step_ms"]) * _means(rows, method, scene)[-1] / 100


def _percents(values: Sequence[float], digits: int = 1) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values) + "%"


QUESTION = Question(
    name="jitter",
    title="How much do random delays cost? (RQ4)",
    settings=tuple(Scene.__dataclass_fields__),
    figures=("method", "step_ms"),
    cells=cells,
    measure=measure,
    write=write,
)
