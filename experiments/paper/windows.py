"""RQ6: how much do more stages, more microbatches and a wider window gain?

The paper's speed-ups grow with the stages (1.07, 1.94, 2.01 for 4, 8 and 16) and with the batch (1.98, 2.14, 2.18 for
64, 128 and 192), and saturate at a window of 16. Its baseline is blocking strict 1F1B.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.paper.pictures import draw_lines
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, selected
from experiments.paper.scene import Method, Scene, simulated
from experiments.paper.tables import geometric_mean, markdown

STRICT, BLOCKING, GUIDED = "1f1b strict", "1f1b strict, blocking", "1f1b-split + foresight"
WINDOWS = (4, 8, 16, 32, 48)
PIPELINES, BATCHES = (4, 8, 16, 32, 64), (64, 128, 192)
FIXED = {
    BLOCKING: Method({"schedule": "1f1b", "consume": "strict"}, communication="blocking"),
    STRICT: Method({"schedule": "1f1b", "consume": "strict"}),
    GUIDED: Method({"schedule": "1f1b-split"}),
}
HINTS = ("bf", "bfw")


def cells(quick: bool) -> Sequence[Cell]:
    """Returns stages at 64 microbatches, and batches at 8 stages; transfers take half a forward."""
    sizes = [(p, 64) for p in (PIPELINES[:3] if quick else PIPELINES)]
    sizes += [(8, m) for m in (BATCHES[1:2] if quick else BATCHES[1:])]
    return [
        Scene(
            stages=p, microbatches=m, jitter="lognormal:0.5", comm_ms=5.0, steps=2 if quick else 6, seed=seed
        ).as_cell()
        for p, m in sizes
        for seed in range(1, 3 if quick else 6)
    ]


def measure(cell: Cell) -> Measured:
    """Measures fixed orders, and the hints in every window."""
    scene = Scene.of(cell)
    methods = dict(FIXED) | {f"{hint}, {w}": Method({"hint": hint}, w) for hint in HINTS for w in WINDOWS}
    found = {name: simulated(scene, method) for name, method in methods.items()}
    return [{"method": name, "step_ms": round(one.step_ms, 6), "peak": one.peak} for name, one in found.items()]


def speed(rows: Rows, method: str, base: str, **scene: int) -> float:
    """Returns the speed relative to ``base``, the geometric mean over seeds."""
    first = {row["seed"]: float(row["step_ms"]) for row in selected(rows, method=base, **scene)}
    return geometric_mean(
        [first[row["seed"]] / float(row["step_ms"]) for row in selected(rows, method=method, **scene)]
    )


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: a table of sizes, and lines over the window."""
    sizes = sorted({(int(row["stages"]), int(row["microbatches"])) for row in rows})
    names = [STRICT, GUIDED, *(f"{hint}, 32" for hint in HINTS)]
    lines = [
        [f"{p} x {m}", *(f"{speed(rows, name, BLOCKING, stages=p, microbatches=m):.3f}" for name in names)]
        for p, m in sizes
    ]
    curves = {
        f"{p} stages x {m} microbatches": {
            hint: [(w, speed(rows, f"{hint}, {w}", STRICT, stages=p, microbatches=m)) for w in WINDOWS]
            for hint in HINTS
        }
        for p, m in sizes
        if m == 64 and p <= 16
    }
    gains = [f"{speed(rows, 'bf, 48', 'bf, 16', stages=p, microbatches=m) - 1:.1%} ({p} x {m})" for p, m in sizes]
    return "\n\n".join(
        [
            markdown(["stages x microbatches", *(f"{name}, of blocking 1F1B" for name in names)], lines),
            draw_lines(
                curves,
                folder / "windows.png",
                across="window, microbatches",
                up="times as fast as strict 1F1B",
                ticks=WINDOWS,
            ),
            f"From a window of 16 to one of 48 bf gains {', '.join(gains)}: the more stages, the later it saturates, "
            "which in the paper it has by 16.",
            "*Threats*: simulated; log-normal noise of sigma 0.5, transfers of half a forward, stages of equal work.",
        ]
    )


QUESTION = Question(
    name="windows",
    title="More stages, more microbatches, a wider window? (RQ6)",
    settings=tuple(Scene.__dataclass_fields__),
    figures=("method", "step_ms", "peak"),
    cells=cells,
    measure=measure,
    write=write,
)
