"""RQ3: beside torch's own 1F1B, with the same durations in the same run.

``torch.distributed.pipelining`` runs 1F1B over gloo, four processes whose stages sleep as long as ours are told to
(:mod:`experiments.bench_torch`). It holds ``p - s`` microbatches on stage s. Ours are strict 1F1B, tables with
foresight in that memory, and hints in a window of 8.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from experiments.bench_torch import TORCH_VERSION
from experiments.bench_torch_ranks import resolve_entries
from experiments.paper.pictures import draw_lines
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.rows import Cell, Value, selected
from experiments.paper.tables import markdown
from experiments.torch_comparison import TORCH, Row, Setting, rows_of
from experiments.torch_comparison import measure as measure_turns
from experiments.turns import printed_by

INTERPRETER = "RRFP_TORCH_PYTHON"
"""The variable that names an interpreter with torch; without it this one is taken."""
STAGES, MICROBATCHES = 4, 16
STRICT = "1f1b:strict"
GROUPS = {None: (STRICT, "1f1b-split", "zb-h1"), "8": ("bf", "bfw")}
"""Entries by their window; None: the order's own memory."""
SIGMAS = (0.0, 0.2, 0.5, 1.0)


def lacks() -> str | None:
    """What is missing for it, in a sentence."""
    if printed_by(_interpreter(), TORCH_VERSION) is None:
        return f"needs torch 2.6 or newer: set {INTERPRETER} to an interpreter that has it"
    return None


def _interpreter() -> str:
    return os.environ.get(INTERPRETER, sys.executable)


def cells(quick: bool) -> Sequence[Cell]:
    """Rounds with new draws."""
    return [{"steps": 2 if quick else 4, "seed": seed} for seed in range(1, 4 if quick else 8)]


def measure(cell: Cell) -> Measured:
    """Torch and ours in turn, under each noise."""
    rows: list[dict[str, Value]] = []
    for window, entries in GROUPS.items():
        setting = _setting(cell, window, entries)
        given = {"num-stages": STAGES, "num-microbatches": MICROBATCHES, "compare": ",".join(entries), "window": window}
        ours = [f"--{name}={value}" for name, value in given.items() if value is not None]
        found = rows_of(measure_turns(setting, _interpreter(), bind="cores", ours=ours))
        rows += [_row(row, window) for row in found]
    return rows


def _row(row: Row, window: str | None) -> dict[str, Value]:
    return {
        "method": row.order if window is None or row.order == TORCH else f"{row.order}, window {window}",
        "sigma": row.sigma,
        "step_ms": round(row.median_ms, 3),
        "over": round(row.torch_over_this, 6),
        "in_flight": row.in_flight,
    }


def _setting(cell: Cell, window: str | None, entries: Sequence[str]) -> Setting:
    return Setting(
        num_stages=STAGES,
        num_microbatches=MICROBATCHES,
        durations_ms=(10.0, 10.0, 10.0),
        sigmas=SIGMAS,
        num_blocks=1,
        num_steps=int(cell["steps"]),
        num_warm_up=1,
        seed=int(cell["seed"]),
        strict_1f1b=resolve_entries(STRICT, None, STAGES, MICROBATCHES)[STRICT],
        orders=resolve_entries(",".join(entries), window, STAGES, MICROBATCHES),
    )


def write(rows: Rows, folder: Path) -> str:
    """Torch's time over ours, within a run."""
    methods = [name for name in dict.fromkeys(row["method"] for row in rows) if name != TORCH]
    lines, curves = [], {}
    for name in methods:
        ratios = {s: median(float(row["over"]) for row in selected(rows, method=name, sigma=s)) for s in SIGMAS}
        held = max(int(row["in_flight"]) for row in selected(rows, method=name))
        lines.append([name, str(held), *(f"{ratio:.3f}" for ratio in ratios.values())])
        curves[name] = list(ratios.items())
    times = [median(float(row["step_ms"]) for row in selected(rows, method=TORCH, sigma=s)) for s in SIGMAS]
    lines.insert(0, [f"{TORCH}, ms", str(STAGES), *(f"{ms:.0f}" for ms in times)])
    strict = [ratio for _, ratio in curves[STRICT]]
    guided = [ratio for _, ratio in curves["zb-h1"]]
    return "\n\n".join(
        [
            markdown(["method", "held at most", *(f"sigma {sigma:g}" for sigma in SIGMAS)], lines),
            draw_lines({"step time": curves}, folder / "others.png", across="sigma", up="torch's time over ours"),
            f"Torch's time over that of our strict 1F1B is {min(strict):.3f} to {max(strict):.3f}; over that of ZB-H1 "
            f"with foresight, whose fullest stage holds as much, {min(guided):.3f} to {max(guided):.3f}.",
            "*Threats*: emulated stages on one machine; torch's stages sleep in Python, ours in a compiled program; "
            "messages are small.",
        ]
    )


QUESTION = Question(
    name="others",
    title="Beside torch's own 1F1B (RQ3)",
    settings=("steps", "seed"),
    figures=("method", "sigma", "step_ms", "over", "in_flight"),
    cells=cells,
    measure=measure,
    write=write,
    is_timed=True,
    lacks=lacks,
)
