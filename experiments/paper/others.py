"""RQ3: how do we compare with torch's own schedules, with the same durations in the same run?

``torch.distributed.pipelining`` runs 1F1B, interleaved 1F1B and zero bubble V over gloo, four processes whose stages
sleep as long as ours are told to (:mod:`experiments.torch_comparison`). Beside each of them stand the same table of
ours, strictly, tables with foresight in its memory, and beside 1F1B hints in a window of 8.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from experiments.bench_torch import TORCH_VERSION
from experiments.bench_torch_ranks import resolve_entries
from experiments.paper.pictures import draw_lines
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.repeats import Ratios, Rounds, precision
from experiments.paper.rows import Cell, Value, selected
from experiments.paper.tables import markdown
from experiments.torch_comparison import THEIRS, Row, Setting, rows_of
from experiments.torch_comparison import measure as measure_turns
from experiments.turns import printed_by

INTERPRETER = "RRFP_TORCH_PYTHON"
"""Name of the environment variable that names an interpreter with torch; without it this interpreter is used."""
STAGES, MICROBATCHES = 4, 16


class Group(NamedTuple):
    """A schedule of torch's, and orders of ours with as many chunks."""

    schedule: str
    """Schedule that torch runs, by our name of it."""
    window: str | None
    """Window of our orders; None: each order's own memory."""
    entries: tuple[str, ...]
    sigmas: tuple[float, ...]


STRICT = "1f1b:strict"
SIGMAS, FEW = (0.0, 0.2, 0.5, 1.0), (0.0, 0.5)
GROUPS = (
    Group("1f1b", None, (STRICT, "1f1b-split", "zb-h1"), SIGMAS),
    Group("1f1b", "8", ("bf", "bfw"), SIGMAS),
    Group("interleaved-1f1b", None, ("interleaved-1f1b:strict", "interleaved-1f1b", "interleaved-1f1b-split"), FEW),
    Group("zb-v", None, ("zb-v:strict", "zb-v"), FEW),
)


def lacks() -> str | None:
    """Returns a sentence that names the missing requirement; None if nothing is missing."""
    if printed_by(interpreter(), TORCH_VERSION) is None:
        return f"needs torch 2.6 or newer: set {INTERPRETER} to an interpreter that has it"
    return None


def interpreter() -> str:
    """Returns the Python that is asked for torch."""
    return os.environ.get(INTERPRETER, sys.executable)


def one_round(quick: bool, number: int) -> Sequence[Cell]:
    """Returns all groups, one after another, with new draws."""
    return [{"steps": 2 if quick else 4, "seed": number}]


def measure(cell: Cell) -> Measured:
    """Measures torch and ours in turn, under each noise."""
    rows: list[dict[str, Value]] = []
    for group in GROUPS:
        setting = _setting(cell, group)
        given = {
            "num-stages": STAGES,
            "num-microbatches": MICROBATCHES,
            "num-chunks": setting.theirs.placement.num_chunks,
            "compare": ",".join(group.entries),
            "window": group.window,
        }
        ours = [f"--{name}={value}" for name, value in given.items() if value is not None]
        found = rows_of(measure_turns(setting, interpreter(), bind="cores", ours=ours))
        rows += [_row(row, group) for row in found if row.order != THEIRS[group.schedule] or group.window is None]
    return rows


def _row(row: Row, group: Group) -> dict[str, Value]:
    return {
        "method": row.order if group.window is None else f"{row.order}, window {group.window}",
        "beside": THEIRS[group.schedule],
        "sigma": row.sigma,
        "step_ms": round(row.median_ms, 3),
        "over": round(row.torch_over_this, 6),
        "held": row.in_flight,
    }


