"""RQ3 with real tasks: one small model, trained by torch's 1F1B, by ours, and without a pipeline on both sides.

Two stages of residual layers (:mod:`experiments.small_model`), each a process on a core of its own, from the same
parameters and on the same batches, so that losses must agree. Kernels differ: torch computes eagerly with its own
libraries, JAX runs compiled programs. So the runtimes are compared by each one's speed-up over the loop of its own
framework on one such core; two cores cannot give more than 2.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.paper import others
from experiments.paper.pictures import draw_bars
from experiments.paper.question import Measured, Question, Rows
from experiments.paper.repeats import Ratios, Rounds, precision
from experiments.paper.rows import Cell, Value, selected
from experiments.paper.tables import geometric_mean, interval, markdown
from experiments.small_model import STAGES
from experiments.turns import LineProcess, our_ranks, torch_processes

TORCH_LOOP, TORCH, OUR_LOOP = "torch, a loop", "torch 1F1B", "JAX, a jitted loop"
ENTRIES = ("1f1b:strict", "1f1b", "zb-h1", "bf")
OURS = {f"ours, {entry}": entry for entry in ENTRIES}
MICROBATCHES, WARM_UP = 16, 2


def one_round(quick: bool, number: int) -> Sequence[Cell]:
    """Returns a cell in which all ways take their turn."""
    return [{"microbatches": MICROBATCHES, "steps": 6 if quick else 20, "seed": number}]


def measure(cell: Cell) -> Measured:
    """Measures the median step and the last loss of each way."""
    told = {"microbatches": int(cell["microbatches"]), "seed": int(cell["seed"])}
    told["steps"] = int(cell["steps"]) + WARM_UP
    options = [f"--num-stages={STAGES}", f"--num-microbatches={cell['microbatches']}", f"--compare={','.join(ENTRIES)}"]
    with (
        torch_processes(others.interpreter(), ("-m", "experiments.torch_model"), STAGES) as members,
        our_ranks("experiments.model_ranks", STAGES, *options) as ranks,
    ):
        found = {
            TORCH_LOOP: _of_torch(members, told | {"way": "loop"}),
            TORCH: _of_torch(members, told | {"way": "pipeline"}),
            OUR_LOOP: _of_ours(ranks, told | {"way": "loop"}),
            **{name: _of_ours(ranks, told | {"way": entry}) for name, entry in OURS.items()},
        }
    rows: list[dict[str, Value]] = []
    for name, (step_ms, losses) in found.items():
        ends = {"first_loss": round(losses[0], 7), "last_loss": round(losses[-1], 7)}
        rows.append({"method": name, "step_ms": round(median(step_ms[WARM_UP:]), 3), **ends})
    return rows


def _of_torch(members: Sequence[LineProcess], told: dict[str, Any]) -> tuple[list[float], list[float]]:
    for member in members:
        member.tell(json.dumps(told))
    answers = [json.loads(member.answer()) for member in members]
    (losses,) = (answer["losses"] for answer in answers if answer["losses"])
    return answers[0]["step_ms"], losses


def _of_ours(ranks: LineProcess, told: dict[str, Any]) -> tuple[list[float], list[float]]:
    ranks.tell(json.dumps(told))
    answer = json.loads(ranks.answer())
    return answer["step_ms"], answer["losses"]


def ratios(rows: Rows) -> Ratios:
    """Returns the speed of each pipeline over the loop of its own framework, in each round."""
    return {
        name: [
            float(loop["step_ms"]) / float(row["step_ms"])
            for row in selected(rows, method=name)
            for loop in selected(rows, method=base, seed=row["seed"], steps=row["steps"])
        ]
        for name, base in {TORCH: TORCH_LOOP, **dict.fromkeys(OURS, OUR_LOOP)}.items()
    }


def write(rows: Rows, folder: Path) -> str:
    """Returns the section: times, speed-ups and losses."""
    over, lines = ratios(rows), []
    for name in (TORCH_LOOP, TORCH, OUR_LOOP, *OURS):
        some = selected(rows, method=name)
        step_ms = median(float(row["step_ms"]) for row in some)
        fall = f"{float(some[0]['first_loss']):.4f} to {float(some[0]['last_loss']):.4f}"
        lines.append([name, f"{step_ms:.0f}", interval(over[name]) if name in over else "1", fall])
    bars = {name: geometric_mean(some) for name, some in over.items()}
    apart = max(
        abs(float(row["last_loss"]) / float(plain["last_loss"]) - 1)
        for plain in selected(rows, method=OUR_LOOP)
        for row in selected(rows, seed=plain["seed"], steps=plain["steps"])
    )
    best = max(OURS, key=bars.__getitem__)
    return "\n\n".join(
        [
            markdown(["way", "step ms", "times as fast as the own loop", "loss"], lines),
            draw_bars({"two stages, two cores": bars}, folder / "small_models.png", "times as fast as the own loop"),
            f"Torch's 1F1B is {bars[TORCH]:.2f} times as fast as torch's loop, ours in the same order "
            f"{bars['ours, 1f1b:strict']:.2f} times as fast as the jitted one, and at best {bars[best]:.2f} times "
            f"({best.removeprefix('ours, ')}). All ways come to the same loss within {apart:.1e} of it. "
            f"{precision(over)}",
            "*Threats*: kernels of two frameworks on one core each; what both cores share (caches, memory) makes "
            "tasks in a pipeline slower than in a loop alone; the jitted loop is one program, torch's is eager.",
        ]
    )


ROUNDS = Rounds(of=one_round, ratios=ratios)
QUESTION = Question(
    name="small_models",
    title="A real small model, beside torch and without a pipeline (RQ3)",
    settings=("microbatches", "steps", "seed"),
    figures=("method", "step_ms", "first_loss", "last_loss"),
    cells=ROUNDS.first,
    measure=measure,
    write=write,
    is_timed=True,
    rounds=ROUNDS,
    lacks=others.lacks,
)
