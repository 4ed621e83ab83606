"""RQ2: where does the time of a step go, and what does coordination within tensor-parallel groups cost?

The paper splits a step of its largest model into computation, blocking and coordination (TP1 to TP4: 1F1B 2.581 s, of
which 1.722 blocking; RRFP 1.788 s, of which 0.768 blocking, and 0.010 to 0.015 coordination with TP). Here the same is
measured in the real runtime, a process for every device, with idle time by its reasons.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from experiments.paper.emulated import until_arrived
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.repeats import Ratios, Rounds, precision
from experiments.paper.rows import Cell, Value, selected
from experiments.paper.scene import Method, Scene
from experiments.paper.tables import markdown, settings_of

STAGES, MICROBATCHES = 4, 16
METHODS: dict[str, tuple[str, ...]] = {
    "1f1b strict, blocking": ("--schedule", "1f1b", "--consume", "strict"),
    "1f1b strict": ("--schedule", "1f1b", "--consume", "strict"),
    "1f1b-split + foresight": ("--schedule", "1f1b-split"),
    "bf, window 32": ("--hint", "bf", "--window", "32"),
}
THEIRS = (
    ("paper, 1F1B", 1, 2.581, 0.859, 1.722, 0.0),
    ("paper, RRFP", 1, 1.788, 1.020, 0.768, 0.0),
    ("paper, 1F1B", 2, 2.644, 0.946, 1.698, 0.0),
    ("paper, RRFP", 2, 1.824, 1.026, 0.788, 0.010),
    ("paper, 1F1B", 4, 2.750, 0.938, 1.812, 0.0),
    ("paper, RRFP", 4, 1.942, 1.054, 0.873, 0.015),
)
"""Method, tensor parallelism, and seconds of a step: all, computation, blocking, coordination (section 7.2)."""
HELD = ("window", "hold")
"""Reasons for which a stage does not run a ready task."""
_DEADLINE_S = 300.0


def one_round(quick: bool, number: int) -> Sequence[Cell]:
    """Returns cells of tensor parallelism over processes; a transfer takes half a forward."""
    return [
        {"tensor": tensor, "comm_ms": 5.0, "forward_ms": 10.0, "jitter": "lognormal:0.3", "steps": 4, "seed": number}
        for tensor in ((1, 2) if quick else (1, 2, 4))
    ]


def measure(cell: Cell) -> Measured:
    """Measures every method, launched as a user would."""
    return [{"method": name, **_figures(cell, name)} for name in METHODS]


def scene_of(cell: Cell) -> Scene:
    """Returns the scene of a cell, which leaves out its tensor parallelism."""
    times_ms = dict.fromkeys(("forward_ms", "input_ms", "weight_ms"), cell["forward_ms"])
    return Scene.of({**cell, **times_ms, "stages": STAGES, "microbatches": MICROBATCHES})


def _figures(cell: Cell, name: str) -> dict[str, Value]:
    comm_ms, scene = float(cell["comm_ms"]), scene_of(cell)
    order = Method({"hint": "bf"}).order(scene)  # any of so many chunks has the same durations
    durations_ms = scene.costs(order).durations_ms
    delays = ",".join(f"{stage}-{stage + 1}:{comm_ms:g}" for stage in range(STAGES - 1))
    links = ["--link-delay-ms", delays]
    if "blocking" in name:
        durations_ms, links = until_arrived(durations_ms, comm_ms), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "durations.npy")
        np.save(path, durations_ms)
        found = _run(int(cell["tensor"]), [*METHODS[name], *links, "--durations", str(path)])
    work_ms = durations_ms.sum(axis=(2, 3)).mean()  # per stage and step
    idle = found["idle_ms"]
    step_ms = found["makespan_ms_mean"]
    held_ms = fmean(sum(stage.get(reason, 0.0) for reason in HELD) for stage in idle)
    host_ms = fmean(stage.get("host", 0.0) for stage in idle)
    num_tasks = MICROBATCHES * (3 if "split" in name else 2)
    agreed_ms = (found.get("agreement_us_per_task") or 0.0) * num_tasks / 1e3
    return {
        "step_ms": round(step_ms, 3),
        "compute_ms": round(float(work_ms), 3),
        "held_ms": round(held_ms, 3),
        "host_ms": round(host_ms, 3),
        "coordination_ms": round(agreed_ms, 3),
    }


def _run(tensor: int, words: Sequence[str]) -> dict:
    launcher = ["-m", "rrfp_jax.commands.launch", "--processes", str(STAGES * tensor), "--"]
    sizes = ["--num-stages", STAGES, "--num-microbatches", MICROBATCHES, "--tensor", tensor]
    command = [sys.executable, *launcher, "experiments.emulate", *map(str, sizes), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    figures: dict = json.loads(done.stdout.splitlines()[-1])
    return figures


def ratios(rows: Rows) -> Ratios:
    """Returns how many times as fast as blocking strict 1F1B each method is."""
    base, *others = METHODS
    cell_of = settings_of(QUESTION.settings)
    first = {cell_of(row): float(row["step_ms"]) for row in selected(rows, method=base)}
    return {
        f"{method}, TP{tensor}": [
            first[cell_of(row)] / float(row["step_ms"]) for row in selected(rows, method=method, tensor=tensor)
        ]
        for method in others
        for tensor in sorted({row["tensor"] for row in rows})
    }


def write(rows: Rows, folder: Path) -> str:  # noqa: ARG001
    """Returns the section: the parts of a step, ours and the paper's, as fractions of the whole."""
    lines = []
    tensors = sorted({int(row["tensor"]) for row in rows})
    for name, tensor, *seconds in THEIRS:
        if tensor in tensors:
            whole, compute, blocking, coordination = (1e3 * each for each in seconds)
            lines.append(_line(name, tensor, whole, compute, blocking, 0.0, 0.0, coordination))
    for tensor in tensors:
        for name in METHODS:
            some = selected(rows, method=name, tensor=tensor)
            step, compute, held, host, coordination = (
                fmean(float(row[column]) for row in some)
                for column in ("step_ms", "compute_ms", "held_ms", "host_ms", "coordination_ms")
            )
            blocking = max(0.0, step - compute - held - host - coordination)
            lines.append(_line(name, tensor, step, compute, blocking, held, host, coordination))
    agreed = [float(row["coordination_ms"]) / float(row["step_ms"]) for row in rows if int(row["tensor"]) > 1]
    found = f"Agreement within groups takes {min(agreed):.2%} to {max(agreed):.2%} of a step. " if agreed else ""
    return "\n\n".join(
        [
            markdown(["method", "TP", "step ms", "computes", "waits", "holds", "host", "coordination"], lines),
            f"{found}What remains of readiness's gain is waiting that it does not do: the work is the same on both "
            "sides, where the paper's computation differs between its methods, too. A blocking sender's transfer "
            f"counts as computation here, since a task lasts until it has arrived. {precision(ratios(rows))}",
            "*Threats*: one machine of few cores, on which all processes share them, so that the host's part is larger "
            "than on hosts of their own; tasks sleep, and collectives within a group are not run.",
        ]
    )


def _line(name: str, tensor: int, whole_ms: float, *parts_ms: float) -> list[str]:
    return [name, str(tensor), f"{whole_ms:.0f}", *(f"{part_ms / whole_ms:.1%}" for part_ms in parts_ms)]


ROUNDS = Rounds(of=one_round, ratios=ratios, quick=(2, 3), full=(3, 8))
QUESTION = Question(
    name="breakdown",
    title="Where does the time go? (RQ2)",
    settings=("tensor", "comm_ms", "forward_ms", "jitter", "steps", "seed"),
    figures=("method", "step_ms", "compute_ms", "held_ms", "host_ms", "coordination_ms"),
    cells=ROUNDS.first,
    measure=measure,
    write=write,
    is_timed=True,
    rounds=ROUNDS,
)