def _setting(cell: Cell, group: Group) -> Setting:
    entry = f"{group.schedule}:strict"
    num_chunks = STAGES if group.schedule == "1f1b" else 2 * STAGES
    theirs, orders = (
        resolve_entries(text, window, STAGES, MICROBATCHES, num_chunks=num_chunks)
        for text, window in ((entry, None), (",".join(group.entries), group.window))
    )
    return Setting(
        num_stages=STAGES,
        num_microbatches=MICROBATCHES,
        durations_ms=(10.0, 10.0, 10.0),
        sigmas=group.sigmas,
        num_blocks=1,
        num_steps=int(cell["steps"]),
        num_warm_up=1,
        seed=int(cell["seed"]),
        theirs=theirs[entry],
        orders=orders,
        schedule=group.schedule,
    )


def ratios(rows: Rows) -> Ratios:
    """Returns the ratio of torch's time to ours."""
    keys = dict.fromkeys((row["beside"], row["method"], row["sigma"]) for row in rows if row["beside"] != row["method"])
    return {
        f"{method} beside {beside}, sigma {sigma}": [
            float(row["over"]) for row in selected(rows, beside=beside, method=method, sigma=sigma)
        ]
        for beside, method, sigma in keys
    }


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: the ratios of torch's time to ours within a run."""
    lines: list[list[str]] = []
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for theirs in dict.fromkeys(row["beside"] for row in rows):
        for name in dict.fromkeys(row["method"] for row in selected(rows, beside=theirs)):
            by_sigma = {sigma: selected(rows, beside=theirs, method=name, sigma=sigma) for sigma in SIGMAS}
            held = max(float(row["held"]) for some in by_sigma.values() for row in some)
            column, digits = ("step_ms", 0) if name == theirs else ("over", 3)
            values = {s: median(float(row[column]) for row in some) for s, some in by_sigma.items() if some}
            if name != theirs:
                curves.setdefault(theirs, {})[name] = list(values.items())
            label = f"**{name}**, ms" if name == theirs else name
            texts = [f"{values[sigma]:.{digits}f}" if sigma in values else "-" for sigma in SIGMAS]
            lines.append([label, f"{held:g}", *texts])
    headings = ["torch's, and its time over ours", "held at most", *(f"sigma {sigma:g}" for sigma in SIGMAS)]
    return "\n\n".join(
        [
            markdown(headings, lines),
            draw_lines(
                curves, folder / "others.png", across="sigma", up="torch's time over ours", has_own_legends=True
            ),
            f"{_finding(curves)} {precision(ratios(rows))}",
            "**JaxPP** (NVIDIA) was not measured: its releases ask for JAX 0.6.2 to 0.8.2 with CUDA, and for cupy "
            "([its pyproject.toml](https://github.com/NVIDIA/jaxpp/blob/main/pyproject.toml)), so it runs "
            "neither beside the JAX that this package needs nor on CPUs.",
            "*Threats*: emulated stages on one machine; messages are small. With two chunks on a rank "
            "each has its own draws, so that columns of different schedules of torch's are not the same noise; "
            "ratios are of the same draws.",
        ]
    )


def _finding(curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> str:
    def over(schedule: str, entry: str) -> str:
        ratios = [ratio for _, ratio in curves[THEIRS[schedule]][entry]]
        return f"{min(ratios):.3f} to {max(ratios):.3f}"

    strictly = ", ".join(f"{over(schedule, f'{schedule}:strict')} beside {name}" for schedule, name in THEIRS.items())
    return (
        f"Torch's time over that of our same table, strictly, is {strictly}. With foresight, within the same memory: "
        f"{over('1f1b', '1f1b-split')} (1F1B, split, as much on every stage), {over('1f1b', 'zb-h1')} (ZB-H1, as much "
        f"as 1F1B on its fullest stage), {over('interleaved-1f1b', 'interleaved-1f1b')} (interleaved 1F1B) and "
        f"{over('zb-v', 'zb-v')} (zero bubble V)."
    )


ROUNDS = Rounds(of=one_round, ratios=ratios, quick=(2, 4))
QUESTION = Question(
    name="others",
    title="Beside torch's own schedules (RQ3)",
    settings=("steps", "seed"),
    figures=("method", "beside", "sigma", "step_ms", "over", "held"),
    cells=ROUNDS.first,
    measure=measure,
    write=write,
    is_timed=True,
    rounds=ROUNDS,
    lacks=lacks,
)
